"""Cheap stand-ins for the compiler, importable by child processes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from megamoe.cute_kernels.image import Image, Parameter
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.runtime.cache import ImageCache


def problem(hidden: int = 512, **changes: Any) -> Problem:
    sizes: dict[str, Any] = {
        "hidden": hidden,
        "intermediate": 256,
        "num_experts": 8,
        "experts_per_pe": 4,
        "top_k": 2,
        "num_pes": 2,
        "max_tokens": 64,
        "pool_rows": 1024,
    }
    return Problem(**(sizes | changes))


def image_of(problem: Problem, config: KernelConfig, arch: str) -> Image:
    """An image whose code names what it was made for."""
    return Image(
        entry="kernel",
        arch=arch,
        ptx=f"// {problem}\n",
        cubin=b"\x7fELF" + repr((problem, config)).encode() + bytes(range(256)),
        parameters=(Parameter("x", 8, 0), Parameter("pe", 4, 8)),
        threads=384,
        smem_bytes=1000,
        registers=168,
        spill_bytes=0,
        setmaxnreg=(("dec", 56), ("inc", 224)),
        mma_instructions={"m64n128k16.f32.bf16.bf16": 8},
        notes=("(C7519) a note",),
        compile_seconds=1.5,
    )


def fake_compile(*, problem: Problem, config: KernelConfig, arch: str) -> Image:
    return image_of(problem, config, arch)


def counting_compile(*, problem: Problem, config: KernelConfig, arch: str) -> Image:
    """Takes a while, and leaves one file a compilation in the folder the environment names."""
    folder = Path(os.environ["MEGAMOE_TEST_COMPILES"])
    (folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()
    time.sleep(float(os.environ.get("MEGAMOE_TEST_COMPILE_SECONDS", "0.2")))
    return image_of(problem, config, arch)


def run_child(folder: str) -> None:
    """Get one image from a cache and print a digest of its code."""
    cache = ImageCache(folder, compile=counting_compile)
    print(hash_of(cache.get_or_compile(problem())))


def hash_of(image: Image) -> str:
    import hashlib

    return hashlib.sha256(image.cubin + image.ptx.encode()).hexdigest()


if __name__ == "__main__":
    run_child(sys.argv[1])
