"""GPU tests run the steps of ``perf/gpu_check.sh`` one by one."""

import sys
from pathlib import Path

import pytest
import torch

PERF = Path(__file__).parents[2] / "perf"
sys.path.insert(0, str(PERF))


@pytest.fixture(scope="session")
def backend():
    """One real GPU, with images from the default cache, else compiled here."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from gpu_backend import RealBackend

    from megamoe.runtime.cache import default_cache

    return RealBackend(default_cache())
