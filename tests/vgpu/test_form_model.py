"""The arithmetic of ``perf/form_model.py`` is what vgpu counts, and what the docs say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"
sys.path.insert(0, str(PERF))

import compare_forms  # noqa: E402
from form_model import FORMS, Form, expert, layer, useful_flops  # noqa: E402

SIZE = {"hidden": compare_forms.HIDDEN, "intermediate": compare_forms.INTERMEDIATE}


@pytest.mark.parametrize("name", ["256 x 128, shared weights", "64 x 128"])
def test_counters_agree(name: str) -> None:
    """Blocks that are full, short and missing; both GEMMs."""
    (form,) = (form for form in FORMS if form.name == name)
    rows = (150, 20)
    found, model = compare_forms.count(form, rows), layer(form, rows, **SIZE)
    assert (found.flops, found.operands) == (model.flops, model.operands)
    # What else the load warp reads are counters and the row table.
    assert model.l2 <= found.l2 < 1.01 * model.l2


def test_one_tile_by_hand() -> None:
    form = Form(name="f")
    one = expert(form, 128, 256, 64)
    assert one.flops == 2 * 256 * 128 * 64 and one.wgmma == 16
    assert one.operands == 16 * (64 + 128) * 16 * 2 == 96 * 1024
    assert one.l2 == one.stored == (256 + 128) * 64 * 2 == 48 * 1024
    # 130 rows: a second block, of 8; 100 deep are two k-tiles; 300 weight rows two tiles.
    more = expert(form, 130, 300, 100)
    assert more.flops == 2 * 2 * 2 * 256 * (128 + 8) * 64
    assert more.wgmma == 4 * 2 * 16
    assert useful_flops([3, 4], hidden=5, intermediate=6) == 2 * 7 * (2 * 6 * 5 + 5 * 6)


def test_pairs_load_what_they_share_once() -> None:
    alone = Form(name="a")
    weights, tokens = Form(name="w", shares="weights"), Form(name="t", shares="tokens")
    two = [expert(form, 256, 512, 64) for form in (alone, weights, tokens)]
    kb = [each.l2 // 1024 for each in two]
    assert kb == [192, 128, 160]
    assert len({(each.flops, each.operands, each.stored) for each in two}) == 1
    # A block without a partner: both CTAs of the pair store the weights.
    one = expert(weights, 100, 256, 64)
    assert one.l2 == 48 * 1024 and one.stored == (2 * 32 + 16) * 1024


def test_forms_that_are_not_built() -> None:
    wide, plain = FORMS[-2:]
    assert wide.changes is None and plain.changes is None
    one = expert(wide, 256, 128, 64)
    other = expert(plain, 128, 256, 64)
    for each in (one, other):
        assert each.flops == compare_forms.STEP_FLOPS
        assert (each.operands, each.l2, each.wgmma) == (80 * 1024, 48 * 1024, 8)
    assert expert(plain, 1, 256, 64).flops == 2 * 64 * 256 * 64
    assert expert(wide, 129, 128, 64).flops == one.flops


def test_loops_are_counted() -> None:
    ptx = """
$L1:
    mov.b32 %r1, 0;
$L2:
    .loc 1 2 3
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%r7], %r8;
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE:
wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, p, 1;
wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r2}, %rd1, %rd2, p, 1;
    @%p1 bra $L3;
    add.s32 %r1, %r1, 1;
$L3:
    @%p2 bra $L2;
    @%p3 bra $L1;
"""
    assert compare_forms.loop_instructions(ptx) == 7


def test_the_docs_say_the_same() -> None:
    docs = (PERF.parent / "docs" / "configs.md").read_text()
    for part in compare_forms.real_tables().split("\n\n"):
        if part.startswith("|"):
            assert part in docs
