"""Kernel configs change no bit: the same call under other depths, widths, lags and registers.

Other tiles are compared on integers: vgpu joins the four k-steps of narrow ones into one product,
so its sums of other data round at other points; parts of a split over K do so on hardware too.
"""

from dataclasses import replace

import pytest
from forward_cases import assert_same_bits

from megamoe.cute_kernels.build import compile_forward
from megamoe.cute_kernels.smem import default_config
from megamoe.lowering import kernel_problem
from megamoe.verify.cases import Case, call, expected, layer

CASE = Case(name="configs", tokens=(64, 21), top_k=3, activation="silu", grid=3)
ODD = {"tokens": (64, 21), "top_k": 3, "grid": 3, "hidden": 520, "intermediate": 200}
TILES: dict[str, tuple[dict, dict]] = {
    "rows_128": ({}, {"block_n": 128}),
    "rows_64": ({}, {"block_n": 64}),
    "up_gate": (
        {"w13_layout": "up_gate", "fc1_bias": True, "combine": "prereduced"},
        {"block_n": 64},
    ),
    "interleaved": (
        {"w13_layout": "interleaved", "weight_at": "combine", "ring_rows": 256},
        {"block_n": 128},
    ),
    "paired": (
        {
            "w13_layout": "interleaved",
            "w13_transposed": True,
            "w2_transposed": True,
            "fc1_bias": True,
            "fc2_bias": True,
        },
        {"block_n": 128},
    ),
    "no_gate": ({"w2_transposed": True, "fc1_bias": True}, {"block_n": 64}),
    "shared_weights": ({"combine": "prereduced"}, {"cluster": "weights"}),
    "shared_tokens": ({"ring_rows": 256, "w2_transposed": True}, {"cluster": "tokens"}),
    "shared_paired_weights": (
        {"w13_layout": "interleaved", "w13_transposed": True, "w2_transposed": True},
        {"cluster": "weights", "token_widths": (32, 128)},
    ),
    "split": ({}, {"split_k": 2}),
    "narrow_split": ({"fc2_bias": True}, {"split_k": 4, "block_n": 64}),
    "split_ring": ({"combine": "prereduced", "ring_rows": 256}, {"split_k": 3, "block_n": 128}),
}
CHANGES = {
    "shallow": {"stages": 2, "ring_slots": 2},
    "one_width": {"token_widths": (128,)},
    "wide_steps": {"token_widths": (16, 48, 96, 128)},
    "late_fc2": {"lag_waves": 4},
    "no_prefetch": {"prefetch_tiles": 0},
    "lean_service": {"service_registers": 40, "math_registers": 232},
    "sixteen_warps": {"service_warps": 8, "math_registers": 200, "ring_slots": 2},
}


@pytest.mark.parametrize("name", CHANGES)
def test_same_bits(name):
    problem = kernel_problem(CASE.cfg)
    config = replace(default_config(problem), **CHANGES[name])
    image = compile_forward(problem=problem, config=config)
    assert image.spill_bytes == 0
    assert image.setmaxnreg_kept
    assert not image.wgmma_serialised
    data = CASE.inputs(integers=False)
    want = call(layer(CASE, data), data).y
    assert_same_bits(call(layer(CASE, data, image=image), data).y, want)


@pytest.mark.parametrize("name", TILES)
def test_other_tiles_of_every_storage(name):
    """Under the race detector, on integers, with tails of rows, columns and k."""
    features, changes = TILES[name]
    activation = "relu2" if name == "no_gate" else "relu"
    odd = ODD | {"grid": 4} if "cluster" in changes else ODD
    case = Case(name=name, activation=activation, features=tuple(features.items()), **odd)
    problem = kernel_problem(case.cfg)
    config = replace(default_config(problem), stages=4, **changes)
    image = compile_forward(problem=problem, config=config)
    assert image.spill_bytes == 0 and not image.wgmma_serialised
    data = case.inputs()
    moe = layer(case, data, image=image, detect=True, schedule="random")
    for _ in range(2):
        result = call(moe, data)
        assert [str(f) for f in result.report.findings] == []
        assert_same_bits(result.y, expected(case, data))


def test_the_sum_of_parts_has_one_order():
    """Sums of parts round, so another order would show: no schedule may change it."""
    problem = kernel_problem(CASE.cfg)
    config = replace(default_config(problem), split_k=4)
    image = compile_forward(problem=problem, config=config)
    data = CASE.inputs(integers=False)
    want = call(layer(CASE, data, image=image), data).y
    for seed in range(2):
        moe = layer(CASE, data, image=image, schedule="random", completion="random", seed=seed)
        assert_same_bits(call(moe, data).y, want)
