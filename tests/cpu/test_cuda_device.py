"""Device ``cuda`` through a recording driver: every call's arguments, checked against the installed
cuda-python and the driver's documented rules (CASES J7, J8, X7, S7, G2)."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from cache_helpers import problem
from recorded import STREAM, arguments, bind, device, launched, pe_session
from recorded import recording_api as api_of

from megamoe.cute_kernels.kernel_config import BLOCKS_N, KernelConfig, check_fits
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.smem import SMEM_LIMIT, SharedMap, default_config
from megamoe.cute_kernels.tensor_maps import map_table
from megamoe.runtime.devices.driver import Driver
from megamoe.runtime.devices.recording import stub_image
from megamoe.runtime.errors import (
    DriverError,
    DriverMissing,
    LaunchRefused,
    SessionClosed,
    UnsupportedDevice,
)

SHAPES = [
    (hidden, inter, experts, pes)
    for hidden, inter, experts, pes in (
        (64, 64, 1, 1), (8, 8, 8, 8), (136, 72, 3, 2), (192, 320, 5, 1), (328, 200, 7, 4),
        (512, 256, 8, 2), (576, 320, 8, 3), (1024, 4096, 16, 4), (2048, 768, 128, 8),
        (2048, 1408, 64, 8), (2880, 2880, 32, 4), (3584, 18944, 8, 8), (4096, 1536, 128, 8),
        (4096, 14336, 8, 8), (4096, 14336, 8, 1), (5120, 1536, 160, 64), (6144, 16384, 8, 2),
        (7168, 2048, 256, 8), (7168, 2048, 384, 64), (8192, 64, 512, 64), (64, 8192, 31, 5),
    )
]  # fmt: skip


LAYOUTS = [
    {"w13_layout": layout, "w13_transposed": turned, "w2_transposed": turned}
    for layout in ("gate_up", "up_gate", "interleaved")
    for turned in (False, True)
] + [{"activation": "relu2"}, {"combine": "prereduced"}, {"ring_blocks": 2}]


def shape(hidden: int, inter: int, experts: int, pes: int, **layout: object) -> Problem:
    local = -(-experts // pes)
    return problem(
        hidden,
        intermediate=inter,
        num_experts=experts,
        experts_per_pe=local,
        num_pes=pes,
        top_k=1,
        max_tokens=128,
        pool_rows=128 * (local + 1),
        **layout,
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
@pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("block_n", BLOCKS_N)
def test_tensor_maps_keep_the_documented_rules(sizes, layout, block_n):
    """The rules of cuTensorMapEncodeTiled for a 2-byte type, no interleave, swizzled."""
    p = shape(*sizes, **layout)
    config = KernelConfig(block_n=block_n)
    if p.gated and p.w13_transposed and not p.paired_rows and block_n < 256:
        with pytest.raises(ValueError, match=f"block_n={block_n}: must be 256 where w13"):
            check_fits(p, config)
        return
    api = api_of()
    gpu = device(api)
    address = 0x7F0000000400
    specs = [entry.spec for entry in map_table(p, config, p.experts_per_pe).values()]
    maps = [gpu.encode_tensor_map(spec, address) for spec in specs]
    assert [len(data) for data in maps] == [128] * len(specs)
    calls = [call for name, call in api.calls if name == "cuTensorMapEncodeTiled"]
    for spec, call in zip(specs, calls, strict=True):
        kind, rank, at, dims, strides, box, steps, interleave, swizzle, _, fill = call
        assert kind.name.endswith("BFLOAT16") and interleave.name.endswith("NONE")
        assert fill.name.endswith("FILL_NONE")
        dims, strides, box, steps = ([int(v) for v in part] for part in (dims, strides, box, steps))
        assert swizzle.name.endswith(f"_{box[0] * 2}B")
        assert at == address and at % 16 == 0
        assert 1 <= rank <= 5 and len(dims) == len(box) == len(steps) == rank
        assert len(strides) == rank - 1
        assert all(1 <= size <= 2**32 for size in dims)
        assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in strides)
        assert all(1 <= size <= 256 for size in box)
        assert box[0] * 2 in (64, 128)
        assert steps == [1] * rank
        assert (tuple(dims), tuple(strides), tuple(box)) == (spec.dims, spec.strides, spec.box)
    # The weights' maps end exactly where the tensors end.
    for spec, rows in zip(specs[:2], (p.w13_rows, p.intermediate), strict=True):
        nbytes = 2 * p.experts_per_pe * rows * p.hidden
        last = sum((d - 1) * s for d, s in zip(spec.dims[1:], spec.strides, strict=True))
        assert last + 2 * spec.dims[0] == nbytes


@pytest.mark.parametrize("hidden", [1024, 2048, 4096, 7168, 8192, 12288, 16384])
def test_the_kernels_shared_memory_is_what_the_launch_asks_for(hidden):
    p = problem(hidden)
    total = SharedMap.of(p, default_config(p)).total
    api = api_of()
    launch = device(api).prepare(stub_image(total), grid=4)
    launch(bytes(stub_image().parameters[-1].offset + 8))
    (asked,) = [call for name, call in api.calls if name == "cuFuncSetAttribute"]
    assert asked[1].name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert asked[2] == api.launches[0].smem_bytes == total <= SMEM_LIMIT


def test_one_launch():
    api = api_of()
    session = pe_session(api)
    bound = bind(session)
    given = arguments(session.problem, 5)
    session.launch(bound, **given)
    (launch,) = api.launches
    assert (launch.grid, launch.block) == ((132, 1, 1), (384, 1, 1))
    assert launch.smem_bytes == 231552 and launch.stream == STREAM
    assert launch.attributes == {"COOPERATIVE": 1}
    values = launched(api)
    assert values["x"] == given["x_TH"].data_ptr()
    assert values["x_stride"] == 2 * session.problem.hidden
    assert (values["stage_x"], values["ids_wide"], values["pe"]) == (1, 0, 0)
    assert values["ids"] == given["topk_ids_TK"].data_ptr()
    assert values["weights"] == given["topk_weights_TK"].data_ptr()
    assert values["y"] == given["y_TH"].data_ptr()
    assert values["maps"] == bound.maps.address and values["maps"] % 64 == 0
    assert values["timeout_ns"] == 300 * 10**9
    assert int(session._counts.bytes_N.view(torch.int32)[5]) == 5
    assert values["tokens"] == session._counts.address + 4 * 5
    assert values["status"] == session._status.address


def test_forms_of_the_input():
    api = api_of()
    session = pe_session(api)
    bound, p = bind(session), session.problem
    session.launch(bound, **(arguments(p, 3) | {"x_TH": session.input_view_TH[:3]}))
    assert launched(api)["stage_x"] == 0
    session.launch(bound, **arguments(p, 3, ids_dtype=torch.int64))
    assert launched(api)["ids_wide"] == 1
    session.launch(bound, **arguments(p, 0))
    assert launched(api)["stage_x"] == 0
    wide = torch.zeros(4, 1000, dtype=torch.bfloat16)[:, : p.hidden]
    session.launch(bound, **(arguments(p, 4) | {"x_TH": wide}))
    assert launched(api)["x_stride"] == 2000
    count = torch.tensor([2], dtype=torch.int32)
    session.launch(bound, **arguments(p, p.max_tokens), num_tokens=count)
    assert launched(api)["tokens"] == count.data_ptr()


def test_nothing_but_the_launch_in_steady_state(monkeypatch):
    """No allocation, no module, no synchronisation: one driver call a forward, besides the look
    at the current context."""
    api = api_of()
    session = pe_session(api)
    bound = bind(session)
    given = [arguments(session.problem, tokens) for tokens in (5, 0, 64, 17)]
    session.launch(bound, **given[0])
    before = api.counts.copy()
    monkeypatch.setattr(torch, "empty", None)
    monkeypatch.setattr(torch, "tensor", None)
    for _ in range(25):
        for call in given:
            session.launch(bound, **call)
    new = api.counts - before
    assert new["cuLaunchKernelEx"] == 100
    assert set(new) <= {
        "cuLaunchKernelEx",
        "cuCtxGetCurrent",
        "cuCtxPushCurrent",
        "cuCtxPopCurrent",
    }


def test_the_right_context_is_current_and_the_callers_restored():
    api = api_of()
    second = device(api, 1)
    api._contexts = [0x1000]
    image = stub_image()
    launch = second.prepare(image, grid=2)
    launch(bytes(launch._nbytes))
    assert api.launches[-1].context == 0x1001
    assert api._contexts == [0x1000]
    api._contexts = [0x1001]
    pushes = api.counts["cuCtxPushCurrent"]
    launch(bytes(launch._nbytes))
    assert api.counts["cuCtxPushCurrent"] == pushes


def test_modules_are_loaded_once_a_device_from_many_threads():
    api = api_of()
    gpus = [device(api, index) for index in (0, 1)]
    image = stub_image()
    threads = [
        threading.Thread(target=gpu.prepare, args=(image,), kwargs={"grid": 4}) for gpu in gpus * 4
    ]
    # The recording keeps one context stack; make every device's context current beforehand.
    for gpu in gpus:
        gpu.prepare(image, grid=4)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert api.counts["cuModuleLoadData"] == 2


def test_the_stream_is_asked_for_at_every_launch():
    api = api_of()
    streams = iter([1, 1, 2, 0])
    launch = device(api, stream=lambda: next(streams)).prepare(stub_image(), grid=1)
    for _ in range(4):
        launch(bytes(launch._nbytes))
    assert [launch.stream for launch in api.launches] == [1, 1, 2, 0]


@pytest.mark.parametrize(("sharers", "limit"), [(1, 132), (2, 66), (4, 33), (8, 16)])
def test_a_grid_that_cannot_be_resident_is_refused(sharers, limit):
    api = api_of()
    gpu = device(api, sharers=sharers)
    launch = gpu.prepare(stub_image(), grid=limit)
    launch(bytes(launch._nbytes))
    assert api.launches[0].attributes == ({"COOPERATIVE": 1} if sharers == 1 else {})
    for grid in (0, limit + 1):
        with pytest.raises(LaunchRefused, match=rf"grid={grid}: .* 1 to {limit} CTAs .*132 SMs"):
            gpu.prepare(stub_image(), grid=grid)
    with pytest.raises(ValueError, match="sharers=0"):
        device(api, sharers=0)


def test_clusters_can_be_asked_for():
    config = Driver(api_of()).launch_config(
        grid=4, threads=384, smem_bytes=0, cooperative=False, cluster=2
    )
    (attribute,) = config.attrs
    size = attribute.value.clusterDim
    assert attribute.id.name.endswith("CLUSTER_DIMENSION") and (size.x, size.y, size.z) == (2, 1, 1)


@pytest.mark.parametrize(("major", "minor"), [(7, 5), (8, 0), (8, 9), (10, 0), (11, 0), (12, 0)])
def test_an_unsupported_gpu_is_named_at_once(major, minor):
    api = api_of()
    api.attributes |= {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor}
    with pytest.raises(UnsupportedDevice, match=rf"{major}\.{minor}, .*sm_90a needs 9\.0; .*class"):
        device(api).prepare(stub_image(), grid=1)
    assert api.counts["cuModuleLoadData"] == 0
    with pytest.raises(UnsupportedDevice, match="none known"):
        device(api).check(stub_image(arch="sm_75"))


def test_too_little_shared_memory_and_no_cooperative_launch():
    api = api_of()
    api.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 166912
    with pytest.raises(UnsupportedDevice, match=r"166912 bytes .*needs 231552"):
        device(api).prepare(stub_image(), grid=1)
    api.attributes["COOPERATIVE_LAUNCH"] = 0
    with pytest.raises(UnsupportedDevice, match="cooperatively"):
        device(api)


@pytest.mark.parametrize(
    "name", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx",
             "cuTensorMapEncodeTiled", "cuOccupancyMaxActiveBlocksPerMultiprocessor"]
)  # fmt: skip
def test_a_failing_call_is_named(name):
    api = api_of(failures={name: "CUDA_ERROR_INVALID_VALUE"})
    with pytest.raises(DriverError, match=f"{name}: CUDA_ERROR_INVALID_VALUE: text of"):
        session = pe_session(api)
        session.launch(bind(session), **arguments(session.problem, 1))


def test_without_a_driver_the_error_says_what_works():
    class NoDriver:
        def __init__(self, real):
            self.CUresult = real.CUresult

        def cuInit(self, flags):
            raise RuntimeError("libcuda not found")

    with pytest.raises(DriverMissing, match=r"no CUDA driver .*libcuda.* megamoe\.testing"):
        Driver(NoDriver(api_of().real))


def test_use_after_close():
    api = api_of()
    session = pe_session(api)
    bound = bind(session)
    session.close()
    session.close()
    assert session.device._allocations == [session._symmetric.allocation]
    with pytest.raises(SessionClosed, match="PE 0"):
        session.launch(bound, **arguments(session.problem, 1))
    with pytest.raises(SessionClosed):
        bind(session)


def test_weights_that_moved_are_bound_anew():
    api = api_of()
    session = pe_session(api)
    bound = bind(session)
    same = dict(bound.tensors)
    assert bound.still_there(same)
    assert not bound.still_there(same | {"w13": same["w13"].clone()})
    assert not bound.still_there(same | {"b2": same["w2"]})
    session.release_weights(bound)
    assert all(kept is not bound.maps for kept in session.device._allocations)


def test_a_report_is_waited_for_only_when_there_is_one():
    from megamoe.cute_kernels.abi import Phase, Status, StatusWord
    from megamoe.runtime.errors import InvalidExpertId, MegaMoETimeout, PoolCapacityError

    api = api_of()
    session = pe_session(api, check_invalid_ids=True)
    bound, given = bind(session), arguments(session.problem, 1)
    waits = api.counts["cuCtxSynchronize"]
    session.launch(bound, **given)
    session.raise_on_status()
    assert api.counts["cuCtxSynchronize"] == waits
    words = session._status_words
    words[StatusWord.CODE], words[StatusWord.PEER] = Status.CAPACITY, 3
    with pytest.raises(PoolCapacityError, match="pool of PE 3"):
        session.launch(bound, **given)
    assert api.counts["cuCtxSynchronize"] == waits + 1
    words[StatusWord.INVALID_IDS], words[StatusWord.INVALID_ID] = 1, 99
    with pytest.raises(InvalidExpertId, match="=99 on PE 0"):
        session.launch(bound, **given)
    words[StatusWord.CODE], words[StatusWord.PHASE] = Status.TIMEOUT, Phase.ARRIVE
    for _ in range(2):
        with pytest.raises(MegaMoETimeout, match="rebuild"):
            session.launch(bound, **given)
    assert len(api.launches) == 1


def test_clusters_are_asked_for_and_grids_are_whole_clusters():
    api = api_of()
    image = replace(stub_image(), config=KernelConfig(cluster="weights"))
    gpu = device(api)
    with pytest.raises(LaunchRefused, match=r"grid=5: must be a multiple of 2"):
        gpu.prepare(image, grid=5)
    with pytest.raises(LaunchRefused, match=r"grid=134: .* holds 1 to 132 CTAs"):
        gpu.prepare(image, grid=134)
    gpu.prepare(image, grid=4)(bytes(image.parameters[-1].offset + 8))
    assert "CLUSTER_DIMENSION" in " ".join(api.launches[0].attributes)
