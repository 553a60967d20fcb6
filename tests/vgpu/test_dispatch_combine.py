"""The two directions mirror each other: what the kernels gather into rows is the transpose of what
they sum back, in the forward and in dgrad, probed with unit vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megamoe import MoEConfig
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.saved import dgrad_block, saved_block
from megamoe.routes import route_slots
from megamoe.runtime.session import region_view
from megamoe.testing import VgpuMoE

SIZE = 64
"""H and I; more than there are tokens, so that the last coordinate is nobody's."""


def probe_layer(cfg: MoEConfig) -> dict[str, list[torch.Tensor]]:
    """gate = x + 1, up = 1, W2 = 2^slot: a row leaves as 2^slot (x + 1), its gradient as
    2^slot dy."""
    first = [sum(cfg.experts_per_pe[:pe]) for pe in range(cfg.num_pes)]
    eye = torch.eye(SIZE).bfloat16()
    w13, w2, b13 = [], [], []
    for pe, count in enumerate(cfg.experts_per_pe):
        w13.append(torch.cat([eye, 0 * eye]).repeat(count, 1, 1))
        w2.append(torch.stack([2.0 ** (first[pe] + i) * eye for i in range(count)]))
        b13.append(torch.ones(count, 2 * SIZE).bfloat16())
    return {"w13": w13, "w2": w2, "b13": b13}


def rows_of(cfg: MoEConfig, moe: VgpuMoE, saved: Any, kind: str, name: str) -> set[tuple[int, int]]:
    """The dispatch matrix: (slot, token) of every row, read from the pool."""
    tables = {"saved": saved_block(moe.problem), "dgrad": dgrad_block(moe.problem)}
    found = set()
    for pe in range(cfg.num_pes):
        kept = saved[pe].block("saved")
        counts_PS = region_view(tables["saved"], kept, "route_count")
        rows_MH = region_view(tables[kind], saved[pe].block(kind), name)
        first, row = sum(cfg.experts_per_pe[:pe]), 0
        for slot in range(first, first + cfg.experts_per_pe[pe]):
            count = int(counts_PS[:, slot].sum())
            for unit_H in rows_MH[row : row + count]:
                (token,) = unit_H.nonzero().flatten().tolist()
                assert unit_H[token] == 1 and (slot, token) not in found
                found.add((slot, token))
            row += -(-count // BLOCK_M) * BLOCK_M
    return found


def summed(values_TH: torch.Tensor, num_slots: int) -> set[tuple[int, int, int]]:
    """The combine matrix: (token, slot, token of the row) of everything a token received."""
    found = set()
    for token, row in enumerate(values_TH.int().tolist()):
        for other, bits in enumerate(row):
            found |= {(token, slot, other) for slot in range(num_slots) if bits >> slot & 1}
    return found


def check(num_pes: int, combine: Any, seed: int, places: Any = None) -> None:
    cfg = MoEConfig(
        hidden=SIZE, intermediate=SIZE, num_experts=6, top_k=3, num_pes=num_pes, max_tokens=16,
        activation="relu", fc1_bias=True, combine=combine, expert_map=places,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 13, (num_pes,), generator=rng).tolist()
    tokens[0] = max(tokens[0], 1)
    total = sum(tokens)
    units = list(torch.eye(SIZE)[:total].bfloat16().split(tokens))
    ids_TK = torch.rand(total, 6, generator=rng).argsort(dim=1)[:, :3].int()
    ids_TK[torch.rand(total, 3, generator=rng) < 0.2] = -1
    ids = [part.contiguous() for part in ids_TK.split(tokens)]
    moe = VgpuMoE(cfg, **probe_layer(cfg), training=True)
    done = moe.forward(
        x=units, topk_ids=ids, topk_weights=[torch.ones(t, 3) for t in tokens],
        save_for_backward=True,
    )  # fmt: skip
    dispatched = rows_of(cfg, moe, done.saved, "saved", "x")

    routed = [route_slots(cfg, pe=pe, topk_ids_TK=part) for pe, part in enumerate(ids)]
    pe_TK, local_TK = (torch.cat([part[i] for part in routed]) for i in (0, 1))
    first_P = torch.tensor([sum(cfg.experts_per_pe[:pe]) for pe in range(num_pes)])
    slot_TK = torch.where(pe_TK >= 0, first_P[pe_TK.clamp(min=0)] + local_TK, -1)
    named = {(s, t) for t, slots in enumerate(slot_TK.tolist()) for s in slots if s >= 0}
    assert dispatched == named and (len(named) > 0)

    transposed = {(token, slot, token) for slot, token in dispatched}
    y_TH = torch.cat(done.y).float()
    y_TH = y_TH - y_TH[:, -1:]
    assert summed(y_TH, cfg.num_slots) == transposed
    back = moe.backward_dgrad(units, done.saved)
    assert rows_of(cfg, moe, done.saved, "dgrad", "dy") == dispatched
    assert summed(torch.cat(back.dx).float(), cfg.num_slots) == transposed


@pytest.mark.parametrize("seed", range(3))
def test_combine_is_dispatch_transposed(seed: int) -> None:
    check(2, "prereduced" if seed % 2 else "direct", seed)


@pytest.mark.slow
@pytest.mark.parametrize("num_pes", [1, 3, 4, 5])
@pytest.mark.parametrize("combine", ["direct", "prereduced"])
def test_on_any_number_of_pes(num_pes: int, combine: str) -> None:
    for seed in range(3):
        check(num_pes, combine, seed)


@pytest.mark.slow
def test_with_replicas_in_any_order() -> None:
    places = [(2, 1), [(0, 0), (1, 1)], (1, 0), (2, 0), (0, 1), (0, 2)]
    for combine in ("direct", "prereduced"):
        check(3, combine, 5, places)


def test_the_probe_sees_a_lost_and_a_moved_row() -> None:
    """The comparison is not empty: both faults change the decoded matrix."""
    y_TH = torch.zeros(3, SIZE)
    y_TH[1, 1] = 2.0**2 + 2.0**0
    whole = summed(y_TH, 6)
    assert whole == {(1, 2, 1), (1, 0, 1)}
    y_TH[1, 1] = 2.0**0
    assert summed(y_TH, 6) == {(1, 0, 1)}
    y_TH[1, 2] = 2.0**2
    assert summed(y_TH, 6) == {(1, 0, 1), (1, 2, 2)}
