"""How much memory a session takes, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb

from megamoe.config import MoEConfig
from megamoe.cute_kernels.kernel_config import DEFAULT_SMS, KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.saved import dgrad_block, mode_kernels, saved_block
from megamoe.cute_kernels.smem import SharedMap
from megamoe.cute_kernels.workspace import local_block, symmetric_block
from megamoe.lowering import kernel_problem

SYMMETRIC = "symmetric"
LOCAL = "local"


@dataclass(frozen=True)
class PlannedRegion:
    """One named array of a PE's workspace."""

    block: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What one PE allocates. Weights are read where they are and are not in it.

    Args:
        regions: every array of both blocks.
        symmetric_bytes: the block that peers address, from the transport.
        local_bytes: the block of this PE alone, from torch.
        smem_bytes: shared memory of one CTA.
        saved_bytes: of a training session: held by each forward whose dgrad has not run.
        dgrad_bytes: held besides, from a call's dgrad to its wgrad.
        fetches_per_token: how often a token's row is pulled, over all PEs, if its experts are drawn
            evenly: once per PE that holds one of them, or, with a ring pool, once per expert.
    """

    problem: Problem
    config: KernelConfig
    regions: tuple[PlannedRegion, ...]
    symmetric_bytes: int
    local_bytes: int
    smem_bytes: int
    saved_bytes: int = 0
    dgrad_bytes: int = 0
    fetches_per_token: float = 0.0

    @property
    def total_bytes(self) -> int:
        return self.symmetric_bytes + self.local_bytes


def plan(
    cfg: MoEConfig,
    *,
    kernel_config: KernelConfig | None = None,
    training: bool = False,
    recompute: bool = False,
    sms: int | None = DEFAULT_SMS,
) -> Plan:
    """The workspace of one PE; the same on every PE. Allocates nothing and needs no GPU.

    Args:
        cfg: the layer.
        kernel_config: None chooses by rule.
        training: of a session built with ``training=True``: its blocks serve saving forwards and
            dgrad too. ``regions`` are those of the forward.
        recompute: of a training session whose dgrad computes the pre-activations again.
        sms: SMs that the rule serves: ``num_sms`` of the session, by default all of an H100 or
            H200. None: the widest tiles, as on vgpu.

    Raises:
        ValueError: the kernel does not run this config, or no kernel config fits.

    >>> cfg = MoEConfig(hidden=7168, intermediate=2048, num_experts=256, top_k=8, num_pes=8,
    ...                 max_tokens=4096)
    >>> planned = plan(cfg)
    >>> [round(n / 2**30, 2) for n in (planned.symmetric_bytes, planned.local_bytes)]
    [0.5, 4.57]
    """
    problem = replace(kernel_problem(cfg), recompute=recompute)
    kernels = mode_kernels(problem, kernel_config, training=training, sms=sms)
    config = kernels["forward"][1]
    symmetric, local = symmetric_block(problem), local_block(problem, config)
    regions = tuple(
        PlannedRegion(name, region.name, region.dtype, region.shape, region.nbytes)
        for name, block in ((SYMMETRIC, symmetric), (LOCAL, local))
        for region in block.regions
    )
    return Plan(
        problem=problem,
        config=config,
        regions=regions,
        symmetric_bytes=max(symmetric_block(each).nbytes for each, _ in kernels.values()),
        local_bytes=max(local_block(*each).nbytes for each in kernels.values()),
        smem_bytes=SharedMap.of(problem, config).total,
        fetches_per_token=fetches_per_token(cfg),
        saved_bytes=saved_block(problem).nbytes if training else 0,
        dgrad_bytes=dgrad_block(problem).nbytes if training else 0,
    )


def fetches_per_token(cfg: MoEConfig) -> float:
    """`Plan.fetches_per_token`; of a replicated expert one place is taken.

    >>> cfg = MoEConfig(hidden=4096, intermediate=2048, num_experts=256, top_k=6, num_pes=8,
    ...                 max_tokens=8192)
    >>> round(fetches_per_token(cfg), 2)
    4.44
    """
    if cfg.ring_rows:
        return float(cfg.top_k)
    held = [0] * cfg.num_pes
    for owner, _ in cfg.placement:
        held[owner] += 1
    every = comb(cfg.num_experts, cfg.top_k)
    return sum(1 - comb(cfg.num_experts - each, cfg.top_k) / every for each in held)
