"""CTAs and clusters: shared memory, barriers, warps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.barriers import ClusterBarrier, MBarrier, NamedBarrier, RegisterPool
from megamoe.runtime.vgpu.errors import MemoryFault
from megamoe.runtime.vgpu.memory import Region
from megamoe.runtime.vgpu.program import SMEM_START
from megamoe.runtime.vgpu.ptx_ast import Instruction
from megamoe.runtime.vgpu.warp import Warp
from megamoe.runtime.vgpu.warpgroup import Warpgroup

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.launch import Launch
    from megamoe.runtime.vgpu.world import World

REGISTERS = 65536


class Cluster:
    """CTAs that start together and can reach each other's shared memory."""

    def __init__(self, launch: Launch, first: tuple[int, int, int]) -> None:
        self.launch, self.first = launch, first
        cx, cy, cz = launch.cluster
        self.size = cx * cy * cz
        self.barrier = ClusterBarrier()
        self.ctas: list[Cta] = []
        self.uid = 0  # of a detector

    def start(self, world: World, sm: int) -> list[Cta]:
        """Make the CTAs."""
        cx, cy, cz = self.launch.cluster
        x0, y0, z0 = self.first
        gx, gy, _ = self.launch.grid
        offsets = [(x, y, z) for z in range(cz) for y in range(cy) for x in range(cx)]
        for rank, (x, y, z) in enumerate(offsets):
            index = (x0 + x, y0 + y, z0 + z)
            number = index[0] + gx * (index[1] + gy * index[2])
            self.ctas.append(Cta(world, self, index, number, rank, (sm + rank) % world.sms))
        self.barrier.ctas = self.ctas
        for cta in self.ctas:
            cta.make_warps()
        return self.ctas


def clusters_of(launch: Launch) -> list[Cluster]:
    """The CTAs of a launch, grouped in clusters, in launch order."""
    cx, cy, cz = launch.cluster
    gx, gy, gz = (g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
    return [
        Cluster(launch, (x * cx, y * cy, z * cz))
        for z in range(gz) for y in range(gy) for x in range(gx)
    ]  # fmt: skip


class Cta:
    """One thread block."""

    def __init__(
        self, world: World, cluster: Cluster, index: tuple[int, int, int], number: int,
        rank: int, sm: int,
    ) -> None:  # fmt: skip
        self.world, self.cluster, self.launch = world, cluster, cluster.launch
        self.pe, self.index, self.number, self.rank, self.sm = (
            self.launch.pe, index, number, rank, sm,
        )  # fmt: skip
        program = self.launch.kernel.program
        self.smem_base = rank << 24
        # Sixteen bytes more than asked for at most, so that wide views reach every byte; the
        # region ends where the launch said.
        size = program.smem_dynamic + self.launch.smem
        self.smem = np.full(-(-size // 1024) * 1024, 0xFF, np.uint8)
        self.smem_size = size
        self.region = Region(
            self.smem_base + SMEM_START, self.smem[SMEM_START:size], "smem", self.pe, "shared"
        )
        self.mbarriers: dict[int, MBarrier] = {}
        self.barriers = [NamedBarrier(i) for i in range(16)]
        self.warps: list[Warp] = []
        self.warpgroups: dict[int, Warpgroup] = {}
        bx, by, bz = self.launch.block
        self.threads = bx * by * bz
        self.pool = RegisterPool(REGISTERS, self.launch.registers, -(-self.threads // 32))

    def make_warps(self) -> None:
        """Create the warps once the whole cluster exists."""
        program = self.launch.kernel.program
        for i in range(-(-self.threads // 32)):
            lanes = min(32, self.threads - 32 * i)
            w = Warp(self, i, (1 << lanes) - 1, program)
            w.role = self.launch.roles.get(i, "")
            self.warps.append(w)

    def peer(self, rank: int) -> Cta | None:
        """The CTA of a rank in the cluster."""
        ctas = self.cluster.ctas
        return ctas[rank] if rank < len(ctas) else None

    def shared_region(self, address: int) -> Region | None:
        """The region of a shared-window address."""
        if address >> 24 == self.rank:
            return self.region
        cta = self.peer(address >> 24)
        return None if cta is None else cta.region

    def shared_check(self, w: Any, ins: Instruction, address: int, nbytes: int) -> None:
        """Refuse a range outside this CTA's shared memory."""
        off = address - self.region.base
        if not 0 <= off <= self.region.end - self.region.base - nbytes:
            raise MemoryFault(
                f"{w.place()}: {ins.opcode} at {address:#x}: {self.describe_shared(address)}"
                f" ({w.source(ins)})"
            )

    def describe_shared(self, address: int) -> str:
        """What a shared address is, in words."""
        rank, off = address >> 24, address & 0xFFFFFF
        cta = self.peer(rank)
        if cta is None:
            return f"smem+{off:#x} of rank {rank}, the cluster has {len(self.cluster.ctas)} CTAs"
        text = f"smem+{off:#x}" + (f" of rank {rank}" if rank != self.rank else "")
        if off >= cta.smem_size:
            return f"{text}, {off - cta.smem_size} bytes past the end ({cta.smem_size} bytes)"
        return text + (", below the first variable" if off < SMEM_START else "")

    def warpgroup(self, w: Warp) -> Warpgroup:
        """The warpgroup of a warp."""
        index = w.index // 4
        found = self.warpgroups.get(index)
        if found is None:
            found = self.warpgroups[index] = Warpgroup(self)
        return found

    def alive_threads(self) -> int:
        """Threads that have not exited."""
        return sum(w.alive.bit_count() for w in self.warps)

    def check_exit(self, w: Warp) -> bool:
        """After lanes left: complete barriers that waited for them; True if the CTA is done."""
        for bar in self.barriers:
            if bar.arrived and bar.expected is None:
                bar.check(self, self.world)
        self.cluster.barrier.check(self.world)
        # Registers of a warp that left do not come back to the pool before the CTA ends.
        return not any(x.alive for x in self.warps)

    def finished(self) -> bool:
        """True if every CTA of the cluster has ended (their memory is reachable until then)."""
        return not any(x.alive for c in self.cluster.ctas for x in c.warps)
