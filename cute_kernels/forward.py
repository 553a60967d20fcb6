"""The forward megakernel: dispatch, fc1, activation, fc2 and combine in one persistent launch.

Roles (one CTA per SM, 12 warps; in brackets with ``service_warps=8``, 16 warps):

    all warps of a few CTAs        dispatch-send, before the roles split
    warp 0      [0]                load            TMA tiles for fc1 and fc2
    warp 1      [1, 2]             recv-and-place  layout; rows from their source PEs into the pool
    warp 2      [3, 4]             combine-send    with the pre-reduced combine: sum the rows of one
                                                   (token, PE), send the sum; then reduce
    warps 2, 3  [3–7]              reduce          sum contributions, write y
    warps 4–7, 8–11 [8–11, 12–15]  math            WGMMA, activation, rows to their source PEs or to
                                                   pool_y; then combine-send and reduce

Barriers of a CTA: ``full[s]`` 1 arrival + bytes (load → math), ``empty[s]`` 8 arrivals, one per
math warp (math → load), ``ring_full[r]`` 1 arrival + bytes (inside recv-and-place),
``layout_ready`` 1 arrival, phase 0 only (recv-and-place → all roles); in clusters ``partner_ready``
1 arrival, phase 0 only (recv-and-place of one CTA → that of the other). Across CTAs and PEs: the
words of ``workspace.py``; each one's writer, reader, scope and reset are in docs/protocol.md.

Timeline: prologue (epoch, zero the next bank) → dispatch-send → [roles] place ∥ load ∥ math ∥
reduce → exit; nothing waits at the end except reduce for its own tokens (invariants I5, I6).
"""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_copies
from megamoe.cute_kernels.combine import reduce_role
from megamoe.cute_kernels.combine_send import combine_send_role
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.dispatch import dispatch_send
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.load import load_role
from megamoe.cute_kernels.mma_sm90 import math_role
from megamoe.cute_kernels.pipelines import init_barriers
from megamoe.cute_kernels.place import recv_and_place
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.roles import LOAD_WARP, PLACE_WARP, first_reduce_warp
from megamoe.cute_kernels.smem import (
    CTRL_EPOCH,
    CTRL_FLAG,
    CTRL_REDUCE,
    CTRL_SEND,
    CTRL_TOKENS,
    SharedMap,
)
from megamoe.cute_kernels.sync import Guard
from megamoe.cute_kernels.workspace import local_block, symmetric_block


