"""``megamoe.Session``: plan, warm-up, errors alike on every rank, and the way out
(CASES X1, X6, X14, X17, G3, J8)."""

from __future__ import annotations

import threading

import pytest
import torch
from api_helpers import config, inputs, recording_layer, recording_session, weights
from recorded import recording_api, stub_compile
from thread_group import run_ranks

import megamoe
from megamoe import MoEConfig, Session
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.smem import default_config
from megamoe.runtime.devices.cuda import CudaDevice
from megamoe.runtime.devices.driver import Driver
from megamoe.runtime.devices.recording import driver_present
from megamoe.runtime.errors import (
    CompilerMissing,
    DriverMissing,
    LaunchRefused,
    MegaMoEError,
    SessionClosed,
    SymmetricMemoryError,
    UnsupportedDevice,
)
from megamoe.runtime.transports.preflight import allocate_alike


def test_the_plan_comes_before_any_allocation(tmp_path):
    session, _ = recording_session(config(), tmp_path)
    planned = session.plan()
    assert session.device._allocations == [] and not session.warm
    assert planned == megamoe.plan(config())
    for block, total in (
        ("symmetric", planned.symmetric_bytes),
        ("local", planned.local_bytes),
    ):
        used = sum(region.nbytes for region in planned.regions if region.block == block)
        count = sum(region.block == block for region in planned.regions)
        assert used <= total <= used + 256 * count
    session.warmup()
    held = sorted(a.bytes_N.numel() for a in session.device._allocations)
    assert held[-2:] == sorted((planned.symmetric_bytes, planned.local_bytes))
    assert sum(held[:-2]) < 4 * (session.cfg.max_tokens + 1) + 4096
    assert planned.total_bytes == planned.symmetric_bytes + planned.local_bytes


def test_warm_up_is_one_empty_call_and_happens_once(tmp_path):
    session, api = recording_session(config(), tmp_path)
    assert session.warmup() is session and session.warmup() is session
    assert len(api.launches) == 1
    assert api.launches[0].grid == (132, 1, 1)
    assert session.input_view.shape == (16, 128)
    session.check()


def test_sms_can_be_left_free(tmp_path):
    session, api = recording_session(config(), tmp_path, num_sms=100)
    session.warmup()
    assert api.launches[0].grid == (100, 1, 1)
    for num_sms in (0, 133):
        with pytest.raises(ValueError, match=f"num_sms={num_sms}: must be 1 to 132"):
            recording_session(config(), tmp_path, num_sms=num_sms)


@pytest.mark.parametrize(("num_sms", "tiles"), [(None, (64, 2)), (6, (128, 1)), (3, (256, 1))])
def test_the_rule_serves_the_sms_of_the_session(num_sms, tiles, tmp_path):
    cfg = config(hidden=512, intermediate=1024, num_experts=4, top_k=1)
    session, _ = recording_session(cfg, tmp_path, num_sms=num_sms)
    asked = []
    session._cache.compile = lambda **what: asked.append(what["config"]) or stub_compile(**what)
    session.warmup()
    chosen = session.plan().config
    assert asked == [chosen] == [default_config(session.plan().problem, sms=num_sms or 132)]
    assert (chosen.block_n, chosen.split_k) == tiles
    assert session.plan() == megamoe.plan(cfg, sms=num_sms or 132)
    # vgpu and whoever asks for no SMs get what depends on no machine.
    plain = megamoe.plan(cfg, sms=None).config
    assert (plain.block_n, plain.split_k) == (256, 1)


def test_a_grid_that_does_not_fit_is_refused_and_everything_given_back(tmp_path):
    api = recording_api(resident_ctas=0)
    session, _ = recording_session(config(), tmp_path, api)
    with pytest.raises(LaunchRefused, match="holds 1 to 0 CTAs"):
        session.warmup()
    assert session.device._allocations == [] and not session.warm
    session.close()


