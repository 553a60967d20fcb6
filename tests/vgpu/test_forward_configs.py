"""Kernel configs change no bit: the same call under other depths, widths, lags and registers."""

from dataclasses import replace

import pytest
from forward_cases import assert_same_bits

from megamoe.cute_kernels.build import compile_forward
from megamoe.cute_kernels.smem import default_config
from megamoe.lowering import kernel_problem
from megamoe.verify.cases import Case, call, layer

CASE = Case(name="configs", tokens=(64, 21), top_k=3, activation="silu", grid=3)
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
