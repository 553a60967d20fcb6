"""One call of any layer on vgpu against the oracle: bit for bit on integers, else by the bound."""

import torch
from forward_cases import assert_same_bits
from strategies import Call

from megamoe.cute_kernels.problem import Problem
from megamoe.error_bound import error_bound
from megamoe.lowering import kernel_problem
from megamoe.reference import moe_oracle
from megamoe.testing import VgpuMoE, VgpuResult
from megamoe.verify.inputs import weights_per_pe


def problem_of(call: Call) -> Problem:
    """What the call's kernel is compiled for."""
    return kernel_problem(call.cfg, b13_dtype=call.bias_dtype, b2_dtype=call.bias_dtype)


def run(call: Call, *, grid: int = 2, **options) -> VgpuResult:
    """The call on vgpu; ``options`` as for ``VgpuMoE``."""
    data = call.inputs()
    moe = VgpuMoE(call.cfg, **weights_per_pe(call.cfg, data), grid=grid, **options)
    return moe.forward(
        x=data.x,
        topk_ids=data.topk_ids,
        topk_weights=data.topk_weights,
        residual=data.residual,
    )


def check(call: Call, got: list[torch.Tensor]) -> None:
    """Compare with the oracle."""
    data = call.inputs()
    if call.integers:
        assert_same_bits(got, moe_oracle(call.cfg, **data.kwargs, rounding="kernel"))
        return
    oracle = moe_oracle(call.cfg, **data.kwargs)
    bound = error_bound(call.cfg, **data.kwargs)
    for pe, y_TH in enumerate(got):
        excess = (y_TH.double() - oracle[pe]).abs() - bound[pe]
        assert bool((excess <= 0).all()), f"PE {pe}: {float(excess.max()):.3e} over the bound"
