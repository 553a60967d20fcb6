"""The public session and module drive the shipped kernel on vgpu: right numbers, one launch a call;
a replayed launch is a new call with its own T (what a CUDA graph does)."""

from __future__ import annotations

import pytest
import torch
from forward_cases import assert_same_bits

from megamoe import MegaMoE, MoEConfig, Session
from megamoe.cute_kernels.image import Image
from megamoe.reference import moe_oracle
from megamoe.runtime.devices.vgpu import VgpuDevice
from megamoe.runtime.errors import InvalidExpertId
from megamoe.runtime.vgpu.world import World
from megamoe.verify.inputs import make_inputs


class RunningDevice(VgpuDevice):
    """A one-PE world that runs each launch at once, with what a session asks a GPU for."""

    index, name, sms, capability = 0, "vgpu", 2, (9, 0)
    memory = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__(World(pes=1), 0)
        self.blocks: list[bytes] = []

    def check(self, image: Image) -> None:
        """vgpu runs what it can decode."""

    def prepare(self, image: Image, *, grid: int):
        launch = super().prepare(image, grid=grid)

        def run(block: bytes) -> None:
            self.blocks.append(block)
            launch(block)
            self.world.run()

        self.run_block = run
        return run


@pytest.fixture(scope="module")
def cfg() -> MoEConfig:
    return MoEConfig(
        hidden=512, intermediate=256, num_experts=8, top_k=2, num_pes=1, max_tokens=24,
        activation="relu",
    )  # fmt: skip


def answer(cfg, data, x, ids, weights):
    return moe_oracle(
        cfg, x=[x], topk_ids=[ids], topk_weights=[weights], w13=data.w13, w2=data.w2,
        rounding="kernel",
    )  # fmt: skip


@torch.inference_mode()
def test_the_module_runs_the_kernel(cfg):
    device = RunningDevice()
    data = make_inputs(cfg, tokens=[20], integers=True)
    with Session(cfg, device=device) as session:
        layer = MegaMoE(cfg, data.w13, data.w2, session=session)
        for tokens in (20, 0, 3):
            given = (data.x[0][:tokens], data.topk_ids[0][:tokens], data.topk_weights[0][:tokens])
            before = device.launches
            y = layer(*given)
            assert device.launches == before + 1 + (tokens == 20)  # and the warm-up
            assert_same_bits([y], answer(cfg, data, *given))
        assert session.input_view.shape == (24, 512)
        session.check()


@torch.inference_mode()
def test_a_replayed_launch_is_a_new_call_with_its_own_tokens(cfg):
    device = RunningDevice()
    data = make_inputs(cfg, tokens=[24], integers=True)
    session = Session(cfg, device=device).warmup()
    layer = MegaMoE(cfg, data.w13, data.w2, session=session)
    x, ids, weights = (t[0].clone() for t in (data.x, data.topk_ids, data.topk_weights))
    count, out = torch.tensor([24], dtype=torch.int32), torch.empty_like(x)
    layer(x, ids, weights, num_tokens=count, out=out)
    block = device.blocks[-1]
    for seed, tokens in ((1, 5), (2, 0), (3, 24), (4, 1)):
        new = make_inputs(cfg, tokens=[tokens], seed=seed, integers=True)
        x[:tokens], ids[:tokens] = new.x[0], new.topk_ids[0]
        weights[:tokens] = new.topk_weights[0]
        count.fill_(tokens)
        out.fill_(7)
        device.run_block(block)
        right = answer(cfg, data, new.x[0], new.topk_ids[0], new.topk_weights[0])
        assert_same_bits([out[:tokens]], right)
        assert bool((out[tokens:] == 7).all())
    session.close()


@torch.inference_mode()
def test_a_report_reaches_the_next_call(cfg):
    device = RunningDevice()
    data = make_inputs(cfg, tokens=[6], integers=True)
    layer = MegaMoE(cfg, data.w13, data.w2, session=Session(cfg, device=device).warmup())
    ids = data.topk_ids[0].clone()
    ids[4, 1] = 99
    count = torch.tensor([6], dtype=torch.int32)
    # Ids of CPU tensors are checked on the host; put the bad one in place behind its back.
    full = make_inputs(cfg, tokens=[24], integers=True)
    given = (full.x[0], full.topk_ids[0], full.topk_weights[0])
    layer(*given, num_tokens=count)
    given[1][:6] = ids
    device.run_block(device.blocks[-1])
    given[1][4, 1] = 0
    with pytest.raises(InvalidExpertId, match=r"topk_ids\[4, 1\]=99 on PE 0"):
        layer(*given, num_tokens=count)
    layer(*given, num_tokens=count)
    layer.session.close()


@torch.inference_mode()
def test_tiles_chosen_for_the_sms_change_no_bit():
    """Two SMs and two experts: the rule takes narrow tiles for forwards, but not for those that
    save; both count their tiles in the same words of one workspace, call after call."""
    cfg = MoEConfig(
        hidden=256, intermediate=128, num_experts=2, top_k=1, num_pes=1, max_tokens=24,
        activation="relu",
    )  # fmt: skip
    data = make_inputs(cfg, tokens=[20], integers=True)
    given = (data.x[0], data.topk_ids[0], data.topk_weights[0])
    right = answer(cfg, data, *given)
    with Session(cfg, device=RunningDevice(), training=True) as session:
        bound = session.warmup().bind(data.w13, data.w2)
        built = session._pe_session
        assert (built.image.config.block_n, built.image.config.split_k) == (128, 1)
        assert built.training._images.modes["save"].config.block_n == 256
        for _ in range(2):
            assert_same_bits([session.forward(bound, *given)], right)
            y, saved = session.forward(bound, *given, save_for_backward=True)
            assert_same_bits([y], right)
            saved.free()
        session.check()
