"""Loads, stores, atomics, address spaces, and the faults they report."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_harness import entry, run, u64_params

from megamoe.runtime.vgpu import Kernel, LaunchError, MemoryFault, World

TID = "mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];"


def test_widths_and_vectors() -> None:
    src = np.arange(32 * 16, dtype=np.uint8)
    dst = np.zeros(32 * 16, np.uint8)
    body = (
        TID
        + """
    mad.wide.u32 %d2, %r0, 16, %d0; mad.wide.u32 %d3, %r0, 16, %d1;
    ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%d2];
    ld.global.v2.b64 {%d4,%d5}, [%d2];
    ld.global.v2.b32 {%r5,%r6}, [%d2+8];
    ld.global.b64 %d6, [%d2+8];
    ld.global.u16 %h0, [%d2+2]; ld.global.s8 %r7, [%d2+5]; ld.global.u8 %h1, [%d2+6];
    mov.b64 %d7, {%r5, %r6};
    xor.b64 %d8, %d7, %d6; xor.b64 %d9, %d8, %d5;
    st.global.v4.b32 [%d3], {%r1,%r2,%r3,%r4};
    st.global.b64 [%d3+8], %d9;
    st.global.u16 [%d3+2], %h0; st.global.u8 [%d3+5], %r7; st.global.b8 [%d3+6], %h1;
    """
    )
    run(entry(body, u64_params(2)), [src, dst])
    np.testing.assert_array_equal(dst, src)


def test_signed_bytes_extend() -> None:
    src = np.array([-1, -128, 127, 5] * 8, np.int8)
    dst = np.zeros(32, np.int32)
    body = (
        TID
        + """
    cvt.u64.u32 %d2, %r0; add.u64 %d2, %d2, %d0; ld.global.s8 %r1, [%d2];
    mad.wide.u32 %d3, %r0, 4, %d1; st.global.b32 [%d3], %r1;
    ld.global.s8 %h2, [%d0]; cvt.s32.s16 %r2, %h2; setp.ne.s32 %p0, %r2, -1; @%p0 trap;
    """
    )
    run(entry(body, u64_params(2)), [src, dst])
    np.testing.assert_array_equal(dst, src.astype(np.int32))


def test_shared_memory_generic_addresses_and_local() -> None:
    out = np.zeros(64, np.uint32)
    body = """
    .shared .align 16 .b8 buf[512];
    .local .align 8 .b8 stack[64];
    mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0];
    mov.u32 %r1, buf; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2;
    mul.lo.u32 %r4, %r0, %r0; st.shared.u32 [%r3], %r4;
    bar.sync 0;
    xor.b32 %r5, %r2, 4; add.u32 %r6, %r1, %r5;
    cvt.u64.u32 %d1, %r6; cvta.shared.u64 %d2, %d1; ld.u32 %r7, [%d2];
    isspacep.shared %p0, %d2; isspacep.global %p1, %d2; @!%p0 trap; @%p1 trap;
    and.b32 %r8, %r0, 7; shl.b32 %r8, %r8, 3; mov.u32 %r9, stack; add.u32 %r10, %r9, %r8;
    st.local.u32 [%r10], %r7; st.local.u32 [stack+4], %r0;
    ld.local.u32 %r11, [%r10];
    mov.u64 %d5, stack; cvta.local.u64 %d6, %d5; ld.u32 %r14, [%d6+4];
    mad.wide.u32 %d3, %r0, 8, %d0; st.global.v2.u32 [%d3], {%r11, %r14};
    """
    run(entry(body, u64_params(1)), [out])
    lane = np.arange(32)
    np.testing.assert_array_equal(out[::2], (lane ^ 1) ** 2)
    np.testing.assert_array_equal(out[1::2], lane)


def test_dynamic_shared_follows_static() -> None:
    out = np.zeros(2, np.uint32)
    head = ".shared .align 4 .b8 small[20];\n.extern .shared .align 128 .b8 big[];\n"
    body = """
    mov.u32 %r0, small; mov.u32 %r1, big; ld.param.u64 %d0, [p0];
    st.shared.u32 [big+252], %r1;
    st.global.v2.u32 [%d0], {%r0, %r1};
    """
    run(entry(body, u64_params(1), head=head), [out], smem=256)
    assert out[0] == 1024 and out[1] == 1024 + 128


def test_module_constants_and_parameters() -> None:
    out = np.zeros(4, np.uint64)
    head = ".const .align 4 .b32 table[4] = {1, 2, 0x30, -4};\n.global .align 8 .b64 cell = 7;\n"
    params = ".param .u64 p0, .param .f32 p1, .param .align 8 .b8 p2[12], .param .u16 p3"
    body = """
    ld.param.u64 %d0, [p0]; ld.param.f32 %r0, [p1]; ld.param.b32 %r1, [p2+8];
    ld.param.u16 %h0, [p3]; ld.param.v2.b32 {%r5, %r6}, [p2];
    ld.const.u32 %r2, [table+12]; ld.global.u64 %d1, [cell];
    mov.u64 %d2, p2; cvta.param.u64 %d3, %d2; ld.param.b32 %r3, [%d2+8];
    setp.ne.b32 %p0, %r3, %r1; @%p0 trap; setp.ne.u32 %p0, %r5, 11; @%p0 trap;
    mov.b64 %d4, {%r0, %r1}; mov.b64 %d5, {%r2, %r6}; cvt.u64.u16 %d6, %h0;
    st.global.u64 [%d0], %d4; st.global.u64 [%d0+8], %d5; st.global.u64 [%d0+16], %d1;
    st.global.u64 [%d0+24], %d6;
    """
    raw = np.array([11, 22, 33], np.uint32).tobytes()
    run(entry(body, params, head=head), [out, 1.5, raw, 65535])
    low = int(np.float32(1.5).view(np.uint32))
    assert out.tolist() == [low | 33 << 32, 0xFFFFFFFC | 22 << 32, 7, 65535]


ATOMS = {
    "add.u32": (lambda o, b: (o + b) & 0xFFFFFFFF, 5),
    "max.s32": (lambda o, b: max(o - (o >> 31 << 32), b) & 0xFFFFFFFF, 3),
    "min.u32": (min, 9),
    "and.b32": (lambda o, b: o & b, 0x5A5A),
    "or.b32": (lambda o, b: o | b, 0x5A5A),
    "xor.b32": (lambda o, b: o ^ b, 0x5A5A),
    "exch.b32": (lambda o, b: b, 77),
    "inc.u32": (lambda o, b: 0 if o >= b else o + 1, 10),
    "dec.u32": (lambda o, b: b if o == 0 or o > b else o - 1, 10),
}


@pytest.mark.parametrize("name", list(ATOMS))
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(name: str, space: str) -> None:
    fn, operand = ATOMS[name]
    out = np.zeros(33, np.uint32)
    start = np.array([0xFFFFFFF0], np.uint32)
    where = "[%d5]" if space == "global" else "[cell]"
    body = f"""
    .shared .align 4 .b32 cell;
    mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d5, [p1];
    ld.global.u32 %r9, [%d5]; st.shared.u32 [cell], %r9; bar.sync 0;
    atom.{space}.{name} %r1, {where}, {operand};
    bar.sync 0;
    ld.{space}.u32 %r2, {where};
    mad.wide.u32 %d3, %r0, 4, %d0; st.global.u32 [%d3], %r1; st.global.u32 [%d0+128], %r2;
    """
    run(entry(body, u64_params(2)), [out, start.copy()])
    old = int(start[0])
    for lane in range(32):
        assert out[lane] == old, lane
        old = fn(old, operand)
    assert out[32] == old


def test_cas_red_and_float_atomics() -> None:
    out = np.zeros(4, np.uint32)
    wide = np.array([1 << 40, 0], np.uint64)
    body = """
    mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
    atom.acq_rel.gpu.global.cas.b32 %r1, [%d0], %r0, 100;
    red.release.sys.global.add.u32 [%d0+4], 2;
    red.global.add.f32 [%d0+8], 0f3F000000;
    red.relaxed.gpu.global.add.noftz.bf16x2 [%d0+12], %r5;
    atom.global.add.u64 %d2, [%d1], 3;
    atom.global.max.s64 %d2, [%d1+8], -5;
    """
    body = "mov.b32 %r5, 0x3F803F80;\n" + body
    run(entry(body, u64_params(2)), [out, wide])
    assert out[0] == 100 and out[1] == 64
    assert out[2:3].view(np.float32)[0] == 16.0
    assert out[3] == 0x42004200
    assert wide.tolist() == [(1 << 40) + 96, 0]


FAULTS = {
    "past_the_end": ("ld.global.b32 %r1, [%d0+128];", "0 bytes past the end of p0"),
    "before": ("ld.global.b32 %r1, [%d0+-4];", "4 bytes before p0"),
    "misaligned": ("ld.global.b32 %r1, [%d0+2];", "misaligned"),
    "null": ("mov.u64 %d4, 0; st.global.b32 [%d4], %r1;", "no allocation"),
    "wide": ("ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%d0+120];", "out of bounds"),
    "one_lane": ("mad.wide.u32 %d3, %r0, 4, %d0;\nst.global.b32 [%d3+4], %r1;", "lane 31"),
    "one_lane_low": ("mad.wide.u32 %d3, %r0, 4, %d0;\nld.global.b32 %r1, [%d3+-4];", "lane 0"),
    "shared": ("mov.u32 %r5, 1024; ld.shared.b32 %r1, [%r5+64];", "past the end"),
    "shared_null": ("mov.u32 %r5, 0; ld.shared.b32 %r1, [%r5];", "below the first"),
    "shared_lane": ("mad.lo.u32 %r5, %r0, 4, 1024;\nst.shared.b32 [%r5], %r0;", "lane 16"),
    "atomic": ("red.global.add.u32 [%d0+128], 1;", "past the end"),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_faults_name_the_place(name: str) -> None:
    code, text = FAULTS[name]
    head = ".shared .align 16 .b8 buf[64];\n"
    body = f"mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0];\n{code}"
    ptx = entry(body, u64_params(1), head=head)
    wrong = code.split("\n")[-1]
    line = next(i for i, s in enumerate(ptx.split("\n"), 1) if wrong in s)
    with pytest.raises(MemoryFault) as e:
        run(ptx, [np.zeros(32, np.uint32)])
    message = str(e.value)
    assert text in message and f"PTX line {line}" in message
    assert "PE 0 CTA (0, 0, 0) warp 0" in message
    assert e.value.report.warp_instructions >= 0


def test_fault_names_source_line() -> None:
    body = ".loc 1 77 3\nmov.u64 %d1, 16;\n.loc 1 78 3\nst.global.b32 [%d1], %r1;"
    ptx = entry(body) + '.file 1 "/some/where/mine.py"\n'
    with pytest.raises(MemoryFault, match=r"mine\.py:78"):
        run(ptx, [])


def test_use_after_release_and_read_only() -> None:
    x = np.zeros(32, np.uint32)
    world = World()
    addr = world.register(x, name="x")
    store = "ld.param.u64 %d0, [p0]; st.global.b32 [%d0], 1;"
    kernel = Kernel.from_ptx(entry(store, u64_params(1)))
    world.unregister(x)
    world.launch(pe=0, kernel=kernel, grid=1, block=32, args=[addr])
    with pytest.raises(MemoryFault, match="after its release"):
        world.run()
    y = np.zeros(32, np.uint32)
    y.flags.writeable = False
    world.register(y, name="y")
    world.launch(pe=0, kernel=kernel, grid=1, block=32, args=[y])
    with pytest.raises(MemoryFault, match="read-only"):
        world.run()


def test_alloc_is_poisoned_views_have_addresses_and_peers_are_reachable() -> None:
    world = World(pes=2)
    a = world.alloc(64, name="a", pe=1)
    assert (world.bytes_at(a) == 0xFF).all()
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    base = world.register(x, name="x", pe=0)
    assert world.address_of(x[2, 3:]) == base + (2 * 8 + 3) * 4
    kernel = Kernel.from_ptx(entry(
        "ld.param.u64 %d0,[p0]; ld.param.u64 %d1,[p1]; ld.global.b32 %r1,[%d0+4];"
        "st.global.b32 [%d1], %r1;", u64_params(2)))  # fmt: skip
    world.launch(pe=0, kernel=kernel, grid=1, block=32, args=[x, a])
    report = world.run()
    assert world.bytes_at(a)[:4].view(np.float32)[0] == 1.0
    assert report.bytes_by_pair == {(0, 0): 4, (0, 1): 4}
    assert report.bytes_between_pes == 4


def test_torch_tensors_and_strided_arrays() -> None:
    import torch

    t = torch.zeros(4, 6, dtype=torch.bfloat16)
    wide = np.zeros((4, 10), np.int32)
    world = World()
    at = world.register(t, name="t")
    ws = world.register(wide[:, :3], name="w")
    kernel = Kernel.from_ptx(entry(
        "ld.param.u64 %d0,[p0]; ld.param.u64 %d1,[p1]; mov.b16 %h0, 0x3F80;"
        "st.global.b16 [%d0+14], %h0; st.global.b32 [%d1+44], 9;", u64_params(2)))  # fmt: skip
    world.launch(pe=0, kernel=kernel, grid=1, block=32, args=[t, ws])
    world.run()
    assert t[1, 1] == 1.0 and at == world.address_of(t)
    assert wide[1, 1] == 9


def test_launch_arguments_are_checked() -> None:
    text = entry("", u64_params(1)).replace("{\n.reg", ".reqntid 64, 1, 1\n{\n.reg", 1)
    kernel = Kernel.from_ptx(text)
    world = World()
    with pytest.raises(LaunchError, match="requires"):
        world.launch(pe=0, kernel=kernel, grid=1, block=32, args=[0])
    with pytest.raises(LaunchError, match="0 arguments"):
        world.launch(pe=0, kernel=kernel, grid=1, block=64, args=[])
    with pytest.raises(LaunchError, match="not registered"):
        world.launch(pe=0, kernel=kernel, grid=1, block=64, args=[np.zeros(3)])
    with pytest.raises(LaunchError, match="limit"):
        world.launch(pe=0, kernel=kernel, grid=1, block=64, args=[0], smem=240 * 1024)
    with pytest.raises(LaunchError, match="multiple"):
        world.launch(pe=0, kernel=kernel, grid=3, block=64, cluster=2, args=[0])
