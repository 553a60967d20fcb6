"""Vector clocks of the race detector: who knows what, lane by lane, proxy by proxy.

Every thread (lane of a warp) and every asynchronous source of writes or reads is an *agent* and
owns a column of all clocks. An access is stamped with its agent and the agent's time; somebody is
ordered after it if its clock shows at least that time in that column.

A clock has three rows. ``GENERIC`` is causality order itself. The others say what a proxy fence has
made visible to asynchronous accesses of global and of shared memory, for the cluster that owns the
clock; they are never ahead of ``GENERIC`` except for an agent's own column.

Lanes of a warp share one clock until they learn different things: a warp holds *parts*, disjoint
sets of lanes with their clock. Clock arrays are never written after they are shared.

Agents of asynchronous work are chosen so that knowledge is prefix-closed: an mbarrier (time = its
phase), the bulk or cp.async groups of a lane (time = number of the operation; reads and writes
apart), a warpgroup (time = wgmma group).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

GENERIC, GLOBAL, SHARED, TENSORMAP = range(4)  # TENSORMAP is no row, only a name in reports
ROWS = 3
LANES = 32
ALL = 32  # column and lane code that stand for every lane of a warp
STRIDE = 33
HOST = 0  # column of what the host did before any kernel

Clock = NDArray[np.int32]


@lru_cache(maxsize=4096)
def lane_array(bits: int) -> NDArray[np.int64]:
    """The lane numbers of a bit mask."""
    return np.array([i for i in range(LANES) if bits >> i & 1], np.int64)


def bits_of(lanes: NDArray[np.int64]) -> int:
    """The bit mask of lane numbers."""
    out = 0
    for lane in lanes.tolist():
        out |= 1 << lane
    return out


class Agents:
    """Columns by key, their current times, and the cluster of asynchronous ones."""

    def __init__(self) -> None:
        self.width = 256
        self.count = 1
        self.base: dict[tuple, int] = {("host",): HOST}
        self.key_of: dict[int, tuple] = {HOST: ("host",)}
        self.times: dict[int, int] = {HOST: 1}
        # Cluster of the agent's accesses if they go through the asynchronous proxy, else -1.
        self.cluster = np.full(self.width, -1, np.int32)

    def column(self, key: tuple, n: int = 1, cluster: int = -1) -> int:
        """The first of ``n`` columns of a key; the same key keeps its columns over runs."""
        base = self.base.get(key)
        if base is None:
            base = self.base[key] = self.count
            self.count += n
            self.times[base] = 0
            self.key_of[base] = key
            while self.count > self.width:
                self.width *= 2
            if len(self.cluster) < self.width:
                wider = np.full(self.width, -1, np.int32)
                wider[: len(self.cluster)] = self.cluster
                self.cluster = wider
        if cluster >= 0:
            self.cluster[base : base + n] = cluster
        return base

    def key(self, column: int) -> tuple:
        """The key of the agent that owns a column."""
        while column not in self.key_of:
            column -= 1
        return self.key_of[column]

    def empty(self) -> Clock:
        """A clock that knows nothing."""
        return np.zeros((ROWS, self.width), np.int32)

    def fit(self, clock: Clock) -> Clock:
        """The clock with all present columns."""
        if clock.shape[1] == self.width:
            return clock
        out = self.empty()
        out[:, : clock.shape[1]] = clock
        return out

    def joined(self, a: Clock, b: Clock) -> Clock:
        """A new clock that knows what either knows."""
        return np.maximum(self.fit(a), self.fit(b))


class WarpClock:
    """Clocks of one warp's lanes.

    ``time`` is the current time of all its lanes; it advances after every release, so that later
    accesses are not covered by what was released.
    """

    __slots__ = ("agents", "base", "fences", "full", "parts", "pending", "time")

    def __init__(self, agents: Agents, base: int, full: int, clock: Clock) -> None:
        self.agents, self.base, self.full = agents, base, full
        self.parts: list[tuple[int, Clock]] = [(full, clock)]
        self.time = agents.times[base] + 1
        # (bits, scope, clock) of release fences; (word, bits) → acquire patterns not yet fenced.
        self.fences: list[tuple[int, str, Clock]] = []
        self.pending: dict[tuple, tuple] = {}

    def lookup(self, bits: int) -> list[tuple[int, Clock]]:
        """Clocks of these lanes: (lanes, clock) with disjoint lanes."""
        width = self.agents.width
        parts = self.parts
        if len(parts) == 1:
            clock = parts[0][1]
            if clock.shape[1] != width:
                clock = self.agents.fit(clock)
                parts[0] = (parts[0][0], clock)
            return [(bits, clock)]
        return [(b & bits, self.agents.fit(c)) for b, c in parts if b & bits]

    def weakest(self, bits: int) -> Clock:
        """What every one of these lanes knows."""
        found = self.lookup(bits)
        out = found[0][1]
        for _, clock in found[1:]:
            out = np.minimum(out, clock)
        return out

    def _mark(self, row: NDArray[np.int32], bits: int) -> None:
        base = self.base
        if bits == self.full:
            row[base : base + STRIDE] = self.time
        else:
            row[base + lane_array(bits)] = self.time
            row[base + ALL] = row[base : base + LANES].min()

    def publish(self, bits: int) -> Clock:
        """What a release by these lanes makes known; their later accesses are not part of it."""
        found = self.lookup(bits)
        out = found[0][1].copy()
        for _, clock in found[1:]:
            np.maximum(out, clock, out=out)
        self._mark(out[GENERIC], bits)
        self.time += 1
        return out

    def learn(self, bits: int, clock: Clock, same_cluster: bool = True) -> None:
        """An acquire by these lanes. Proxy fences of another cluster serve that cluster only."""
        if not same_cluster:
            clock = clock.copy()
            clock[GLOBAL:] = 0
        parts: list[tuple[int, Clock]] = []
        for b, c in self.parts:
            hit = b & bits
            if hit != b:
                parts.append((b & ~bits, c))
            if hit:
                parts.append((hit, self.agents.joined(c, clock)))
        self.parts = parts

    def column(self, bits: int, column: int, time: int) -> None:
        """These lanes learn that an agent is done up to a time."""
        parts: list[tuple[int, Clock]] = []
        for b, c in self.parts:
            hit = b & bits
            c = self.agents.fit(c)
            if not hit or c[GENERIC, column] >= time:
                parts.append((b, c))
                continue
            if hit != b:
                parts.append((b & ~bits, c))
            c = c.copy()
            c[GENERIC, column] = time
            parts.append((hit, c))
        self.parts = parts

    def unify(self, bits: int, clock: Clock) -> None:
        """These lanes all come to know the same: ``clock`` and what any of them knew."""
        rest = [(b & ~bits, c) for b, c in self.parts if b & ~bits]
        for _, c in self.lookup(bits):
            clock = self.agents.joined(clock, c)
        self.parts = [*rest, (bits, clock)]

    def sync(self, bits: int) -> None:
        """bar.warp.sync."""
        clock = self.publish(bits)
        self.parts = [*((b & ~bits, c) for b, c in self.parts if b & ~bits), (bits, clock)]

    def proxy_fence(self, bits: int, rows: tuple[int, ...]) -> None:
        """A proxy fence: what these lanes know and did becomes visible to other proxies."""
        parts: list[tuple[int, Clock]] = []
        for b, c in self.parts:
            hit = b & bits
            if hit != b:
                parts.append((b & ~bits, c))
            if hit:
                out = self.agents.fit(c).copy()
                for row in rows:
                    np.maximum(out[row], out[GENERIC], out=out[row])
                    self._mark(out[row], hit)
                parts.append((hit, out))
        self.parts = parts
        self.time += 1
