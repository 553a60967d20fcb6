"""Puts this folder on the import path, so that tests share its helpers, and keeps the
images that tests compile: one compilation serves all workers and the next run."""

import os
from pathlib import Path

os.environ.setdefault(
    "MEGAMOE_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "megamoe")
)
