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
