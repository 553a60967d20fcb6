"""Refuse bad input before anything is launched: argument, value, what is allowed.

Nothing here reads a CUDA tensor's contents, so no check synchronises the host.

Legend: T tokens, H hidden, E experts, K experts per token, I intermediate, L local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megamoe.config import Activation, Combine, MoEConfig, W13Layout, WeightAt

X_DTYPES = (torch.bfloat16,)
ID_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (*X_DTYPES, torch.float16, torch.float32, torch.float64)  # of the reference
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BIAS_DTYPES = (torch.bfloat16, torch.float32)

# What the kernel runs of what `MoEConfig` describes. A feature lands by extending its line.
KERNEL_ACTIVATIONS: tuple[Activation, ...] = (
    "silu",
    "gelu_tanh",
    "relu",
    "gpt_oss",
    "swiglu_clamped",
    "relu2",
)
KERNEL_WEIGHT_AT: tuple[WeightAt, ...] = ("act", "combine")
KERNEL_W13_LAYOUTS: tuple[W13Layout, ...] = ("gate_up", "up_gate", "interleaved")
KERNEL_W13_TRANSPOSED = (False, True)
KERNEL_W2_TRANSPOSED = (False, True)
KERNEL_FC1_BIAS = (False, True)
KERNEL_FC2_BIAS = (False, True)
KERNEL_COMBINE: tuple[Combine, ...] = ("auto", "direct", "prereduced")
KERNEL_REPLICATED = (False, True)
KERNEL_SIZE_MULTIPLE = 8


def check_kernel_support(cfg: MoEConfig) -> None:
    """Raise ``ValueError`` for what `MoEConfig` can describe but this kernel does not run yet."""
    for name in ("hidden", "intermediate"):
        value = getattr(cfg, name)
        if value % KERNEL_SIZE_MULTIPLE:
            raise ValueError(
                f"{name}={value}: the kernel of this version runs multiples of "
                f"{KERNEL_SIZE_MULTIPLE} only"
            )
    supported: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("activation", KERNEL_ACTIVATIONS),
        ("weight_at", KERNEL_WEIGHT_AT),
        ("w13_layout", KERNEL_W13_LAYOUTS),
        ("w13_transposed", KERNEL_W13_TRANSPOSED),
        ("w2_transposed", KERNEL_W2_TRANSPOSED),
        ("fc1_bias", KERNEL_FC1_BIAS),
        ("fc2_bias", KERNEL_FC2_BIAS),
        ("combine", KERNEL_COMBINE),
        ("replicated", KERNEL_REPLICATED),
    )
    for name, allowed in supported:
        value = getattr(cfg, name)
        if value not in allowed:
            raise ValueError(
                f"{name}={value!r}: the kernel of this version runs "
                f"{', '.join(map(repr, allowed))} only"
            )


def check_training_support(cfg: MoEConfig) -> None:
    """Raise ``ValueError`` for what a layer that trains cannot have."""
    if cfg.ring_rows is not None:
        raise ValueError(
            f"ring_rows={cfg.ring_rows}: must be None with training=True, as the backward needs "
            "every row of the call"
        )


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: tuple[int | str, ...],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Type, shape (a str is a free size), dtype, device and a contiguous last dimension."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}: must be a torch.Tensor")
    wanted = "[" + ", ".join(map(str, shape)) + "]"
    if tensor.ndim != len(shape) or any(
        isinstance(size, int) and size != got for size, got in zip(shape, tensor.shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {list(tensor.shape)}: must be {wanted}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {_names([tensor.dtype])}: must be {_names(dtypes)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}: must be on {device}")
    if tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}: its last dimension must be contiguous"
        )


def invalid_id_text(cfg: MoEConfig, topk_ids_TK: torch.Tensor, *, name: str) -> str | None:
    """The first id >= E of a tensor with its token and slot, or None. Reads the tensor."""
    bad = (topk_ids_TK >= cfg.num_experts).nonzero()
    if not len(bad):
        return None
    token, slot = bad[0].tolist()
    return (
        f"{name}[{token}, {slot}]={int(topk_ids_TK[token, slot])} (token {token}, slot {slot}): "
        f"must be < num_experts={cfg.num_experts}, or negative for a masked slot"
    )


def check_inputs(
    cfg: MoEConfig,
    x_TH: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    *,
    pe: int | None = None,
    x_dtypes: Sequence[torch.dtype] = X_DTYPES,
) -> None:
    """Check the inputs of one PE. The tensors are read at most, never changed.

    Args:
        cfg: the layer.
        x_TH: ``[T, H]`` bf16, 0 <= T <= Tmax, any row stride, last dimension contiguous.
        topk_ids_TK: ``[T, K]`` int32 or int64 global expert ids; < 0 is a masked slot.
        topk_weights_TK: ``[T, K]`` fp32, bf16 or fp16.
        pe: names the PE in messages (``x[2]``) when a caller checks several.
        x_dtypes: the reference also takes fp32 and fp64, and fp64 router weights.

    Raises:
        ValueError: names the argument, its value and what is allowed. Ids >= E raise it only on
            CPU tensors and with ``cfg.invalid_ids == "error"``; otherwise such a slot is masked.
    """
    where = "" if pe is None else f"[{pe}]"
    _check_tensor(f"x{where}", x_TH, shape=("T", cfg.hidden), dtypes=x_dtypes)
    num_tokens = x_TH.shape[0]
    if num_tokens > cfg.max_tokens:
        raise ValueError(
            f"x{where} has {num_tokens} tokens: must be <= max_tokens={cfg.max_tokens}"
        )
    shape = (num_tokens, cfg.top_k)
    _check_tensor(
        f"topk_ids{where}", topk_ids_TK, shape=shape, dtypes=ID_DTYPES, device=x_TH.device
    )
    _check_tensor(
        f"topk_weights{where}",
        topk_weights_TK,
        shape=shape,
        dtypes=(*WEIGHT_DTYPES, torch.float64) if torch.float64 in x_dtypes else WEIGHT_DTYPES,
        device=x_TH.device,
    )
    if cfg.invalid_ids == "error" and topk_ids_TK.device.type == "cpu":
        text = invalid_id_text(cfg, topk_ids_TK, name=f"topk_ids{where}")
        if text is not None:
            raise ValueError(text)


def _check_bias(
    name: str, bias: torch.Tensor | None, *, wanted: bool, flag: str, **rule: Any
) -> None:
    """A bias is given exactly when the config says so, and then follows ``rule``."""
    if bias is None:
        if wanted:
            raise ValueError(f"{name} is None: must be a tensor, as {flag}=True")
        return
    if not wanted:
        raise ValueError(f"{name} is given: must be None, as {flag}=False")
    _check_tensor(name, bias, **rule)


def check_weights(
    cfg: MoEConfig,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    num_experts: int,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    pe: int | None = None,
    dtypes: Sequence[torch.dtype] = X_DTYPES,
    bias_dtypes: Sequence[torch.dtype] = BIAS_DTYPES,
    device: torch.device | None = None,
) -> None:
    """Check the weights of ``num_experts`` experts: L of one PE, or E for the global tensors.

    Args:
        w13: ``[num_experts, *cfg.w13_shape]``: ``[.., 2I, H]``, transposed or not gated as ``cfg``
            says. Which rows are gate and which are up is not seen in a tensor.
        w2: ``[num_experts, *cfg.w2_shape]``.
        b13: ``[num_experts, 2I or I]`` bf16 or fp32, given exactly if ``cfg.fc1_bias``.
        b2: ``[num_experts, H]`` bf16 or fp32, given exactly if ``cfg.fc2_bias``.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    where = "" if pe is None else f"[{pe}]"
    common: dict[str, Any] = {"dtypes": dtypes, "device": device}
    _check_tensor(f"w13{where}", w13, shape=(num_experts, *cfg.w13_shape), **common)
    _check_tensor(f"w2{where}", w2, shape=(num_experts, *cfg.w2_shape), **common)
    common["dtypes"] = bias_dtypes
    _check_bias(
        f"b13{where}",
        b13,
        wanted=cfg.fc1_bias,
        flag="fc1_bias",
        shape=(num_experts, cfg.w13_rows),
        **common,
    )
    _check_bias(
        f"b2{where}",
        b2,
        wanted=cfg.fc2_bias,
        flag="fc2_bias",
        shape=(num_experts, cfg.hidden),
        **common,
    )


