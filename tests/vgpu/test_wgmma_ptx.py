"""Hand-written PTX for wgmma: every swizzle, major and type from descriptors, and registers."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_harness import entry, run, u64_params
from wgmma_reference import place, raw_values

from megamoe.runtime.vgpu import MemoryFault, UnsupportedInstruction, VgpuError, convert, wgmma

A_AT, B_AT, BYTES = 0x4000, 0x10000, 0x20000


def kernel(body: str, store: str, regs: str) -> str:
    """One warpgroup; the shared window is filled from p0, the accumulators go to p1.

    %r0 = thread, %d1 = p1, %d2 = p2 (A registers, [thread][4]), %d3 = p3 (descriptors of A and B,
    relative to the window), %d15 = what to add to them.
    """
    return entry(
        f"""
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2]; ld.param.u64 %d3, [p3];
mov.u32 %r0, %tid.x; mov.u32 %r1, window;
mov.u32 %r2, %r0;
COPY: mul.lo.u32 %r3, %r2, 16; cvt.u64.u32 %d4, %r3; add.u64 %d5, %d0, %d4; add.u32 %r4, %r1, %r3;
ld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [%d5];
st.shared.v4.u32 [%r4], {{%r5, %r6, %r7, %r8}};
add.u32 %r2, %r2, 128;
setp.lt.u32 %p1, %r2, {BYTES // 16};
@%p1 bra COPY;
cvt.u64.u32 %d15, %r1; shr.u64 %d15, %d15, 4;
fence.proxy.async.shared::cta;
bar.sync 0;
{body}
{store}
""",
        u64_params(4),
        f"{regs} .shared .align 1024 .b8 window[{BYTES}];",
    )


def program(
    n: int, d: str, ab: str, a: str, tail: str, *, registers: int, start: str = "0", a_regs: int = 0
) -> str:
    """A kernel with one wgmma; accumulators start with the bits `start`.

    `a` is the operand text, `tail` what follows the B descriptor.
    """
    k = 32 // {"tf32": 4, "bf16": 2, "f16": 2}.get(ab.split(".")[0], 1)
    acc = "{" + ", ".join(f"%acc{i}" for i in range(registers)) + "}"
    zero = "\n".join(f"mov.b32 %acc{i}, {start};" for i in range(registers))
    load_a = "\n".join(f"ld.global.b32 %a{i}, [%d9+{4 * i}];" for i in range(a_regs))
    body = f"""
{zero}
shl.b32 %r10, %r0, 4; cvt.u64.u32 %d8, %r10; add.u64 %d9, %d2, %d8;
{load_a}
ld.global.u64 %d10, [%d3]; ld.global.u64 %d11, [%d3+8];
add.u64 %d10, %d10, %d15; add.u64 %d11, %d11, %d15;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{ab} {acc}, {a}, %d11, {tail};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
"""
    store = f"mul.lo.u32 %r11, %r0, {4 * registers}; cvt.u64.u32 %d6, %r11; add.u64 %d7, %d1, %d6;"
    store += "\n".join(f"st.global.b32 [%d7+{4 * i}], %acc{i};" for i in range(registers))
    return kernel(body, store, f".reg .b32 %acc<{registers}>; .reg .b32 %a<4>;")


def execute(
    text: str, smem: np.ndarray, descs: tuple[int, int], registers: int,
    a_regs: np.ndarray | None = None, completion: str = "eager",
) -> np.ndarray:  # fmt: skip
    """Accumulator registers uint32 [4 warps, registers, 32 lanes]."""
    out = np.zeros((128, registers), np.uint32)
    a = np.zeros((128, 4), np.uint32)
    if a_regs is not None:
        a[:] = a_regs.transpose(0, 2, 1).reshape(128, 4)
    run(text, [smem, out, a, np.array(descs, np.uint64)], block=128, completion=completion)
    return out.reshape(4, 32, registers).transpose(0, 2, 1)


def layout(swizzle: int, mn: bool) -> tuple[int, int]:
    """(lbo, sbo) of a dense tile of 16 k (32 bytes)."""
    if mn:
        return (16 * swizzle, 8 * swizzle) if swizzle else (128, 256)
    return (16, 8 * swizzle) if swizzle else (128, 256)


def operands(
    dtype: str, n: int, swizzle: int, a_mn: bool, b_mn: bool
) -> tuple[np.ndarray, tuple[int, int], np.ndarray, np.ndarray]:
    """(shared window, descriptors, A [64, K], B [n, K]); window address 0 is the first byte."""
    a_raw, a = raw_values(64, dtype, 1)
    b_raw, b = raw_values(n, dtype, 2)
    window = np.zeros(BYTES, np.uint8)
    descs = []
    for raw, at, mn in ((a_raw, A_AT, a_mn), (b_raw, B_AT, b_mn)):
        lbo, sbo = layout(swizzle, mn)
        half = place(raw, at, mn, swizzle, lbo, sbo)[:BYTES]
        end = at + 0x8000
        window[at:end] = half[at:end]
        descs.append(wgmma.encode(at, lbo, sbo, swizzle))
    return window, (descs[0], descs[1]), a, b


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_bf16_every_swizzle_and_major(swizzle: int, a_mn: int, b_mn: int) -> None:
    n = 64
    window, descs, a, b = operands("bf16", n, swizzle, bool(a_mn), bool(b_mn))
    text = program(
        n, "f32", "bf16.bf16", "%d10", f"1, 1, 1, {a_mn}, {b_mn}", registers=32, start="0f40400000"
    )
    regs = execute(text, window, descs, 32)
    d = wgmma.regs_to_d(np.ascontiguousarray(regs).view(np.float32))
    np.testing.assert_array_equal(d, a @ b.T + 3)


@pytest.mark.parametrize("dtype", ["f16", "tf32", "e4m3", "e5m2"])
@pytest.mark.parametrize("n", [8, 136, 256])
def test_float_types_and_widths(dtype: str, n: int) -> None:
    window, descs, a, b = operands(dtype, n, 128, False, False)
    flags = "p, -1, 1, 0, 0" if dtype == "f16" else "p, -1, 1"
    text = program(
        n, "f32", f"{dtype}.{dtype}", "%d10", flags.replace("p", "1"), registers=n // 2,
        start="0f3F800000",
    )  # fmt: skip
    regs = execute(text, window, descs, n // 2, completion="late")
    d = wgmma.regs_to_d(np.ascontiguousarray(regs).view(np.float32))
    np.testing.assert_array_equal(d, 1 - a @ b.T)


@pytest.mark.parametrize("dtype", ["s8", "u8"])
def test_integer_types(dtype: str) -> None:
    n = 32
    window, descs, a, b = operands(dtype, n, 32, False, False)
    text = program(n, "s32", f"{dtype}.{dtype}", "%d10", "1", registers=n // 2, start="-5")
    d = wgmma.regs_to_d(np.ascontiguousarray(execute(text, window, descs, n // 2)).view(np.int32))
    np.testing.assert_array_equal(d, (a @ b.T).astype(np.int32) - 5)


def test_f16_accumulator_and_scale_d_zero() -> None:
    n = 48
    window, descs, a, b = operands("f16", n, 64, False, False)
    for scale, base in (("1", 2.0), ("0", 0.0)):
        text = program(
            n, "f16", "f16.f16", "%d10", f"{scale}, 1, 1, 0, 0", registers=n // 4,
            start="0x40004000",
        )  # fmt: skip
        d = wgmma.regs_to_d_f16(execute(text, window, descs, n // 4))
        np.testing.assert_array_equal(d, (a @ b.T + base).astype(np.float16))


@pytest.mark.parametrize("dtype", ["bf16", "tf32", "e4m3"])
def test_a_from_registers(dtype: str) -> None:
    n = 24
    window, descs, a, b = operands(dtype, n, 128, False, False)
    narrow = {
        "bf16": convert.bf16_from_f32, "tf32": convert.tf32_from_f32, "e4m3": convert.e4m3_from_f32
    }[dtype]  # fmt: skip
    by_row = narrow(a).view(np.uint8).reshape(64, 32)
    regs = np.zeros((4, 4, 32), np.uint32)
    for warp in range(4):
        for lane in range(32):
            for r in range(4):
                row = 16 * warp + lane // 4 + 8 * (r % 2)
                word = by_row[row, 16 * (r // 2) + 4 * (lane % 4) :][:4]
                regs[warp, r, lane] = word.copy().view(np.uint32)[0]
    tail = "1, 1, -1, 0" if dtype == "bf16" else "1, 1, -1"
    text = program(
        n, "f32", f"{dtype}.{dtype}", "{%a0, %a1, %a2, %a3}", tail, registers=n // 2, a_regs=4
    )
    got = execute(text, window, descs, n // 2, regs)
    d = wgmma.regs_to_d(np.ascontiguousarray(got).view(np.float32))
    np.testing.assert_array_equal(d, -(a @ b.T))


CHAIN = """
mov.b32 %acc0, 0f3F800000; mov.b32 %acc1, 0f3F800000;
mov.b32 %acc2, 0f3F800000; mov.b32 %acc3, 0f3F800000;
mov.b32 %acc4, 0f40000000; mov.b32 %acc5, 0f40000000;
mov.b32 %acc6, 0f40000000; mov.b32 %acc7, 0f40000000;
ld.global.u64 %d10, [%d3]; ld.global.u64 %d11, [%d3+8];
add.u64 %d10, %d10, %d15; add.u64 %d11, %d11, %d15;
wgmma.fence.sync.aligned;
{op} {{%acc0, %acc1, %acc2, %acc3}}, %d10, %d11, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
{op} {{%acc4, %acc5, %acc6, %acc7}}, %d10, %d11, 0, 1, 1, 0, 0;
{op} {{%acc0, %acc1, %acc2, %acc3}}, %d10, %d11, 1, 1, 1, 0, 0;
{op} {{%acc4, %acc5, %acc6, %acc7}}, %d10, %d11, 1, -1, 1, 0, 0;
{op} {{%acc4, %acc5, %acc6, %acc7}}, %d10, %d11, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 1;
wgmma.wait_group.sync.aligned 0;
"""
WGMMA8 = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
STORE8 = "shl.b32 %r11, %r0, 5; cvt.u64.u32 %d6, %r11; add.u64 %d7, %d1, %d6;\n" + "\n".join(
    f"st.global.b32 [%d7+{4 * i}], %acc{i};" for i in range(8)
)


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_chains_over_two_groups_and_two_accumulators(completion: str) -> None:
    window, descs, a, b = operands("bf16", 8, 128, False, False)
    text = kernel(CHAIN.format(op=WGMMA8), STORE8, ".reg .b32 %acc<8>;")
    regs = execute(text, window, descs, 8, completion=completion)
    ab = a @ b.T
    first, second = (np.ascontiguousarray(regs[:, i : i + 4]).view(np.float32) for i in (0, 4))
    np.testing.assert_array_equal(wgmma.regs_to_d(first), 1 + 2 * ab)
    np.testing.assert_array_equal(wgmma.regs_to_d(second), ab)


def test_misuse_is_reported() -> None:
    window, descs, _, _ = operands("bf16", 8, 128, False, False)
    early = CHAIN.replace("wgmma.wait_group.sync.aligned 0;", "").format(op=WGMMA8)
    with pytest.raises(VgpuError, match="wait_group is missing"):
        execute(kernel(early, STORE8, ".reg .b32 %acc<8>;"), window, descs, 8)
    text = kernel(CHAIN.format(op=WGMMA8), STORE8, ".reg .b32 %acc<8>;")
    with pytest.raises(MemoryFault, match="outside shared memory"):
        execute(text, window, (descs[0], wgmma.encode(0x3F000, 16, 1024, 128)), 8)
    with pytest.raises(UnsupportedInstruction, match="base offset"):
        execute(text, window, (descs[0] | 1 << 49, descs[1]), 8)
    for bad in ("m64n12k16.f32.bf16.bf16", "m64n8k16.f32.bf16.f16x", "m64n8k32.f32.bf16.bf16"):
        op = f"wgmma.mma_async.sync.aligned.{bad}"
        with pytest.raises(UnsupportedInstruction):
            execute(kernel(CHAIN.format(op=op), STORE8, ".reg .b32 %acc<8>;"), window, descs, 8)
