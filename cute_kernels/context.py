"""What every role of one launch knows: pointers, sizes, epoch, addresses of regions.

Legend: P PEs, T tokens, H hidden, I intermediate, E experts, K top-k, S expert slots.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.kernel_config import (
    KernelConfig,
    fc1_tiles,
    fc2_tiles,
    recompute_tiles,
)
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.saved import dgrad_block, saved_block
from megamoe.cute_kernels.smem import SharedMap
from megamoe.cute_kernels.sync import Guard
from megamoe.cute_kernels.tensor_maps import map_names
from megamoe.cute_kernels.workspace import TENSOR_MAP_BYTES, local_block, symmetric_block


@dataclass(frozen=True)
class Context:
    """Launch parameters and what the prologue derived from them. Fields as in ``PARAMETERS``."""

    x: Int64
    x_stride: Int64
    stage_x: Int32
    ids: Int64
    ids_wide: Int32
    weights: Int64
    y: Int64
    residual: Int64
    bias13: Int64
    bias2: Int64
    symmetric: Int64
    local: Int64
    maps: Int64
    pe: Int32
    saved: Int64
    dgrad: Int64
    d_topk: Int64
    epoch: Int32
    bank: Int32
    tokens: Int32
    cta: Int32
    grid: Int32
    smem: Int32
    guard: Guard
    problem: cutlass.Constexpr[Problem]
    config: cutlass.Constexpr[KernelConfig]
    shared: cutlass.Constexpr[SharedMap]

    def sym(self, region: str) -> Int64:
        """Address of a symmetric region on this PE."""
        return self.symmetric + symmetric_block(self.problem)[region].offset

    def loc(self, region: str) -> Int64:
        """Address of a local region."""
        return self.local + local_block(self.problem, self.config)[region].offset

    def saved_region(self, region: str) -> Int64:
        """Address of a region that the forward keeps."""
        return self.saved + saved_block(self.problem)[region].offset

    def dgrad_region(self, region: str) -> Int64:
        """Address of a region that dgrad leaves."""
        return self.dgrad + dgrad_block(self.problem)[region].offset

    def pool_x(self) -> Int64:
        """Address of the pool that recv-and-place fills."""
        if self.problem.backward:
            return self.dgrad_region("dy")
        return self.saved_region("x") if self.problem.saves else self.loc("pool_x")

    def route_counts(self) -> Int64:
        """Address of the call's ``[P, S]`` rows per (source PE, slot)."""
        if self.problem.backward:
            return self.saved_region("route_count")
        p = self.problem
        return self.sym("route_count") + Int64(self.bank * p.num_pes) * (p.num_slots * 4)

    def primary_counts(self) -> Int64:
        """Address of the call's ``[P, E_local]`` records per (source PE, local expert)."""
        if self.problem.backward:
            return self.saved_region("primary_count")
        p = self.problem
        return self.sym("primary_count") + Int64(self.bank * p.num_pes) * (p.experts_per_pe * 4)

    def records(self, source: Int32) -> Int64:
        """Address of the call's route records from PE ``source``."""
        p = self.problem
        nbytes = p.max_records * p.record_words * 4
        if p.backward:
            return self.saved_region("route") + Int64(source) * nbytes
        return self.sym("route") + Int64(self.bank * p.num_pes + source) * nbytes

    def peer(self, pe: Int32, region: str) -> Int64:
        """Address of a symmetric region on PE ``pe``."""
        base = ptx.ld_i64(self.loc("peers") + Int64(pe) * 8)
        return base + symmetric_block(self.problem)[region].offset

    def counter(self, region: str, index: Int32) -> Int64:
        """Address of word ``index`` of a local two-bank counter, in this epoch's bank."""
        length = local_block(self.problem)[region].shape[1]
        return self.loc(region) + Int64(self.bank * length + index) * 4

    def row_meta(self, row: Int32) -> Int64:
        """Address of a row's metadata; ``row`` counts all rows of the call."""
        return self.loc("row_meta") + Int64(row) * (self.problem.meta_words * 4)

    def stored_block(self, block: Int32) -> Int32:
        """Where a block lies in ``pool_x`` and ``pool_h``: the same, or its turn in the ring."""
        return block % self.problem.ring_blocks if self.problem.ring_blocks else block

    def h_target(self) -> int:
        """``h_ready`` of a block whose activations are complete."""
        return fc1_tiles(self.problem, self.config) * self.config.math_groups

    def recomputed_target(self) -> int:
        """``h_ready`` of a block whose gate and up have been computed again. Tiles that need them
        count behind those that compute them, so nothing less says it."""
        return recompute_tiles(self.problem, self.config) * self.config.math_groups

    def y_target(self) -> int:
        """``y_ready`` of a block whose fc2 tiles are done."""
        return fc2_tiles(self.problem, self.config) * self.config.math_groups

    def map(self, name: str) -> Int64:
        """Address of a tensor map."""
        return self.maps + self.map_index(name) * TENSOR_MAP_BYTES

    def map_index(self, name: str) -> int:
        """Place of a tensor map among the launch's."""
        return map_names(self.problem).index(name)

    def slot_base(self, pe: Int32) -> Int32:
        """First expert slot of PE ``pe``; ``slot_base(P)`` is the number of slots."""
        return ptx.ld_i32(self.loc("slot_base") + Int64(pe) * 4)

    def local_experts(self) -> Int32:
        """Number of experts this PE holds."""
        return self.slot_base(self.pe + 1) - self.slot_base(self.pe)


@cute.jit
def lane() -> Int32:
    """This thread's lane in its warp."""
    return cute.arch.lane_idx()
