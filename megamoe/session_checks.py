"""What a session checks about its device and about the tensors beyond ``megamoe.checks``."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.config import MoEConfig
from megamoe.cute_kernels.abi import FORWARD_ARCHS
from megamoe.runtime.devices.cuda import CAPABILITY, CudaDevice
from megamoe.runtime.errors import UnsupportedDevice


def device_of(device: Any) -> CudaDevice:
    """The device object for what the caller gave.

    Raises:
        ValueError: not a CUDA device. DriverMissing: no driver.
    """
    if hasattr(device, "prepare"):
        return device
    if device is None:
        if not torch.cuda.is_available():
            return CudaDevice(0)  # raises for want of a driver, or torch is a CPU build
        return CudaDevice(torch.cuda.current_device())
    if isinstance(device, int):
        return CudaDevice(device)
    found = torch.device(device)
    if found.type != "cuda":
        raise ValueError(
            f"device={device!r}: must be a CUDA device; MegaMoE computes CPU tensors with the "
            "reference, megamoe.testing runs the kernel without a GPU"
        )
    return CudaDevice(found.index if found.index is not None else torch.cuda.current_device())


def arch_of(device: CudaDevice) -> str:
    """The architecture this GPU runs.

    Raises:
        UnsupportedDevice: none that megamoe has a kernel for (CASES J8: at construction).
    """
    for arch in FORWARD_ARCHS:
        if CAPABILITY[arch] == device.capability:
            return arch
    found = ".".join(map(str, device.capability))
    needed = ", ".join(f"{'.'.join(map(str, CAPABILITY[arch]))} ({arch})" for arch in FORWARD_ARCHS)
    raise UnsupportedDevice(
        f"GPU {device.index} ({device.name}) has compute capability {found}, megamoe needs "
        f"{needed}; megamoe.classical runs on any GPU"
    )


def check_rows(name: str, rows: torch.Tensor, *, like: torch.Tensor) -> None:
    """``rows`` is contiguous bf16 with the shape and place of ``like``, or ``ValueError``."""
    if (
        rows.shape != like.shape
        or rows.dtype != torch.bfloat16
        or rows.device != like.device
        or not rows.is_contiguous()
    ):
        raise ValueError(
            f"{name} is {rows.dtype} {list(rows.shape)} on {rows.device}, strides {rows.stride()}: "
            f"must be a contiguous bfloat16 {list(like.shape)} on {like.device}"
        )


def gradient_rows(dy: torch.Tensor | None, *, tokens: int, like: torch.Tensor) -> torch.Tensor:
    """``dy`` as rows the kernel reads: zeros for None, and copied once if its rows are not
    contiguous, as the gradient of a sum, whose strides are 0.

    Args:
        tokens: T of the call. like: gives hidden size and device.

    Raises:
        ValueError: another shape, dtype or device.
    """
    shape = (tokens, like.shape[1])
    if dy is None:
        return torch.zeros(shape, dtype=torch.bfloat16, device=like.device)
    if tuple(dy.shape) != shape or dy.dtype != torch.bfloat16 or dy.device != like.device:
        raise ValueError(
            f"dy is {dy.dtype} {list(dy.shape)} on {dy.device}: must be bfloat16 {list(shape)} on "
            f"{like.device}, as the y of its forward"
        )
    return dy.contiguous()


def weight_gradients(
    cfg: MoEConfig, *, pe: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """New tensors for the gradients of the weights of ``pe``, by name, contents undefined."""
    shapes: dict[str, tuple[int, ...]] = {"w13": cfg.w13_shape, "w2": cfg.w2_shape}
    if cfg.fc1_bias:
        shapes["b13"] = (cfg.w13_rows,)
    if cfg.fc2_bias:
        shapes["b2"] = (cfg.hidden,)
    experts = cfg.experts_per_pe[pe]
    return {
        name: torch.empty(experts, *shape, dtype=dtype, device=device)
        for name, shape in shapes.items()
    }


def check_num_tokens(
    num_tokens: torch.Tensor, *, rows: int, max_tokens: int, like: torch.Tensor
) -> None:
    """``num_tokens`` is int32 [1] beside x and x has Tmax rows, or ``ValueError``."""
    if num_tokens.shape != (1,) or num_tokens.dtype != torch.int32:
        raise ValueError(
            f"num_tokens is {num_tokens.dtype} {list(num_tokens.shape)}: must be int32 [1]"
        )
    if num_tokens.device != like.device:
        raise ValueError(f"num_tokens is on {num_tokens.device}: must be on {like.device}")
    if rows != max_tokens:
        # The kernel clamps T to Tmax, not to the rows it was given.
        raise ValueError(f"x has {rows} rows: with num_tokens it must have max_tokens={max_tokens}")
