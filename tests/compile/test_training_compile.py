"""The compiler's report on the kernels of training for real models; no GPU needed."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from megamoe.cli import main
from megamoe.config import MoEConfig
from megamoe.cute_kernels.abi import PARAMETERS, WGRAD_PARAMETERS
from megamoe.cute_kernels.build import compile_forward, compile_wgrad
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.smem import SMEM_LIMIT, default_config
from megamoe.cute_kernels.wgrad_tables import (
    WgradConfig,
    WgradShared,
    default_wgrad_config,
)
from megamoe.lowering import kernel_problem

GPT_OSS = {
    "activation": "gpt_oss",
    "w13_layout": "interleaved",
    "w13_transposed": True,
    "w2_transposed": True,
    "fc1_bias": True,
    "fc2_bias": True,
}
LAYERS = {
    "Mixtral-8x7B": (4096, 14336, 8, 2, {}),
    "Qwen3-30B-A3B": (2048, 768, 128, 8, {}),
    "DeepSeek-V3": (7168, 2048, 256, 8, {}),
    "gpt-oss-120b": (2880, 2880, 128, 4, GPT_OSS),
}


def problem_of(hidden, intermediate, num_experts, top_k, features, num_pes=8):
    return kernel_problem(
        MoEConfig(
            hidden=hidden, intermediate=intermediate, num_experts=num_experts, top_k=top_k,
            num_pes=num_pes, max_tokens=4096, **features,
        )
    )  # fmt: skip


def assert_sound(image: Image) -> None:
    assert image.sound and not image.notes
    assert image.spill_bytes == 0
    assert image.registers <= 65536 // image.threads
    assert image.setmaxnreg_kept
    assert image.setmaxnreg == (("dec", 56), ("inc", 224))
    assert not image.wgmma_serialised
    assert image.smem_bytes <= SMEM_LIMIT


@pytest.mark.parametrize("mode", ["save", "dgrad"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_save_and_dgrad(layer, mode):
    problem = replace(problem_of(*layer), mode=mode)
    image = compile_forward(problem=problem)
    assert_sound(image)
    # As the forward: both GEMMs share the main loop of a token width.
    assert image.mma_instructions == {
        f"m64n{width}k16.f32.bf16.bf16": 8 for width in default_config(problem).token_widths
    }
    assert [p.name for p in image.parameters] == [name for name, _, _ in PARAMETERS]


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_dgrad_that_recomputes(layer):
    """w13 is multiplied from both sides: two main loops, so fewer token widths (C7511)."""
    image = compile_forward(problem=replace(problem_of(*layer), mode="dgrad", recompute=True))
    assert_sound(image)
    assert image.mma_instructions == {f"m64n{width}k16.f32.bf16.bf16": 16 for width in (32, 128)}


@pytest.mark.parametrize("grad", ["f32", "bf16"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_wgrad(layer, grad):
    problem = problem_of(*layer)
    config = default_wgrad_config(problem, grad=grad, bias_grad=grad)
    image = compile_wgrad(problem=problem, config=config)
    assert_sound(image)
    # One main loop for every product: two halves of 64 rows, four k-steps.
    assert image.mma_instructions == {"m64n128k16.f32.bf16.bf16": 8}
    assert [p.name for p in image.parameters] == [name for name, _, _ in WGRAD_PARAMETERS]


def test_many_experts_take_fewer_stages():
    """The tables of 8 saved calls lie in shared memory beside the stages."""
    few = problem_of(2048, 768, 128, 8, {}, num_pes=1)
    many = problem_of(2048, 768, 1024, 8, {}, num_pes=1)
    assert default_wgrad_config(few).stages == 4
    assert default_wgrad_config(many).stages == 3
    with pytest.raises(ValueError, match=r"stages=4, experts_per_pe=1024: .* use fewer stages"):
        WgradShared.of(many, WgradConfig(stages=4))


def test_refusals():
    problem = problem_of(512, 256, 8, 2, {}, num_pes=2)
    with pytest.raises(ValueError, match=r"arch='sm_80'.*allowed: sm_90a"):
        compile_wgrad(problem=problem, arch="sm_80")
    with pytest.raises(ValueError, match="grad='f16': must be 'f32' or 'bf16'"):
        WgradConfig(grad="f16")
    with pytest.raises(ValueError, match="exceed the 65536 of an SM"):
        WgradConfig(service_registers=56, math_registers=240)


@pytest.mark.parametrize("kernel, products", [("dgrad", 40), ("wgrad", 8)])
def test_command(tmp_path, kernel, products):
    path = tmp_path / "report.json"
    shape = ["--hidden", "256", "--intermediate", "128", "--experts", "4", "--top-k", "2"]
    ran = CliRunner().invoke(
        main, ["compile", "--kernel", kernel, *shape, "--pes", "1", "--json", str(path)]
    )
    assert ran.exit_code == 0, ran.output
    assert f"{kernel}, sm_90a" in ran.output
    report = json.loads(path.read_text())
    assert (report["spill_bytes"], report["mma_instructions"]) == (0, products)
