"""Divergence, reconvergence and operations between lanes."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_harness import entry, run, u64_params

from megamoe.runtime.vgpu import Kernel, PtxSyntaxError, UnsupportedInstruction, World

LANE = np.arange(32)
rng = np.random.default_rng(3)
STORE = "mad.wide.u32 %d3, %r0, 4, %d0; st.global.b32 [%d3], %r1;"
START = "mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0];"


def result(body: str, block: int = 32, **kw) -> np.ndarray:
    out = np.zeros(block, np.uint32)
    run(entry(START + body + STORE, u64_params(1)), [out], block=block, **kw)
    return out


def test_if_else_and_loops_with_different_trip_counts() -> None:
    body = """
    mov.u32 %r1, 0; mov.u32 %r2, 0;
    and.b32 %r3, %r0, 1; setp.eq.u32 %p0, %r3, 0; @%p0 bra EVEN;
    mov.u32 %r1, 1000; bra.uni JOIN;
    EVEN: mov.u32 %r1, 2000;
    JOIN:
    setp.ge.u32 %p1, %r2, %r0; @%p1 bra DONE;
    add.u32 %r1, %r1, %r2; add.u32 %r2, %r2, 1; bra JOIN;
    DONE: add.u32 %r1, %r1, %r2;
    """
    want = [(1000 if i & 1 else 2000) + i * (i - 1) // 2 + i for i in range(32)]
    np.testing.assert_array_equal(result(body), want)
    for seed in range(3):
        np.testing.assert_array_equal(result(body, schedule="random", seed=seed), want)


def test_uniform_value_written_in_one_arm_only() -> None:
    body = """
    mov.u32 %r1, 5; setp.lt.u32 %p0, %r0, 10; @%p0 bra SKIP;
    mov.u32 %r1, 9; setp.lt.u32 %p2, %r0, 20; @%p2 bra SKIP; add.u32 %r1, %r1, 1;
    SKIP: add.u32 %r1, %r1, 100;
    """
    want = np.where(LANE < 10, 105, np.where(LANE < 20, 109, 110))
    np.testing.assert_array_equal(result(body), want)


def test_branch_tables() -> None:
    code = """
    ts: .branchtargets A, B, C;
    brx.idx %r3, ts;
    A: mov.u32 %r1, 10; bra JOIN;
    B: mov.u32 %r1, 20; bra JOIN;
    C: mov.u32 %r1, 30;
    JOIN: add.u32 %r1, %r1, %r0;
    """
    np.testing.assert_array_equal(result("mov.u32 %r1, 0; mov.u32 %r3, 1;" + code), 20 + LANE)
    want = np.array([10, 20, 30])[LANE % 3] + LANE
    np.testing.assert_array_equal(result("mov.u32 %r1, 0; rem.u32 %r3, %r0, 3;" + code), want)


def test_early_exit_and_partial_warps() -> None:
    body = "setp.gt.u32 %p0, %r0, 40; @%p0 exit; mov.u32 %r1, 7;"
    np.testing.assert_array_equal(result(body, block=50), np.where(np.arange(50) > 40, 0, 7))


def test_elect_and_scopes_reuse_names() -> None:
    body = """
    mov.u32 %r1, 0;
    elect.sync %r2|%p1, -1;
    @!%p1 bra OUT;
    { .reg .pred p; .reg .b32 x; LAB: mov.b32 x, 3; setp.eq.u32 p, x, 3; @p bra DONE; bra LAB;
      DONE: add.u32 %r1, %r1, x; }
    { .reg .pred p; .reg .b32 x; LAB: mov.b32 x, 4; setp.eq.u32 p, x, 4; @p bra DONE; bra LAB;
      DONE: add.u32 %r1, %r1, x; }
    OUT:
    """
    np.testing.assert_array_equal(result(body), np.where(LANE == 0, 7, 0))


def shfl_reference(mode: str, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    src, ok = np.zeros(32, int), np.zeros(32, int)
    seg, clamp = c >> 8 & 31, c & 31
    for lane in range(32):
        top = lane & seg | clamp & ~seg & 31
        if mode == "up":
            j = lane - b
            p = j >= top
        elif mode == "down":
            j = lane + b
            p = j <= top
        elif mode == "bfly":
            j = lane ^ b
            p = j <= top
        else:
            j = lane & seg | b & ~seg & 31
            p = j <= top
        src[lane], ok[lane] = (j if p else lane), p
    return src, ok


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [0, 31, 0x1800, 0x181F, 0x1C07])
def test_shfl(mode: str, c: int) -> None:
    if mode == "up" and c & 31:
        c &= ~31
    data = rng.integers(0, 1 << 32, 32).astype(np.uint32)
    for b in (0, 1, 5, 16):
        src, ok = shfl_reference(mode, b, c)
        out = np.zeros(64, np.uint32)
        body = f"""{START} ld.param.u64 %d1, [p1]; mad.wide.u32 %d2, %r0, 4, %d1;
        ld.global.b32 %r2, [%d2];
        shfl.sync.{mode}.b32 %r1|%p0, %r2, {b}, {c}, -1;
        selp.u32 %r4, 1, 0, %p0;
        mad.wide.u32 %d3, %r0, 8, %d0; st.global.v2.b32 [%d3], {{%r1, %r4}};"""
        run(entry(body, u64_params(2)), [out, data])
        np.testing.assert_array_equal(out[::2], data[src])
        np.testing.assert_array_equal(out[1::2], ok)


def test_shfl_with_lane_operands_and_broadcast() -> None:
    body = "shl.b32 %r2, %r0, 1; sub.u32 %r3, 31, %r0; shfl.sync.idx.b32 %r1, %r2, %r3, 31, -1;"
    np.testing.assert_array_equal(result(body), 2 * (31 - LANE))
    body = "mul.lo.u32 %r2, %r0, %r0; shfl.sync.idx.b32 %r1, %r2, 5, 31, 0xffffffff;"
    np.testing.assert_array_equal(result(body), np.full(32, 25))


def test_votes_match_redux() -> None:
    data = rng.integers(0, 4, 32).astype(np.uint64)
    small = data < 2
    bits = sum(1 << i for i in range(32) if small[i])
    t = "setp.lt.u32 %p0, %r1, 2;"
    # In the `part` mode of the harness lanes 20 and up are elsewhere: membermask names who is here.
    for mask, n in ((0xFFFFFFFF, 32), (0xFFFFF, 20)):
        part = bits & ((1 << n) - 1)
        vals = data[:n]
        pred = f"setp.ge.u32 %p9, %r60, {n}; @%p9 bra SKIP;"

        def go(code: str, ref, pred: str = pred, n: int = n) -> None:
            out, src = np.zeros(32, np.uint32), data.astype(np.uint32)
            body = f"""mov.u32 %r60, %tid.x; ld.param.u64 %d0,[p0]; ld.param.u64 %d1,[p1];
            mad.wide.u32 %d2, %r60, 4, %d1; mad.wide.u32 %d3, %r60, 4, %d0;
            ld.global.b32 %r1, [%d2]; {pred}
            {code}
            st.global.b32 [%d3], %r0; SKIP:"""
            run(entry(body, u64_params(2)), [out, src])
            want = [ref(i) if i < n else 0 for i in range(32)]
            np.testing.assert_array_equal(out, np.array(want, np.uint64).astype(np.uint32))

        go(f"{t} vote.sync.ballot.b32 %r0, %p0, {mask};", lambda i, part=part: part)
        go(f"{t} vote.sync.any.pred %p1, %p0, {mask}; selp.u32 %r0,1,0,%p1;",
           lambda i, part=part: int(part != 0))  # fmt: skip
        go(f"{t} vote.sync.all.pred %p1, !%p0, {mask}; selp.u32 %r0,1,0,%p1;",
           lambda i, part=part: int(part == 0))  # fmt: skip
        go(
            f"match.any.sync.b32 %r0, %r1, {mask};",
            lambda i, vals=vals: sum(1 << j for j, v in enumerate(vals) if v == data[i]),
        )
        go(f"redux.sync.add.u32 %r0, %r1, {mask};", lambda i, vals=vals: int(vals.sum()))
        go(f"redux.sync.max.s32 %r0, %r1, {mask};", lambda i, vals=vals: int(vals.max()))
        go(f"redux.sync.or.b32 %r0, %r1, {mask};",
           lambda i, vals=vals: int(np.bitwise_or.reduce(vals)))  # fmt: skip
        go("activemask.b32 %r0;", lambda i, n=n: (1 << n) - 1)
    go("mov.u32 %r0, %lanemask_lt; mov.u32 %r2, %lanemask_ge; not.b32 %r2, %r2;"
       "setp.ne.u32 %p1, %r0, %r2; @%p1 trap;", lambda i: (1 << i) - 1)  # fmt: skip


def test_match_all() -> None:
    body = "match.all.sync.b32 %r1|%p0, %r0, -1; @%p0 trap;"
    np.testing.assert_array_equal(result(body), np.zeros(32))
    body = "mov.u32 %r5, 9; match.all.sync.b32 %r1|%p0, %r5, -1; @!%p0 trap;"
    np.testing.assert_array_equal(result(body), np.full(32, 0xFFFFFFFF))


def test_warp_sync_in_both_arms() -> None:
    body = """
    .shared .align 4 .b8 buf[128];
    mov.u32 %r5, buf; shl.b32 %r6, %r0, 2; add.u32 %r6, %r6, %r5;
    setp.lt.u32 %p0, %r0, 16; @%p0 bra LOW;
    add.u32 %r7, %r0, 100; st.shared.u32 [%r6], %r7; bar.warp.sync -1; bra.uni JOIN;
    LOW: add.u32 %r7, %r0, 200; st.shared.u32 [%r6], %r7; bar.warp.sync 0xffffffff;
    JOIN: xor.b32 %r8, %r6, 64; ld.shared.u32 %r1, [%r8];
    """
    np.testing.assert_array_equal(result(body), np.where(LANE < 16, LANE + 116, LANE + 184))


def test_lanes_can_signal_each_other_while_one_spins() -> None:
    body = """
    .shared .align 4 .b32 flag;
    setp.eq.u32 %p0, %r0, 31; st.shared.u32 [flag], 0;
    @%p0 bra PUT;
    WAIT: ld.volatile.shared.u32 %r1, [flag]; setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT;
    bra.uni JOIN;
    PUT: mov.u32 %r1, 5; st.volatile.shared.u32 [flag], %r1;
    JOIN:
    """
    np.testing.assert_array_equal(result(body), np.full(32, 5))


def test_special_registers_in_a_grid() -> None:
    out = np.zeros(2 * 3 * 64 * 4, np.uint32)
    body = """
    ld.param.u64 %d0, [p0]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y;
    mov.u32 %r3, %nctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %warpid; mov.u32 %r6, %laneid;
    mov.u32 %r10, %tid.y;
    mad.lo.u32 %r7, %r2, %r3, %r1; mov.u32 %r11, %ntid.y; mad.lo.u32 %r12, %r10, %r4, %r0;
    mul.lo.u32 %r13, %r4, %r11; mad.lo.u32 %r8, %r7, %r13, %r12;
    mad.wide.u32 %d1, %r8, 16, %d0; mad.lo.u32 %r9, %r5, 32, %r6;
    st.global.v4.u32 [%d1], {%r9, %r7, %r13, %r10};
    """
    world = World()
    world.register(out)
    kernel = Kernel.from_ptx(entry(body, u64_params(1)))
    world.launch(pe=0, kernel=kernel, grid=(2, 3), block=(16, 4), args=[out])
    report = world.run()
    rows = out.reshape(6, 64, 4)
    np.testing.assert_array_equal(rows[:, :, 0], np.broadcast_to(np.arange(64), (6, 64)))
    np.testing.assert_array_equal(rows[:, :, 1], np.arange(6)[:, None].repeat(64, 1))
    np.testing.assert_array_equal(rows[:, :, 3], np.broadcast_to(np.arange(64) // 16, (6, 64)))
    assert report.launches == {0: 1} and report.warp_instructions > 0


REFUSED = {
    "frobnicate.u32 %r0, %r1;": "opcode 'frobnicate'",
    "add.wobbly.u32 %r0, %r1, %r2;": "modifier .wobbly",
    "ld.global.L3::evict.b32 %r0, [%d0];": "modifier .L3::evict",
    "call.uni foo, (%r0);": "opcode 'call'",
    "add.u32 %r0, %r1;": "operands",
    "div.rz.f32 %r0, %r1, %r2;": "modifier .rz",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 128;": "opcode 'tcgen05'",
    "mul.u32 %r0, %r1, %r2;": "needs .lo, .hi or .wide",
}


@pytest.mark.parametrize("code", list(REFUSED))
def test_refuses_by_name_and_line(code: str) -> None:
    text = entry("mov.u32 %r0, 1;\n" + code)
    line = next(i for i, s in enumerate(text.split("\n"), 1) if s == code)
    with pytest.raises((UnsupportedInstruction, PtxSyntaxError)) as e:
        Kernel.from_ptx(text)
    assert REFUSED[code] in str(e.value) and f"line {line}" in str(e.value)
