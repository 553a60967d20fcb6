"""The public session and module train with the shipped kernels on vgpu; replayed launches are new
calls with their own T (what a CUDA graph of a training step does)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backward_runs import assert_same
from test_session_on_vgpu import RunningDevice
from torch import nn

from megamoe import MegaMoE, MoEConfig, Session
from megamoe.reference_backward import Gradients, moe_backward_oracle
from megamoe.verify.inputs import Inputs, make_inputs


class ReplayDevice(RunningDevice):
    """Keeps what was launched, to launch it again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, bytes]] = []

    def address_of(self, tensor: torch.Tensor, name: str, *, keep: bool = False) -> int:
        """For good, as memory in a captured graph's pool."""
        return super().address_of(tensor, name, keep=True)

    def prepare(self, image: Any, *, grid: int) -> Any:
        run = super().prepare(image, grid=grid)

        def call(block: bytes) -> None:
            self.calls.append((run, block))
            run(block)

        return call


@pytest.fixture(scope="module")
def cfg() -> MoEConfig:
    return MoEConfig(
        hidden=64, intermediate=64, num_experts=4, top_k=2, num_pes=1, max_tokens=24,
        activation="relu",
    )  # fmt: skip


def right(cfg: MoEConfig, data: Inputs, w13: Any, w2: Any, dy: torch.Tensor) -> Gradients:
    return moe_backward_oracle(
        cfg, dy=[dy], x=data.x, topk_ids=data.topk_ids, topk_weights=data.topk_weights,
        w13=w13.detach(), w2=w2.detach(), dtype=torch.float32, rounding="kernel",
    )  # fmt: skip


@pytest.mark.parametrize("main_grad, recompute", [(False, False), (True, False), (True, True)])
def test_the_module_trains(cfg: MoEConfig, main_grad: bool, recompute: bool) -> None:
    device = ReplayDevice()
    data = make_inputs(cfg, tokens=[24], integers=True)
    with Session(cfg, device=device, training=True, recompute=recompute) as session:
        w13, w2 = nn.Parameter(data.w13), nn.Parameter(data.w2)
        layer = MegaMoE(cfg, w13, w2, session=session, recompute=recompute)
        if main_grad:
            w13.main_grad, w2.main_grad = torch.ones(w13.shape), torch.ones(w2.shape)
        totals = [torch.full(w.shape, float(main_grad)) for w in (w13, w2)]
        for seed, tokens in enumerate((20, 0, 3)):
            new = make_inputs(cfg, tokens=[tokens], seed=seed, integers=True)
            x, router = new.x[0].requires_grad_(), new.topk_weights[0].requires_grad_()
            before = device.launches
            layer(x, new.topk_ids[0], router).sum().backward()
            warm_up = 3 if seed == 0 else 0
            assert device.launches == before + 3 + warm_up
            plain = make_inputs(cfg, tokens=[tokens], seed=seed, integers=True)
            want = right(cfg, plain, w13, w2, torch.ones(tokens, cfg.hidden).bfloat16())
            assert_same([x.grad, router.grad], [want.dx[0], want.d_topk_weights[0]])
            parts = (want.dw13[0], want.dw2[0])
            if main_grad:
                totals = [t + part for t, part in zip(totals, parts, strict=True)]
                assert_same([w13.main_grad, w2.main_grad], totals)
                assert not w13.grad.any()
            else:
                assert_same([w13.grad, w2.grad], [part.bfloat16() for part in parts])
                w13.grad = w2.grad = None
        session.check()


def test_a_replayed_step_is_a_new_step_with_its_own_tokens(cfg: MoEConfig) -> None:
    device = ReplayDevice()
    layer = make_inputs(cfg, tokens=[24], integers=True)
    session = Session(cfg, device=device, training=True).warmup()
    bound = session.bind(layer.w13, layer.w2)
    x, ids, router = (t[0].clone() for t in (layer.x, layer.topk_ids, layer.topk_weights))
    count, dy = torch.tensor([24], dtype=torch.int32), torch.empty_like(x)
    into = {"w13": torch.zeros(layer.w13.shape), "w2": torch.zeros(layer.w2.shape)}
    del device.calls[:]
    _, saved = session.forward(bound, x, ids, router, num_tokens=count, save_for_backward=True)
    dx, d_router = session.backward_dgrad(dy.fill_(0), saved)
    session.backward_wgrad(saved, out=into)
    step = list(device.calls)
    assert len(step) == 3
    for seed, tokens in ((1, 5), (2, 0), (3, 24), (4, 1)):
        new = make_inputs(cfg, tokens=[tokens], seed=seed, integers=True)
        x.fill_(float("nan")), dy.fill_(float("nan"))
        x[:tokens], ids[:tokens], router[:tokens] = (
            new.x[0], new.topk_ids[0], new.topk_weights[0],
        )  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        dy[:tokens] = torch.randint(-1, 2, (tokens, cfg.hidden), generator=rng).bfloat16()
        count.fill_(tokens)
        dx.fill_(7), d_router.fill_(7)
        for run, block in step:
            run(block)
        want = right(cfg, new, layer.w13, layer.w2, dy[:tokens])
        assert_same([dx[:tokens], d_router[:tokens]], [want.dx[0], want.d_topk_weights[0]])
        assert bool((dx[tokens:] == 7).all()) and bool((d_router[tokens:] == 7).all())
        assert_same([into["w13"], into["w2"]], [want.dw13[0], want.dw2[0]])
    session.close()
