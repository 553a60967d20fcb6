"""``MegaMoE``, the layer as a torch module, and ``forward``, the same as a function.

Legend: T tokens, H hidden, I intermediate, E experts, L local experts, K top-k, P PEs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megamoe.autograd import WEIGHTS, Engine, Side, apply
from megamoe.checks import check_inputs, check_weights
from megamoe.config import MoEConfig
from megamoe.reference_engine import ReferenceEngine
from megamoe.runtime.errors import MegaMoEError
from megamoe.runtime.session import BoundWeights
from megamoe.session import Session
from megamoe.session_engine import SessionEngine
from megamoe.weight_gradients import DelayedGradients

log = logging.getLogger("megamoe")
_SHARED: dict[Any, Session] = {}


class MegaMoE(nn.Module):
    """The expert FFNs of a mixture-of-experts layer over the PEs of a group, for torch autograd.

    On a CUDA tensor a call is one kernel launch on the current stream, and its backward one for
    dgrad and one for wgrad. On a CPU tensor the reference computes the same results, so that a
    model with this layer runs, trains and is tested anywhere; with several PEs it then needs an
    initialised ``torch.distributed`` (gloo).

    Every rank makes the same calls in the same order, forward and backward, also with T = 0: its
    loss must depend on y there too. Gradients of experts are plain sums over the tokens of all PEs,
    not scaled; those of experts without rows are zeros of full shape. A weight's ``main_grad``, if
    it has one, is added to in place (`megamoe.weight_gradients`).

    Args:
        cfg: the layer.
        w13: bf16 of this PE's experts, ``[L, *cfg.w13_shape]``, in the layout of the config.
        w2: bf16, ``[L, *cfg.w2_shape]``.
        b13, b2: biases, exactly if the config says so.
        session: workspace to use; None shares one between all layers with this config, group and
            device, built at the first CUDA call. Layers that run at the same time need different
            ones.
        group: ``torch.distributed`` group whose ranks are the PEs.
        delay_wgrad: leave the gradients of the weights to ``backward_dw()``: autograd then returns
            none for them, and no hook of theirs fires in ``loss.backward()``.
        recompute: keep only the rows of x from the forward to the backward, which computes the
            pre-activations again: less memory, more work in dgrad, the same bits. A
            ``session`` must have been built alike. On the CPU the reference keeps what it likes.

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
        delay_wgrad: bool = False,
        recompute: bool = False,
    ):
        super().__init__()
        self.w13: torch.Tensor
        self.w2: torch.Tensor
        self.b13: torch.Tensor | None
        self.b2: torch.Tensor | None
        if session is not None and session.cfg != cfg:
            raise ValueError(f"session was built for {session.cfg}: must be built for {cfg}")
        if session is not None and session.training and session.recompute != recompute:
            raise ValueError(
                f"session was built with recompute={session.recompute}: must be {recompute}"
            )
        check_weights(cfg, w13, w2, num_experts=w2.shape[0], b13=b13, b2=b2)
        if w13.device != w2.device:
            raise ValueError(f"w2 is on {w2.device}: must be on {w13.device}, as w13")
        self.cfg = cfg
        self.group = group
        self.session = session
        self.delay_wgrad = delay_wgrad
        self.recompute = recompute
        self._delayed = DelayedGradients()
        self._bound: BoundWeights | None = None
        self._said = self._shares_session = False
        for name, tensor in zip(WEIGHTS, (w13, w2, b13, b2), strict=True):
            if tensor is None or isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this copy's place in memory, and without pending gradients."""
        return self.__dict__ | {"_bound": None, "_delayed": DelayedGradients()}

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

        Args and errors: as ``megamoe.Session.forward``; ``out`` is refused if a gradient is wanted.

        Returns:
            ``[T, H]`` bf16, differentiable.
        """
        session, bound, weights = self.session, self._bound, self._weights()
        gradients = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad
            for tensor in (x, topk_weights, residual, *weights.values())
        )
        if gradients and out is not None:
            raise ValueError("out is given: must be None where a gradient is wanted")
        if session is None or session.tensor_device != x.device:
            if x.device.type == "cpu":
                side = Side(x, topk_ids, topk_weights, residual, weights)
                return self._reference(side, out, num_tokens, gradients)
            session = self._session_for(x.device)
        if gradients and not session.training:
            if not self._shares_session:
                raise MegaMoEError(
                    "an input or weight requires a gradient: build the session with training=True, "
                    "or call under torch.inference_mode() or torch.no_grad()"
                )
            session = self._session_for(x.device, training=True)
        if bound is None or not bound.still_there(weights):
            bound = self._bind(session, weights)
        if gradients:
            side = Side(x, topk_ids, topk_weights, residual, weights)
            return self._differentiable(SessionEngine(session, bound, num_tokens), side)
        return session.forward(
            bound, x, topk_ids, topk_weights, out=out, residual=residual, num_tokens=num_tokens
        )

    def _differentiable(self, engine: Engine, side: Side) -> torch.Tensor:
        return apply(engine, [side], delay=self._delayed.append if self.delay_wgrad else None)[0]

    def backward_dw(self) -> None:
        """With ``delay_wgrad``: the gradients of the weights of all calls whose ``backward`` has
        run, in one go. They are added to ``main_grad``, or to ``.grad`` where there is none; then
        the registered hooks are called. Local: no other rank takes part.

        Raises:
            MegaMoEError: the layer was built without ``delay_wgrad``.
        """
        if not self.delay_wgrad:
            raise MegaMoEError("backward_dw: the layer was built without delay_wgrad=True")
        self._delayed.run()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """With ``delay_wgrad``: ``hook`` is called at the end of every ``backward_dw``."""
        self._delayed.hooks.append(hook)

    def _weights(self) -> dict[str, torch.Tensor]:
        named = ((name, getattr(self, name)) for name in WEIGHTS)
        return {name: tensor for name, tensor in named if tensor is not None}

    def _session_for(self, device: torch.device, *, training: bool = False) -> Session:
        if self.session is not None and not self._shares_session:
            raise ValueError(f"x is on {device}: must be on {self.session.tensor_device}")
        training = training or any(tensor.requires_grad for tensor in self._weights().values())
        self.session = shared_session(
            self.cfg,
            group=self.group,
            device=device,
            training=training,
            recompute=training and self.recompute,
        )
        self._shares_session = True
        self._bound = None
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
        side: Side,
        out: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        gradients: bool,
    ) -> torch.Tensor:
        """The same result on the CPU."""
        if not self._said:
            self._said = True
            log.info("MegaMoE: CPU tensors are computed with the reference, not with the kernel")
        check_inputs(self.cfg, side.x, side.topk_ids, side.topk_weights)
        rows = side.x.shape[0]
        if num_tokens is not None:
            count = min(int(num_tokens), rows)
            plus = None if side.residual is None else side.residual[:count]
            router = side.topk_weights[:count]
            side = Side(side.x[:count], side.topk_ids[:count], router, plus, side.weights)
        engine = ReferenceEngine(self.cfg, group=self.group)
        y = self._differentiable(engine, side) if gradients else engine.forward(side)
        if num_tokens is None:
            return y if out is None else out.copy_(y)
        if out is None:
            rest = y.new_zeros(rows - y.shape[0], self.cfg.hidden)
            return torch.cat([y, rest])
        out[: y.shape[0]] = y
        return out


def shared_session(
    cfg: MoEConfig,
    *,
    group: Any,
    device: torch.device,
    training: bool = False,
    recompute: bool = False,
) -> Session:
    """The session that layers with one config, group and device share, one for each way to train
    and one for layers that do not; not warm when new."""
    key = (cfg, group, device, training, recompute)
    session = _SHARED.get(key)
    if session is None or session.closed:
        session = Session(cfg, group=group, device=device, training=training, recompute=recompute)
        _SHARED[key] = session
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
