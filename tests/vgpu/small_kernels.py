"""Runs of the small kernels in `kernels`, each checked against plain torch under the detector."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from cutlass import Int32, Int64
from kernels.compiling import compile_ptx
from kernels.gemm import THREADS, GemmConfig, compile_gemm, operand_box, output_box
from kernels.pingpong import (
    EPI_N,
    TILE_M,
    TILE_N,
    PingPongConfig,
    compile_pingpong,
)
from kernels.pingpong import THREADS as PINGPONG_THREADS
from kernels.ring import THREADS as RING_THREADS
from kernels.ring import RingAllReduce
from kernels.stream_k import WIDTH, StreamK

from megamoe.runtime.vgpu import Kernel, Report, TensorMap, World

POLICIES = {"seed": 0, "schedule": "round_robin", "completion": "eager"}


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Small integers, so that every sum is exact."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=rng).to(dtype)


@functools.lru_cache(maxsize=16)
def pingpong_ptx(fp8: bool) -> str:
    return compile_pingpong(PingPongConfig(128, 256, 512, fp8))


def run_pingpong(ptx: str, fp8: bool, **policies) -> Report:
    """Eight tiles on two CTAs: each warpgroup has two, and stages wrap."""
    c = PingPongConfig(128, 256, 512, fp8)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    a, b = integers(c.m, c.k, seed=1, dtype=dtype), integers(c.n, c.k, seed=2, dtype=dtype)
    d = torch.zeros(c.m, c.n, dtype=torch.bfloat16)
    world = World(pes=1, detect=True, **(POLICIES | policies))
    for name, tensor in (("a", a), ("b", b), ("d", d)):
        world.register(tensor, name=name)
    maps = [
        TensorMap(a, box=(c.tile_k, TILE_M), swizzle=128),
        TensorMap(b, box=(c.tile_k, TILE_N), swizzle=128),
        TensorMap(d, box=(EPI_N, TILE_M), swizzle=64),
    ]
    world.launch(
        pe=0, kernel=Kernel.from_ptx(ptx), grid=2, block=PINGPONG_THREADS, smem=c.smem_bytes,
        args=maps,
    )  # fmt: skip
    report = world.run()
    assert torch.equal(d, (a.float() @ b.float().T).to(torch.bfloat16)), "wrong result"
    return report


MULTICAST = GemmConfig(256, 256, 64 * 12, stages=2, cluster=2)


@functools.lru_cache(maxsize=1)
def multicast_ptx() -> str:
    return compile_gemm(MULTICAST)


def run_multicast(ptx: str, **policies) -> Report:
    """One pair of CTAs that share A, two tiles each, so that each stage is used twelve times: an
    arrival too few shows only once the phases have run far enough ahead."""
    c = MULTICAST
    a, b = integers(c.m, c.k, seed=1), integers(c.n, c.k, seed=2)
    d = torch.zeros(c.m, c.n, dtype=torch.bfloat16)
    world = World(pes=1, detect=True, **(POLICIES | policies))
    for name, tensor in (("a", a), ("b", b), ("d", d)):
        world.register(tensor, name=name)
    box, swizzle = output_box(c)
    maps = [
        TensorMap(a, box=operand_box(c, c.tile_m // 2, False), swizzle=c.swizzle),
        TensorMap(b, box=operand_box(c, c.tile_n, False), swizzle=c.swizzle),
        TensorMap(d, box=box, swizzle=swizzle),
    ]
    world.launch(
        pe=0, kernel=Kernel.from_ptx(ptx), grid=2, block=THREADS, smem=c.smem_bytes, cluster=2,
        args=maps,
    )  # fmt: skip
    report = world.run()
    assert torch.equal(d, (a.float() @ b.float().T).to(torch.bfloat16)), "wrong result"
    return report


PES, CHUNK = 3, 96


@functools.lru_cache(maxsize=1)
def ring_ptx() -> str:
    zero = Int64(0)
    return compile_ptx(RingAllReduce(PES, CHUNK), Int32(0), zero, zero, zero, zero, zero)


def run_ring(ptx: str, **policies) -> Report:
    """Three PEs."""
    data = [integers(PES, CHUNK, seed=pe, dtype=torch.float32) for pe in range(PES)]
    want = sum(data)
    world = World(pes=PES, detect=True, **(POLICIES | policies))
    steps = 2 * (PES - 1)
    at = [world.register(data[pe], name="data", pe=pe) for pe in range(PES)]
    inbox = [world.alloc(steps * CHUNK * 4, name="inbox", pe=pe) for pe in range(PES)]
    flags = [np.zeros(steps, np.int32) for _ in range(PES)]
    flag_at = [world.register(flags[pe], name="flags", pe=pe) for pe in range(PES)]
    kernel = Kernel.from_ptx(ptx)
    for pe in range(PES):
        right = (pe + 1) % PES
        args = [pe, at[pe], inbox[pe], flag_at[pe], inbox[right], flag_at[right]]
        world.launch(pe=pe, kernel=kernel, grid=1, block=RING_THREADS, args=args)
    report = world.run()
    assert all(torch.equal(mine, want) for mine in data), "wrong result"
    return report


TILES, STEPS, CTAS = 3, 10, 4


@functools.lru_cache(maxsize=2)
def stream_k_ptx(fixup: bool) -> str:
    zero = Int64(0)
    return compile_ptx(StreamK(TILES, STEPS, CTAS, fixup), zero, zero, zero, zero)


def run_stream_k(ptx: str, **policies) -> Report:
    """Three tiles of ten steps on four CTAs: every tile but none of the CTAs is whole."""
    x = integers(STEPS, TILES * WIDTH, seed=4, dtype=torch.float32)
    out = torch.zeros(TILES * WIDTH)
    counters = np.zeros(TILES, np.int32)
    world = World(pes=1, detect=True, **(POLICIES | policies))
    args = [
        world.register(x, name="x"),
        world.register(out, name="out"),
        world.alloc(TILES * CTAS * WIDTH * 4, name="parts"),
        world.register(counters, name="counters"),
    ]
    world.launch(pe=0, kernel=Kernel.from_ptx(ptx), grid=CTAS, block=WIDTH, smem=64, args=args)
    report = world.run()
    assert torch.equal(out, x.sum(0)), "wrong result"
    return report


@dataclass(frozen=True)
class SmallKernel:
    """How to compile and run one."""

    name: str
    ptx: Callable[[], str]
    run: Callable[..., Report]


KERNELS = (
    SmallKernel("multicast", multicast_ptx, run_multicast),
    SmallKernel(
        "pingpong", lambda: pingpong_ptx(False), lambda p, **o: run_pingpong(p, False, **o)
    ),
    SmallKernel("fp8", lambda: pingpong_ptx(True), lambda p, **o: run_pingpong(p, True, **o)),
    SmallKernel("ring", ring_ptx, run_ring),
    SmallKernel("stream_k", partial(stream_k_ptx, True), run_stream_k),
    SmallKernel("stream_k_atomics", partial(stream_k_ptx, False), run_stream_k),
)
