"""The compiler's report on the forward kernel for real models; no GPU needed."""

import pytest

from megamoe.config import MoEConfig
from megamoe.cute_kernels.abi import PARAMETERS
from megamoe.cute_kernels.build import compile_forward
from megamoe.cute_kernels.smem import SMEM_LIMIT, default_config
from megamoe.lowering import kernel_problem

SHAPES = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "DeepSeek-V3": (7168, 2048, 256, 8),
}


def problem_of(shape, num_pes=8, max_tokens=4096, activation="silu"):
    hidden, inter, experts, top_k = shape
    return kernel_problem(
        MoEConfig(
            hidden=hidden,
            intermediate=inter,
            num_experts=experts,
            top_k=top_k,
            num_pes=num_pes,
            max_tokens=max_tokens,
            activation=activation,
        )
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_report(shape):
    problem = problem_of(shape)
    image = compile_forward(problem=problem)
    config = default_config(problem)
    assert image.spill_bytes == 0
    assert image.registers <= 65536 // image.threads
    assert image.setmaxnreg_kept
    assert image.setmaxnreg == (
        ("dec", config.service_registers),
        ("inc", config.math_registers),
    )
    assert 128 * config.service_registers + 256 * config.math_registers <= 65536
    assert not image.wgmma_serialised
    assert image.smem_bytes <= SMEM_LIMIT
    # Per token width: two halves of 64 weight rows, four k-steps, one loop for fc1 and fc2.
    assert image.mma_instructions == {
        f"m64n{width}k16.f32.bf16.bf16": 8 for width in config.token_widths
    }
    assert [p.name for p in image.parameters] == [name for name, _, _ in PARAMETERS]
    assert image.cubin[:4] == b"\x7fELF"


def test_unknown_arch_is_refused():
    with pytest.raises(ValueError, match=r"arch='sm_80'.*allowed: sm_90a"):
        compile_forward(problem=problem_of((512, 256, 8, 2), num_pes=2), arch="sm_80")
