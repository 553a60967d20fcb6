"""All PEs of a group on one real GPU: its SMs are divided among them, each on its own stream.

For tests and measurements on a machine with one GPU; serving uses ``megamoe.Session``. The launches
are not cooperative (``CudaDevice(sharers=P)``), so nothing else may run on the GPU meanwhile.

Legend: P PEs, T tokens, H hidden, I intermediate, L experts of one PE, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megamoe.checks import check_group, check_kernel_support, check_weights
from megamoe.config import MoEConfig
from megamoe.cute_kernels.smem import default_config
from megamoe.lowering import kernel_problem
from megamoe.runtime.cache import ImageCache, default_cache
from megamoe.runtime.devices.cuda import CudaDevice
from megamoe.runtime.local_group import LocalGroup

DEFAULT_TIMEOUT_S = 20.0


class OneGpuMoE:
    """An MoE layer whose P PEs share a GPU; one session a PE, any number of calls.

    Args:
        cfg: the layer.
        w13, w2: per PE the weights of its experts, on the GPU.
        devices: one ``CudaDevice(sharers=P)`` a PE, each with a stream of its own.
        synchronize: waits for all of them.
        num_sms: SMs that all PEs together may use; None is all.
        timeout_s: deadline of waits between PEs.
        cache: where images come from.

    Raises:
        ValueError: names the argument, its value and what is allowed.
        MegaMoEError: the GPU refuses.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        *,
        w13: Sequence[torch.Tensor],
        w2: Sequence[torch.Tensor],
        devices: Sequence[CudaDevice],
        synchronize: Callable[[], None],
        num_sms: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        cache: ImageCache | None = None,
    ):
        check_kernel_support(cfg)
        for pe in range(cfg.num_pes):
            check_weights(cfg, w13[pe], w2[pe], num_experts=cfg.experts_per_pe[pe], pe=pe)
        sms = devices[0].sms if num_sms is None else num_sms
        self.cfg, self.devices = cfg, list(devices)
        self.grid = sms // cfg.num_pes
        problem = kernel_problem(cfg)
        config = default_config(problem, sms=self.grid)
        image = (cache or default_cache()).get_or_compile(problem, config)
        self.group = LocalGroup(
            problem=problem,
            image=image,
            devices=devices,
            run=synchronize,
            replicas=cfg.replicas,
            grid=self.grid,
            timeout_s=timeout_s,
            check_invalid_ids=cfg.invalid_ids == "error",
        )
        self.weights = self.group.bind_weights(w13=w13, w2=w2)

    def enqueue(
        self,
        pe: int,
        *,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """One PE's part of a call, on its stream. All PEs must enqueue before anyone is awaited."""
        self.group.sessions[pe].launch(
            self.weights[pe],
            x_TH=x,
            topk_ids_TK=topk_ids,
            topk_weights_TK=topk_weights,
            y_TH=out,
        )

    def forward(
        self,
        *,
        x: Sequence[torch.Tensor],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        in_place: bool = False,
    ) -> list[torch.Tensor]:
        """One call on every PE, awaited.

        Args:
            x, topk_ids, topk_weights: per PE, on the GPU.
            in_place: write x into the sessions' own input views instead of having it staged.

        Returns:
            Per PE ``[T, H]`` bf16; rows that the kernel forgot to write are NaN.

        Raises:
            ValueError: bad arguments. MegaMoEError: what the kernels reported.
        """
        check_group(self.cfg, x=x, topk_ids=topk_ids, topk_weights=topk_weights)
        rows = list(x)
        if in_place:
            for pe, session in enumerate(self.group.sessions):
                rows[pe] = session.input_view_TH[: x[pe].shape[0]]
                rows[pe].copy_(x[pe])
        y = [torch.full_like(x_TH, float("nan")) for x_TH in rows]
        for device in self.devices:
            device.synchronize()  # the tensors above were made on another stream
        self.group.forward(self.weights, x=rows, topk_ids=topk_ids, topk_weights=topk_weights, y=y)
        return y

    def close(self) -> None:
        """Free the sessions' memory."""
        for session in self.group.sessions:
            session.close()
