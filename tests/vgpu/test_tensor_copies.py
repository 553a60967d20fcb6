"""Hand-written PTX for cp.async.bulk.tensor: ranks, edges, swizzles, multicast, reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vgpu_harness import entry, run

from megamoe.runtime.vgpu import MemoryFault, TensorMap, UnsupportedInstruction

SHARED = ".shared .align 1024 .b8 buf[16384]; .shared .align 8 .b64 bar;"
LOAD = "cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{n}d.global.shared::cta.tile.bulk_group"
POLICIES = ["eager", "late", "random"]


def kernel(body: str, maps: int, pointers: int) -> str:
    """Maps m0 …, pointers p0 … in %d0 …; %d20 + i = address of map i; a barrier of count 1."""
    params = ", ".join(
        [f".param .align 64 .b8 m{i}[128]" for i in range(maps)]
        + [f".param .u64 p{i}" for i in range(pointers)]
    )
    loads = "\n".join(
        [f"mov.b64 %d40, m{i}; cvta.param.u64 %d{20 + i}, %d40;" for i in range(maps)]
        + [f"ld.param.u64 %d{i}, [p{i}];" for i in range(pointers)]
    )
    setup = f"""
{loads}
mov.u32 %r0, %tid.x; mov.u32 %r1, buf; mov.u32 %r2, bar;
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
    return entry(setup + body, params, SHARED)


WAIT = """
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r2], 0;
@!%p5 bra WAIT;
"""


def coords(values: tuple[int, ...]) -> tuple[str, str]:
    """Instructions that put coordinates into %r20 …, and the coordinate vector."""
    moves = "".join(f"mov.s32 %r{20 + i}, {v};\n" for i, v in enumerate(values))
    return moves, "{" + ", ".join(f"%r{20 + i}" for i in range(len(values))) + "}"


def move_box(
    src: Any, dst: Any, box: tuple[int, ...], at: tuple[int, ...], to: tuple[int, ...],
    *, swizzle: int = 0, out_swizzle: int | None = None, op: str = "", completion: str = "eager",
) -> np.ndarray:  # fmt: skip
    """Load a box of `src` at `at`, store (or reduce) it to `dst` at `to`; returns the shared bytes.

    The shared window starts as 0xEE, so that what a load leaves untouched is seen.
    """
    n = len(box)
    a = TensorMap(src, box=box, swizzle=swizzle)
    b = TensorMap(dst, box=box, swizzle=swizzle if out_swizzle is None else out_swizzle)
    load_at, load_vec = coords(at)
    store_at, store_vec = coords(to)
    store = STORE.format(n=n)
    if op:
        store = f"cp.reduce.async.bulk.tensor.{n}d.global.shared::cta.{op}.tile.bulk_group"
    body = f"""
mov.u32 %r5, %r0;
FILL: mad.lo.u32 %r6, %r5, 4, %r1;
st.shared.u32 [%r6], 0xEEEEEEEE;
add.u32 %r5, %r5, 32;
setp.lt.u32 %p1, %r5, 4096;
@%p1 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p0 bra L;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {a.desc(0).box_bytes};
{load_at}
{LOAD.format(n=n)} [%r1], [%d20, {load_vec}], [%r2];
L: {WAIT}
@!%p0 bra S;
{store_at}
{store} [%d21, {store_vec}], [%r1];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
S:
mov.u32 %r5, %r0;
DUMP: mad.lo.u32 %r6, %r5, 4, %r1;
ld.shared.u32 %r7, [%r6];
mad.wide.u32 %d10, %r5, 4, %d0;
st.global.u32 [%d10], %r7;
add.u32 %r5, %r5, 32;
setp.lt.u32 %p1, %r5, 4096;
@%p1 bra DUMP;
"""
    window = np.zeros(4096, np.uint32)
    run(kernel(body, 2, 3), [a, b, window, src, dst], completion=completion)
    return window.view(np.uint8)


