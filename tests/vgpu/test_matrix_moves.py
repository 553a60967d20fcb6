"""Hand-written PTX for ldmatrix, stmatrix, movmatrix and mma.sync."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vgpu_harness import entry, run, u64_params

from megamoe.runtime.vgpu import MemoryFault, matrix

SHARED = ".shared .align 128 .b8 buf[2048];"

HEAD = """
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
mov.u32 %r0, %tid.x; mov.u32 %r1, buf;
mul.lo.u32 %r2, %r0, 16; add.u32 %r3, %r1, %r2; cvt.u64.u32 %d2, %r2;
"""


def vector(count: int, first: int = 10) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def load_kernel(count: int, trans: str, row: str) -> str:
    """Rows 16 bytes apart from p0; `row` computes this lane's row number into %r5 from %r0."""
    out = "\n".join(f"st.global.u32 [%d4+{128 * i}], %r{10 + i};" for i in range(count))
    return entry(
        f"""{HEAD}
add.u64 %d3, %d0, %d2;
ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d3];
st.shared.v4.u32 [%r3], {{%r20, %r21, %r22, %r23}};
bar.warp.sync -1;
{row}
mad.lo.u32 %r6, %r5, 16, %r1;
ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {vector(count)}, [%r6];
mad.wide.u32 %d4, %r0, 4, %d1;
{out}
""",
        u64_params(2),
        SHARED,
    )


def store_kernel(count: int, trans: str, row: str) -> str:
    """Registers [count][32] from p0; the shared rows go to p1."""
    load = "\n".join(f"ld.global.u32 %r{10 + i}, [%d4+{128 * i}];" for i in range(count))
    return entry(
        f"""{HEAD}
st.shared.v4.u32 [%r3], {{-1, -1, -1, -1}};
bar.warp.sync -1;
mad.wide.u32 %d4, %r0, 4, %d0;
{load}
{row}
mad.lo.u32 %r6, %r5, 16, %r1;
stmatrix.sync.aligned.m8n8.x{count}{trans}.shared::cta.b16 [%r6], {vector(count)};
bar.warp.sync -1;
ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r3];
add.u64 %d3, %d1, %d2;
st.global.v4.u32 [%d3], {{%r20, %r21, %r22, %r23}};
""",
        u64_params(2),
        SHARED,
    )


# Lane l names row l, or, shuffled, row 5·l mod 32: any order of rows is allowed.
ROWS = {
    "straight": ("mov.u32 %r5, %r0;", np.arange(32)),
    "shuffled": ("mul.lo.u32 %r5, %r0, 5; and.b32 %r5, %r5, 31;", np.arange(32) * 5 % 32),
}


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count: int, trans: str, rows: str) -> None:
    code, order = ROWS[rows]
    memory = np.arange(256, dtype=np.uint16).reshape(32, 8) * 7
    regs = np.zeros((count, 32), np.uint32)
    run(load_kernel(count, trans, code), [memory, regs])
    tiles = memory[order[: 8 * count]].reshape(count, 8, 8)
    for j in range(count):
        tile = tiles[j].T if trans else tiles[j]
        want = tile.astype(np.uint32).reshape(32, 2)
        np.testing.assert_array_equal(regs[j], want[:, 0] | want[:, 1] << 16)
    back = np.zeros_like(memory)
    run(store_kernel(count, trans, code), [regs, back])
    want = np.full_like(memory, 0xFFFF)
    want[order[: 8 * count]] = memory[order[: 8 * count]]
    np.testing.assert_array_equal(back, want)


def test_lanes_that_name_no_row_may_hold_any_address() -> None:
    wild = "setp.ge.u32 %p1, %r0, 16; mov.u32 %r5, %r0; @%p1 mov.u32 %r5, 0x7fffff;"
    memory = np.arange(256, dtype=np.uint16).reshape(32, 8)
    regs = np.zeros((2, 32), np.uint32)
    run(load_kernel(2, "", wild), [memory, regs])
    np.testing.assert_array_equal(regs, matrix.ldmatrix(memory[:16].view(np.uint8)))
    with pytest.raises(MemoryFault):
        run(load_kernel(4, "", wild), [memory, np.zeros((4, 32), np.uint32)])


def test_misaligned_row() -> None:
    text = load_kernel(1, "", "mov.u32 %r5, %r0;").replace("[%r6];", "[%r6+8];")
    with pytest.raises(MemoryFault, match="16"):
        run(text, [np.zeros((32, 8), np.uint16), np.zeros((1, 32), np.uint32)])


def test_movmatrix() -> None:
    text = entry(
        """
ld.param.u64 %d0, [p0]; mov.u32 %r0, %tid.x; mad.wide.u32 %d1, %r0, 4, %d0;
ld.global.u32 %r1, [%d1];
movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;
st.global.u32 [%d1], %r2;
""",
        u64_params(1),
    )
    m = np.arange(64, dtype=np.uint16).reshape(8, 8)
    data = m.copy()
    run(text, [data])
    np.testing.assert_array_equal(data, m.T)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_ldmatrix_feeds_mma(name: str, dtype: torch.dtype) -> None:
    """A [16, 16] by ldmatrix.x4, B [n=8, k=16] by ldmatrix.x2, as kernels do it."""
    text = entry(
        f"""{HEAD}
add.u64 %d3, %d0, %d2;
ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d3];
st.shared.v4.u32 [%r3], {{%r20, %r21, %r22, %r23}};
ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d3+512];
st.shared.v4.u32 [%r3+512], {{%r20, %r21, %r22, %r23}};
bar.warp.sync -1;
and.b32 %r5, %r0, 15; shl.b32 %r5, %r5, 5;
shr.u32 %r6, %r0, 4; shl.b32 %r6, %r6, 4;
add.u32 %r7, %r5, %r6; add.u32 %r7, %r7, %r1;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {vector(4)}, [%r7];
and.b32 %r5, %r0, 7; shl.b32 %r5, %r5, 5;
shr.u32 %r6, %r0, 3; and.b32 %r6, %r6, 1; shl.b32 %r6, %r6, 4;
add.u32 %r8, %r5, %r6; add.u32 %r8, %r8, %r1;
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {vector(2, 14)}, [%r8+512];
mov.b32 %r30, 0f3F800000;
mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32
    {vector(4, 40)}, {vector(4)}, {vector(2, 14)}, {{%r30, %r30, %r30, %r30}};
shr.u32 %r31, %r0, 2; and.b32 %r32, %r0, 3;
shl.b32 %r33, %r31, 5; mad.lo.u32 %r34, %r32, 8, %r33; cvt.u64.u32 %d5, %r34; add.u64 %d6, %d1, %d5;
st.global.v2.b32 [%d6], {{%r40, %r41}};
st.global.v2.b32 [%d6+256], {{%r42, %r43}};
""",
        u64_params(2),
        SHARED,
    )
    g = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 8, (16, 16), generator=g).to(dtype)
    b = torch.randint(-8, 8, (8, 16), generator=g).to(dtype)
    memory = torch.zeros(512, dtype=dtype)
    memory[:256], memory[256:384] = a.ravel(), b.ravel()
    d = torch.zeros(16, 8)
    run(text, [memory, d])
    assert torch.equal(d, a.float() @ b.float().T + 1)
