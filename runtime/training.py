"""The calls of a training session beyond the forward: save, dgrad, wgrad.

Legend: T tokens, H hidden, K top-k, L experts of this PE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megamoe.cute_kernels.abi import WGRAD_MAX_SAVED
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.saved import TRAINING_MODES
from megamoe.cute_kernels.wgrad_tables import WgradConfig
from megamoe.runtime.saved import Saved, SavedPool
from megamoe.runtime.weights import BoundWeights
from megamoe.runtime.wgrad import GRAD_DTYPES, BoundList, Gradient, WgradLauncher

if TYPE_CHECKING:
    from megamoe.runtime.session import PeSession

KINDS = {dtype: kind for kind, dtype in GRAD_DTYPES.items()}


@dataclass(frozen=True)
class TrainingImages:
    """What was compiled for training.

    Args:
        modes: images of the modes ``"save"`` and ``"dgrad"``.
        wgrad: called with the types of the weights' and the biases' gradients, each ``"f32"`` or
            ``"bf16"``; gives the config and image of the wgrad kernel.
    """

    modes: Mapping[str, Image]
    wgrad: Callable[[str, str], tuple[WgradConfig, Image]]


@dataclass(frozen=True)
class TrainingLaunch:
    """What a launch in a training mode is given besides, as addresses."""

    mode: str
    maps: int
    saved: int
    dgrad: int = 0
    d_topk_TK: torch.Tensor | None = None

    def parameters(self, address_of: Callable[[torch.Tensor, str], int]) -> dict[str, int]:
        """By parameter name; ``maps`` takes the place of the weights' own."""
        d_topk = 0 if self.d_topk_TK is None else address_of(self.d_topk_TK, "d_topk_weights")
        return {"maps": self.maps, "saved": self.saved, "dgrad": self.dgrad, "d_topk": d_topk}


Gradients = torch.Tensor | Sequence[torch.Tensor | None]
"""Of one weight: one tensor, or one an expert."""
NO_TRAINING = {"saved": 0, "dgrad": 0, "d_topk": 0}