class ForwardKernel:
    """The forward kernel of one problem and config; call it with ``PARAMETERS`` in order."""

    def __init__(self, problem: Problem, config: KernelConfig):
        self.problem = problem
        self.config = config
        self.shared = SharedMap.of(problem, config)

    @cute.jit
    def __call__(
        self,
        x: Int64,
        x_stride: Int64,
        stage_x: Int32,
        ids: Int64,
        ids_wide: Int32,
        weights: Int64,
        tokens: Int64,
        y: Int64,
        residual: Int64,
        bias13: Int64,
        bias2: Int64,
        symmetric: Int64,
        local: Int64,
        maps: Int64,
        pe: Int32,
        timeout_ns: Int64,
        status: Int64,
        saved: Int64,
        dgrad: Int64,
        d_topk: Int64,
        grid: Int32,
    ):
        """Host entry of the trace; only the grid is not a kernel parameter."""
        self.kernel(
            x,
            x_stride,
            stage_x,
            ids,
            ids_wide,
            weights,
            tokens,
            y,
            residual,
            bias13,
            bias2,
            symmetric,
            local,
            maps,
            pe,
            timeout_ns,
            status,
            saved,
            dgrad,
            d_topk,
        ).launch(
            grid=(grid, 1, 1),
            block=(self.config.threads, 1, 1),
            smem=self.shared.total,
            min_blocks_per_mp=1,
            cooperative=True,
            cluster=(self.config.cluster_size, 1, 1) if self.config.cluster_size > 1 else None,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        x_stride: Int64,
        stage_x: Int32,
        ids: Int64,
        ids_wide: Int32,
        weights: Int64,
        tokens: Int64,
        y: Int64,
        residual: Int64,
        bias13: Int64,
        bias2: Int64,
        symmetric: Int64,
        local: Int64,
        maps: Int64,
        pe: Int32,
        timeout_ns: Int64,
        status: Int64,
        saved: Int64,
        dgrad: Int64,
        d_topk: Int64,
    ):
        """Setup, then the table of roles."""
        problem, shared, config = self.problem, self.shared, self.config
        words = local_block(problem)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = Int32(cutlass.memory.SmemAllocator().allocate(shared.total, 1024).toint())
        ctrl = smem + shared.ctrl
        if thread == 0:
            begin_epoch(local + words["epoch"].offset, local + words["readers"].offset, grid, ctrl)
            count = ptx.ld_i32(tokens)
            # A replayed graph may hold anything here; never address past the workspace.
            if count > problem.max_tokens:
                count = Int32(problem.max_tokens)
            if count < 0:
                count = Int32(0)
            ptx.sts_i32(ctrl + CTRL_TOKENS, count)
            ptx.sts_i32(ctrl + CTRL_FLAG, Int32(0))
            ptx.sts_i32(ctrl + CTRL_REDUCE, Int32(0))
            ptx.sts_i32(ctrl + CTRL_SEND, Int32(0))
            init_barriers(smem, shared, config)
        cute.arch.sync_threads()
        epoch = ptx.lds_i32(ctrl + CTRL_EPOCH)
        guard = Guard(
            abort=local + words["abort"].offset,
            status=status,
            epoch=epoch,
            timeout_ns=timeout_ns,
            poll_sleep_ns=config.poll_sleep_ns,
        )
        c = Context(
            x=x,
            x_stride=x_stride,
            stage_x=stage_x,
            ids=ids,
            ids_wide=ids_wide,
            weights=weights,
            y=y,
            residual=residual,
            bias13=bias13,
            bias2=bias2,
            symmetric=symmetric,
            local=local,
            maps=maps,
            pe=pe,
            saved=saved,
            dgrad=dgrad,
            d_topk=d_topk,
            epoch=epoch,
            bank=epoch & 1,
            tokens=ptx.lds_i32(ctrl + CTRL_TOKENS),
            cta=cta,
            grid=grid,
            smem=smem,
            guard=guard,
            problem=problem,
            config=config,
            shared=shared,
        )
        zero_next_bank(c, thread)
        dispatch_send(c, thread)
        # dispatch-send used the pipeline stages by generic accesses, and ended with a CTA barrier
        # wherever it did; TMA writes them next. Whoever issues a copy has fenced itself.
        ptx_copies.fence_proxy_async_shared()
        if cutlass.const_expr(config.cluster_size > 1):
            # The partner's copies write to these stages, and it arrives at these barriers.
            ptx_copies.cluster_sync()
        if warp < config.service_warps:
            if cutlass.const_expr(config.reallocates):
                cute.arch.setmaxregister_decrease(config.service_registers)
            if warp == LOAD_WARP:
                load_role(c)
            elif warp < first_reduce_warp(config):
                recv_and_place(c, warp - PLACE_WARP)
            else:
                if cutlass.const_expr(problem.prereduced):
                    if warp < first_reduce_warp(config) + config.send_warps:
                        combine_send_role(c)
                reduce_role(c)
        else:
            if cutlass.const_expr(config.reallocates):
                cute.arch.setmaxregister_increase(config.math_registers)
            math_role(c, thread - config.service_warps * 32)
            # The sums sit in the tail: math warps without a tile left help with them.
            if cutlass.const_expr(problem.prereduced):
                combine_send_role(c)
            reduce_role(c)


@cute.jit
def begin_epoch(epoch_word: Int64, readers: Int64, grid: Int32, ctrl: Int32):
    """Read the epoch; the last reader advances it for the next launch (invariant I10).

    Plain accesses: all reads come before the last reader's writes by ``atom.acq_rel`` alone.
    """
    epoch = ptx.ld_i32(epoch_word) + 1
    ptx.sts_i32(ctrl + CTRL_EPOCH, epoch)
    if ptx.atom_acq_rel(readers, Int32(1)) == grid - 1:
        ptx.st_i32(readers, Int32(0))
        ptx.st_i32(epoch_word, epoch)


@cute.jit
def zero_next_bank(c: Context, thread: Int32):
    """Zero the counters of the other bank, which the next epoch uses (invariant I3)."""
    other = 1 - c.bank
    finished = ("finished",) if c.problem.prereduced else ()
    for name in ("x_ready", "h_ready", "y_ready", *finished):
        length = local_block(c.problem)[name].shape[1]
        zero_words(c, thread, c.loc(name) + Int64(other * length) * 4, Int32(length))
    length = symmetric_block(c.problem)["done"].shape[1]
    zero_words(c, thread, c.sym("done") + Int64(other * length) * 4, Int32(length))


@cute.jit
def zero_words(c: Context, thread: Int32, address: Int64, count: Int32):
    """All CTAs together store ``count`` zero words."""
    threads = c.config.threads
    for word in cutlass.range(c.cta * threads + thread, count, c.grid * threads, unroll=1):
        ptx.st_i32(address + Int64(word) * 4, Int32(0))
