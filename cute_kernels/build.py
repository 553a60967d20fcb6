"""Compile kernels on any machine, GPU or not: problem + config + arch → image.

``compile_forward`` is not thread-safe (the compiler is not); run several in several processes.
"""

import contextlib
import io
import tempfile
import time

import cutlass  # noqa: F401  (loads the DSL before its submodules)
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels.abi import FORWARD_ARCHS, PARAMETERS, WGRAD_PARAMETERS
from megamoe.cute_kernels.forward import ForwardKernel
from megamoe.cute_kernels.image import Image, describe, parse_signature
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.smem import default_config
from megamoe.cute_kernels.wgrad import WgradKernel
from megamoe.cute_kernels.wgrad_tables import WgradConfig, default_wgrad_config


def compile_forward(
    *, problem: Problem, config: KernelConfig | None = None, arch: str = "sm_90a"
) -> Image:
    """Trace and compile the forward kernel.

    Args:
        problem: static sizes.
        config: kernel config; None chooses ``default_config(problem)``.
        arch: target, one of ``FORWARD_ARCHS``.

    Raises:
        ValueError: ``arch`` has no kernel, or the config does not fit the problem.
        RuntimeError: the compiler failed; its text is in the message.
    """
    if arch not in FORWARD_ARCHS:
        raise ValueError(f"arch={arch!r}: no forward kernel; allowed: {', '.join(FORWARD_ARCHS)}")
    config = config or default_config(problem)
    kernel = ForwardKernel(problem, config)
    kernel.kernel.set_name_prefix("megamoe_forward")
    return compile_kernel(
        kernel,
        parameters=PARAMETERS,
        smem_bytes=kernel.shared.total,
        arch=arch,
        config=config,
    )


def compile_wgrad(
    *, problem: Problem, config: WgradConfig | None = None, arch: str = "sm_90a"
) -> Image:
    """Trace and compile the wgrad kernel; arguments and errors as ``compile_forward``."""
    if arch not in FORWARD_ARCHS:
        raise ValueError(f"arch={arch!r}: no wgrad kernel; allowed: {', '.join(FORWARD_ARCHS)}")
    kernel = WgradKernel(problem, config or default_wgrad_config(problem))
    kernel.kernel.set_name_prefix("megamoe_wgrad")
    return compile_kernel(
        kernel, parameters=WGRAD_PARAMETERS, smem_bytes=kernel.shared.total, arch=arch
    )


def compile_kernel(
    kernel: object,
    *,
    parameters: tuple[tuple[str, str, str], ...],
    smem_bytes: int,
    arch: str,
    config: KernelConfig | None = None,
) -> Image:
    """Trace and compile a kernel whose parameters are scalars, followed by the grid.

    Args:
        kernel: called as ``kernel(*parameters, grid)``.
        parameters: (name, ``"u32"`` or ``"u64"``, meaning) in order.
        smem_bytes: dynamic shared memory of a launch.
        config: of the forward kernel; others have none.

    Raises:
        RuntimeError: the compiler failed; its text is in the message.
    """
    scalars = {"u32": Int32(0), "u64": Int64(0)}
    arguments = [scalars[width] for _, width, _ in parameters]
    started = time.perf_counter()
    remarks = io.StringIO()
    # One dump folder a compile: two compiles sharing one return each other's code.
    with tempfile.TemporaryDirectory(prefix="megamoe-") as folder:
        options = (
            f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder} "
            "--generate-line-info --ptxas-options '-v' remarks{ptx}"
        )
        with contextlib.redirect_stderr(remarks), contextlib.redirect_stdout(remarks):
            compiled = cute.compile(kernel, *arguments, Int32(1), options=options)
        ptx, cubin = compiled.artifacts.PTX, bytes(compiled.artifacts.CUBIN)
    names = tuple(name for name, _, _ in parameters)
    entry, signature, threads = parse_signature(ptx, names)
    return Image(
        entry=entry,
        arch=arch,
        ptx=ptx,
        cubin=cubin,
        parameters=signature,
        threads=threads,
        smem_bytes=smem_bytes,
        config=config or KernelConfig(),
        compile_seconds=time.perf_counter() - started,
        **describe(ptx, remarks.getvalue()),
    )
