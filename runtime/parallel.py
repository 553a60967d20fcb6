"""Several images at once, each in a process of its own: the compiler is not thread-safe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.runtime.cache import DEFAULT_ARCH, Compile, ImageCache, ImageKey
from megamoe.runtime.image_file import decode, encode

Job = tuple[Problem, KernelConfig | None]


def _work(folder: Path, compile: Compile | None, job: Job, arch: str) -> tuple[bytes, int]:
    cache = ImageCache(folder, compile=compile)
    problem, config = job
    image = cache.get_or_compile(problem, config, arch=arch)
    # Whole, not by way of the folder: it may be read-only or full.
    return encode(image, ImageKey.of(problem, config, arch=arch).plain()), cache.compiles


def compile_many(
    jobs: Sequence[Job],
    *,
    cache: ImageCache,
    arch: str = DEFAULT_ARCH,
    workers: int = 2,
    on_done: Callable[[int, bool], None] | None = None,
) -> list[Image]:
    """The images of ``jobs`` in order; those that no cache holds are compiled in parallel.

    Args:
        jobs: (problem, kernel config or None for the rule-based one).
        workers: processes at once.
        on_done: called in this process as ``on_done(index, compiled)`` when an image is ready;
            ``compiled`` is False if it was cached.

    Raises:
        ValueError, CompilerMissing: as ``ImageCache.get_or_compile``; jobs not begun are dropped.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: must be at least 1")
    images: list[Image | None] = [None] * len(jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, max(1, len(jobs))), mp_context=context) as pool:
        waiting = {
            pool.submit(_work, cache.folder, cache.compile, job, arch): index
            for index, job in enumerate(jobs)
        }
        try:
            for future in as_completed(waiting):
                data, compiles = future.result()
                images[waiting[future]] = decode(data)[0]
                if on_done is not None:
                    on_done(waiting[future], compiles > 0)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [image for image in images if image is not None]