def test_use_before_warm_up_and_after_close(tmp_path):
    cfg = config()
    session, _ = recording_session(cfg, tmp_path)
    for use in (session.check, lambda: session.bind(*weights(cfg)), lambda: session.input_view):
        with pytest.raises(MegaMoEError, match="warm up first"):
            use()
    bound = session.warmup().bind(*weights(cfg))
    session.close()
    session.close()
    assert session.device._allocations == []
    for use in (
        session.check,
        session.warmup,
        lambda: session.forward(bound, *inputs(cfg)),
        lambda: session.bind(*weights(cfg)),
    ):
        with pytest.raises(SessionClosed):
            use()


def test_twenty_sessions_one_after_another_leave_nothing(tmp_path):
    api = recording_api()
    for _ in range(20):
        with recording_session(config(), tmp_path, api)[0] as session:
            session.warmup()
        assert session.device._allocations == []
    assert api.counts["cuModuleLoadData"] == 1


def test_an_error_inside_the_context_stays_visible(tmp_path, caplog):
    with pytest.raises(KeyError, match="mine"):
        with recording_session(config(), tmp_path)[0] as session:
            session.warmup()
            raise KeyError("mine")
    assert session.closed and "abandoned" in caplog.text


def test_warming_up_inside_a_capture_is_refused(tmp_path, monkeypatch):
    cfg = config()
    layer, api = recording_layer(cfg, tmp_path)
    monkeypatch.setattr(Session, "capturing", lambda self: True)
    with torch.inference_mode(), pytest.raises(MegaMoEError, match="warm up first"):
        layer(*inputs(cfg))
    assert api.launches == [] and not layer.session.closed
    monkeypatch.setattr(Session, "capturing", lambda self: False)
    with torch.inference_mode():
        layer(*inputs(cfg))
        monkeypatch.setattr(Session, "capturing", lambda self: True)
        layer(*inputs(cfg))
        layer.w13 = layer.w13.clone()
        with pytest.raises(MegaMoEError, match="warm up first: the weights moved"):
            layer(*inputs(cfg))


def test_arguments_of_a_call(tmp_path):
    cfg = config()
    session, api = recording_session(cfg, tmp_path)
    bound = session.warmup().bind(*weights(cfg))
    given = inputs(cfg)
    x = given[0]
    full = inputs(cfg, cfg.max_tokens)
    count = torch.tensor([3], dtype=torch.int32)
    launches = len(api.launches)
    for options, text in (
        ({"out": torch.empty(4, 128, dtype=torch.bfloat16)}, r"out is .*\[4, 128\].*must be"),
        ({"out": torch.empty(5, 128)}, "out is torch.float32"),
        ({"out": torch.empty(128, 5, dtype=torch.bfloat16).T}, "out is .*contiguous"),
        ({"residual": x.float()}, "residual is torch.float32"),
        ({"num_tokens": count}, "x has 5 rows: with num_tokens it must have max_tokens=16"),
        ({"num_tokens": count.long()}, "num_tokens is torch.int64"),
    ):
        with pytest.raises(ValueError, match=text):
            session.forward(bound, *given, **options)
    with pytest.raises(ValueError, match=r"x is on meta: must be on cpu"):
        session.forward(bound, x.to("meta"), *given[1:])
    with pytest.raises(ValueError, match="17 tokens: must be <= max_tokens=16"):
        session.forward(bound, *inputs(cfg, 17))
    assert len(api.launches) == launches
    session.forward(bound, *full, num_tokens=count, residual=full[0])
    assert len(api.launches) == launches + 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transport": "mpi"}, "transport='mpi': must be one of"),
        ({"timeout_s": -1}, "timeout_s=-1"),
    ],
)
def test_refused_at_construction(tmp_path, options, text):
    with pytest.raises(ValueError, match=text):
        recording_session(config(), tmp_path, **options)
    with pytest.raises(ValueError, match=r"device='cpu': must be a CUDA device.*megamoe.testing"):
        Session(config(), device="cpu")
    with pytest.raises(MegaMoEError, match="init_process_group"):
        recording_session(config(num_pes=2), tmp_path)


