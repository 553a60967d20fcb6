"""Run one PTX instruction over 32 lanes: per-lane, uniform and partly masked operands."""

from __future__ import annotations

import numpy as np
import torch

from megamoe.runtime.vgpu import Kernel, World

HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"


def entry(body: str, params: str = "", regs: str = "", head: str = "", name: str = "k") -> str:
    """A module with one kernel."""
    return f"""{HEADER}{head}
.visible .entry {name}({params})
{{
.reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<64>; .reg .b64 %d<64>;
{regs}
{body}
ret;
}}
"""


def u64_params(n: int) -> str:
    """n 8-byte parameters p0, p1, ..."""
    return ", ".join(f".param .u64 p{i}" for i in range(n))


def run(text: str, args: list, block: int = 32, grid: int = 1, **kw) -> World:
    """One launch in a fresh world; arrays in ``args`` are registered."""
    launch = {k: kw.pop(k) for k in ("smem", "cluster", "registers", "roles") if k in kw}
    world = World(**kw)
    for i, a in enumerate(args):
        if isinstance(a, np.ndarray | torch.Tensor):
            world.register(a, name=f"p{i}")
    kernel = Kernel.from_ptx(text)
    world.launch(pe=0, kernel=kernel, grid=grid, block=block, args=args, **launch)
    world.report = world.run()
    return world


WIDTH = {"h": 16, "r": 32, "d": 64}


def unary_kernel(instruction: str, dst: str, srcs: str, mode: str) -> str:
    """Load operands (registers %?1, %?2, ... of the classes in ``srcs``), run, store %?0.

    ``mode``: ``lanes`` (one value a lane), ``uniform`` (all lanes read element 0), ``part`` (only
    lanes below 20 run it; the others store zero).
    """
    lines = ["mov.u32 %r60, %tid.x;", "mov.u32 %r61, %r60;"]
    if mode == "uniform":
        lines.append("mov.u32 %r61, 0;")
    for i, c in enumerate(srcs, 1):
        n = WIDTH[c] // 8
        lines += [
            f"ld.param.u64 %d60, [p{i}];",
            f"mad.wide.u32 %d61, %r61, {n}, %d60;",
            f"ld.global.b{8 * n} %{c}{i}, [%d61];",
        ]
    if mode == "part":
        lines += [f"mov.b{WIDTH[dst]} %{dst}0, 0;", "setp.ge.u32 %p31, %r60, 20;",
                  "@%p31 bra SKIP;"]  # fmt: skip
    lines += [instruction, "SKIP:"]
    n = WIDTH[dst] // 8
    lines += [
        "ld.param.u64 %d60, [p0];",
        f"mad.wide.u32 %d61, %r60, {n}, %d60;",
        f"st.global.b{8 * n} [%d61], %{dst}0;",
    ]
    return entry("\n".join(lines), u64_params(len(srcs) + 1))


def lanes_of(instruction: str, dst: str, srcs: str, *values: np.ndarray) -> None:
    """Results of an instruction in the three modes: (lanes, uniform, part)."""
    out = []
    for mode in ("lanes", "uniform", "part"):
        d = np.full(32, 0xAA, f"u{WIDTH[dst] // 8}")
        args = [d] + [np.ascontiguousarray(v).view(f"u{WIDTH[c] // 8}").copy()
                      for v, c in zip(values, srcs, strict=True)]  # fmt: skip
        run(unary_kernel(instruction, dst, srcs, mode), args)
        out.append(d)
    return out


def check(instruction: str, dst: str, srcs: str, values: list, reference) -> None:
    """Compare an instruction with ``reference(*numbers) -> raw bits`` in all modes."""
    arrays = [np.resize(np.asarray(v), 32) for v in values]
    arrays = [a.astype(f"u{WIDTH[c] // 8}") if a.dtype.kind in "iu" else a
              for a, c in zip(arrays, srcs, strict=True)]  # fmt: skip
    mask = (1 << WIDTH[dst]) - 1
    want = np.array(
        [reference(*(x.item() for x in row)) & mask for row in zip(*arrays, strict=True)],
        f"u{WIDTH[dst] // 8}",
    )
    lanes, uniform, part = lanes_of(instruction, dst, srcs, *arrays)
    np.testing.assert_array_equal(lanes, want, err_msg=instruction)
    np.testing.assert_array_equal(uniform, np.full(32, want[0]), err_msg=f"{instruction} uniform")
    np.testing.assert_array_equal(part[:20], want[:20], err_msg=f"{instruction} part")
    assert not part[20:].any(), f"{instruction}: lanes outside the mask were written"
