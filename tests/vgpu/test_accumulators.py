"""Accumulator registers of wgmma: in flight, copied, merged under a mask, chained."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_harness import entry, run, u64_params

from megamoe.runtime.vgpu import Deadlock, SyncError, VgpuError
from megamoe.runtime.vgpu.wgmma import encode

# 64 x 16 A and 8 x 16 B, K-major without swizzle: 8 x 8 blocks of 128 bytes, first along K.
A = encode(1024, 128, 256, 0)
B = encode(1024 + 2048, 128, 256, 0)
ACC = "{%r10, %r11, %r12, %r13}"
HEAD = ".shared .align 128 .b8 ops[4096];\n"
ONES = f"""
mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; mov.u64 %d1, {A}; mov.u64 %d2, {B};
mov.u32 %r1, ops; mad.lo.u32 %r1, %r0, 4, %r1; mov.u32 %r2, 0x3F803F80; mov.u32 %r3, 0;
FILL: st.shared.b32 [%r1], %r2; add.u32 %r1, %r1, 512; add.u32 %r3, %r3, 1;
setp.lt.u32 %p0, %r3, 5; @%p0 bra FILL;
mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0;
fence.proxy.async; bar.sync 0; wgmma.fence.sync.aligned;
"""
MMA = (
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {ACC}, %d1, %d2, 1, 1, 1, 0, 0;\n"
    "wgmma.commit_group.sync.aligned;\n"
)
WAIT = "wgmma.wait_group.sync.aligned 0;\n"
STORE = "mad.wide.u32 %d3, %r0, 16, %d0; st.global.v4.b32 [%d3], " + ACC + ";"


def go(body: str, block: int = 128, **kw) -> np.ndarray:
    out = np.zeros((block, 4), np.float32)
    run(entry(ONES + body, u64_params(1), head=HEAD), [out], block=block, **kw)
    return out


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_chained_products(completion: str) -> None:
    assert (go(MMA + WAIT + STORE, completion=completion) == 16).all()
    assert (go(MMA * 3 + WAIT + STORE, completion=completion) == 48).all()
    one_in_flight = "wgmma.wait_group.sync.aligned 1;\n"
    body = MMA + (MMA + one_in_flight) * 4 + WAIT + STORE
    assert (go(body, completion=completion) == 80).all()


def test_values_changed_between_products() -> None:
    half = "mul.f32 %r10, %r10, 0f3F000000; mov.b32 %r11, 0;\n"
    fence = "wgmma.fence.sync.aligned;\n"
    out = go(MMA + WAIT + half + fence + MMA + WAIT + STORE)
    np.testing.assert_array_equal(out, np.broadcast_to([24, 16, 32, 32], (128, 4)))
    copy = "mov.b32 %r20, %r10;\n"
    keep = STORE.replace("%r11", "%r20")
    out = go(MMA + WAIT + copy + fence + MMA + WAIT + keep)
    np.testing.assert_array_equal(out, np.broadcast_to([32, 16, 32, 32], (128, 4)))
    lanes = "setp.gt.u32 %p1, %r0, 63; @%p1 bra NEXT; mov.b32 %r12, 0f40000000; NEXT:\n"
    out = go(MMA + WAIT + lanes + fence + MMA + WAIT + STORE)
    assert (out[:64, 2] == 18).all() and (out[64:, 2] == 32).all() and (out[:, 3] == 32).all()
    some = "and.b32 %r30, %r0, 1; setp.eq.u32 %p1, %r30, 0; @%p1 mov.b32 %r13, 0;\n"
    out = go(MMA + WAIT + some + fence + MMA + WAIT + STORE)
    assert (out[::2, 3] == 16).all() and (out[1::2, 3] == 32).all()


def test_reading_an_accumulator_in_flight_is_an_error() -> None:
    with pytest.raises(VgpuError, match=r"%r10, an accumulator of a wgmma in flight"):
        go(MMA + STORE)
    with pytest.raises(VgpuError, match="in flight"):
        go(MMA + "add.f32 %r40, %r12, %r12; st.global.b32 [%d0], %r40;" + WAIT)


def test_the_whole_warpgroup_must_take_part() -> None:
    skip = "setp.ge.u32 %p1, %r0, 96; @%p1 bra OUT;\n"
    with pytest.raises(Deadlock, match=r"committed by warps \[0, 1, 2\]"):
        go(skip + MMA + WAIT + STORE + "\nOUT:")
    other = f"setp.lt.u32 %p1, %r0, 96; @%p1 bra A;\n{MMA}bra B;\nA: {MMA}B:\n"
    with pytest.raises(SyncError, match="different wgmma"):
        go(other + WAIT + STORE)