def test_an_unsupported_gpu_is_refused_at_construction(tmp_path):
    api = recording_api()
    api.attributes["COMPUTE_CAPABILITY_MAJOR"] = 8
    with pytest.raises(UnsupportedDevice, match=r"8\.0, megamoe needs 9\.0 \(sm_90a\); "):
        recording_session(config(), tmp_path, api)


def test_without_a_driver():
    from cuda.bindings import driver

    if driver_present(driver):
        pytest.skip("this machine has a driver")
    with pytest.raises(DriverMissing, match=r"no CUDA driver.*CPU tensors with the reference"):
        Session(config())


def test_a_timeout_abandons_the_session_at_close(tmp_path, caplog):
    from megamoe.cute_kernels.abi import Phase, Status, StatusWord

    session, _ = recording_session(config(), tmp_path)
    session.warmup()
    words = session._pe_session._status_words
    words[StatusWord.CODE], words[StatusWord.PHASE] = Status.TIMEOUT, Phase.ARRIVE
    with pytest.raises(MegaMoEError, match="rebuild"):
        session.check()
    session.close()
    assert "abandoned" in caplog.text


# --- several ranks ------------------------------------------------------------------------------


class SharedTransport:
    """Symmetric memory among threads."""

    name = "threads"

    def __init__(self, group, device, events, free_bytes=1 << 62):
        self.group, self.device, self.events, self.free_bytes = group, device, events, free_bytes

    def allocate(self, nbytes):
        from megamoe.runtime.transports.base import SymmetricBlock

        own = allocate_alike(
            self.group,
            nbytes=nbytes,
            free_bytes=self.free_bytes,
            allocate=lambda: self.device.allocate(nbytes, "symmetric"),
            release=self.device.free,
        )
        addresses = self.group.gather("addresses", own.address)
        return SymmetricBlock(own, tuple(addresses))

    def free(self, block):
        self.events.append(("free", self.group.rank))
        self.device.free(block.allocation)

    def close(self):
        self.events.append(("close", self.group.rank))


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """``ranks(body, cfgs)`` runs ``body(session, rank)`` with one session a thread."""
    events: list[tuple[str, int]] = []
    local = threading.local()
    options: dict[int, int] = {}
    monkeypatch.setattr("megamoe.session_setup.group_of", lambda group, num_pes: local.group)
    monkeypatch.setattr(
        "megamoe.session_setup.choose_transport",
        lambda name, *, group, device, memory: SharedTransport(
            group, device, events, options.get(group.rank, 1 << 62)
        ),
    )
    apis = {}

    def run(body, cfgs: list[MoEConfig], *, free_bytes=None, compile=None, settings=None):
        options.update(free_bytes or {})

        def main(group):
            local.group = group
            apis[group.rank] = recording_api()
            given = settings[group.rank] if settings else {}
            session, _ = recording_session(cfgs[group.rank], tmp_path, apis[group.rank], **given)
            if compile is not None:
                session._cache.compile = compile(group.rank)
                session._cache.folder = session._cache._images_folder = tmp_path / str(group.rank)
            return body(session, group.rank)

        return run_ranks(len(cfgs), main)

    run.events, run.apis = events, apis
    return run


def same_error(results, kind, *texts):
    assert all(isinstance(result, kind) for result in results), results
    for text in texts:
        assert all(text in str(result) for result in results), results


def test_ranks_that_differ_are_told_before_any_launch(ranks):
    cfgs = [config(num_pes=3, max_tokens=16 if rank < 2 else 32) for rank in range(3)]
    results = ranks(lambda session, rank: session.warmup(), cfgs)
    same_error(results, ValueError, "max_tokens: rank 0 has 16, rank 2 has 32")
    assert all(api.launches == [] for api in ranks.apis.values())


