"""The workspace and shared-memory tables, and what a problem refuses."""

import doctest
import itertools

import pytest

from megamoe import lowering
from megamoe.config import MoEConfig
from megamoe.cute_kernels import workspace
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import BLOCK_M, Problem
from megamoe.cute_kernels.smem import SMEM_LIMIT, SharedMap, default_config
from megamoe.cute_kernels.workspace import REGION_ALIGN, local_block, symmetric_block
from megamoe.lowering import kernel_problem


def problem(**changes) -> Problem:
    base = {
        "hidden": 512,
        "intermediate": 256,
        "num_experts": 8,
        "experts_per_pe": 4,
        "top_k": 2,
        "num_pes": 2,
        "max_tokens": 64,
        "pool_rows": 768,
    }
    return Problem(**(base | changes))


@pytest.mark.parametrize("module", [workspace, lowering])
def test_worked_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("block_of", [symmetric_block, local_block])
def test_regions_are_aligned_and_disjoint(block_of):
    block = block_of(problem(num_pes=3, num_experts=9, experts_per_pe=3, top_k=3, max_tokens=17))
    for region in block.regions:
        assert region.offset % REGION_ALIGN == 0
    for a, b in itertools.pairwise(block.regions):
        assert a.offset + a.nbytes <= b.offset
    last = block.regions[-1]
    assert block.nbytes >= last.offset + last.nbytes


def test_signals_do_not_move_with_the_hidden_size():
    """CASES X2: a counter of one shape must not lie where another shape has data."""
    for name in ("arrive", "route_count", "primary_count", "done", "route"):
        offsets = {symmetric_block(problem(hidden=h))[name].offset for h in (256, 512, 7168)}
        assert len(offsets) == 1, name


def test_route_record_is_16_byte_vectors_and_small():
    """K = 8: token + 8 packed + 8 weights = 17 words, 80 bytes: under 2 % of a 2048-wide row."""
    p = problem(hidden=2048, num_experts=128, experts_per_pe=64, top_k=8, max_tokens=4096)
    assert p.record_words == 20
    assert 4 * p.record_words < 0.02 * 2 * p.hidden


@pytest.mark.parametrize(
    "shape",
    [(2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 2048, 256, 8), (7168, 3072, 384, 6)],
)
@pytest.mark.parametrize("num_pes", [1, 8, 64])
def test_default_config_fits_the_sm(shape, num_pes):
    hidden, inter, experts, top_k = shape
    if num_pes > experts:
        num_pes = experts
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=inter,
        num_experts=experts,
        top_k=top_k,
        num_pes=num_pes,
        max_tokens=1024,
    )
    p = kernel_problem(cfg)
    config = default_config(p)
    assert SharedMap.of(p, config).total <= SMEM_LIMIT
    assert config.stages >= 3


@pytest.mark.parametrize(
    ("shape", "max_tokens", "tiles"),
    [
        ((4096, 14336, 8, 2), 64, (64, 4)),  # one expert a PE: 64 fc2 tiles for 132 SMs
        ((4096, 14336, 8, 2), 512, (64, 1)),
        ((4096, 14336, 8, 2), 4096, (256, 1)),
        ((2048, 768, 128, 8), 64, (64, 1)),
        ((7168, 2048, 256, 8), 1, (128, 1)),
        ((7168, 2048, 256, 8), 64, (256, 1)),
    ],
)
def test_few_tiles_get_narrower_and_are_split(shape, max_tokens, tiles):
    hidden, inter, experts, top_k = shape
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=inter,
        num_experts=experts,
        top_k=top_k,
        num_pes=8,
        max_tokens=max_tokens,
    )
    p = kernel_problem(cfg)
    config = default_config(p, sms=132)
    assert (config.block_n, config.split_k) == tiles
    assert SharedMap.of(p, config).total <= SMEM_LIMIT
    assert default_config(p).block_n == 256


def test_hidden_sweep_keeps_one_formula():
    """CASES S7: the map covers every hidden size up to 16384 or refuses with the limit."""
    for hidden in range(1024, 16385, 1024):
        p = problem(hidden=hidden)
        shared = SharedMap.of(p, default_config(p))
        assert shared.total <= SMEM_LIMIT
        assert shared.full > shared.row_entries > shared.ring > shared.staging > shared.b


def test_too_many_stages_are_refused_with_the_limit():
    with pytest.raises(ValueError, match=r"stages=5.*232448"):
        SharedMap.of(problem(), KernelConfig(stages=5))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 100}, "hidden=100: must be a positive multiple of 8"),
        ({"intermediate": 0}, "intermediate=0"),
        ({"top_k": 33}, "top_k=33: must be 1 to 32"),
        ({"top_k": 9, "num_experts": 8}, "top_k=9: must not exceed num_experts"),
        ({"num_pes": 65}, "num_pes=65: must be 1 to 64"),
        ({"experts_per_pe": 3}, "experts_per_pe=3"),
        ({"pool_rows": 100}, "pool_rows=100"),
        ({"activation": "tanh"}, "activation='tanh'"),
        ({"max_tokens": 2**30}, "max_tokens=1073741824"),
    ],
)
def test_problem_refuses(changes, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        problem(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"math_registers": 232}, "math_registers=232: .* exceed the 64512"),
        ({"service_registers": 240}, "service_registers=240: .* from 24 to 168"),
        ({"service_warps": 8}, "math_registers=224: .* 71680 registers; they exceed the 65536"),
        ({"cluster": "rows"}, "cluster='rows': must be one of"),
        ({"cluster": "tokens", "split_k": 2}, "cluster='tokens': needs block_n=256 and split_k=1"),
        ({"split_k": 17}, "split_k=17: must be 1 to 16"),
        ({"block_n": 96}, "block_n=96: must be one of .256, 128, 64."),
        ({"service_warps": 6}, "service_warps=6: must be 4 or 8"),
        ({"math_registers": 230}, "multiples of 8"),
        ({"stages": 1}, "stages=1"),
    ],
)
def test_config_refuses(changes, text):
    with pytest.raises(ValueError, match=text):
        KernelConfig(**changes)


def test_a_split_needs_a_k_tile_for_every_part():
    with pytest.raises(ValueError, match=r"split_k=5: must be 1 to 4, .*intermediate=256"):
        SharedMap.of(problem(intermediate=256), KernelConfig(split_k=5))


def test_a_ring_pool_cannot_share_weights():
    with pytest.raises(ValueError, match="cluster='weights': must be 'none' or 'tokens'"):
        SharedMap.of(problem(ring_blocks=2), KernelConfig(cluster="weights"))


def test_a_split_adds_regions_at_the_end():
    """What else a PE keeps lies where it does without a split; partial sums are fp32 per part."""
    p = problem(hidden=512, intermediate=256)
    config = KernelConfig(split_k=2, block_n=128)
    plain, split = local_block(p).regions, local_block(p, config)
    assert split.regions[: len(plain)] == plain
    assert split["partial"].nbytes == p.stored_rows * p.hidden * 4 * config.split_k


def test_capacity_always_holds_its_rows():
    """Any split of C rows over the local experts fits ``padded_pool_rows(C, L)``."""
    for capacity, experts in itertools.product((1, 2, 127, 128, 129, 300), (1, 2, 5)):
        pool = lowering.padded_pool_rows(capacity, experts)
        for first in range(capacity + 1):
            split = [first] + [0] * (experts - 1)
            for i in range(capacity - first):
                split[1 + i % max(1, experts - 1) if experts > 1 else 0] += 1
            assert sum(-(-rows // BLOCK_M) * BLOCK_M for rows in split) <= pool
