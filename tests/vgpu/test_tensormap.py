"""tensormap.py against element-by-element copies written as plain loops."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from megamoe.runtime.vgpu.tensormap import TensorMap, TensorMapDesc

BASE = 0x7000_0000_1000
PAD = 64  # bytes before the tensor in its region


def load_box(
    desc: TensorMapDesc, coords: tuple[int, ...], smem: np.ndarray, smem_addr: int,
    data: np.ndarray, base: int,
) -> int:  # fmt: skip
    """Global → shared: `data` are the bytes of the region at `base`, `smem` the shared window.

    Elements outside the tensor are filled. Returns the bytes to complete on the mbarrier.
    """
    first, plan = desc.plan(coords, smem_addr)
    off = first - base
    plan.scatter_shared(smem, smem_addr, plan.gather_global(data[off : off + plan.extent]))
    return desc.box_bytes


def store_box(
    desc: TensorMapDesc, coords: tuple[int, ...], smem: np.ndarray, smem_addr: int,
    data: np.ndarray, base: int,
) -> int:  # fmt: skip
    """Shared → global; elements outside the tensor are not written. Returns the bytes written."""
    first, plan = desc.plan(coords, smem_addr)
    off = first - base
    plan.scatter_global(data[off : off + plan.extent], plan.gather_shared(smem, smem_addr))
    return plan.bytes_inside


def box_rows(desc: TensorMapDesc, coords: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Global addresses (int64) where the in-bounds part of each row starts, and its bytes."""
    first, plan = desc.plan(coords, 0)
    return first + plan.row_starts, plan.row_bytes


def naive(
    m: TensorMapDesc, coords: tuple[int, ...], smem_addr: int
) -> list[tuple[int | None, int]]:
    """(global byte address or None outside, shared byte address) of every element, in order."""
    pairs: list[tuple[int | None, int]] = []
    for linear, index in enumerate(itertools.product(*(range(n) for n in reversed(m.counts)))):
        j = tuple(reversed(index))
        at = [
            c + x * (e if i else 1)
            for i, (c, x, e) in enumerate(zip(coords, j, m.element_strides, strict=True))
        ]
        inside = all(0 <= a < d for a, d in zip(at, m.dims, strict=True))
        strides = (m.element_bytes, *m.strides_bytes)
        address = m.address + sum(a * s for a, s in zip(at, strides, strict=True))
        shared = smem_addr + linear * m.element_bytes
        bits = {0: 0, 32: 1, 64: 3, 128: 7}[m.swizzle]
        shared ^= ((shared >> 7) & bits) << 4
        pairs.append((address if inside else None, shared))
    return pairs


def check(
    m: TensorMapDesc,
    coords: tuple[int, ...],
    smem_addr: int,
    region: np.ndarray,
    fill: bytes | None = None,
) -> None:
    """Load and store one box both ways and compare all of memory."""
    size = m.element_bytes
    rng = np.random.default_rng(0)
    smem = rng.integers(0, 256, 96 * 1024 + 8).astype(np.uint8)
    want = smem.copy()
    pairs = naive(m, coords, smem_addr)
    for g, s in pairs:
        if g is None:
            want[s : s + size] = 0 if fill is None else np.frombuffer(fill, np.uint8)
        else:
            want[s : s + size] = region[g - BASE : g - BASE + size]
    got = smem.copy()
    assert load_box(m, coords, got, smem_addr, region, BASE) == len(pairs) * size
    np.testing.assert_array_equal(got, want)

    stored, expect = region.copy(), region.copy()
    count = 0
    for g, s in pairs:
        if g is not None:
            expect[g - BASE : g - BASE + size] = smem[s : s + size]
            count += size
    assert store_box(m, coords, smem, smem_addr, stored, BASE) == count
    np.testing.assert_array_equal(stored, expect)

    starts, nbytes = box_rows(m, coords)
    inside = {g for g, _ in pairs if g is not None}
    assert {int(a) + i for a in starts for i in range(0, nbytes, size)} == inside


