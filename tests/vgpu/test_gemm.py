"""Compiled CuTe DSL GEMMs on vgpu: TMA, mbarrier ring, WGMMA, stmatrix, TMA store together.

Integer data keep every partial sum exact, so the results must agree bit for bit.
"""

from __future__ import annotations

import functools

import pytest
import torch
from kernels.gemm import (
    THREADS,
    GemmConfig,
    compile_gemm,
    operand_box,
    output_box,
)

from megamoe.runtime.vgpu import Kernel, Report, TensorMap, World


@functools.lru_cache(maxsize=32)
def kernel_of(config: GemmConfig) -> Kernel:
    """Compiled and parsed once a process."""
    return Kernel.from_ptx(compile_gemm(config))


def operand(rows: int, k: int, mn: bool, seed: int) -> torch.Tensor:
    """bf16 [rows, k] of small integers, contiguous along k or, transposed, along the rows."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, k), generator=g).to(torch.bfloat16)
    return x.T.contiguous().T if mn else x


def run(
    config: GemmConfig,
    *,
    ctas: int = 2,
    seed: int = 0,
    schedule: str = "round_robin",
    completion: str = "eager",
) -> Report:
    """Run one GEMM in fresh memory and compare every element of D, and what is around it."""
    c = config
    a, b = operand(c.m, c.k, c.a_mn, 1), operand(c.n, c.k, c.b_mn, 2)
    shape = (c.n, c.m) if c.m_major else (c.m, c.n)
    guarded = torch.full((shape[0] + 2, shape[1]), 77.0, dtype=torch.bfloat16)
    d = guarded[1:-1]
    world = World(pes=1, seed=seed, schedule=schedule, completion=completion)
    for name, tensor in (("a", a), ("b", b), ("d", guarded)):
        world.register(tensor, name=name, pe=0)
    box, swizzle = output_box(c)
    maps = [
        TensorMap(
            a.T if c.a_mn else a,
            box=operand_box(c, c.tile_m // c.cluster, c.a_mn),
            swizzle=c.swizzle,
        ),
        TensorMap(b.T if c.b_mn else b, box=operand_box(c, c.tile_n, c.b_mn), swizzle=c.swizzle),
        TensorMap(d, box=box, swizzle=swizzle),
    ]
    world.launch(
        pe=0, kernel=kernel_of(c), grid=(ctas, 1, 1), block=(THREADS, 1, 1), smem=c.smem_bytes,
        cluster=(c.cluster, 1, 1), args=maps,
    )  # fmt: skip
    report = world.run()
    want = (a.float() @ b.float().T).to(torch.bfloat16)
    assert torch.equal(d.T if c.m_major else d, want)
    assert (guarded[0] == 77).all()
    assert (guarded[-1] == 77).all()
    return report


PLAIN = GemmConfig(256, 256, 64 * 9)
SWAPPED = GemmConfig(512, 128, 64 * 9, tile_m=256, stages=3, m_major=True)


@pytest.mark.parametrize("config", [PLAIN, SWAPPED], ids=["plain", "swapped"])
def test_stages_wrap_and_work_is_counted(config: GemmConfig) -> None:
    report = run(config)
    assert report.wgmma_flops == 2 * config.m * config.n * config.k
    # An instruction multiplies 64 rows of A by tile_n of B, 16 deep.
    products = report.wgmma_flops // (2 * 64 * config.tile_n * 16)
    assert report.wgmma_operand_bytes == products * (64 + config.tile_n) * 16 * 2
    tiles = (config.m // config.tile_m) * (config.n // config.tile_n)
    stage = (config.tile_m + config.tile_n) * config.tile_k * 2
    assert report.tensor_load_bytes == tiles * config.k // config.tile_k * stage


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
@pytest.mark.parametrize("schedule", ["round_robin", "random", "starve"])
@pytest.mark.parametrize("config", [PLAIN, SWAPPED], ids=["plain", "swapped"])
def test_every_schedule_and_completion_policy(
    config: GemmConfig, schedule: str, completion: str
) -> None:
    for seed in (0, 1):
        run(config, seed=seed, schedule=schedule, completion=completion)


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(200, 136, 72),  # every edge ragged, one k tile and a bit
        GemmConfig(8, 8, 8),  # one box, mostly outside
        GemmConfig(328, 40, 200, tile_m=256, stages=3, m_major=True),
    ],
    ids=["ragged", "tiny", "swapped"],
)
def test_ragged_edges_are_cut_by_tma(config: GemmConfig) -> None:
    run(config, completion="random")


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("a_mn", [False, True])
@pytest.mark.parametrize("b_mn", [False, True])
def test_descriptors_of_every_swizzle_and_major(swizzle: int, a_mn: bool, b_mn: bool) -> None:
    """The compiler's own shared-memory layouts and descriptors against ours."""
    run(GemmConfig(136, 120, 96, swizzle=swizzle, a_mn=a_mn, b_mn=b_mn), ctas=1)


def test_more_ctas_than_tiles_and_fewer() -> None:
    for ctas in (1, 3, 8):
        run(PLAIN, ctas=ctas)


MULTICAST = GemmConfig(200, 456, 64 * 9, cluster=2)


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
@pytest.mark.parametrize("schedule", ["round_robin", "random", "starve"])
def test_clusters_of_two_share_a_by_multicast(schedule: str, completion: str) -> None:
    """Two m tiles × two pairs of n tiles, ragged; each CTA loads half of A for both."""
    for ctas in (2, 4):
        report = run(MULTICAST, ctas=ctas, seed=5, schedule=schedule, completion=completion)
        assert any("multicast" in name for name in report.async_ops)


@pytest.mark.slow
def test_speed() -> None:
    """A GEMM-like kernel runs at 150,000 warp instructions a second or more on one core.

    Measured on the builder's machine: 450,000 to 490,000.
    """
    config = GemmConfig(1024, 1024, 512)
    reports = [run(config, ctas=4) for _ in range(4)]
    rate = max(r.warp_instructions / r.seconds for r in reports)
    print(f"vgpu: {rate:,.0f} warp instructions per second")
    assert rate > 150_000
