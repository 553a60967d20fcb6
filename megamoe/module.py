"""``MegaMoE``, the layer as a torch module, and ``forward``, the same as a function.

Legend: T tokens, H hidden, I intermediate, E experts, L local experts, K top-k, P PEs.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from megamoe.checks import check_inputs, check_weights
from megamoe.config import MoEConfig
from megamoe.runtime.errors import MegaMoEError
from megamoe.runtime.session import BoundWeights
from megamoe.session import Session

log = logging.getLogger("megamoe")
WEIGHTS = ("w13", "w2", "b13", "b2")
_SHARED: dict[Any, Session] = {}


class MegaMoE(nn.Module):
    """The expert FFNs of a mixture-of-experts layer over the PEs of a group; forward only.

    On a CUDA tensor a call is one kernel launch on the current stream. On a CPU tensor the
    reference computes the same result, so that a model with this layer runs and is tested anywhere;
    with several PEs it then needs an initialised ``torch.distributed`` (gloo).

    Args:
        cfg: the layer.
        w13: bf16 of this PE's experts, ``[L, *cfg.w13_shape]``, in the layout of the config.
        w2: bf16, ``[L, *cfg.w2_shape]``.
        b13, b2: biases, exactly if the config says so.
        session: workspace to use; None shares one between all layers with this config, group and
            device, built at the first CUDA call. Layers that run at the same time need different
            ones.
        group: ``torch.distributed`` group whose ranks are the PEs.

    Weights are taken by reference: an ``nn.Parameter`` is registered as it is, a plain tensor as a
    buffer outside the state dict. They are read in place at every call.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        w13: torch.Tensor,
        w2: torch.Tensor,
        *,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        session: Session | None = None,
        group: Any = None,
    ):
        super().__init__()
        self.w13: torch.Tensor
        self.w2: torch.Tensor
        self.b13: torch.Tensor | None
        self.b2: torch.Tensor | None
        if session is not None and session.cfg != cfg:
            raise ValueError(f"session was built for {session.cfg}: must be built for {cfg}")
        check_weights(cfg, w13, w2, num_experts=w2.shape[0], b13=b13, b2=b2)
        if w13.device != w2.device:
            raise ValueError(f"w2 is on {w2.device}: must be on {w13.device}, as w13")
        self.cfg = cfg
        self.group = group
        self.session = session
        self._bound: BoundWeights | None = None
        self._said = False
        for name, tensor in zip(WEIGHTS, (w13, w2, b13, b2), strict=True):
            if tensor is None or isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this copy's place in memory."""
        return self.__dict__ | {"_bound": None}

    def extra_repr(self) -> str:
        cfg = self.cfg
        return (
            f"H={cfg.hidden}, I={cfg.intermediate}, E={cfg.num_experts}, K={cfg.top_k}, "
            f"P={cfg.num_pes}, local experts={self.w2.shape[0]}, {cfg.activation}"
        )

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        num_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output for this PE's tokens. Every rank calls, also with T = 0.

        Args and errors: as ``megamoe.Session.forward``.

        Returns:
            ``[T, H]`` bf16.
        """
        session, bound = self.session, self._bound
        if session is None or session.tensor_device != x.device:
            if x.device.type == "cpu":
                return self._reference(x, topk_ids, topk_weights, out, residual, num_tokens)
            session = self._session_for(x.device)
        weights = self._weights()
        if torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (x, topk_weights, *weights.values())
        ):
            raise MegaMoEError(
                "an input or weight requires a gradient, and this version computes the forward "
                "only: call under torch.inference_mode() or torch.no_grad()"
            )
        if bound is None or not bound.still_there(weights):
            bound = self._bind(session, weights)
        return session.forward(
            bound, x, topk_ids, topk_weights, out=out, residual=residual, num_tokens=num_tokens
        )

    def _weights(self) -> dict[str, torch.Tensor]:
        named = ((name, getattr(self, name)) for name in WEIGHTS)
        return {name: tensor for name, tensor in named if tensor is not None}

    def _session_for(self, device: torch.device) -> Session:
        if self.session is not None:
            raise ValueError(f"x is on {device}: must be on {self.session.tensor_device}")
        self.session = shared_session(self.cfg, group=self.group, device=device)
        return self.session

    def _bind(self, session: Session, weights: dict[str, torch.Tensor]) -> BoundWeights:
        if self._bound is not None and session.capturing():
            raise MegaMoEError(
                "warm up first: the weights moved since the last call; run the layer once before "
                "capturing a CUDA graph"
            )
        session.warmup()
        old, self._bound = self._bound, None
        if old is not None:
            session.release(old)
        if session.capturing():
            raise MegaMoEError("warm up first: run the layer once before capturing a CUDA graph")
        bound = session.bind(**{name: tensor.detach() for name, tensor in weights.items()})
        self._bound = bound
        return bound

    def _reference(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None,
        residual: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same result on the CPU, by ``megamoe.reference`` or ``megamoe.classical``."""
        if not self._said:
            self._said = True
            log.info("MegaMoE: CPU tensors are computed with the reference, not with the kernel")
        cfg = self.cfg
        check_inputs(cfg, x, topk_ids, topk_weights)
        count = x.shape[0] if num_tokens is None else min(int(num_tokens), x.shape[0])
        given = (x[:count], topk_ids[:count], topk_weights[:count])
        plus = None if residual is None else residual[:count]
        y = (self._one_pe if cfg.num_pes == 1 else self._several_pes)(*given, plus)
        if out is None and num_tokens is None:
            return y
        if out is None:
            out = torch.zeros_like(x)
        out[:count] = y
        return out

    def _one_pe(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        from megamoe.reference import moe_oracle

        cfg = self.cfg
        local = cfg.local_experts(0)
        order = [local.index(expert) for expert in range(cfg.num_experts)]
        in_order = order == list(range(len(local)))
        tensors: dict[str, Any] = {
            name: tensor if in_order else tensor[order] for name, tensor in self._weights().items()
        }
        return moe_oracle(
            cfg,
            x=[x],
            topk_ids=[ids],
            topk_weights=[weights],
            residual=None if residual is None else [residual],
            dtype=torch.float32,
            rounding="kernel",
            **tensors,
        )[0]

    def _several_pes(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        import torch.distributed as dist

        from megamoe.classical import moe_classical

        if not dist.is_available() or not dist.is_initialized():
            raise MegaMoEError(
                f"CPU tensors and num_pes={self.cfg.num_pes}: call init_process_group('gloo') "
                "first, or use a config with num_pes=1"
            )
        y = moe_classical(
            self.cfg,
            x_TH=x,
            topk_ids_TK=ids,
            topk_weights_TK=weights,
            w13_LGH=self.w13,
            w2_LHI=self.w2,
            b13_LG=self.b13,
            b2_LH=self.b2,
            group=self.group,
            dtype=torch.float32,
        )
        return (y if residual is None else y + residual.float()).to(torch.bfloat16)


def shared_session(cfg: MoEConfig, *, group: Any, device: torch.device) -> Session:
    """The session that layers with one config, group and device share; not warm when new."""
    key = (cfg, group, device)
    session = _SHARED.get(key)
    if session is None or session.closed:
        session = _SHARED[key] = Session(cfg, group=group, device=device)
    return session


def forward(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    weights: BoundWeights,
    session: Session,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """One call of a layer without a module: ``weights`` come from ``session.bind``.

    Args, result and errors: as ``megamoe.Session.forward``.
    """
    return session.forward(
        weights, x, topk_ids, topk_weights, out=out, residual=residual, num_tokens=num_tokens
    )