def slices(
    shape: tuple[int, ...], box: tuple[int, ...], at: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """(in the tensor, in the box): the part of a box inside; arguments innermost first."""
    tensor, inside = [], []
    for dim, b, c in zip(reversed(shape), box, at, strict=True):
        low, high = max(c, 0), max(min(c + b, dim), max(c, 0))
        tensor.append(slice(low, high))
        inside.append(slice(low - c, high - c))
    return tuple(reversed(tensor)), tuple(reversed(inside))


@pytest.mark.parametrize("completion", POLICIES)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_every_rank_inside_and_across_edges(rank: int, completion: str) -> None:
    shape = (3, 4, 3, 5, 24)[5 - rank :]
    box = (8, 4, 2, 3, 2)[:rank]
    rng = np.random.default_rng(rank)
    for at, to in (
        ((8, 1, 1, 0, 1), (16, 0, 1, 1, 0)),
        ((20, 3, 2, 2, 2), (-4, -2, -1, -1, -1)),
        ((-8, 0, 0, 0, 0), (3, 0, 0, 0, 0)),
    ):
        src = rng.integers(1, 1 << 30, shape).astype(np.int32)
        dst = np.full(shape, -1, np.int32)
        window = move_box(src, dst, box, at[:rank], to[:rank], completion=completion)
        tile = np.zeros(tuple(reversed(box)), np.int32)
        outside, inside = slices(shape, box, at[:rank])
        tile[inside] = src[outside]
        np.testing.assert_array_equal(window[: tile.nbytes].view(np.int32), tile.ravel())
        assert (window[tile.nbytes :] == 0xEE).all()
        want = np.full(shape, -1, np.int32)
        outside, inside = slices(shape, box, to[:rank])
        want[outside] = tile[inside]
        np.testing.assert_array_equal(dst, want)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_swizzled_bytes_in_shared_memory(swizzle: int) -> None:
    cols = swizzle // 2
    src = np.arange(32 * cols, dtype=np.int16).reshape(32, cols)
    dst = np.zeros_like(src)
    window = move_box(src, dst, (cols, 32), (0, 0), (0, 0), swizzle=swizzle)
    np.testing.assert_array_equal(dst, src)
    flat = src.reshape(-1).view(np.uint8).reshape(-1, 16)
    got = window.reshape(-1, 16)
    for chunk in range(len(flat)):
        address = chunk * 16
        if swizzle == 128:
            address ^= (address >> 7 & 7) << 4
        elif swizzle == 64:
            address ^= (address >> 7 & 3) << 4
        else:
            address ^= (address >> 7 & 1) << 4
        np.testing.assert_array_equal(got[address // 16], flat[chunk])


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("add", torch.bfloat16), ("add", torch.float32), ("add", torch.float16), ("min", torch.int32),
     ("max", torch.int64), ("add", torch.int32), ("xor", torch.int32), ("max", torch.bfloat16)],
)  # fmt: skip
def test_reductions_take_their_type_from_the_map(op: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    src = torch.randint(-50, 50, (8, 16), generator=g).to(dtype)
    dst = torch.randint(-50, 50, (8, 16), generator=g).to(dtype)
    fn = {
        "add": torch.add, "min": torch.minimum, "max": torch.maximum, "xor": torch.bitwise_xor
    }[op]  # fmt: skip
    want = dst.clone()
    want[2:6, 8:] = fn(want[2:6, 8:], src[0:4, 0:8])
    move_box(src, dst, (8, 4), (0, 0), (8, 2), op=op)
    assert torch.equal(dst, want)


MULTICAST = f"""
mov.u32 %r8, %cluster_ctarank;
mov.u32 %r5, %r0;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@!%p0 bra L;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;
shl.b32 %r20, %r8, 3;
mov.u32 %r21, 0;
mad.lo.u32 %r9, %r8, 512, %r1;
mov.u16 %h1, 3;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
    [%r9], [%d20, {{%r20, %r21}}], [%r2], %h1;
L: {WAIT}
DUMP: mad.lo.u32 %r6, %r5, 4, %r1;
ld.shared.u32 %r7, [%r6];
mad.lo.u32 %r10, %r8, 256, %r5;
mad.wide.u32 %d10, %r10, 4, %d0;
st.global.u32 [%d10], %r7;
add.u32 %r5, %r5, 32;
setp.lt.u32 %p1, %r5, 256;
@%p1 bra DUMP;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


@pytest.mark.parametrize("completion", POLICIES)
def test_two_ctas_load_half_each_for_both(completion: str) -> None:
    src = np.arange(16 * 16, dtype=np.int32).reshape(16, 16)
    out = np.zeros((2, 2, 16, 8), np.int32)
    m = TensorMap(src, box=(8, 16))
    world = run(
        kernel(MULTICAST, 1, 2), [m, out, src], grid=2, cluster=2, completion=completion, seed=3
    )
    for cta in range(2):
        np.testing.assert_array_equal(out[cta, 0], src[:, :8])
        np.testing.assert_array_equal(out[cta, 1], src[:, 8:])
    assert world.report.tensor_load_bytes == 2 * 2 * 512


def one_copy(copy: str) -> str:
    body = f"""
@!%p0 bra DONE;
mov.u32 %r20, 0; mov.u32 %r21, 0; mov.u32 %r22, 0;
{copy}
DONE:
"""
    return kernel(body, 1, 1)


def test_faults_and_refusals() -> None:
    src = np.zeros((16, 64), np.int32)
    m = TensorMap(src, box=(32, 16), swizzle=128)
    load2, load3 = LOAD.format(n=2), LOAD.format(n=3)
    with pytest.raises(MemoryFault, match="rank 2"):
        run(one_copy(f"{load3} [%r1], [%d20, {{%r20, %r21, %r22}}], [%r2];"), [m, src])
    with pytest.raises(MemoryFault, match="not aligned to 128"):
        run(one_copy(f"{load2} [%r1+64], [%d20, {{%r20, %r21}}], [%r2];"), [m, src])
    with pytest.raises(MemoryFault, match="not a tensor map"):
        run(one_copy(f"{load2} [%r1], [%d0, {{%r20, %r21}}], [%r2];"), [m, src])
    with pytest.raises(UnsupportedInstruction, match="coordinates"):
        run(one_copy(f"{load2} [%r1], [%d20, {{%r20, %r21, %r22}}], [%r2];"), [m, src])
    with pytest.raises(UnsupportedInstruction, match="im2col"):
        bad = load2.replace(".tile", ".im2col")
        run(one_copy(f"{bad} [%r1], [%d20, {{%r20, %r21}}], [%r2];"), [m, src])
    # A map that reaches beyond what is registered: only 8 of the 16 rows.
    with pytest.raises(MemoryFault, match="leaves the allocation"):
        raw = m.to_bytes(0x7000_0000_0000)
        half = np.zeros((8, 64), np.int32)
        run(one_copy(f"{load2} [%r1], [%d20, {{%r20, %r21}}], [%r2];"), [raw, half])


def test_prefetch_changes_nothing() -> None:
    src = np.zeros((16, 64), np.int32)
    m = TensorMap(src, box=(32, 16), swizzle=128)
    run(
        one_copy(
            "prefetch.tensormap [%d20];\n"
            "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d20, {%r20, %r21}];"
        ),
        [m, src],
    )
