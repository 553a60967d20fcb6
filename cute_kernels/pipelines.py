"""The A/B stage ring between load and math: ``full`` and ``empty`` mbarriers and a position.

``full[s]``: one arrival (the load thread, with the stage's bytes) and the bytes themselves.
``empty[s]``: one arrival per math warp, after the last WGMMA that read the stage has retired.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from megamoe.cute_kernels import ptx_copies
from megamoe.cute_kernels.context import Context, lane


@dataclass
class StagePosition:
    """A role's place in the ring. ``parity`` is the phase of ``full`` to wait for; the producer
    waits for the opposite phase of ``empty``, which a fresh barrier counts as complete."""

    stage: Int32
    parity: Int32
    stages: cutlass.Constexpr[int]

    @cute.jit
    def advance(self):
        """Next stage; the parity flips when the ring wraps."""
        self.stage = self.stage + 1
        if self.stage == self.stages:
            self.stage = Int32(0)
            self.parity = self.parity ^ 1


def make_position(stages: int) -> StagePosition:
    """The first stage."""
    return StagePosition(stage=Int32(0), parity=Int32(0), stages=stages)


def full_barrier(c: Context, stage: Int32) -> Int32:
    """Shared address of ``full[stage]``."""
    return c.smem + c.shared.full + stage * 8


def empty_barrier(c: Context, stage: Int32) -> Int32:
    """Shared address of ``empty[stage]``."""
    return c.smem + c.shared.empty + stage * 8


@cute.jit
def await_cluster_phase(barrier: Int32, parity: Int32):
    """Wait for a phase that a CTA of the cluster completes, whose writes are visible then."""
    done = Int32(0)
    while done == 0:
        done = ptx_copies.mbarrier_try_wait_cluster(barrier, parity)


@cute.jit
def await_empty(c: Context, position: StagePosition):
    """The producer's wait until every consumer of the stage has released it."""
    if cutlass.const_expr(c.config.cluster_size == 1):
        ptx_copies.mbarrier_wait(empty_barrier(c, position.stage), position.parity ^ 1)
    else:
        await_cluster_phase(empty_barrier(c, position.stage), position.parity ^ 1)


@cute.jit
def init_stages(
    c_smem: Int32,
    shared: cutlass.Constexpr,
    stages: cutlass.Constexpr[int],
    arrivals: cutlass.Constexpr[int],
):
    """Initialise the stage ring's mbarriers; one thread, which fences afterwards."""
    for stage in cutlass.range_constexpr(stages):
        ptx_copies.mbarrier_init(c_smem + shared.full + stage * 8, 1)
        ptx_copies.mbarrier_init(c_smem + shared.empty + stage * 8, arrivals)


@cute.jit
def release(c: Context, stage: Int32, ctas: cutlass.Constexpr[int] = 1):
    """This warp no longer reads ``stage``, which ``ctas`` CTAs of the cluster load."""
    if cutlass.const_expr(ctas == 1):
        if lane() == 0:
            ptx_copies.mbarrier_arrive(empty_barrier(c, stage))
    elif lane() < ctas:
        ptx_copies.mbarrier_arrive_at(empty_barrier(c, stage), lane())


@cute.jit
def init_barriers(c_smem: Int32, shared: cutlass.Constexpr, config: cutlass.Constexpr):
    """Initialise all mbarriers of the CTA; one thread."""
    # A stage is free once the math warps of all CTAs that it is loaded for have released it.
    arrivals = config.math_warps * config.cluster_size
    init_stages(c_smem, shared, config.stages, arrivals)
    for slot in cutlass.range_constexpr(config.place_warps * config.ring_slots):
        ptx_copies.mbarrier_init(c_smem + shared.ring_full + slot * 8, 1)
    ptx_copies.mbarrier_init(c_smem + shared.layout_ready, 1)
    if cutlass.const_expr(config.cluster_size > 1):
        ptx_copies.mbarrier_init(c_smem + shared.partner_ready, 1)
    ptx_copies.fence_mbarrier_init()
