"""Tensor maps: the rules of the driver's encode call, our own 128-byte form, boxes as index plans.

Source: CUDA driver API, "Tensor Map Object Management" (`cuTensorMapEncodeTiled`: what it accepts)
and PTX ISA, "Tensors", "Tiled mode", "Swizzling modes" (what a box is and where its bytes go).
The driver's binary format is private and is neither used nor imitated: `to_bytes` is our own.

Everywhere dimensions are innermost first, as in the driver's call; sizes of dims and box are in
elements, strides and addresses in bytes. Interleaved layouts and im2col do not exist here.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from megamoe.runtime.vgpu.boxplan import BoxPlan, build_plan

DTYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64")
DTYPE_BYTES = dict(zip(DTYPES, (1, 2, 4, 4, 8, 8, 2, 2, 4, 8), strict=True))
OOB_FILLS = ("zero", "nan")

_MAGIC = b"vT"
# Magic, codes, address, dims - 1, strides / 16, box - 1, element strides, checksum. All of it lies
# in the first 64 bytes: kernels that copy a map move no more.
_LAYOUT = struct.Struct("<2sHQ5I20s5BHI")
ENCODED = 64
SWIZZLES = (0, 32, 64, 128)
BYTES = 128


@dataclass(frozen=True)
class TensorMapDesc:
    """A validated tensor map bound to a global address.

    Args:
        address: of element 0, a multiple of 16.
        dtype: one of `DTYPES`.
        dims: elements of each dimension, innermost first, 1 to 5 of them.
        strides_bytes: of dimensions 1 and up (the innermost is contiguous): multiples of 16.
        box: elements of each dimension of the tile, each ≤ 256.
        swizzle: 0, 32, 64 or 128 bytes.
        element_strides: step in elements along each dimension, 1 to 8; the innermost is ignored.
        oob_fill: "zero" or, for float types, "nan".

    Raises:
        ValueError: names the rule.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    element_strides: tuple[int, ...] = ()
    oob_fill: str = "zero"
    plans: dict[tuple[int, ...], BoxPlan] = field(
        default_factory=dict, compare=False, repr=False, hash=False
    )

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.dims))
        _check(self)

    @property
    def rank(self) -> int:
        """Number of dimensions: the N of `cp.async.bulk.tensor.Nd`."""
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        """Size of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements a box really holds: ceil(box / element stride) beyond the innermost."""
        steps = zip(self.box[1:], self.element_strides[1:], strict=True)
        return (self.box[0], *(-(-b // e) for b, e in steps))

    @property
    def box_bytes(self) -> int:
        """Bytes of a box in shared memory, out-of-bounds elements included.

        This is also what a load adds to the mbarrier's complete_tx count.
        """
        return int(np.prod(self.counts)) * self.element_bytes

    def plan(self, coords: Sequence[int], smem_addr: int) -> tuple[int, BoxPlan]:
        """The box at `coords` (innermost first, may be negative) with shared address `smem_addr`.

        Returns (global address of the first byte inside the tensor, plan); the plan is shared by
        all boxes that are cut and aligned alike, so a main loop builds it once.
        """
        first = self.address
        key = [smem_addr & 1023, coords[0] * self.element_bytes & 15]
        steps = (1, *self.element_strides[1:])
        strides = (self.element_bytes, *self.strides_bytes)
        for c, dim, n, step, stride in zip(
            coords, self.dims, self.counts, steps, strides, strict=True
        ):
            low = 0 if c >= 0 else min(-(c // step), n)
            high = max(low, min(n, -(-(dim - c) // step)))
            first += (c + low * step) * stride
            key += (low, high)
        clip = tuple(key)
        found = self.plans.get(clip)
        if found is None:
            found = self.plans[clip] = self._build(clip)
        return first, found

    def _build(self, clip: tuple[int, ...]) -> BoxPlan:
        fill = b"\0" * 16
        if self.oob_fill == "nan":
            nan = {"f16": "7fff", "bf16": "7fff", "f32": "7fffffff", "f64": "7fffffffffffffff"}
            one = bytes.fromhex(nan[self.dtype])[::-1]
            fill = one * (16 // len(one))
        steps = (1, *self.element_strides[1:])
        strides = (self.element_bytes, *self.strides_bytes)
        return build_plan(
            self.counts, tuple(e * s for e, s in zip(steps, strides, strict=True)),
            self.swizzle, clip, fill,
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        """Exactly 128 bytes in vgpu's own form, to pass as a kernel's tensor map parameter."""
        pad = (0,) * (5 - self.rank)
        one = (1,) * (5 - self.rank)
        return _pack({
            "codes": [self.rank, DTYPES.index(self.dtype), SWIZZLES.index(self.swizzle),
                      OOB_FILLS.index(self.oob_fill)],
            "global_address": [self.address],
            "global_dim": [*self.dims, *one],
            "global_stride": [*self.strides_bytes, *pad],
            "box_dim": [*self.box, *one],
            "element_stride": [*self.element_strides, *one],
        })  # fmt: skip

    @staticmethod
    def from_bytes(raw: bytes) -> TensorMapDesc:
        """Decode `to_bytes`; cached, so that the same bytes give the same object and plans."""
        return _decode(bytes(raw[:ENCODED]))


FIELDS = {
    "global_address": 1, "global_dim": 5, "global_stride": 4, "box_dim": 5, "element_stride": 5,
}  # fmt: skip
"""Fields that can be replaced in an encoded map, and how many entries each has."""


def _pack(fields: dict[str, list[int]]) -> bytes:
    """128 bytes. Raises ValueError for numbers that the form cannot hold."""
    rank, dtype, swizzle, fill = fields["codes"]
    strides = b"".join((x // 16).to_bytes(5, "little") for x in fields["global_stride"])
    if any(x % 16 for x in fields["global_stride"]):
        raise ValueError(f"strides {fields['global_stride']} must be multiples of 16")
    steps = fields["element_stride"]
    if not all(1 <= x <= 8 for x in steps):
        raise ValueError(f"element strides {steps} must be 1 to 8")
    body = (
        _MAGIC, rank | dtype << 3 | swizzle << 7 | fill << 9, *fields["global_address"],
        *(x - 1 for x in fields["global_dim"]), strides, *(x - 1 for x in fields["box_dim"]),
        sum((x - 1) << 3 * i for i, x in enumerate(steps)),
    )  # fmt: skip
    raw = _LAYOUT.pack(*body, 0)
    return _LAYOUT.pack(*body, zlib.crc32(raw)).ljust(BYTES, b"\0")


def _unpack(raw: bytes) -> dict[str, list[int]]:
    """The fields of an encoded map."""
    if raw[:2] != _MAGIC:
        raise ValueError("not a tensor map made by vgpu (TensorMap or TensorMapDesc.to_bytes)")
    values = _LAYOUT.unpack(raw[: _LAYOUT.size])
    if zlib.crc32(_LAYOUT.pack(*values[:-1], 0)) != values[-1]:
        raise ValueError("tensor map bytes are damaged (checksum)")
    codes, strides, steps = values[1], values[8], values[14]
    return {
        "codes": [codes & 7, codes >> 3 & 15, codes >> 7 & 3, codes >> 9 & 1],
        "global_address": [values[2]],
        "global_dim": [x + 1 for x in values[3:8]],
        "global_stride": [
            16 * int.from_bytes(strides[i : i + 5], "little") for i in range(0, 20, 5)
        ],
        "box_dim": [x + 1 for x in values[9:14]],
        "element_stride": [(steps >> 3 * i & 7) + 1 for i in range(5)],
    }


def replaced(raw: bytes, field: str, index: int, value: int) -> bytes:
    """An encoded map with one field changed; most rules are checked when it is decoded.

    Raises:
        ValueError: `raw` is no map, or the entry does not exist or hold such a value.
    """
    fields = _unpack(raw)
    if not 0 <= index < FIELDS[field]:
        raise ValueError(f"{field} has {FIELDS[field]} entries, not {index}")
    fields[field][index] = value
    try:
        return _pack(fields)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{field}[{index}] = {value} is out of range") from error


@lru_cache(maxsize=1024)
def _decode(raw: bytes) -> TensorMapDesc:
    fields = _unpack(raw)
    rank, dtype, swizzle, fill = fields["codes"]
    return TensorMapDesc(
        fields["global_address"][0], DTYPES[dtype], tuple(fields["global_dim"][:rank]),
        tuple(fields["global_stride"][: rank - 1]), tuple(fields["box_dim"][:rank]),
        SWIZZLES[swizzle], tuple(fields["element_stride"][:rank]), OOB_FILLS[fill],
    )  # fmt: skip


def _check(m: TensorMapDesc) -> None:
    """The documented requirements of `cuTensorMapEncodeTiled`, interleave none."""

    def require(ok: bool, rule: str) -> None:
        if not ok:
            raise ValueError(f"tensor map: {rule}")

    require(m.dtype in DTYPES, f"dtype {m.dtype!r} must be one of {', '.join(DTYPES)}")
    rank = len(m.dims)
    require(1 <= rank <= 5, f"rank {rank} must be 1 to 5")
    require(len(m.strides_bytes) == rank - 1, f"{rank} dims need {rank - 1} strides_bytes")
    require(len(m.box) == rank, f"box {m.box} must have {rank} entries")
    require(
        len(m.element_strides) == rank, f"element_strides {m.element_strides} need {rank} entries"
    )
    require(m.address % 16 == 0, f"address {m.address:#x} must be a multiple of 16")
    for i, dim in enumerate(m.dims):
        require(1 <= dim <= 1 << 32, f"dims[{i}]={dim} must be 1 to 2^32")
    for i, stride in enumerate(m.strides_bytes, 1):
        require(stride % 16 == 0, f"stride of dimension {i} = {stride} B must be a multiple of 16")
        require(0 <= stride < 1 << 40, f"stride of dimension {i} = {stride} B must be < 2^40")
    for i, (b, e) in enumerate(zip(m.box, m.element_strides, strict=True)):
        require(1 <= b <= 256, f"box[{i}]={b} must be 1 to 256")
        require(1 <= e <= 8, f"element_strides[{i}]={e} must be 1 to 8")
    inner = m.box[0] * DTYPE_BYTES[m.dtype]
    require(inner % 16 == 0, f"box[0] = {inner} B must be a multiple of 16")
    require(m.swizzle in (0, 32, 64, 128), f"swizzle={m.swizzle} must be 0, 32, 64 or 128")
    if m.swizzle:
        require(inner <= m.swizzle, f"box[0] = {inner} B must be ≤ the swizzle span {m.swizzle} B")
        require(
            inner == m.swizzle,
            f"box[0] = {inner} B must equal the swizzle span {m.swizzle} B (a limit of vgpu: the "
            "layout of narrower rows is not documented)",
        )
    require(m.oob_fill in OOB_FILLS, f"oob_fill={m.oob_fill!r} must be zero or nan")
    require(
        m.oob_fill == "zero" or m.dtype in ("f16", "bf16", "f32", "f64"),
        f"oob_fill='nan' needs a float type, not {m.dtype}",
    )


class TensorMap:
    """A tensor described the way the driver's public encode call does.

    Args:
        array: numpy array or CPU torch tensor, outermost dimension first as usual, last dimension
            contiguous; other dimensions may have any order and strides.
        box: elements of the tile, **innermost first** (box[0] belongs to the array's last axis).
        swizzle: 0, 32, 64 or 128 bytes.
        element_strides: innermost first, default all 1.
        oob_fill: "zero" or "nan".

    The array is not copied. `desc(address)` binds the map to the address of its first element.
    """

    def __init__(
        self,
        array: Any,
        *,
        box: Sequence[int],
        swizzle: int = 0,
        element_strides: Sequence[int] | None = None,
        oob_fill: str = "zero",
    ) -> None:
        self.array = array
        size, strides = _element_strides(array)
        shape = tuple(int(n) for n in reversed(tuple(array.shape)))
        if not shape:
            raise ValueError("tensor map: rank 0 must be 1 to 5")
        if strides[0] != size and shape[0] != 1:
            raise ValueError(f"tensor map: the last axis must be contiguous, stride {strides[0]} B")
        self._spec = (
            _dtype_of(array), shape, strides[1:], tuple(int(b) for b in box), swizzle,
            tuple(element_strides or (1,) * len(shape)), oob_fill,
        )  # fmt: skip
        self.desc(0)  # all rules but the address now, where the user can see them

    def desc(self, address: int) -> TensorMapDesc:
        """The map with its tensor's first element at a virtual address."""
        return TensorMapDesc(address, *self._spec)

    def to_bytes(self, address: int) -> bytes:
        """`desc(address).to_bytes()`: 128 bytes for a kernel parameter."""
        return self.desc(address).to_bytes()


def _element_strides(array: Any) -> tuple[int, tuple[int, ...]]:
    """Element size and strides in bytes, innermost first; size-1 axes get a harmless stride."""
    if isinstance(array, np.ndarray):
        size, steps = array.itemsize, array.strides
    elif hasattr(array, "data_ptr"):
        size = array.element_size()
        steps = tuple(s * size for s in array.stride())
    else:
        raise ValueError(f"tensor map: {type(array).__name__} is no numpy array or torch tensor")
    pairs = zip(reversed(tuple(array.shape)), reversed(steps), strict=True)
    return size, tuple(int(s) if n > 1 else -(-int(s) // 16) * 16 for n, s in pairs)


def _dtype_of(array: Any) -> str:
    name = str(array.dtype).removeprefix("torch.")
    known = {
        "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
        "int32": "s32", "int64": "s64", "uint32": "u32", "uint64": "u64",
    }  # fmt: skip
    size = array.itemsize if isinstance(array, np.ndarray) else array.element_size()
    if name in known:
        return known[name]
    if size in (1, 2, 4, 8) and "complex" not in name:
        return f"u{8 * size}"
    raise ValueError(f"tensor map: element type {name} has no 1, 2, 4 or 8 byte equivalent")
