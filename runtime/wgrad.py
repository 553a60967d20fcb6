"""Launching the wgrad kernel: gradients of one PE's weights from what its forwards saved.

Legend: L experts of this PE, H hidden, I intermediate, G rows of w13 (2I with a gate, else I).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamoe.cute_kernels.abi import WGRAD_MAPS, WGRAD_MAX_SAVED
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.wgrad_tables import (
    ENTRY_BYTES,
    ENTRY_DGRAD,
    ENTRY_MAPS,
    ENTRY_SAVED,
    WgradConfig,
    block_of,
    map_regions,
    wgrad_map_spec,
)
from megamoe.runtime.devices.base import Allocation, Device
from megamoe.runtime.launch import ParameterPacker

GRAD_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
GRADS = ("w13", "w2", "b13", "b2")
ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class BoundSaved:
    """A saved call's two blocks and their tensor maps, ready for any number of launches."""

    saved: int
    dgrad: int
    entry: Allocation


@dataclass(frozen=True, eq=False)
class BoundList:
    """Gradients of one name that lie apart, one tensor an expert (None: not wanted)."""

    name: str
    tensors: tuple[torch.Tensor | None, ...]
    addresses: tuple[int, ...]
    table: Allocation


Gradient = torch.Tensor | BoundList | None


def gradient_shapes(p: Problem) -> dict[str, tuple[int, ...]]:
    """Shape of one expert's gradient, the weight's own; biases only if the layer has them."""
    rows, hidden, inter = p.w13_rows, p.hidden, p.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "w13": (hidden, rows) if p.w13_transposed else (rows, hidden),
        "w2": (inter, hidden) if p.w2_transposed else (hidden, inter),
    }
    if p.bias13 != "none":
        shapes["b13"] = (rows,)
    if p.bias2 != "none":
        shapes["b2"] = (hidden,)
    return shapes


