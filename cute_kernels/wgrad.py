"""The wgrad kernel: gradients of the weights and biases of one PE's experts, in one launch.

A local, persistent, k-grouped GEMM over what forwards saved and dgrads left (``saved.py``); no
other PE takes part and no CTA waits for another. Roles (one CTA per SM, 12 warps):

    warp 0              load   TMA boxes of both operands
    warps 1–3           bias   column sums, if the layer has biases
    warps 4–7, 8–11     math   WGMMA; gradients straight from the accumulators

Barriers of a CTA: ``full[s]`` 1 arrival + bytes (load → math), ``empty[s]`` 8 arrivals, one per
math warp (math → load); named barrier 1: all math threads, where a stage's tail rows are zeroed.

An output tile has one owner, which sums all its rows in order: no atomics, and the same bits
whatever the grid.
"""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_copies
from megamoe.cute_kernels.pipelines import init_stages
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.saved import saved_block
from megamoe.cute_kernels.segments import sum_segments
from megamoe.cute_kernels.wgrad_bias import bias_role
from megamoe.cute_kernels.wgrad_context import WgradContext
from megamoe.cute_kernels.wgrad_load import wgrad_load_role
from megamoe.cute_kernels.wgrad_math import wgrad_math_role
from megamoe.cute_kernels.wgrad_tables import (
    BIAS_WARP,
    ENTRY_SAVED,
    FIRST_MATH_WARP,
    LOAD_WARP,
    MATH_WARPS,
    WARPS,
    WgradConfig,
    WgradShared,
    bias_sums,
)

THREADS = WARPS * 32


class WgradKernel:
    """The wgrad kernel of one problem and config; call it with ``WGRAD_PARAMETERS`` in order."""

    def __init__(self, problem: Problem, config: WgradConfig):
        self.problem = problem
        self.config = config
        self.shared = WgradShared.of(problem, config)

    @cute.jit
    def __call__(
        self,
        w13: Int64,
        w13_stride: Int64,
        w2: Int64,
        w2_stride: Int64,
        b13: Int64,
        b13_stride: Int64,
        b2: Int64,
        b2_stride: Int64,
        accumulate: Int32,
        first_slot: Int32,
        experts: Int32,
        num_saved: Int32,
        saved_0: Int64,
        saved_1: Int64,
        saved_2: Int64,
        saved_3: Int64,
        saved_4: Int64,
        saved_5: Int64,
        saved_6: Int64,
        saved_7: Int64,
        grid: Int32,
    ):
        """Host entry of the trace; only the grid is not a kernel parameter."""
        self.kernel(
            w13,
            w13_stride,
            w2,
            w2_stride,
            b13,
            b13_stride,
            b2,
            b2_stride,
            accumulate,
            first_slot,
            experts,
            num_saved,
            saved_0,
            saved_1,
            saved_2,
            saved_3,
            saved_4,
            saved_5,
            saved_6,
            saved_7,
        ).launch(
            grid=(grid, 1, 1),
            block=(THREADS, 1, 1),
            smem=self.shared.total,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        w13: Int64,
        w13_stride: Int64,
        w2: Int64,
        w2_stride: Int64,
        b13: Int64,
        b13_stride: Int64,
        b2: Int64,
        b2_stride: Int64,
        accumulate: Int32,
        first_slot: Int32,
        experts: Int32,
        num_saved: Int32,
        saved_0: Int64,
        saved_1: Int64,
        saved_2: Int64,
        saved_3: Int64,
        saved_4: Int64,
        saved_5: Int64,
        saved_6: Int64,
        saved_7: Int64,
    ):
        """Setup, then the table of roles."""
        problem, shared, config = self.problem, self.shared, self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = Int32(cutlass.memory.SmemAllocator().allocate(shared.total, 1024).toint())
        if thread == 0:
            entries = (
                saved_0, saved_1, saved_2, saved_3, saved_4, saved_5, saved_6, saved_7,
            )  # fmt: skip
            for i in cutlass.range_constexpr(len(entries)):
                ptx.sts_i64(smem + shared.entries + i * 8, entries[i])
            init_stages(smem, shared, config.stages, MATH_WARPS)
            ptx_copies.fence_mbarrier_init()
        cute.arch.sync_threads()
        c = WgradContext(
            w13=w13,
            w13_stride=w13_stride,
            w2=w2,
            w2_stride=w2_stride,
            b13=b13,
            b13_stride=b13_stride,
            b2=b2,
            b2_stride=b2_stride,
            accumulate=accumulate,
            first_slot=first_slot,
            experts=experts,
            num_saved=num_saved,
            cta=cta,
            grid=grid,
            smem=smem,
            problem=problem,
            config=config,
            shared=shared,
        )
        if warp < num_saved:
            lay_out_saved(c, warp)
        cute.arch.sync_threads()
        if warp < FIRST_MATH_WARP:
            cute.arch.setmaxregister_decrease(config.service_registers)
            if warp == LOAD_WARP:
                wgrad_load_role(c)
            else:
                if cutlass.const_expr(len(bias_sums(problem)) > 0):
                    bias_role(c, warp - BIAS_WARP)
        else:
            cute.arch.setmaxregister_increase(config.math_registers)
            wgrad_math_role(c, thread - FIRST_MATH_WARP * 32)


@cute.jit
def lay_out_saved(c: WgradContext, saved: Int32):
    """Where the experts' rows of one saved call lie; one warp."""
    base = ptx.ld_i64(c.entry(saved) + ENTRY_SAVED)
    sum_segments(
        c.problem,
        base + saved_block(c.problem)["route_count"].offset,
        c.first_slot,
        c.experts,
        c.block_prefix(saved),
        c.expert_rows(saved),
        Int32(0),
        False,
    )