def test_ranks_agree_on_the_number_of_sms_that_chooses_the_config(ranks):
    settings = [{"num_sms": 132}, {"num_sms": 100}]
    results = ranks(lambda s, r: s.warmup(), [config(num_pes=2)] * 2, settings=settings)
    same_error(results, ValueError, "num_sms: rank 0 has 132, rank 1 has 100; must be the same")
    assert all(api.launches == [] for api in ranks.apis.values())
    # With a config given it decides nothing that others see.
    settings = [{**each, "kernel_config": KernelConfig()} for each in settings]
    results = ranks(lambda s, r: s.warmup().num_sms, [config(num_pes=2)] * 2, settings=settings)
    assert results == [132, 100]


def test_each_pe_knows_every_block(ranks):
    def body(session, rank):
        session.warmup()
        table = session._pe_session.local_view("peers").tolist()
        own = session._block.allocation.address
        with torch.inference_mode():
            bound = session.bind(*weights(session.cfg, rank))
            session.forward(bound, *inputs(session.cfg, tokens=rank))
        session.close()
        return table, own

    results = ranks(body, [config(num_pes=4)] * 4)
    addresses = [own for _, own in results]
    assert all(table == addresses for table, _ in results)
    assert sorted(ranks.events) == sorted(
        [("free", rank) for rank in range(4)] + [("close", rank) for rank in range(4)]
    )


def test_a_compilation_that_fails_on_one_rank_fails_on_all(ranks):
    def compile(rank):
        def run(**what):
            if rank == 1:
                raise CompilerMissing("nothing here")
            from megamoe.runtime.devices.recording import stub_image

            return stub_image()

        return run

    results = ranks(lambda s, r: s.warmup(), [config(num_pes=2)] * 2, compile=compile)
    same_error(results, MegaMoEError, "nothing here")
    assert isinstance(results[1], CompilerMissing)
    assert str(results[0]).startswith("getting the kernel failed on rank 1: CompilerMissing")
    assert all(api.launches == [] for api in ranks.apis.values())


def test_too_little_memory_on_one_rank(ranks):
    results = ranks(lambda s, r: s.warmup(), [config(num_pes=3)] * 3, free_bytes={1: 1000})
    same_error(results, SymmetricMemoryError, "rank 1 asked for", "1000 are free", "max_tokens")


def test_a_first_call_that_fails_on_one_rank_fails_on_all(ranks):
    def body(session, rank):
        if rank == 2:
            ranks.apis[rank].failures["cuLaunchKernelEx"] = "CUDA_ERROR_LAUNCH_FAILED"
        try:
            session.warmup()
        finally:
            assert not session.warm
            session.close()

    results = ranks(body, [config(num_pes=3)] * 3)
    same_error(results, MegaMoEError, "cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED")
    assert "the first call failed on rank 2" in str(results[0])
    assert ranks.events == []  # nothing was freed while a peer may write


def test_closing_after_an_error_on_one_rank_does_not_hang(ranks):
    def body(session, rank):
        session.warmup()
        if rank == 0:
            with session:
                raise ValueError("only here")
        session.close(abandon=True)
        return "out"

    failed, other = ranks(body, [config(num_pes=2)] * 2)
    assert isinstance(failed, ValueError) and other == "out"
    assert ranks.events == []


def test_a_device_of_another_number_is_taken(tmp_path):
    api = recording_api()
    gpu = CudaDevice(1, driver=Driver(api), memory=torch.device("cpu"), stream=lambda: 5)
    from megamoe.runtime.cache import ImageCache
    from megamoe.runtime.devices.recording import stub_image

    cache = ImageCache(tmp_path, compile=lambda **what: stub_image())
    Session(config(), device=gpu, cache=cache).warmup()
    assert (api.launches[0].context, api.launches[0].stream) == (0x1001, 5)
