"""The unfused path over gloo, 2 and 4 processes, against the oracle of the whole group."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megamoe import MoEConfig
from megamoe.classical import moe_classical
from megamoe.reference import moe_oracle
from megamoe.verify.inputs import Inputs, make_inputs, weights_per_pe

SCATTERED = [(1, 0), (0, 1), (3, 0), (1, 1), (0, 0), (2, 0), (2, 1), (3, 1), (0, 2), (1, 2)]


GPT_OSS = {
    "activation": "gpt_oss",
    "activation_limit": 1.0,
    "w13_layout": "interleaved",
    "w13_transposed": True,
    "w2_transposed": True,
    "fc1_bias": True,
    "fc2_bias": True,
    "weight_at": "combine",
    "expert_map": [[(0, 0), (2, 1), (3, 0)], (1, 0), [(2, 0), (0, 1)], (3, 1), (3, 2), (1, 1)],
}
TWICE = {"activation": "relu2", "expert_map": [[(0, 0), (1, 1), (1, 2)], (0, 1), (0, 2), (1, 0)]}
"""CASES A10."""


@dataclass(frozen=True)
class Case:
    name: str
    cfg: MoEConfig
    tokens: list[int]
    masked: float = 0.0
    integers: bool = False

    def inputs(self) -> Inputs:
        return make_inputs(
            self.cfg, tokens=self.tokens, integers=self.integers, masked=self.masked, seed=7
        )


def config(num_pes: int, experts: int, top_k: int, **more: object) -> MoEConfig:
    return MoEConfig(
        hidden=64,
        intermediate=64,
        num_experts=experts,
        top_k=top_k,
        num_pes=num_pes,
        max_tokens=64,
        **more,  # type: ignore[arg-type]
    )


CASES = [
    Case("one PE idle, weight in the combine", config(2, 4, 2, weight_at="combine"), [0, 9]),
    Case("nothing at all", config(2, 4, 2), [0, 0]),
    Case("all slots masked", config(2, 4, 2), [3, 5], masked=1.0),
    Case("ragged, integers", config(2, 3, 3, activation="relu"), [17, 1], integers=True),
    Case("uneven, scattered, masked", config(4, 10, 4, expert_map=SCATTERED), [0, 1, 17, 64], 0.5),
    Case("fewer experts than PEs", config(4, 2, 2), [2, 0, 5, 1]),
    Case("gpt-oss with redundant experts", config(4, 6, 3, **GPT_OSS), [9, 0, 17, 2], masked=0.1),
    Case("relu2, an expert twice on a PE", config(2, 4, 2, **TWICE), [16, 17], integers=True),
    Case("integers, four PEs", config(4, 8, 8, activation="relu"), [5, 0, 33, 2], integers=True),
]  # fmt: skip


def run_case(case: Case, rank: int) -> None:
    inputs = case.inputs()
    weights = weights_per_pe(case.cfg, inputs)
    b13, b2 = (weights[name] and weights[name][rank] for name in ("b13", "b2"))
    ids_before = inputs.topk_ids[rank].clone()
    y_TH = moe_classical(
        case.cfg,
        x_TH=inputs.x[rank],
        topk_ids_TK=inputs.topk_ids[rank],
        topk_weights_TK=inputs.topk_weights[rank],
        w13_LGH=weights["w13"][rank],
        w2_LHI=weights["w2"][rank],
        b13_LG=b13,
        b2_LH=b2,
        dtype=torch.float32 if case.integers else torch.float64,
    )
    expected_TH = moe_oracle(case.cfg, **inputs.kwargs)[rank]
    assert torch.equal(inputs.topk_ids[rank], ids_before)
    if case.integers:
        assert y_TH.dtype == torch.float32
        torch.testing.assert_close(y_TH.double(), expected_TH, rtol=0, atol=0)
    else:
        torch.testing.assert_close(y_TH, expected_TH, rtol=1e-12, atol=1e-13)
    if case.masked == 1.0:
        assert not y_TH.any()
    elif case.tokens[rank] and not case.masked:
        assert (y_TH != 0).any(dim=1).all()


def worker(rank: int, num_pes: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_pes
    )
    for case in CASES:
        if case.cfg.num_pes == num_pes:
            try:
                run_case(case, rank)
            except Exception:
                raise AssertionError(f"{case.name}, PE {rank}:\n{traceback.format_exc()}") from None
    if num_pes == 2:
        with pytest.raises(ValueError, match="num_pes=4: must be the size of the group, 2"):
            run_case(CASES[-1], rank)
    dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.parametrize("num_pes", [2, 4])
def test_classical_equals_the_oracle(num_pes: int, tmp_path: Path) -> None:
    mp.spawn(worker, args=(num_pes, str(tmp_path)), nprocs=num_pes)