class WgradLauncher:
    """One PE's wgrad launches. Nothing is allocated or waited for in ``launch``.

    Args:
        problem, config, image: what was compiled.
        device: where this PE runs.
        first_slot: this PE's first expert slot, ``slot_base[pe]``.
        experts: L.
        grid: CTAs of a launch; any number gives the same bits.

    Raises:
        MegaMoEError: the device refuses the image.
    """

    def __init__(
        self,
        *,
        problem: Problem,
        config: WgradConfig,
        image: Image,
        device: Device,
        first_slot: int,
        experts: int,
        grid: int,
    ):
        self.problem, self.config, self.device = problem, config, device
        self.experts = experts
        self.shapes = gradient_shapes(problem)
        self._first_slot = first_slot
        self._enqueue = device.prepare(image, grid=grid)
        self._packer = ParameterPacker(image.parameters)

    def dtype_of(self, name: str) -> torch.dtype:
        """Type of a gradient."""
        is_bias = name in ("b13", "b2")
        return GRAD_DTYPES[self.config.bias_grad if is_bias else self.config.grad]

    # --- what launches refer to -----------------------------------------------------------------

    def bind_saved(self, *, saved: int, dgrad: int) -> BoundSaved:
        """Encode the maps of a saved call.

        Args:
            saved, dgrad: addresses of its ``saved_block`` and ``dgrad_block``.
        """
        p = self.problem
        regions = map_regions(p)
        bases = {"saved": saved, "dgrad": dgrad}
        data = bytearray(ENTRY_BYTES)
        data[ENTRY_SAVED : ENTRY_SAVED + 8] = saved.to_bytes(8, "little")
        data[ENTRY_DGRAD : ENTRY_DGRAD + 8] = dgrad.to_bytes(8, "little")
        for index, name in enumerate(WGRAD_MAPS):
            # Maps that no product uses are fenced and prefetched too: they must be well formed.
            name = name if name in regions else "x"
            block = regions[name]
            address = bases[block] + block_of(p, block)[name].offset
            encoded = self.device.encode_tensor_map(wgrad_map_spec(p, name), address)
            start = ENTRY_MAPS + index * len(encoded)
            data[start : start + len(encoded)] = encoded
        entry = self._upload(bytes(data), "wgrad_entry")
        return BoundSaved(saved, dgrad, entry)

    def bind_list(self, name: str, tensors: Sequence[torch.Tensor | None]) -> BoundList:
        """Gradients that lie apart (``main_grad`` of each expert); bind once, launch often.

        Args:
            name: ``"w13"``, ``"w2"``, ``"b13"`` or ``"b2"``.
            tensors: one an expert, shape of the weight; None: this one is not wanted.

        Raises:
            ValueError: another number, shape or dtype; not contiguous or not 16-byte aligned.
        """
        if len(tensors) != self.experts:
            raise ValueError(f"{name}: {len(tensors)} tensors, must be {self.experts}")
        for tensor in tensors:
            if tensor is not None:
                self._check(name, tensor, self._shape(name))
        addresses = tuple(
            0 if t is None else self._address(name, t, label=f"{name}[{i}]", keep=True)
            for i, t in enumerate(tensors)
        )
        data = b"".join(address.to_bytes(8, "little") for address in addresses)
        # A PE without experts has no entry, but a table needs an address.
        return BoundList(name, tuple(tensors), addresses, self._upload(data or bytes(8), name))

    def release(self, bound: BoundSaved | BoundList) -> None:
        """Give back what ``bind_…`` allocated; no later launch may use it."""
        self.device.synchronize()
        if isinstance(bound, BoundSaved):
            self.device.free(bound.entry)
            return
        self.device.free(bound.table)
        for address in bound.addresses:
            self.device.forget(address)

    def _upload(self, data: bytes, name: str) -> Allocation:
        allocation = self.device.allocate(len(data), name)
        allocation.bytes_N.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.device.synchronize()
        return allocation

    # --- launching ------------------------------------------------------------------------------

    def launch(
        self,
        saved: Sequence[BoundSaved],
        *,
        accumulate: bool,
        w13: Gradient = None,
        w2: Gradient = None,
        b13: Gradient = None,
        b2: Gradient = None,
    ) -> None:
        """Enqueue one launch: the gradients of all of ``saved``, summed in list order.

        Args:
            saved: 1 to 8 calls of one layer.
            accumulate: add to the gradients (fp32: one add an element; bf16: added in fp32,
                rounded once; experts without rows stay as they are, bit for bit) or overwrite them
                (experts without rows: zeros).
            w13, w2, b13, b2: one tensor ``[L, *weight shape]``, a ``bind_list``, or None: not
                wanted.

        Raises:
            ValueError: a bad number of saved calls or a gradient of another shape or dtype.
        """
        if not 1 <= len(saved) <= WGRAD_MAX_SAVED:
            raise ValueError(f"saved: {len(saved)} calls, allowed are 1 to {WGRAD_MAX_SAVED}")
        values: dict[str, int | bytes] = {
            "accumulate": int(accumulate),
            "first_slot": self._first_slot,
            "experts": self.experts,
            "num_saved": len(saved),
        }
        for i in range(WGRAD_MAX_SAVED):
            values[f"saved_{i}"] = saved[i].entry.address if i < len(saved) else 0
        given = {"w13": w13, "w2": w2, "b13": b13, "b2": b2}
        for name in GRADS:
            values[name], values[f"{name}_stride"] = self._place(name, given[name])
        self._enqueue(self._packer.pack(values))

    def _place(self, name: str, gradient: Gradient) -> tuple[int, int]:
        """(address, bytes between experts) of a gradient as the kernel takes it."""
        if gradient is None:
            return 0, 0
        if isinstance(gradient, BoundList):
            if gradient.name != name:
                raise ValueError(f"{name}: the list was bound as {gradient.name}")
            return gradient.table.address, 0
        self._check(name, gradient, (self.experts, *self._shape(name)))
        per_expert = gradient[:1].numel() * gradient.element_size()
        return self._address(name, gradient, label=f"grad_{name}"), per_expert

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise ValueError(f"{name}: this layer has the gradients {sorted(self.shapes)}")
        return self.shapes[name]

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        dtype = self.dtype_of(name)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)}, must be {dtype} {shape}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, must be contiguous")

    def _address(self, name: str, tensor: torch.Tensor, *, label: str, keep: bool = False) -> int:
        address = self.device.address_of(tensor, label, keep=keep)
        if address % ALIGNMENT:
            raise ValueError(f"{name}: address {address:#x}, must be {ALIGNMENT}-byte aligned")
        return address
