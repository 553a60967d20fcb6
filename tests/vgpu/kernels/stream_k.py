"""A stream-K reduction: out[tile] = Σ_k x[k, tile], the k steps of all tiles dealt out evenly.

A CTA owns a run of consecutive (tile, k) steps, so a tile may be shared by several CTAs. Each adds
its part into ``out`` with float atomics (``fixup`` False), or stores it into its own row of
``parts`` and counts in the tile's counter; the CTA that counts last adds the rows up in CTA order
(``fixup`` True).
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from kernels.ring import f32_at, i32_at

WIDTH = 64
"""Columns of a tile, and threads of a CTA."""


class StreamK:
    """``tiles`` tiles of WIDTH columns, ``steps`` rows of x, ``ctas`` CTAs."""

    def __init__(self, tiles: int, steps: int, ctas: int, fixup: bool) -> None:
        self.tiles, self.steps, self.ctas, self.fixup = tiles, steps, ctas, fixup
        self.share = -(-tiles * steps // ctas)

    @cute.jit
    def __call__(self, x: Int64, out: Int64, parts: Int64, counters: Int64):
        self.kernel(x, out, parts, counters).launch(grid=(self.ctas, 1, 1), block=(WIDTH, 1, 1))

    @cute.kernel
    def kernel(self, x: Int64, out: Int64, parts: Int64, counters: Int64):
        cta, _, _ = cute.arch.block_idx()
        word = SmemAllocator().allocate_array(Int32, 1)
        at = cta * self.share
        stop = at + self.share
        if stop > self.tiles * self.steps:
            stop = Int32(self.tiles * self.steps)
        while at < stop:
            tile = at // self.steps
            end = (tile + 1) * self.steps
            if end > stop:
                end = stop
            total = self.add_rows(x, tile, at - tile * self.steps, end - tile * self.steps)
            if cutlass.const_expr(self.fixup):
                self.hand_over(out, parts, counters, word, tile, cta, total)
            else:
                self.add_atomically(out, tile, total)
            at = end

    @cute.jit
    def add_rows(self, x: Int64, tile: Int32, first: Int32, last: Int32) -> Float32:
        thread, _, _ = cute.arch.thread_idx()
        total = Float32(0.0)
        for k in range(first, last):
            index = (k * self.tiles + tile) * WIDTH + thread
            total = total + cute.arch.load(f32_at(x + Int64(index) * 4), Float32)
        return total

    @cute.jit
    def add_atomically(self, out: Int64, tile: Int32, total: Float32):
        thread, _, _ = cute.arch.thread_idx()
        target = f32_at(out + Int64(tile * WIDTH + thread) * 4)
        cute.arch.red(target, total, op="add", dtype="f32", sem="relaxed", scope="gpu")

    @cute.jit
    def hand_over(
        self, out: Int64, parts: Int64, counters: Int64, word: cute.Pointer, tile: Int32,
        cta: Int32, total: Float32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        first = tile * self.steps // self.share
        last = ((tile + 1) * self.steps - 1) // self.share
        mine = (tile * self.ctas + cta) * WIDTH + thread
        cute.arch.store(f32_at(parts + Int64(mine) * 4), total)
        # All parts are stored, and ``word`` has been read for the tile before.
        cute.arch.sync_threads()
        if thread == 0:
            counter = i32_at(counters + Int64(tile) * 4)
            earlier = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            cute.arch.store(word, earlier)
        cute.arch.sync_threads()
        if cute.arch.load(word, Int32) == last - first:
            result = Float32(0.0)
            for other in range(first, last + 1):
                row = (tile * self.ctas + other) * WIDTH + thread
                result = result + cute.arch.load(f32_at(parts + Int64(row) * 4), Float32)
            cute.arch.store(f32_at(out + Int64(tile * WIDTH + thread) * 4), result)
