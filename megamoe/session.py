"""The session of this process: one workspace, used by any number of layers one after another.

Legend: T tokens, H hidden, I intermediate, E experts, L local experts, K top-k, P PEs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch

from megamoe.checks import check_inputs, check_weights
from megamoe.runtime.errors import MegaMoEError, SessionClosed
from megamoe.runtime.saved import Saved
from megamoe.runtime.session import PeSession
from megamoe.runtime.training import Gradients
from megamoe.runtime.weights import BoundWeights
from megamoe.session_checks import check_num_tokens, check_rows, gradient_rows, weight_gradients
from megamoe.session_setup import SessionSetup


class Session(SessionSetup):
    """One PE's side of an expert-parallel group. Every rank of the group builds one.

    The constructor checks and allocates nothing. ``warmup()``, or the first call, loads or compiles
    the kernel, allocates the workspace and exchanges addresses: that part is collective. After it
    a call allocates nothing on the device, compiles nothing and waits for nothing on the host, and
    can be captured in a CUDA graph.

    Calls of all layers that share a session must be ordered (one stream, or events) and come in the
    same order on every rank, T = 0 included. Layers that run at the same time need two sessions.

    Args:
        cfg: the layer; layers with equal configs can share the session.
        group: ``torch.distributed`` group whose ranks are the PEs; None is the default group, or
            no group at all if ``cfg.num_pes`` is 1.
        device: CUDA device number or ``torch.device``; None is the current one. A device object of
            ``megamoe.runtime.devices`` is taken as it is.
        transport: ``"auto"``, ``"nvshmem"``, ``"torch"`` or ``"local"``.
        num_sms: SMs the kernel may use; None is all of them. The others stay free for other work.
            The same on every rank, unless ``kernel_config`` is given.
        timeout_s: deadline of waits for other PEs, 0 = none.
        cache: where compiled images are kept; None is the default folder.
        kernel_config: of the forward; None chooses by rule for layer, Tmax and ``num_sms``. Only
            its ``split_k`` decides bits of results.
        training: with the kernels of the backward, for ``save_for_backward=True`` and the two
            ``backward_`` calls. Each takes its time to compile, and the workspace serves the
            largest.
        recompute: of training: a saved state keeps only the rows of x; dgrad, still one launch,
            first computes the pre-activations again, to the same bits.

    Raises:
        ValueError: an argument is refused; names it, its value and what is allowed.
        MegaMoEError: no driver, an unsupported GPU, or torch.distributed is not initialised.
    """

    # --- use ------------------------------------------------------------------------------------

    @property
    def input_view(self) -> torch.Tensor:
        """The symmetric input ``[Tmax, H]`` bf16: rows written here need no copy by the kernel."""
        return self._ready().input_view_TH

    def bind(
        self,
        w13: torch.Tensor,
        w2: torch.Tensor,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
    ) -> BoundWeights:
        """Prepare the weights of this PE's experts, in the layout of the config (by default
        ``w13 [L, 2I, H]``, gate first, and ``w2 [L, H, I]``, bf16). They are read in place at every
        call; keep them where they are.

        Raises:
            ValueError: names the argument, its value and what is allowed.
        """
        num_local = self.cfg.experts_per_pe[self.pe]
        check_weights(
            self.cfg, w13, w2, num_experts=num_local, b13=b13, b2=b2, device=self.tensor_device
        )
        return self._ready().bind_weights(w13=w13, w2=w2, b13=b13, b2=b2)

    def release(self, weights: BoundWeights) -> None:
        """Undo ``bind``. Waits for the device; no captured graph may use the weights any more."""
        if self._pe_session is not None and not self.closed:
            self._pe_session.release_weights(weights)

    @overload
    def forward(
        self,
        weights: BoundWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        num_tokens: torch.Tensor | None = None,
        save_for_backward: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def forward(
        self,
        weights: BoundWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        num_tokens: torch.Tensor | None = None,
        save_for_backward: Literal[True],
    ) -> tuple[torch.Tensor, Saved]: ...

    def forward(
        self,
        weights: BoundWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        num_tokens: torch.Tensor | None = None,
        save_for_backward: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Saved]:
        """Enqueue one call on the current stream. Every rank calls, also with T = 0.

        Args:
            weights: from ``bind``.
            x: ``[T, H]`` bf16, 0 ≤ T ≤ Tmax, any row stride.
            topk_ids: ``[T, K]`` int32 or int64; < 0 is a masked slot.
            topk_weights: ``[T, K]`` fp32; bf16 and fp16 are converted first.
            out: ``[T, H]`` bf16, contiguous; None makes one.
            residual: ``[T, H]`` bf16, contiguous, added to the result.
            num_tokens: int32 ``[1]`` on the device: how many of the Tmax rows given here count.
                Read by the kernel, so a replayed graph may find another T each time. Rows of the
                output from T on are left as they are; of one made here they are zeros with
                ``save_for_backward``.
            save_for_backward: also return what ``backward_dgrad`` needs; on every rank or on none.
                Any number of calls may be outstanding. ``topk_ids``, ``topk_weights`` and
                ``num_tokens`` must not change until dgrad; x may, its rows are kept.

        Returns:
            ``[T, H]`` bf16: ``out``, or a new tensor; and the saved state, which owns its memory.

        Raises:
            ValueError: names the argument, its value and what is allowed.
            MegaMoEError: what an earlier call reported; the session is closed or not warm, or not
                built for training.
        """
        session = self._ready()
        cfg = self.cfg
        if x.device != self.tensor_device:
            raise ValueError(f"x is on {x.device}: must be on {self.tensor_device}")
        check_inputs(cfg, x, topk_ids, topk_weights)
        tokens = x.shape[0]
        if num_tokens is not None:
            check_num_tokens(num_tokens, rows=tokens, max_tokens=cfg.max_tokens, like=x)
        if out is None:
            out = self._rows(x, zero=save_for_backward and num_tokens is not None)
        else:
            check_rows("out", out, like=x)
        if residual is not None:
            check_rows("residual", residual, like=x)
        call: dict[str, Any] = {
            "x_TH": x,
            "topk_ids_TK": topk_ids.contiguous(),
            "topk_weights_TK": topk_weights.to(torch.float32).contiguous(),
            "y_TH": out,
            "residual_TH": residual,
            "num_tokens": num_tokens,
        }
        if not save_for_backward:
            session.launch(weights, **call)
            return out
        caller = {"topk_ids": topk_ids, "topk_weights": topk_weights}
        if num_tokens is not None:
            caller["num_tokens"] = num_tokens
        return out, session.training.save(weights, **call, caller=caller)

    def _rows(self, like: torch.Tensor, *, zero: bool) -> torch.Tensor:
        make = torch.zeros if zero else torch.empty
        return make(like.shape, dtype=torch.bfloat16, device=like.device)

    def backward_dgrad(
        self, dy: torch.Tensor | None, saved: Saved
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue the gradients of x and of the router weights, one launch. Every rank calls, in
        the same order among all its calls, also with T = 0 and where y was not used.

        Args:
            dy: ``[T, H]`` bf16 gradient of y, any strides; None stands for zeros.
            saved: of a forward of this session, once.

        Returns:
            dx ``[T, H]`` bf16 and d_topk_weights ``[T, K]`` fp32, 0 at masked slots. With
            ``num_tokens`` rows from T on are zeros.

        Raises:
            ValueError: dy is refused. SavedStateError: saved was used before, was freed, belongs to
            another session, or ids or router weights were modified in place since the forward.
            MegaMoEError: as ``forward``.
        """
        session = self._ready()
        where, cfg = self.tensor_device, self.cfg
        like = torch.empty(0, cfg.hidden, dtype=torch.bfloat16, device=where)
        dy = gradient_rows(dy, tokens=saved.tokens, like=like)
        zero = saved.num_tokens is not None
        dx = self._rows(dy, zero=zero)
        make = torch.zeros if zero else torch.empty
        d_topk_weights = make(saved.tokens, cfg.top_k, dtype=torch.float32, device=where)
        session.training.dgrad(saved, dy_TH=dy, dx_TH=dx, d_topk_TK=d_topk_weights)
        return dx, d_topk_weights

    def backward_wgrad(
        self,
        saved: Saved | Sequence[Saved],
        *,
        out: Mapping[str, Gradients] | None = None,
        accumulate_into: Mapping[str, Gradients] | None = None,
    ) -> Mapping[str, Gradients]:
        """Enqueue the gradients of the weights, one launch for up to 8 calls. Local: no other rank
        takes part. The memory of the calls goes back.

        Args:
            saved: calls with the same bound weights after their dgrad; summed in list order.
            out: ``"w13"``, ``"w2"``, ``"b13"``, ``"b2"`` → where to store: a contiguous tensor of
                the weight's shape, or a list with one tensor for each expert (None: not wanted).
                Weights alike fp32 or bf16, biases likewise; names may be missing. None makes fp32
                tensors for all. Experts without rows get zeros.
            accumulate_into: as ``out``, but added to what is there: fp32 by one addition, bf16 in
                fp32 with one rounding; experts without rows stay as they are.

        Returns:
            ``out``, ``accumulate_into``, or what was made.

        Raises:
            ValueError: both were given, or a tensor is refused.
            SavedStateError: a call is not after dgrad, or belongs to another session.
        """
        session = self._ready()
        if out is not None and accumulate_into is not None:
            raise ValueError("out and accumulate_into are given: must be one of them")
        calls = [saved] if isinstance(saved, Saved) else list(saved)
        grads = accumulate_into if out is None else out
        if grads is None:
            grads = weight_gradients(self.cfg, pe=self.pe, device=self.tensor_device)
        session.training.wgrad(calls, grads, accumulate=accumulate_into is not None)
        return grads

    def check(self) -> None:
        """Wait for the device and raise what the kernel has reported.

        Raises:
            MegaMoEError: a timeout, a full pool or an invalid id.
        """
        session = self._ready()
        self.device.synchronize()
        session.raise_on_status()

    def _ready(self) -> PeSession:
        if self.closed:
            raise SessionClosed("the session is closed; build a new one")
        if self._pe_session is None:
            raise MegaMoEError("warm up first: call session.warmup() on every rank")
        return self._pe_session