def region_for(array: np.ndarray) -> np.ndarray:
    """A region with PAD bytes, the array's bytes and PAD bytes, filled with noise around."""
    noise = np.random.default_rng(1).integers(0, 256, array.nbytes + 2 * PAD).astype(np.uint8)
    noise[PAD : PAD + array.nbytes] = array.reshape(-1).view(np.uint8)
    return noise


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("smem_addr", [0, 1024, 0x1280])
def test_2d_inside_and_every_edge(swizzle: int, smem_addr: int) -> None:
    cols = {0: 24, 32: 16, 64: 32, 128: 64}[swizzle]
    array = np.arange(40 * 104, dtype=np.uint16).reshape(40, 104)
    region = region_for(array)
    m = TensorMap(array, box=(cols, 24), swizzle=swizzle).desc(BASE + PAD)
    for coords in ((0, 0), (8, 3), (3, 1), (101, 30), (-5, -3), (-8, 39), (104, 0), (0, -24)):
        check(m, coords, smem_addr, region)


def test_row_length_that_is_no_multiple_of_16_bytes() -> None:
    array = np.arange(10 * 64, dtype=np.uint16).reshape(10, 64)
    region = region_for(array)
    m = TensorMap(array[:, :57], box=(64, 8), swizzle=128).desc(BASE + PAD)
    assert m.dims == (57, 10)
    for coords in ((0, 0), (0, 5), (-1, 0), (56, 9)):
        check(m, coords, 1024, region)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float64])
