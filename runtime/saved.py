"""What a training forward keeps until its gradients are computed, and the memory it lies in.

A ``Saved`` owns two blocks (``cute_kernels/saved.py``): the first from its forward on, the second
from its dgrad on. Both go back to the session's ``SavedPool`` after wgrad, or at ``free()``, and
the next call takes them again: a steady loop allocates nothing and encodes no tensor map anew.

Legend: T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.saved import dgrad_block, saved_block
from megamoe.runtime.devices.base import Allocation, Device
from megamoe.runtime.errors import SavedStateError
from megamoe.runtime.maps import encode_maps
from megamoe.runtime.weights import BoundWeights
from megamoe.runtime.wgrad import BoundSaved, WgradLauncher

KINDS = ("saved", "dgrad")
NEXT = {
    "forward": "backward_dgrad comes next",
    "dgrad": "backward_dgrad was called; only backward_wgrad may follow",
    "wgrad": "both backward passes were called; each forward has one backward",
    "freed": "free() was called",
}
"""States of a ``Saved``, by the last thing that was done, in words."""


class SavedPool:
    """Blocks for the calls of one session: handed out, taken back, used again.

    Args:
        device: where they lie.
        kernels: problem and config of the modes ``"save"`` and ``"dgrad"``.
        local: address of the session's local block.
        experts: experts of this PE.
    """

    def __init__(
        self,
        device: Device,
        *,
        kernels: Mapping[str, tuple[Problem, KernelConfig]],
        local: int,
        experts: int,
    ):
        self._device, self._kernels = device, kernels
        self._local, self._experts = local, experts
        self.bytes_of = {
            "saved": saved_block(kernels["save"][0]).nbytes,
            "dgrad": dgrad_block(kernels["dgrad"][0]).nbytes,
        }
        self.refuse_growth: Callable[[str], None] = lambda what: None
        """Raises if nothing may be allocated now, as in a graph capture."""
        self._free: dict[str, list[Allocation]] = {kind: [] for kind in KINDS}
        self._all: list[Allocation] = []
        self._streams: dict[int, Any] = {}
        self._maps: dict[tuple[str, int, int, int], tuple[BoundWeights, Allocation]] = {}
        self._entries: dict[tuple[int, int], BoundSaved] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or free."""
        return sum(block.bytes_N.numel() for block in self._all)

    def take(self, kind: str) -> Allocation:
        """A block of a kind, its contents undefined: the oldest free one, or a new one. So equal
        schedules of calls use equal pairs of blocks, and their tensor maps are there."""
        free = self._free[kind]
        if free:
            block = min(free, key=self._all.index)
            free.remove(block)
            self._wait_for_last_use(block)
            return block
        self.refuse_growth(f"memory for one more {kind} state")
        block = self._device.allocate(self.bytes_of[kind], kind)
        self._all.append(block)
        return block

    def used(self, *blocks: Allocation) -> None:
        """Note the stream of a launch that uses blocks."""
        for block in blocks:
            if block.bytes_N.is_cuda:
                self._streams[block.address] = torch.cuda.current_stream(block.bytes_N.device)

    def give_back(self, kind: str, block: Allocation) -> None:
        """The block may be handed out again."""
        if block in self._all:
            self._free[kind].append(block)

    def _wait_for_last_use(self, block: Allocation) -> None:
        """wgrad may have run on a stream of its own, and nobody waited for it."""
        last = self._streams.get(block.address)
        if last is None:
            return
        current = torch.cuda.current_stream(block.bytes_N.device)
        if last != current:
            current.wait_stream(last)

    def maps(
        self, mode: str, weights: BoundWeights, saved: Allocation, dgrad: Allocation | None
    ) -> int:
        """Address of the tensor maps of a launch in ``mode`` over these blocks; encoded once."""
        key = (mode, id(weights), saved.address, 0 if dgrad is None else dgrad.address)
        if key not in self._maps:
            self.refuse_growth("tensor maps of memory that was not used together before")
            bases = {"local": self._local, "saved": saved.address}
            if dgrad is not None:
                bases["dgrad"] = dgrad.address
            maps = encode_maps(
                self._device,
                *self._kernels[mode],
                experts=self._experts if weights.tensors else 0,
                weights=weights.addresses,
                bases=bases,
            )
            self._maps[key] = (weights, maps)
        return self._maps[key][1].address

    def wgrad_entry(
        self, launcher: WgradLauncher, saved: Allocation, dgrad: Allocation
    ) -> BoundSaved:
        """What wgrad launches know of two blocks; the same for all kernels, made once."""
        key = (saved.address, dgrad.address)
        if key not in self._entries:
            self.refuse_growth("tensor maps of memory that was not used together before")
            bound = launcher.bind_saved(saved=saved.address, dgrad=dgrad.address)
            self._entries[key] = bound
        return self._entries[key]

    def forget(self, weights: BoundWeights) -> None:
        """Free the maps of weights that were released. Nothing may be running."""
        for key, (bound, maps) in list(self._maps.items()):
            if bound is weights:
                self._device.free(maps)
                del self._maps[key]

    def close(self) -> None:
        """Free everything. Nothing may be running."""
        for _, maps in self._maps.values():
            self._device.free(maps)
        for bound in self._entries.values():
            self._device.free(bound.entry)
        for block in self._all:
            self._device.free(block)
        self._maps.clear()
        self._entries.clear()
        self._all.clear()
        for free in self._free.values():
            free.clear()


