"""Addresses of findings are told as elements of the workspace and of what training calls keep."""

from dataclasses import replace

import pytest

from megamoe import MoEConfig
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.saved import dgrad_block, saved_block
from megamoe.cute_kernels.workspace import local_block
from megamoe.lowering import kernel_problem
from megamoe.verify.regions import named

PROBLEM = kernel_problem(
    MoEConfig(
        hidden=512, intermediate=256, num_experts=8, top_k=2, num_pes=2, max_tokens=64,
        combine="direct",
    )
)  # fmt: skip


@pytest.mark.parametrize("block, table", [("saved", saved_block), ("dgrad", dgrad_block)])
def test_blocks_of_training_calls(block, table):
    region = table(replace(PROBLEM, mode="dgrad")).regions[-1]
    assert named(f"read of {block}[{region.offset + 4}]", PROBLEM) == (
        f"read of {block}.{region.name}[{1 if len(region.shape) == 1 else '0, 2'}]"
    )


def test_regions_that_only_a_config_has():
    config = KernelConfig(split_k=2)
    at = local_block(PROBLEM, config)["partial"].offset
    assert named(f"local[{at}]", PROBLEM, config).startswith("partial[0")
    assert not named(f"local[{at}]", PROBLEM).startswith("partial")
