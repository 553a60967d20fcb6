"""tensormap.replace and cp_fenceproxy: a kernel edits its own tensor map, as grouped GEMMs do."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_harness import entry, u64_params

from megamoe.runtime.vgpu import Kernel, TensorMap, UnsupportedInstruction, World
from megamoe.runtime.vgpu.errors import SyncError
from megamoe.runtime.vgpu.tensormap import TensorMapDesc, replaced

# p0: the map to start from, p1: where the edited one goes, p2: the tensor, p3: its rows,
# p4: its row stride in bytes, p5: output. One warp; a box of 4 rows of 8 words.
EDIT = """
.shared .align 128 .b8 map[128];
.shared .align 128 .b8 box[128];
.shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0;
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2]; ld.param.u64 %d3, [p3];
ld.param.u64 %d4, [p4]; ld.param.u64 %d5, [p5];
mov.u32 %r1, map; mov.u32 %r2, box; mov.u32 %r3, bar; cvt.u32.u64 %r4, %d3;
mad.wide.u32 %d6, %r0, 4, %d0; mad.lo.u32 %r5, %r0, 4, %r1;
ld.global.b32 %r6, [%d6]; st.shared.b32 [%r5], %r6;
bar.warp.sync -1;
@%p0 bra EDITED;
tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %d2;
tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r1], 1, %r4;
tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r1], 0, %d4;
mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
EDITED:
bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned \
[%d1], [%r1], 128;
FENCE
@%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes \
[%r2], [%d1, {0, 0}], [%r3];
WAIT:
bar.warp.sync -1;
AGAIN: mbarrier.try_wait.parity.shared.b64 %p1, [%r3], 0; @!%p1 bra AGAIN;
mad.lo.u32 %r7, %r0, 4, %r2; ld.shared.b32 %r8, [%r7];
mad.wide.u32 %d7, %r0, 4, %d5; st.global.b32 [%d7], %r8;
"""
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%d1], 128;"


def run_edit(text: str) -> tuple[np.ndarray, np.ndarray, list]:
    """The box as loaded, the tensor, and the findings."""
    small = np.zeros((2, 8), np.uint32)
    large = np.arange(3 * 16, dtype=np.uint32).reshape(3, 16)
    out = np.zeros((4, 8), np.uint32)
    world = World(detect=True)
    for name, array in (("small", small), ("large", large), ("out", out)):
        world.register(array, name)
    start = np.frombuffer(
        TensorMap(small, box=(8, 4)).to_bytes(world.address_of(small)), np.uint8
    ).copy()
    at = world.register(start, "start")
    edited = world.alloc(128, "edited")
    world.launch(
        pe=0, kernel=Kernel.from_ptx(text), grid=1, block=32,
        args=[at, edited, large, 3, 64, out],
    )  # fmt: skip
    return out, large, world.run().findings


def test_a_kernel_points_its_map_at_another_tensor() -> None:
    text = entry(EDIT.replace("FENCE", ACQUIRE), u64_params(6))
    out, large, findings = run_edit(text)
    want = np.zeros((4, 8), np.uint32)
    want[:3] = large[:, :8]
    np.testing.assert_array_equal(out, want)
    assert findings == []


@pytest.mark.parametrize("missing", ["fence", "barrier"])
def test_a_missing_piece_is_a_race(missing: str) -> None:
    body = EDIT.replace("FENCE", "" if missing == "fence" else ACQUIRE)
    if missing == "barrier":
        body = body.replace("EDITED:\nbar.warp.sync -1;", "EDITED:")
    _, _, findings = run_edit(entry(body, u64_params(6)))
    assert {f.kind for f in findings} == {"race"}


# p0: two maps to start from, p1: where the edited ones go, p2: five words a group (source and
# target address, rows, strides in bytes), p3: number of groups. One warp walks the groups as a
# persistent grouped GEMM does, with two rank-3 maps of 8 x 8 x 1 words: it edits both, loads a tile
# by one and stores it by the other, in all lanes.
GROUPS = """
.shared .align 128 .b8 maps[256];
.shared .align 128 .b8 box[256];
.shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; mov.u32 %r2, box; mov.u32 %r3, bar;
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2]; ld.param.u64 %d3, [p3];
cvt.u32.u64 %r4, %d3; add.u64 %d4, %d1, 128;
mov.u32 %r1, maps; EDITED_AT add.u64 %d14, %d13, 128;
mad.wide.u32 %d6, %r0, 8, %d0; ld.global.b64 %d7, [%d6];
mad.wide.u32 %d6, %r0, 8, %d13; st.SPACE.b64 [%d6], %d7;
@%p0 bra READY; mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
READY: bar.warp.sync -1;
mov.u32 %r10, 0;
NEXT: mul.wide.u32 %d6, %r10, 40; add.u64 %d6, %d6, %d2;
ld.global.b64 %d8, [%d6]; ld.global.b64 %d9, [%d6+8]; ld.global.b64 %d12, [%d6+16];
ld.global.b64 %d10, [%d6+24]; ld.global.b64 %d11, [%d6+32]; cvt.u32.u64 %r6, %d12;
@%p0 bra EDITED;
REPLACE_13
REPLACE_14
EDITED: bar.warp.sync -1;
PUBLISH
fence.proxy.tensormap::generic.acquire.gpu [%d1], 128;
fence.proxy.tensormap::generic.acquire.gpu [%d4], 128;
@%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;
cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes \
[%r2], [%d1, {0, 0, 0}], [%r3];
WAIT: and.b32 %r7, %r10, 1;
AGAIN: mbarrier.try_wait.parity.shared.b64 %p1, [%r3], %r7; @!%p1 bra AGAIN;
cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%d4, {0, 0, 0}], [%r2];
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
bar.warp.sync -1;
add.u32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, %r4; @%p2 bra NEXT;
"""


def group_kernel(where: str) -> str:
    """`GROUPS` with the maps edited in place ("global") or in shared memory ("shared::cta")."""
    fields = ("global_address.{}.b1024.b64 [{}], {}", "global_dim.{}.b1024.b32 [{}], 0, 8",
              "global_dim.{}.b1024.b32 [{}], 1, %r6", "global_stride.{}.b1024.b64 [{}], 0, {}",
              *(f"global_dim.{{}}.b1024.b32 [{{}}], {i}, 1" for i in (2, 3, 4)),
              *(f"global_stride.{{}}.b1024.b64 [{{}}], {i}, 0" for i in (1, 2, 3)))  # fmt: skip
    text = GROUPS.replace("SPACE", "global" if where == "global" else "shared")
    at = "mov.u64 %d13, %d1;" if where == "global" else "cvt.u64.u32 %d13, %r1;"
    text = text.replace("EDITED_AT", at)
    for name, address, stride in (("13", "%d8", "%d10"), ("14", "%d9", "%d11")):
        replace = ""
        for field in fields:
            value = address if "address" in field else stride
            replace += f"tensormap.replace.tile.{field.format(where, f'%d{name}', value)};\n"
        text = text.replace(f"REPLACE_{name}", replace)
    publish = "fence.proxy.tensormap::generic.release.gpu;"
    if where != "global":
        publish = "".join(
            "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
            f" [{to}], [{at}], 128;\n"
            for to, at in (("%d1", "%d13"), ("%d4", "%d14"))
        )
    return entry(text.replace("PUBLISH", publish), u64_params(4))


@pytest.mark.parametrize("where", ["global", "shared::cta"])
@pytest.mark.parametrize(
    ("schedule", "completion"), [("round_robin", "eager"), ("random", "late"), ("starve", "random")]
)
def test_a_warp_walks_groups_of_other_sizes(where: str, schedule: str, completion: str) -> None:
    world = World(detect=True, schedule=schedule, completion=completion)
    rng = np.random.default_rng(0)
    sizes = ((8, 8), (3, 24), (1, 12), (5, 8), (8, 40))  # rows of each group, words of a row
    sources = [rng.integers(0, 1 << 32, size, np.uint32) for size in sizes]
    targets = [np.full((8, 8 + 4 * i), 7, np.uint32) for i in range(len(sizes))]
    table = np.array(
        [(world.register(source, "source"), world.register(target, "target"), len(source),
          source.strides[0], target.strides[0])
         for source, target in zip(sources, targets, strict=True)], np.uint64,
    )  # fmt: skip
    anything = np.zeros((1, 8, 8), np.uint32)
    start = TensorMap(anything, box=(8, 8, 1)).to_bytes(world.register(anything))
    maps = np.frombuffer(start * 2, np.uint8).copy()
    world.register(maps, "maps")
    world.register(table, "groups")
    world.launch(
        pe=0, kernel=Kernel.from_ptx(group_kernel(where)), grid=1, block=32,
        args=[maps, world.alloc(256, "edited"), table, len(sizes)],
    )  # fmt: skip
    assert world.run().findings == []
    for source, target in zip(sources, targets, strict=True):
        want = np.full_like(target, 7)
        want[: len(source), :8] = source[:, :8]
        np.testing.assert_array_equal(target, want)


RAW = TensorMapDesc(4096, "f16", (64, 8, 3), (128, 1024), (32, 8, 1), swizzle=64).to_bytes()


@pytest.mark.parametrize(
    ("field", "index", "value", "name", "want"),
    [
        ("global_address", 0, 1 << 20, "address", 1 << 20),
        ("global_dim", 0, 40, "dims", (40, 8, 3)),
        ("global_dim", 2, 1 << 32, "dims", (64, 8, 1 << 32)),
        ("global_stride", 1, 2048, "strides_bytes", (128, 2048)),
        ("box_dim", 1, 4, "box", (32, 4, 1)),
        ("element_stride", 1, 2, "element_strides", (1, 2, 1)),
    ],
)
def test_fields(field: str, index: int, value: int, name: str, want: object) -> None:
    before = TensorMapDesc.from_bytes(RAW)
    after = TensorMapDesc.from_bytes(replaced(RAW, field, index, value))
    assert getattr(after, name) == want
    others = {"address", "dims", "strides_bytes", "box", "element_strides"} - {name}
    assert all(getattr(after, other) == getattr(before, other) for other in others)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="not a tensor map"):
        replaced(bytes(128), "global_address", 0, 0)
    with pytest.raises(ValueError, match="4 entries"):
        replaced(RAW, "global_stride", 4, 16)
    with pytest.raises(ValueError, match="out of range"):
        replaced(RAW, "global_dim", 0, 0)
    # A broken rule shows when the map is used.
    with pytest.raises(ValueError, match="multiple of 16"):
        TensorMapDesc.from_bytes(replaced(RAW, "global_address", 0, 8))
    replace = "tensormap.replace.tile.{}.global.b1024.b32 [%d0], {}%r1;"
    with pytest.raises(UnsupportedInstruction, match="swizzle_mode"):
        Kernel.from_ptx(entry(replace.format("swizzle_mode", ""), u64_params(1)))
    text = entry(
        "ld.param.u64 %d0, [p0]; mov.u32 %r1, 1;" + replace.format("box_dim", "0, "), u64_params(1)
    )
    world = World()
    plain = np.zeros(128, np.uint8)
    world.register(plain)
    world.launch(pe=0, kernel=Kernel.from_ptx(text), grid=1, block=1, args=[plain])
    with pytest.raises(SyncError, match="not a tensor map"):
        world.run()
