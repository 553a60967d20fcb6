"""Compile a CuTe DSL kernel to PTX, without a GPU."""

from __future__ import annotations

import tempfile
from typing import Any

from cutlass import cute


def compile_ptx(host: Any, *args: Any) -> str:
    """PTX of a host function's kernel for sm_90a."""
    with tempfile.TemporaryDirectory(prefix="vgpu-kernel-") as folder:
        options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder} --generate-line-info"
        return str(cute.compile(host, *args, options=options).artifacts.PTX)
