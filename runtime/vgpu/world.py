"""The world: PEs, memory, launches, and the loop that runs every warp to its end."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import numpy as np

from megamoe.runtime.vgpu import asyncops
from megamoe.runtime.vgpu.cta import Cluster, Cta, clusters_of
from megamoe.runtime.vgpu.detector import Detector
from megamoe.runtime.vgpu.errors import Deadlock, VgpuError
from megamoe.runtime.vgpu.findings import FindingError
from megamoe.runtime.vgpu.kernel import Kernel
from megamoe.runtime.vgpu.launch import (
    Launch,
    check_launch,
    dims3,
    pack,
)
from megamoe.runtime.vgpu.memory import AddressSpace, byte_view
from megamoe.runtime.vgpu.ptx_ast import Instruction
from megamoe.runtime.vgpu.race_detector import RaceDetector
from megamoe.runtime.vgpu.report import Report, collect, deadlock_text
from megamoe.runtime.vgpu.schedule import make_scheduler
from megamoe.runtime.vgpu.warp import Group, Warp

COMPLETIONS = ("eager", "late", "random")
_TICK_NS = 100
_SLOW_ROUNDS = 16


class World:
    """Several PEs with one address space, running kernels functionally.

    ``schedule`` is ``round_robin``, ``random`` or ``starve``; ``completion`` says when asynchronous
    operations take effect: ``eager``, ``late`` or ``random``. Both are reproduced by ``seed``.
    ``sms`` is the number of SMs of a PE; CTAs that do not fit start when others end.
    ``stuck_seconds``: logical time without progress after which a run counts as deadlocked;
    ``stall_instructions``: so many warp instructions in a row without a store, an arrival or any
    other effect count as a deadlock too (a loop that polls with plain loads). ``detect`` switches
    the race detector on (docs/verification.md): findings are in the report of a run.
    """

    def __init__(
        self, pes: int = 1, seed: int = 0, schedule: str = "round_robin",
        completion: str = "eager", sms: int = 132, stuck_seconds: float = 3600.0,
        stall_instructions: int = 20_000_000, detect: bool = False,
    ) -> None:  # fmt: skip
        if completion not in COMPLETIONS:
            raise ValueError(f"completion={completion!r}: allowed are {', '.join(COMPLETIONS)}")
        if pes < 1:
            raise ValueError(f"pes={pes}: at least 1")
        make_scheduler(schedule, seed)
        self.pes, self.seed, self.schedule, self.completion = pes, seed, schedule, completion
        self.sms, self.stuck_ns = sms, int(stuck_seconds * 1e9)
        self.stall_instructions = stall_instructions
        self.memory = AddressSpace(pes)
        self.detector: Detector | None = None
        self.now = 1_000_000
        self.runs = 0
        self.launches: list[Launch] = []
        self.module_globals: dict[tuple[int, int], dict[str, int]] = {}
        self.reset_run()
        if detect:
            self.detector = RaceDetector(self)

    def reset_run(self) -> None:
        """Forget the counters of the last run."""
        self.random = random.Random(self.seed * 7919 + self.runs)
        self.scheduler = make_scheduler(self.schedule, self.seed + self.runs)
        self.pending: deque[asyncops.AsyncOp] = deque()
        # Insertion order, not a set: wake-ups must not depend on object addresses.
        self.timed: dict[Group, None] = {}
        self.live_ctas: list[Cta] = []
        self.queued_ctas: deque[Cluster] = deque()
        self.all_warps: list[Warp] = []
        self.async_counts: dict[str, list[int]] = {}
        self.progress = self.ticks = self.wgmma_flops = 0
        self.wgmma_operand_bytes = 0
        self.idle_rounds = self.idle_start = 0
        self.stuck_progress = self.watched_progress = -1
        self.watched_tick = 0

    # -- memory ------------------------------------------------------------------------------
    def register(self, array: Any, name: str = "array", pe: int = 0) -> int:
        """Make a numpy array or CPU torch tensor visible to kernels; returns its address.

        Nothing is copied: kernels read and write the array itself. The world keeps it alive.
        """
        data, _, itemsize, shape = byte_view(array)
        region = self.memory.add(data, name, pe)
        region.array, region.itemsize, region.shape = array, itemsize, shape
        self.memory.by_pointer[_pointer(array)] = region
        if self.detector is not None:
            self.detector.region_added(region, True)
        return region.base

    def alloc(self, nbytes: int, name: str = "alloc", pe: int = 0) -> int:
        """Memory filled with 0xFF; returns its address."""
        data = np.full(nbytes, 0xFF, np.uint8)
        region = self.memory.add(data, name, pe)
        region.array = data
        if self.detector is not None:
            self.detector.region_added(region, False)
        return region.base

    def unregister(self, what: Any) -> None:
        """Release an array or address; later accesses by kernels are faults."""
        address = what if isinstance(what, int) else self.address_of(what)
        region = self.memory.find(address)
        if region is None:
            raise KeyError(f"{address:#x} is not registered")
        self.memory.remove(region)
        for key, value in list(self.memory.by_pointer.items()):
            if value is region:
                del self.memory.by_pointer[key]

    def bytes_at(self, address: int) -> np.ndarray:
        """The bytes from an address to the end of its region, as a live view."""
        region = self.memory.find(address)
        if region is None:
            raise KeyError(f"{address:#x}: {self.memory.describe(address)}")
        return region.data[address - region.base :]

    def address_of(self, array: Any) -> int:
        """The address of a registered array, or of a view into one."""
        pointer = _pointer(array)
        region = self.memory.by_pointer.get(pointer)
        if region is not None:
            return region.base
        for start, region in self.memory.by_pointer.items():
            if start <= pointer < start + len(region.data):
                return region.base + pointer - start
        raise KeyError("the array is not registered with this world")

    # -- launching ---------------------------------------------------------------------------
    def launch(
        self, pe: int, kernel: Kernel, grid: Any, block: Any, args: list[Any],
        cluster: Any = (1, 1, 1), smem: int = 0, registers: int | None = None,
        roles: dict[int, str] | None = None,
    ) -> None:  # fmt: skip
        """Queue a kernel launch for the next :meth:`run`.

        ``args`` in the order of the kernel's parameters: ints (addresses or values), floats,
        bytes, registered arrays (their address), :class:`TensorMap`. ``registers`` per thread are
        for ``setmaxnreg``; the default is what a full SM allows. ``roles`` names warps.
        """
        grid3, block3, cluster3 = dims3(grid), dims3(block), dims3(cluster)
        registers = check_launch(kernel, grid3, block3, cluster3, smem, registers)
        block_bytes = pack(kernel, args, self.address_of)
        region = self.memory.add_params(block_bytes, pe)
        region.writable = False
        cells = {k: region.cells[k] for k in (1, 2, 4, 8)}
        self.launches.append(
            Launch(pe, kernel, grid3, block3, cluster3, smem, registers, dict(roles or {}),
                   region.base, cells, region, self.globals_of(pe, kernel))
        )  # fmt: skip

    def globals_of(self, pe: int, kernel: Kernel) -> dict[str, int]:
        """Addresses of a module's global and constant variables on a PE."""
        key = (pe, id(kernel))
        found = self.module_globals.get(key)
        if found is None:
            found = self.module_globals[key] = {}
            for var in kernel.program.variables.values():
                if var.space in ("global", "const") and not var.extern:
                    data = np.zeros(max(var.size, 1), np.uint8)
                    data[: len(var.init)] = np.frombuffer(var.init, np.uint8)
                    region = self.memory.add(data, var.name, pe)
                    found[var.name] = region.base
                    if self.detector is not None:
                        self.detector.region_added(region, True)
        return found

    # -- running -----------------------------------------------------------------------------
    def run(self, raise_on_finding: bool = False) -> Report:
        """Run all queued launches to their end and return the counters.

        Raises :class:`Deadlock`, :class:`MemoryFault` and others of their family with the report
        of the run so far in ``.report``. ``raise_on_finding``: :class:`FindingError` if the race
        detector found something.
        """
        self.reset_run()
        started = time.perf_counter()
        if self.detector is not None:
            self.detector.run_started()
        try:
            for launch in self.launches:
                self.queued_ctas.extend(clusters_of(launch))
            self.start_ctas()
            with np.errstate(all="ignore"):
                self.loop()
                self.drain()
        except VgpuError as e:
            e.report = collect(self, time.perf_counter() - started)
            e.report.text = str(e)
            raise
        finally:
            report = collect(self, time.perf_counter() - started)
            for launch in self.launches:
                self.memory.remove(launch.region)
            self.launches = []
            self.runs += 1
            if self.detector is not None:
                self.detector.run_ended()
        if raise_on_finding and report.findings:
            error = FindingError("\n".join(str(f) for f in report.findings))
            error.report = report
            raise error
        return report

    def start_ctas(self) -> None:
        """Start queued clusters for which there is room."""
        used = [[0, 0, 0] for _ in range(self.pes)]
        for cta in self.live_ctas:
            used[cta.pe][0] += 1
        left: deque[Cluster] = deque()
        blocked: set[int] = set()
        for cluster in self.queued_ctas:
            launch = cluster.launch
            room = self.sms * launch.ctas_per_sm
            if launch.pe in blocked or used[launch.pe][0] + cluster.size > room:
                blocked.add(launch.pe)
                left.append(cluster)
                continue
            base = used[launch.pe][0]
            used[launch.pe][0] += cluster.size
            for cta in cluster.start(self, base):
                self.live_ctas.append(cta)
                for w in cta.warps:
                    self.all_warps.append(w)
                    self.scheduler.add(w)
            if self.detector is not None:
                self.detector.cluster_started(cluster)
        self.queued_ctas = left

    def loop(self) -> None:
        """Run until every CTA has ended."""
        scheduler = self.scheduler
        randomly = self.completion == "random"
        seen, idle_turns = -1, 0
        while self.live_ctas:
            if randomly and self.pending and self.random.random() < 0.25:
                self.complete_one(self.random.randrange(len(self.pending)))
            turn = scheduler.next()
            if turn is not None:
                self.turn(*turn)
                if self.progress != seen:
                    seen, idle_turns = self.progress, 0
                    continue
                idle_turns += 1
                if idle_turns & 0xFFF == 0:
                    self.nudge()
                continue
            before = self.progress
            for w in scheduler.take_spinners():
                self.turn(w, 64)
            if self.progress != before:
                continue
            if not scheduler.ready:
                self.stuck()
            elif self.pending:  # starved warps wait for what is under way, too
                self.complete_one(0)

    def nudge(self) -> None:
        """Many turns without any effect: somebody may be counting while he waits for a copy."""
        if self.pending:
            self.complete_one(0)
        elif self.progress != self.watched_progress:
            self.watched_progress, self.watched_tick = self.progress, self.ticks
        elif self.ticks - self.watched_tick > self.stall_instructions:
            raise Deadlock(
                deadlock_text(self, f"{self.stall_instructions} instructions without any effect")
            )

    def turn(self, w: Warp, quantum: int) -> None:
        """One quantum of a warp."""
        start = self.ticks
        before = w.icount
        w.run(quantum)
        self.ticks = start + w.icount - before
        self.now += _TICK_NS
        if w.groups and w.runnable():
            self.scheduler.add(w)
            if w.spinning:
                self.note(w, "poll", start)
            else:
                self.note(w, "run", start)
        else:
            self.note(w, "run", start)
            self.note(w, "", self.ticks)

    def note(self, w: Warp, kind: str, at: int) -> None:
        """Extend or start an activity interval."""
        spans = w.intervals
        if not kind:
            w.idle_since = at
            return
        if spans and spans[-1][2] == kind and w.idle_since is None:
            spans[-1] = (spans[-1][0], self.ticks, kind)
        else:
            spans.append((at, self.ticks, kind))
        w.idle_since = None

    def wake(self, g: Group) -> None:
        """A suspended group can look again."""
        if g.dead or g.waiting is None:
            return
        g.waiting = None
        if g.timed:
            g.timed = False
            self.timed.pop(g, None)
        g.warp.spinning = False
        self.scheduler.add(g.warp)

    def stuck(self) -> None:
        """Nothing can go on: complete asynchronous work, else let time pass, else give up."""
        if self.pending:
            pick = 0 if self.completion == "late" else self.random.randrange(len(self.pending))
            self.complete_one(pick)
            return
        if not self.timed and not self.scheduler.spinners:
            raise Deadlock(deadlock_text(self, "every warp waits"))
        if self.progress != self.stuck_progress:
            self.stuck_progress, self.idle_rounds, self.idle_start = self.progress, 0, self.now
        self.idle_rounds += 1
        self.now += 1000 << max(0, self.idle_rounds - _SLOW_ROUNDS)
        if self.now - self.idle_start > self.stuck_ns:
            raise Deadlock(deadlock_text(self, "only fruitless polls and waits are left"))
        for g in list(self.timed):
            waiters = g.waiting.waiters
            if g in waiters:
                waiters.remove(g)
            g.timed_out = True
            self.wake(g)
            g.warp.spinning = True

    def complete_one(self, index: int) -> None:
        """Complete one pending asynchronous operation."""
        self.pending.rotate(-index)
        op = self.pending.popleft()
        self.pending.rotate(index)
        op.complete()

    def submit(self, op: asyncops.AsyncOp) -> None:
        """Queue an asynchronous operation."""
        asyncops.submit(self, op)

    def wgmma_now(self) -> bool:
        """Whether a committed wgmma group executes at once."""
        if self.completion == "random":
            return self.random.random() < 0.5
        return self.completion == "eager"

    def count_async(self, ins: Instruction, nbytes: int) -> None:
        """Count an asynchronous operation by its opcode without hints."""
        entry = self.async_counts.setdefault(ins.opcode, [0, 0])
        entry[0] += 1
        entry[1] += nbytes

    def lanes_left(self, w: Warp, g: Group) -> None:
        """Lanes exited: barriers may be complete, the CTA may be over."""
        self.progress += 1
        cta = w.cta
        if cta.check_exit(w):
            if self.completion != "eager":
                self.drain_cta(cta)
            if cta.finished():
                for c in cta.cluster.ctas:
                    self.live_ctas.remove(c)
                    if self.detector is not None:
                        self.detector.cta_ended(c)
                if self.queued_ctas:
                    self.start_ctas()

    def drain_cta(self, cta: Cta) -> None:
        """A kernel's end completes what its threads have issued."""
        for op in [op for op in self.pending if op.warp.cta is cta]:
            self.pending.remove(op)
            op.complete()

    def drain(self) -> None:
        """Complete whatever is left."""
        while self.pending:
            self.complete_one(0)


def _pointer(array: Any) -> int:
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    return int(array.__array_interface__["data"][0])
