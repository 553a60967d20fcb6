"""A ring all-reduce over PEs: reduce-scatter, then all-gather, pushing to the right neighbour.

Every step has its own inbox and flag, so nothing is reused within a launch. Addresses are plain
numbers: ``data`` [P][chunk] fp32, ``inbox`` [2·(P−1)][chunk] fp32 and ``flags`` [2·(P−1)] int32 of
this PE, and the neighbour's ``inbox`` and ``flags``.
"""

from __future__ import annotations

from cutlass import AddressSpace, Float32, Int32, Int64, cute

THREADS = 64


def f32_at(address: Int64):
    """A pointer to floats in global memory."""
    return cute.make_ptr(Float32, address, AddressSpace.gmem, assumed_align=4)


def i32_at(address: Int64):
    """A pointer to integers in global memory."""
    return cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4)


class RingAllReduce:
    """One CTA a PE sums ``chunk`` · P floats over all PEs."""

    def __init__(self, pes: int, chunk: int) -> None:
        self.pes, self.chunk = pes, chunk

    @cute.jit
    def __call__(
        self, pe: Int32, data: Int64, inbox: Int64, flags: Int64, to_inbox: Int64, to_flags: Int64
    ):
        self.kernel(pe, data, inbox, flags, to_inbox, to_flags).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1)
        )

    @cute.kernel
    def kernel(
        self, pe: Int32, data: Int64, inbox: Int64, flags: Int64, to_inbox: Int64, to_flags: Int64
    ):
        pes = self.pes
        row = self.chunk * 4
        for step in range(2 * (pes - 1)):
            # Reduce-scatter sends chunk pe − s and adds to pe − s − 1; all-gather goes on from
            # the chunk that is complete here, pe + 1.
            sent = (pe + 2 * pes - step) % pes
            self.push(data + Int64(sent) * row, to_inbox + Int64(step) * row)
            cute.arch.sync_threads()
            self.signal(to_flags + Int64(step) * 4)
            self.wait(flags + Int64(step) * 4)
            cute.arch.sync_threads()
            got = (pe + 2 * pes - step - 1) % pes
            # A thread takes the elements that it pushes in the next step.
            self.take(data + Int64(got) * row, inbox + Int64(step) * row, step < pes - 1)

    @cute.jit
    def push(self, source: Int64, target: Int64):
        thread, _, _ = cute.arch.thread_idx()
        for i in range(thread, self.chunk, THREADS):
            value = cute.arch.load(f32_at(source + Int64(i) * 4), Float32)
            cute.arch.store(f32_at(target + Int64(i) * 4), value)

    @cute.jit
    def take(self, target: Int64, source: Int64, add):
        thread, _, _ = cute.arch.thread_idx()
        for i in range(thread, self.chunk, THREADS):
            value = cute.arch.load(f32_at(source + Int64(i) * 4), Float32)
            if add:
                value = value + cute.arch.load(f32_at(target + Int64(i) * 4), Float32)
            cute.arch.store(f32_at(target + Int64(i) * 4), value)

    @cute.jit
    def signal(self, flag: Int64):
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            cute.arch.store(i32_at(flag), Int32(1), sem="release", scope="sys")

    @cute.jit
    def wait(self, flag: Int64):
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            seen = cute.arch.load(i32_at(flag), Int32, sem="acquire", scope="sys")
            while seen == 0:
                seen = cute.arch.load(i32_at(flag), Int32, sem="acquire", scope="sys")