class Saved:
    """The state of one forward call, from ``save_for_backward=True`` to its gradients.

    ``state`` is the last thing done: ``"forward"``, ``"dgrad"``, ``"wgrad"`` or ``"freed"``. What
    is no longer referenced gives its memory back by itself.

    Args:
        owner: the session that ran the call.
        pool: where the memory is from.
        weights: what the call ran with; read again by dgrad.
        ids: ``[T, K]``; read again by dgrad. router: ``[T, K]`` fp32. num_tokens: as in the call.
        caller: the caller's tensors that must not change in place until dgrad, by name.
    """

    def __init__(
        self,
        owner: object,
        pool: SavedPool,
        *,
        weights: BoundWeights,
        ids: torch.Tensor,
        router: torch.Tensor,
        num_tokens: torch.Tensor | None,
        caller: dict[str, torch.Tensor],
    ):
        self.state = "forward"
        self.weights, self.ids, self.router, self.num_tokens = weights, ids, router, num_tokens
        self._owner, self._pool = owner, pool
        self._caller = {name: (tensor, _version(tensor)) for name, tensor in caller.items()}
        self._blocks: dict[str, Allocation] = {}
        self._blocks["saved"] = pool.take("saved")

    @property
    def tokens(self) -> int:
        """T, rows of dx."""
        return self.ids.shape[0]

    @property
    def nbytes(self) -> int:
        """Device memory held: after the forward, after dgrad (more), after wgrad (0)."""
        return sum(block.bytes_N.numel() for block in self._blocks.values())

    def block(self, kind: str) -> Allocation:
        """The ``"saved"`` or ``"dgrad"`` block."""
        if kind not in self._blocks:
            self._blocks[kind] = self._pool.take(kind)
        return self._blocks[kind]

    def require(self, owner: object, *, state: str, what: str) -> None:
        """Refuse a use by another session, twice, after ``free()`` or in the wrong order.

        Raises:
            SavedStateError: says what was done to it before.
        """
        if owner is not self._owner:
            raise SavedStateError(f"{what}: the saved state belongs to another session")
        if self.state != state:
            raise SavedStateError(f"{what}: the saved state is {self.state!r}: {NEXT[self.state]}")

    def require_unchanged(self) -> None:
        """Refuse a backward whose routing is no longer that of the forward: peers would wait for
        rows that do not come.

        Raises:
            SavedStateError: names the tensor.
        """
        for name, (tensor, version) in self._caller.items():
            if _version(tensor) != version:
                raise SavedStateError(
                    f"{name} was modified in place after the forward (version {_version(tensor)}, "
                    f"expected {version}): backward needs it as it was; pass a copy to the forward"
                )

    def advance(self, state: str) -> None:
        """Note what was enqueued; after wgrad the memory goes back."""
        self.state = state
        if state == "dgrad":
            self._caller = {}
        if state in ("wgrad", "freed"):
            self._give_back()

    def free(self) -> None:
        """Give the memory back without (further) gradients. Not collective; may be called twice."""
        if self.state in ("forward", "dgrad"):
            self.advance("freed")

    def _give_back(self) -> None:
        blocks, self._blocks = self._blocks, {}
        self._caller = {}
        for kind, block in blocks.items():
            self._pool.give_back(kind, block)

    def __del__(self) -> None:
        # Without blocks if the constructor failed.
        if self.__dict__.get("_blocks"):
            self._give_back()


def _version(tensor: torch.Tensor) -> int:
    """Torch's count of in-place changes; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version
