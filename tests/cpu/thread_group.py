"""Ranks as threads: each gets its own group object, and a failing rank does not hang the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ThreadGroup:
    """One rank of ``size`` threads (see ``megamoe.runtime.group.Group``)."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]):
        self.rank, self.size, self._shared = rank, size, shared

    def gather(self, what: str, value: Any) -> list[Any]:
        slots = self._shared["slots"]
        slots[self.rank] = (what, value)
        self._shared["barrier"].wait(timeout=10)
        found = list(slots)
        self._shared["barrier"].wait(timeout=10)
        assert {name for name, _ in found} == {what}, "ranks gather different things"
        return [each for _, each in found]


def run_ranks(size: int, body: Callable[[ThreadGroup], Any]) -> list[Any]:
    """``body(group)`` on every rank; results, or the exception a rank ended with."""
    shared = {"slots": [None] * size, "barrier": threading.Barrier(size)}
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        try:
            results[rank] = body(ThreadGroup(rank, size, shared))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "a rank hangs"
    return results
