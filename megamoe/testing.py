"""Run the fused kernels without a GPU: as compiled, on vgpu, all PEs in this process.

A functional simulation for tests: it says whether results and synchronisation are right, nothing
about speed.

Legend: T tokens, H hidden, I intermediate, L experts of one PE, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.checks import (
    check_group,
    check_group_weights,
    check_kernel_support,
    check_training_support,
)
from megamoe.config import MoEConfig
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.saved import mode_kernels
from megamoe.cute_kernels.wgrad_tables import WgradConfig, default_wgrad_config
from megamoe.lowering import kernel_problem
from megamoe.runtime.cache import default_cache
from megamoe.runtime.saved import Saved
from megamoe.runtime.training import TrainingImages
from megamoe.session_checks import gradient_rows, weight_gradients

DEFAULT_GRID = 2
DEFAULT_TIMEOUT_S = 300.0


def compiled(problem: Problem, config: KernelConfig | None = None) -> Image:
    """The forward image of a problem, from the image cache."""
    return default_cache().get_or_compile(problem, config)


@dataclass(frozen=True)
class VgpuResult:
    """One call on all PEs.

    Args:
        y: output of each PE, ``[T, H]`` bf16.
        launches: kernel launches of each PE for this call.
        counters: ``rows`` (rows each PE's experts computed), ``row_fetches`` (how often each PE
            pulled a token's row: once per token, or once per row with a ring pool),
            ``bytes_between_pes``,
            ``wgmma_flops``, ``warp_instructions`` and ``warp_instructions_by_role``;
            ``bytes_read_by_role`` and ``bytes_written_by_role``, of global memory, before caches.
        report: the world's report; ``report.activity`` feeds the timeline picture.
        saved: with ``save_for_backward``, the state of each PE for ``backward_dgrad``.
    """

    y: list[torch.Tensor]
    launches: list[int]
    counters: dict[str, Any]
    report: Any
    saved: list[Saved] | None = None


@dataclass(frozen=True)
class VgpuDgrad:
    """One dgrad on all PEs: dx ``[T, H]`` bf16 and d_topk_weights ``[T, K]`` fp32 of each; launches
    and report as in ``VgpuResult``."""

    dx: list[torch.Tensor]
    d_topk_weights: list[torch.Tensor]
    launches: list[int]
    report: Any


@dataclass(frozen=True)
class VgpuWgrad:
    """One wgrad on all PEs: the gradients of each by name; launches and report as in
    ``VgpuResult``."""

    grads: list[dict[str, torch.Tensor]]
    launches: list[int]
    report: Any


class VgpuMoE:
    """An MoE layer whose PEs all run on vgpu; one session, any number of calls.

    Args:
        cfg: the layer.
        w13, w2: per PE local weights ``[L, *cfg.w13_shape]`` and ``[L, *cfg.w2_shape]`` bf16, in
            the layout of ``cfg`` (`megamoe.weights.split_experts`).
        b13, b2: per PE local biases ``[L, cfg.w13_rows]`` and ``[L, H]`` bf16 or fp32, given
            exactly if ``cfg.fc1_bias`` and ``cfg.fc2_bias``.
        grid: CTAs per PE.
        seed, schedule, completion: of the vgpu world.
        timeout_s: deadline of waits, in logical time; 0 = none.
        config: kernel config; None = rule-based.
        detect: run under the race detector; findings are in ``VgpuResult.report``.
        image: the compiled kernel to run, e.g. a mutant; None = the one of the layer.
        training: with the kernels of the backward.
        recompute: of training: dgrad computes the pre-activations again.
        training_images: other images for some of ``"save"``, ``"dgrad"`` and ``"wgrad"``.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        *,
        w13: Sequence[torch.Tensor],
        w2: Sequence[torch.Tensor],
        b13: Sequence[torch.Tensor] | None = None,
        b2: Sequence[torch.Tensor] | None = None,
        grid: int = DEFAULT_GRID,
        seed: int = 0,
        schedule: str = "round_robin",
        completion: str = "eager",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        config: KernelConfig | None = None,
        detect: bool = False,
        image: Image | None = None,
        training: bool = False,
        recompute: bool = False,
        training_images: Mapping[str, Image] | None = None,
    ):
        from megamoe.cute_kernels.roles import roles_of
        from megamoe.runtime.devices.vgpu import VgpuDevice
        from megamoe.runtime.local_group import LocalGroup
        from megamoe.runtime.vgpu.world import World

        check_kernel_support(cfg)
        if training:
            check_training_support(cfg)
        check_group_weights(cfg, w13=w13, w2=w2, b13=b13, b2=b2)
        self.cfg = cfg
        problem = kernel_problem(
            cfg,
            b13_dtype=b13[0].dtype if b13 else None,
            b2_dtype=b2[0].dtype if b2 else None,
        )
        self.problem = replace(problem, recompute=recompute)
        kernels = mode_kernels(self.problem, config, training=training)
        given = dict(training_images or {})
        self.image = image if image is not None else compiled(*kernels.pop("forward"))
        self._wgrad_image = given.pop("wgrad", None)
        images = {mode: given.get(mode) or compiled(*each) for mode, each in kernels.items()}
        self.world = World(
            pes=cfg.num_pes, seed=seed, schedule=schedule, completion=completion, detect=detect
        )
        roles = roles_of(self.image.config)
        self.devices = [VgpuDevice(self.world, pe, roles) for pe in range(cfg.num_pes)]
        self.group = LocalGroup(
            problem=self.problem,
            image=self.image,
            devices=self.devices,
            run=self.world.run,
            replicas=cfg.replicas,
            grid=grid,
            timeout_s=timeout_s,
            check_invalid_ids=cfg.invalid_ids == "error",
            training=TrainingImages(images, self._wgrad) if training else None,
        )
        self.weights = self.group.bind_weights(w13=w13, w2=w2, b13=b13, b2=b2)

    def _wgrad(self, grad: str, bias_grad: str) -> tuple[WgradConfig, Image]:
        config = default_wgrad_config(self.problem, grad=grad, bias_grad=bias_grad)
        return config, self._wgrad_image or default_cache().get_or_compile(self.problem, config)

    def forward(
        self,
        *,
        x: Sequence[torch.Tensor],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        residual: Sequence[torch.Tensor] | None = None,
        in_place: bool = False,
        save_for_backward: bool = False,
    ) -> VgpuResult:
        """One fused forward on every PE.

        Args:
            x: per PE ``[T, H]`` bf16, 0 ≤ T ≤ Tmax.
            topk_ids: per PE ``[T, K]`` int32 or int64; < 0 is a masked slot.
            topk_weights: per PE ``[T, K]`` fp32, bf16 or fp16.
            residual: per PE contiguous ``[T, H]`` bf16, added to y in the final sum.
            in_place: write x into the session's own input view instead of having it staged.
            save_for_backward: keep what ``backward_dgrad`` needs, in the result's ``saved``.

        Raises:
            ValueError: bad arguments. MegaMoEError: what the kernels reported.
        """
        cfg = self.cfg
        check_group(cfg, x=x, topk_ids=topk_ids, topk_weights=topk_weights)
        rows = list(x)
        if in_place:
            for pe, session in enumerate(self.group.sessions):
                rows[pe] = session.input_view_TH[: x[pe].shape[0]]
                rows[pe].copy_(x[pe])
        y = [_unwritten(t.shape[0], cfg.hidden, dtype=torch.bfloat16) for t in x]
        before = self._launches()
        call: dict[str, Any] = {
            "x": rows,
            "topk_ids": [ids_TK.contiguous() for ids_TK in topk_ids],
            "topk_weights": [weights_TK.float().contiguous() for weights_TK in topk_weights],
            "y": y,
            "residual": residual,
        }
        if not save_for_backward:
            report = self.group.forward(self.weights, **call)
            return VgpuResult(y, self._launches(before), self._counters(report), report)
        caller = [
            {"topk_ids": ids, "topk_weights": router}
            for ids, router in zip(topk_ids, topk_weights, strict=True)
        ]
        report, saved = self.group.save(self.weights, **call, caller=caller)
        return VgpuResult(y, self._launches(before), self._counters(report), report, saved)

    def backward_dgrad(
        self, dy: Sequence[torch.Tensor | None], saved: Sequence[Saved]
    ) -> VgpuDgrad:
        """Gradients of x and of the router weights, as ``megamoe.Session.backward_dgrad``, per PE.

        Args:
            dy: per PE ``[T, H]`` bf16, any strides, or None for zeros.
            saved: from ``forward(save_for_backward=True)``.

        Raises:
            ValueError, SavedStateError: see there. MegaMoEError: what the kernels reported.
        """
        cfg = self.cfg
        like = torch.empty(0, cfg.hidden, dtype=torch.bfloat16)
        rows = [
            gradient_rows(t, tokens=s.tokens, like=like) for t, s in zip(dy, saved, strict=True)
        ]
        dx = [_unwritten(s.tokens, cfg.hidden, dtype=torch.bfloat16) for s in saved]
        d_router = [_unwritten(s.tokens, cfg.top_k, dtype=torch.float32) for s in saved]
        before = self._launches()
        report = self.group.dgrad(saved, dy=rows, dx=dx, d_topk_weights=d_router)
        return VgpuDgrad(dx, d_router, self._launches(before), report)

    def backward_wgrad(
        self,
        saved: Sequence[Saved] | Sequence[Sequence[Saved]],
        *,
        out: Sequence[dict[str, Any]] | None = None,
        accumulate_into: Sequence[dict[str, Any]] | None = None,
    ) -> VgpuWgrad:
        """Gradients of the weights, as ``megamoe.Session.backward_wgrad``, per PE.

        Args:
            saved: of one call (a state per PE), or of several.
            out, accumulate_into: per PE, by name, as there; neither: new fp32 tensors.

        Raises:
            ValueError, SavedStateError: see there.
        """
        calls: list[Any] = [saved] if isinstance(saved[0], Saved) else list(saved)
        grads = list(out or accumulate_into or [])
        if not grads:
            grads = [
                weight_gradients(self.cfg, pe=pe, device=torch.device("cpu"))
                for pe in range(self.cfg.num_pes)
            ]
            for tensor in (tensor for each in grads for tensor in each.values()):
                tensor.fill_(float("nan"))
        before = self._launches()
        report = self.group.wgrad(calls, grads, accumulate=accumulate_into is not None)
        return VgpuWgrad(grads, self._launches(before), report)

    def _launches(self, before: Sequence[int] | None = None) -> list[int]:
        counts = before or [0] * len(self.devices)
        return [device.launches - n for device, n in zip(self.devices, counts, strict=True)]

    def _counters(self, report: Any) -> dict[str, Any]:
        rows, fetches = [], []
        for session in self.group.sessions:
            bank = int(session.local_view("epoch")) & 1
            bases = session.local_view("slot_base").tolist()
            counts_PS = session.symmetric_view("route_count")[bank]
            rows.append(int(counts_PS[:, bases[session.pe] : bases[session.pe + 1]].sum()))
            local = bases[session.pe + 1] - bases[session.pe]
            fetches.append(int(session.symmetric_view("primary_count")[bank][:, :local].sum()))
        return {
            "rows": rows,
            "row_fetches": fetches,
            "bytes_between_pes": report.bytes_between_pes,
            "wgmma_flops": report.wgmma_flops,
            "warp_instructions": report.warp_instructions,
            "warp_instructions_by_role": dict(report.instructions_by_role),
            "bytes_read_by_role": dict(report.read_by_role),
            "bytes_written_by_role": dict(report.written_by_role),
        }


def _unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN, which shows rows that a kernel forgot to write."""
    return torch.full(shape, float("nan"), dtype=dtype)


def run_vgpu(
    cfg: MoEConfig,
    *,
    x: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    w13: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    b13: Sequence[torch.Tensor] | None = None,
    b2: Sequence[torch.Tensor] | None = None,
    seed: int = 0,
    schedule: str = "round_robin",
    completion: str = "eager",
    grid: int = DEFAULT_GRID,
) -> VgpuResult:
    """One fused forward of all PEs on vgpu. Arguments as for ``VgpuMoE`` and its ``forward``."""
    layer = VgpuMoE(
        cfg,
        w13=w13,
        w2=w2,
        b13=b13,
        b2=b2,
        grid=grid,
        seed=seed,
        schedule=schedule,
        completion=completion,
    )
    return layer.forward(x=x, topk_ids=topk_ids, topk_weights=topk_weights)
