"""Kernel configs change no bit: the same call under other depths, widths, lags and registers.

Narrow tiles are compared on integers: vgpu joins their four k-steps into one product, so its sums
of other data round at other points (those of the hardware do not depend on the tile).
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
NARROW: dict[str, tuple[dict, int]] = {
    "rows_128": ({}, 128),
    "rows_64": ({}, 64),
    "up_gate": ({"w13_layout": "up_gate", "fc1_bias": True, "combine": "prereduced"}, 64),
    "interleaved": ({"w13_layout": "interleaved", "weight_at": "combine", "ring_rows": 256}, 128),
    "paired": (
        {
            "w13_layout": "interleaved",
            "w13_transposed": True,
            "w2_transposed": True,
            "fc1_bias": True,
            "fc2_bias": True,
        },
        128,
    ),
    "no_gate": ({"w2_transposed": True, "fc1_bias": True}, 64),
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


@pytest.mark.parametrize("name", NARROW)
def test_narrow_tiles_of_every_storage(name):
    """Under the race detector, on integers, with tails of rows, columns and k."""
    features, block_n = NARROW[name]
    activation = "relu2" if name == "no_gate" else "relu"
    case = Case(name=name, activation=activation, features=tuple(features.items()), **ODD)
    problem = kernel_problem(case.cfg)
    config = replace(default_config(problem), block_n=block_n, stages=6)
    image = compile_forward(problem=problem, config=config)
    assert image.spill_bytes == 0 and not image.wgmma_serialised
    data = case.inputs()
    result = call(layer(case, data, image=image, detect=True), data)
    assert [str(f) for f in result.report.findings] == []
    assert_same_bits(result.y, expected(case, data))