def check_group_weights(
    cfg: MoEConfig,
    *,
    w13: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    b13: Sequence[torch.Tensor] | None = None,
    b2: Sequence[torch.Tensor] | None = None,
) -> None:
    """`check_weights` for lists with the local weights of every PE.

    Raises:
        ValueError: a list is not P long, or one of its entries is refused.
    """
    for name, entries in (("w13", w13), ("w2", w2), ("b13", b13), ("b2", b2)):
        if entries is not None:
            _check_list(cfg, name, entries)
    for pe in range(cfg.num_pes):
        check_weights(
            cfg,
            w13[pe],
            w2[pe],
            num_experts=cfg.experts_per_pe[pe],
            b13=None if b13 is None else b13[pe],
            b2=None if b2 is None else b2[pe],
            pe=pe,
        )


def check_residual(
    cfg: MoEConfig,
    residual: Sequence[torch.Tensor] | None,
    *,
    x: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype] = X_DTYPES,
    name: str = "residual",
) -> None:
    """Check ``residual`` (or another ``name``): None, or one ``[T_p, H]`` tensor per PE, shaped and
    placed as ``x``.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    if residual is None:
        return
    _check_list(cfg, name, residual)
    for pe, tensor in enumerate(residual):
        _check_tensor(
            f"{name}[{pe}]",
            tensor,
            shape=(x[pe].shape[0], cfg.hidden),
            dtypes=dtypes,
            device=x[pe].device,
        )


def _check_list(cfg: MoEConfig, name: str, entries: Sequence[torch.Tensor]) -> None:
    if isinstance(entries, torch.Tensor) or len(entries) != cfg.num_pes:
        raise ValueError(
            f"{name} has {len(entries)} entries: must be a list of num_pes={cfg.num_pes} "
            "tensors, one per PE"
        )


def check_group(
    cfg: MoEConfig,
    *,
    x: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    x_dtypes: Sequence[torch.dtype] = X_DTYPES,
) -> None:
    """`check_inputs` for lists with one entry per PE.

    Raises:
        ValueError: a list is not P long, or one of its entries is refused.
    """
    for name, entries in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        _check_list(cfg, name, entries)
    for pe in range(cfg.num_pes):
        check_inputs(cfg, x[pe], topk_ids[pe], topk_weights[pe], pe=pe, x_dtypes=x_dtypes)