@pytest.mark.parametrize("rank", [1, 3, 4, 5])
def test_every_rank_and_size(dtype: Any, rank: int) -> None:
    size = np.dtype(dtype).itemsize
    shape = (3, 2, 5, 4, 48 // size * 2)[5 - rank :]
    array = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    region = region_for(array)
    box = (48 // size, 3, 4, 2, 2)[:rank]
    m = TensorMap(array, box=box).desc(BASE + PAD)
    assert m.rank == rank
    for coords in ((0,) * 5, (16 // size, 1, 1, 0, 1), (-1, -1, 3, 1, 2), (5, 3, -2, -1, -1)):
        check(m, coords[:rank], 2048, region)


def test_permuted_view_element_strides_and_broadcast() -> None:
    array = np.arange(4 * 6 * 32, dtype=np.uint16).reshape(4, 6, 32)
    region = region_for(array)
    view = array.transpose(1, 0, 2)
    m = TensorMap(view, box=(16, 3, 4)).desc(BASE + PAD)
    assert m.strides_bytes == (6 * 64, 64)
    for coords in ((0, 0, 0), (8, 2, 3), (-3, -1, -2)):
        check(m, coords, 0, region)
    m = TensorMap(array, box=(16, 5, 4), element_strides=(1, 2, 3)).desc(BASE + PAD)
    assert m.counts == (16, 3, 2)
    assert m.box_bytes == 16 * 3 * 2 * 2
    for coords in ((0, 0, 0), (1, 1, 1), (-1, -1, -2), (20, 5, 3), (0, -5, 0)):
        check(m, coords, 0, region)


def test_swapped_gate_up_view_of_five_dimensions() -> None:
    """COOKBOOK's g8 view (8, H, 2, I/8, E): strides that are not multiples of each other."""
    experts, inter, hidden = 2, 16, 64
    w13 = torch.arange(experts * 2 * inter * hidden, dtype=torch.int32).to(torch.int16)
    w13 = w13.view(torch.bfloat16).reshape(experts, 2, inter // 8, 8, hidden)
    view = w13.permute(0, 2, 1, 3, 4)  # E, I/8, 2, 8, H
    region = region_for(w13.view(torch.int16).numpy())
    m = TensorMap(view, box=(64, 8, 2, 2, 1), swizzle=128).desc(BASE + PAD)
    assert m.dtype == "bf16"
    for coords in ((0, 0, 0, 0, 1), (0, 0, 0, 1, 0), (32, 0, 1, 0, 0)):
        check(m, coords, 1024, region)


def test_nan_fill() -> None:
    array = np.ones((4, 16), np.float32)
    m = TensorMap(array, box=(16, 4), oob_fill="nan").desc(BASE + PAD)
    check(m, (3, 2), 0, region_for(array), fill=b"\xff\xff\xff\x7f")
    with pytest.raises(ValueError, match="float type"):
        TensorMap(array.view(np.int32), box=(16, 4), oob_fill="nan")


def test_plans_are_shared_and_bounds_are_known() -> None:
    array = np.zeros((64, 64), np.float32)
    m = TensorMap(array, box=(32, 8), swizzle=128).desc(BASE)
    first, plan = m.plan((0, 8), 1024)
    again, same = m.plan((32, 16), 5 * 1024)
    assert plan is same
    assert plan.piece == 16
    assert (first, again) == (BASE + 8 * 256, BASE + 16 * 256 + 128)
    assert plan.extent == 7 * 256 + 128
    assert plan.bytes_inside == m.box_bytes == 1024
    assert m.plan((64, 0), 0)[1].extent == 0


def test_bytes_round_trip() -> None:
    array = torch.zeros(3, 5, 64, dtype=torch.bfloat16)
    m = TensorMap(array, box=(64, 4, 1), swizzle=128, element_strides=(1, 2, 1))
    raw = m.to_bytes(0x7FFF_FFFF_FF00)
    assert len(raw) == 128
    back = TensorMapDesc.from_bytes(raw)
    assert back == m.desc(0x7FFF_FFFF_FF00)
    assert TensorMapDesc.from_bytes(raw) is back
    huge = TensorMapDesc(16, "u8", (1 << 32, 2), ((1 << 40) - 16,), (256, 256))
    assert TensorMapDesc.from_bytes(huge.to_bytes()) == huge
    with pytest.raises(ValueError, match="checksum"):
        TensorMapDesc.from_bytes(raw[:9] + b"\x77" + raw[10:])
    with pytest.raises(ValueError, match="not a tensor map"):
        TensorMapDesc.from_bytes(bytes(128))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"address": 8}, "address 0x8 must be a multiple of 16"),
        ({"dtype": "fp4"}, "dtype 'fp4'"),
        ({"dims": (), "strides_bytes": (), "box": ()}, "rank 0"),
        ({"dims": (1,) * 6, "strides_bytes": (16,) * 5, "box": (8,) * 6}, "rank 6"),
        ({"dims": (0, 8)}, r"dims\[0\]=0"),
        ({"dims": (64, (1 << 32) + 1)}, r"2\^32"),
        ({"strides_bytes": (136,)}, "stride of dimension 1 = 136 B must be a multiple of 16"),
        ({"strides_bytes": (1 << 40,)}, r"< 2\^40"),
        ({"strides_bytes": ()}, "2 dims need 1"),
        ({"box": (64, 257)}, r"box\[1\]=257"),
        ({"box": (64, 0)}, r"box\[1\]=0"),
        ({"box": (4, 8)}, "8 B must be a multiple of 16"),
        ({"box": (64,)}, "2 entries"),
        ({"box": (128, 8)}, "swizzle span"),
        ({"box": (32, 8)}, "limit of vgpu"),
        ({"swizzle": 16}, "swizzle=16"),
        ({"element_strides": (1, 9)}, r"element_strides\[1\]=9"),
        ({"element_strides": (1,)}, "2 entries"),
        ({"oob_fill": "one"}, "oob_fill"),
    ],
)
def test_rules(change: dict[str, Any], rule: str) -> None:
    good: dict[str, Any] = {
        "address": 4096, "dtype": "bf16", "dims": (64, 8), "strides_bytes": (128,),
        "box": (64, 8), "swizzle": 128,
    }  # fmt: skip
    TensorMapDesc(**good)
    with pytest.raises(ValueError, match=rule):
        TensorMapDesc(**{**good, **change})


def test_arrays_that_cannot_be_described() -> None:
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        TensorMap(np.zeros((8, 8), np.float32)[:, ::2], box=(4, 4))
    with pytest.raises(ValueError, match="complex128"):
        TensorMap(np.zeros(8, np.complex128), box=(8,))
    with pytest.raises(ValueError, match="list"):
        TensorMap([1, 2], box=(8,))
    with pytest.raises(ValueError, match="rank 0"):
        TensorMap(np.zeros((), np.float32), box=())