class TrainingCalls:
    """Saving forwards, dgrad and wgrad of one PE's session.

    Args:
        session: runs the launches; dgrad is an epoch as a forward is.
        images: what was compiled.
        local: address of the session's local block.
    """

    def __init__(self, session: PeSession, images: TrainingImages, *, local: int):
        self._session, self._images = session, images
        problem = session.problem
        self.pool = SavedPool(
            session.device,
            kernels={
                mode: (replace(problem, mode=mode), images.modes[mode].config)
                for mode in TRAINING_MODES
            },
            local=local,
            experts=session.local_experts,
        )
        self._wgrad: dict[tuple[str, str], WgradLauncher] = {}
        self._lists: dict[tuple[Any, ...], BoundList] = {}

    def save(
        self,
        weights: BoundWeights,
        *,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        y_TH: torch.Tensor,
        residual_TH: torch.Tensor | None = None,
        num_tokens: torch.Tensor | None = None,
        caller: Mapping[str, torch.Tensor] | None = None,
    ) -> Saved:
        """``PeSession.launch`` of a forward that keeps what its backward needs.

        Args:
            caller: tensors that must not change in place until dgrad, by name.

        Raises:
            MegaMoEError: as ``launch``.
        """
        session = self._session
        session.check_usable()
        saved = Saved(
            session,
            self.pool,
            weights=weights,
            ids=topk_ids_TK,
            router=topk_weights_TK,
            num_tokens=num_tokens,
            caller=dict(caller or {}),
        )
        block = saved.block("saved")
        maps = self.pool.maps("save", weights, block, None)
        session.launch(
            weights,
            x_TH=x_TH,
            topk_ids_TK=topk_ids_TK,
            topk_weights_TK=topk_weights_TK,
            y_TH=y_TH,
            residual_TH=residual_TH,
            num_tokens=num_tokens,
            training=TrainingLaunch("save", maps, block.address),
        )
        self.pool.used(block)
        return saved

    def dgrad(
        self, saved: Saved, *, dy_TH: torch.Tensor, dx_TH: torch.Tensor, d_topk_TK: torch.Tensor
    ) -> None:
        """Enqueue the dgrad of a call. Every PE issues its calls, forward and dgrad, in one order.

        Args:
            dy_TH: bf16 rows, as ``x_TH`` of ``launch``.
            dx_TH, d_topk_TK: contiguous bf16 and fp32, written for the tokens of the call.

        Raises:
            SavedStateError: used twice, freed, another session's, or its inputs were modified.
            MegaMoEError: as ``launch``.
        """
        session = self._session
        session.check_usable()
        saved.require(session, state="forward", what="backward_dgrad")
        saved.require_unchanged()
        kept, made = saved.block("saved"), saved.block("dgrad")
        maps = self.pool.maps("dgrad", saved.weights, kept, made)
        session.launch(
            saved.weights,
            x_TH=dy_TH,
            topk_ids_TK=saved.ids,
            topk_weights_TK=saved.router,
            y_TH=dx_TH,
            num_tokens=saved.num_tokens,
            training=TrainingLaunch("dgrad", maps, kept.address, made.address, d_topk_TK),
        )
        self.pool.used(kept, made)
        saved.advance("dgrad")

    def launcher(self, dtype: torch.dtype, bias_dtype: torch.dtype) -> WgradLauncher:
        """The wgrad kernel for gradients of these types, made at first use.

        Raises:
            ValueError: neither fp32 nor bf16. MegaMoEError: the device refuses the image.
        """
        for each in (dtype, bias_dtype):
            if each not in KINDS:
                raise ValueError(f"gradients of {each}: must be torch.float32 or torch.bfloat16")
        key = (KINDS[dtype], KINDS[bias_dtype])
        if key not in self._wgrad:
            self.pool.refuse_growth("the wgrad kernel")
            session = self._session
            config, image = self._images.wgrad(*key)
            bases = session.local_view("slot_base").tolist()
            self._wgrad[key] = WgradLauncher(
                problem=session.problem,
                config=config,
                image=image,
                device=session.device,
                first_slot=bases[session.pe],
                experts=session.local_experts,
                grid=session.grid,
            )
        return self._wgrad[key]

    def wgrad(
        self, saved: Sequence[Saved], grads: Mapping[str, Gradients], *, accumulate: bool
    ) -> None:
        """Enqueue the wgrad of calls of one layer, summed in list order; they are done with it.
        Local. More than WGRAD_MAX_SAVED calls take several launches.

        Args:
            grads: by name a tensor ``[L, *weight shape]``, or a list of one an expert (None: not
                wanted); fp32 or bf16, alike for w13 and w2 and for both biases.
            accumulate: add to them.

        Raises:
            SavedStateError: one is not after dgrad, or another session's.
            ValueError: no call, one twice, calls of different weights, or bad gradients.
        """
        self._session.check_usable()
        if not saved:
            raise ValueError("saved is empty: must be one saved state or more")
        if len({id(each) for each in saved}) < len(saved):
            raise ValueError("saved holds one saved state twice")
        for each in saved:
            each.require(self._session, state="dgrad", what="backward_wgrad")
            if each.weights is not saved[0].weights:
                raise ValueError("saved: all must be calls with the same bound weights")
        launcher = self.launcher(_dtype(grads, "w13", "w2"), _dtype(grads, "b13", "b2"))
        bound = {name: self._bind(launcher, name, each) for name, each in grads.items()}
        for first in range(0, len(saved), WGRAD_MAX_SAVED):
            some = saved[first : first + WGRAD_MAX_SAVED]
            blocks = [(each.block("saved"), each.block("dgrad")) for each in some]
            entries = [self.pool.wgrad_entry(launcher, *pair) for pair in blocks]
            launcher.launch(entries, accumulate=accumulate or first > 0, **bound)
            for pair in blocks:
                self.pool.used(*pair)
            for each in some:
                each.advance("wgrad")

    def _bind(self, launcher: WgradLauncher, name: str, gradient: Gradients) -> Gradient:
        """A list of tensors becomes a table in device memory, made once for the same tensors."""
        if isinstance(gradient, torch.Tensor):
            return gradient
        key = (name, *(0 if each is None else each.data_ptr() for each in gradient))
        if key not in self._lists:
            self.pool.refuse_growth(f"a table of the gradients of {name}")
            self._lists[key] = launcher.bind_list(name, gradient)
        return self._lists[key]

    def close(self) -> None:
        """Free everything. Nothing may be running."""
        for launcher in self._wgrad.values():
            for bound in self._lists.values():
                launcher.release(bound)
            break
        self._lists.clear()
        self.pool.close()


def _dtype(grads: Mapping[str, Gradients], *names: str) -> torch.dtype:
    """The type that the gradients of these names have in common; fp32 if there are none.

    Raises:
        ValueError: they differ.
    """
    found: dict[torch.dtype, str] = {}
    for name in names:
        given = grads.get(name, ())
        for each in (given,) if isinstance(given, torch.Tensor) else given:
            if each is not None:
                found.setdefault(each.dtype, name)
    if len(found) > 1:
        raise ValueError(
            f"gradients of {names[0]} and {names[1]} are {sorted(map(str, found))}: "
            "must be of one type"
        )
    return next(iter(found), torch.float32)
