"""Transports over stand-ins of the packages, whose signatures are the installed packages' own
(CASES X1, X11, X14, X15, X17, X18, X19)."""

from __future__ import annotations

import inspect
import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from thread_group import run_ranks

from megamoe.runtime.errors import MegaMoEError, SymmetricMemoryError, TransportError
from megamoe.runtime.group import SoloGroup, agree, fail_alike, group_of
from megamoe.runtime.transports import nvshmem, preflight, torch_symm
from megamoe.runtime.transports.choose import decide, reasons

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class Memory(np.ndarray):
    """A buffer with a handle, as nvshmem4py returns."""

    @property
    def handle(self) -> int:
        return self.ctypes.data


def aligned(nbytes: int) -> Memory:
    raw = np.zeros(nbytes + 256, dtype=np.uint8)
    skip = -raw.ctypes.data % 256
    return raw[skip : skip + nbytes].view(Memory)


class FakeCore:
    """``nvshmem.core`` of one rank. Every call's arguments are bound to the real signature."""

    InitStatus = SimpleNamespace(STATUS_IS_INITIALIZED=2)

    def __init__(self, world: dict[str, Any], rank: int, **faults: Any):
        import nvshmem.core

        self.real, self.world, self.rank, self.faults = nvshmem.core, world, rank, faults
        self.calls: list[str] = []
        self.status = faults.get("status", 0)
        self.pes = faults.get("pes", 0)
        self.pe = faults.get("pe", rank)

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or not inspect.ismethod(found):
            return found
        signature = inspect.signature(getattr(self.real, name))

        def call(*arguments: Any, **named: Any) -> Any:
            signature.bind(*arguments, **named)
            self.calls.append(name)
            if name in self.faults:
                raise RuntimeError(self.faults[name])
            return found(*arguments, **named)

        return call

    def get_version(self) -> str:
        return "fake"

    def init_status(self) -> int:
        return self.status

    def get_unique_id(self, empty: bool = False) -> Any:
        return None if empty else "uid"

    def init(self, device, uid, rank, nranks, initializer_method):
        assert (uid, initializer_method, device) == ("uid", "uid", "device 0")
        self.status, self.pe, self.pes = 2, rank, nranks

    def my_pe(self) -> int:
        return self.pe

    def n_pes(self) -> int:
        return self.pes

    def buffer(self, size: int, except_on_del: bool = True) -> Memory:
        assert except_on_del is False
        memory = aligned(size)
        self.world.setdefault("heaps", {}).setdefault(self.pe, []).append(memory)
        return memory

    def get_peer_buffer(self, buffer: Memory, pe: int) -> Memory:
        assert pe != self.pe, "asking for the own PE would leak the block"
        heaps = self.world["heaps"]
        number = [m.handle for m in heaps[self.pe]].index(buffer.handle)
        if (self.pe, pe) in self.faults.get("unreachable", ()):
            raise RuntimeError("Failed to retrieve peer buffer")
        return heaps[pe][number]

    def free(self, buffer: Memory) -> None:
        self.world["freed"] = self.world.get("freed", 0) + 1

    def finalize(self) -> None:
        self.status = 0


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(nvshmem, "_owned", [])
    monkeypatch.setattr(nvshmem, "_live_blocks", 0)
    monkeypatch.setattr(nvshmem, "free_bytes", lambda device: 10**9)
    monkeypatch.setattr(torch_symm, "free_bytes", lambda device: 10**9)
    monkeypatch.delenv(nvshmem.REMOTE, raising=False)
    yield
    os.environ.pop(nvshmem.REMOTE, None)


def nvshmem_ranks(size: int, body: Any, faults: Any = lambda rank: {}) -> tuple[list, list, dict]:
    world: dict[str, Any] = {}
    cores = [FakeCore(world, rank, **faults(rank)) for rank in range(size)]

    def main(group):
        transport = nvshmem.NvshmemTransport(
            group, GPU, core=cores[group.rank], make_device=lambda index: f"device {index}"
        )
        return body(transport, group)

    return run_ranks(size, main), cores, world


def all_same_error(results: list[Any], kind: type[Exception], *texts: str) -> None:
    assert all(isinstance(result, kind) for result in results), results
    assert len({str(result) for result in results}) == 1
    for text in texts:
        assert text in str(results[0]), results[0]


def test_nvshmem_addresses_are_the_peers_blocks():
    def body(transport, group):
        first, second = transport.allocate(1024), transport.allocate(2048)
        return first, second

    results, cores, world = nvshmem_ranks(3, body)
    for number in (0, 1):
        blocks = [result[number] for result in results]
        handles = tuple(heap[number].handle for _, heap in sorted(world["heaps"].items()))
        assert all(block.peers == handles for block in blocks)
        for rank, block in enumerate(blocks):
            assert block.allocation.address == handles[rank] == block.allocation.bytes_N.data_ptr()
    assert [core.calls.count("init") for core in cores] == [1, 1, 1]
    assert os.environ[nvshmem.REMOTE] == "none"  # one node, no network asked for


def test_a_running_nvshmem_is_adopted_with_its_own_numbering():
    """X11: group rank and PE number differ; X18: nobody initialises twice."""
    results, cores, world = nvshmem_ranks(
        2, lambda t, g: t.allocate(256), lambda rank: {"status": 2, "pes": 2, "pe": 1 - rank}
    )
    heap = world["heaps"]
    assert results[0].peers == (heap[1][0].handle, heap[0][0].handle)
    assert all("init" not in core.calls for core in cores)
    assert nvshmem._owned == []


def test_ten_sessions_share_one_runtime_and_make_no_team():
    cores = [FakeCore({}, 0)]

    def main(group):
        blocks = []
        for _ in range(10):
            transport = nvshmem.NvshmemTransport(
                group, GPU, core=cores[0], make_device=lambda index: f"device {index}"
            )
            blocks.append((transport, transport.allocate(512)))
        with pytest.raises(TransportError, match="10 sessions still use"):
            nvshmem.shutdown()
        for transport, block in blocks:
            transport.free(block)
            transport.free(block)
            transport.close()
        nvshmem.shutdown()
        nvshmem.shutdown()

    assert run_ranks(1, main) == [None]
    calls = cores[0].calls
    assert (calls.count("init"), calls.count("finalize"), calls.count("free")) == (1, 1, 10)
    assert not any("team" in name for name in calls)


def test_nvshmem_over_another_world_is_refused_alike():
    results, _, _ = nvshmem_ranks(2, lambda t, g: None, lambda rank: {"status": 2, "pes": 4})
    all_same_error(results, TransportError, "over 4 PEs on rank 0, the group has 2", "'torch'")
    results, _, _ = nvshmem_ranks(2, lambda t, g: None, lambda rank: {"status": 2 * rank, "pes": 2})
    all_same_error(results, TransportError, "initialised on rank 1 but not on rank 0")


@pytest.mark.parametrize("call", ["get_version", "get_unique_id", "init"])
def test_a_bootstrap_that_fails_on_one_rank_fails_on_all(call):
    results, _, _ = nvshmem_ranks(
        3, lambda t, g: None, lambda rank: {call: "no interface"} if rank == 0 else {}
    )
    all_same_error(results, TransportError, "rank 0", "no interface")
    if call != "get_version":
        assert "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=" in str(results[0])


def test_an_unreachable_pair_is_named_and_the_memory_given_back():
    results, _, world = nvshmem_ranks(
        3, lambda t, g: t.allocate(256), lambda rank: {"unreachable": {(2, 0)}}
    )
    all_same_error(results, TransportError, "2 → 0", "NVLink domain")
    assert world["freed"] == 3


def test_too_little_memory_on_one_rank_is_the_same_error_everywhere(monkeypatch):
    names = iter(range(100))
    monkeypatch.setattr(nvshmem, "free_bytes", lambda device: 100 if next(names) == 0 else 10**9)
    results, cores, _ = nvshmem_ranks(3, lambda t, g: t.allocate(120))
    all_same_error(results, SymmetricMemoryError, "asked for 120 bytes, 100 are free", "max_tokens")
    assert all("buffer" not in core.calls for core in cores)


def test_an_allocator_that_fails_on_one_rank_fails_on_all():
    results, _, _ = nvshmem_ranks(
        2, lambda t, g: t.allocate(512), lambda rank: {"buffer": "heap full"} if rank else {}
    )
    all_same_error(results, SymmetricMemoryError, "rank 1 asked for 512", "heap full", "capacity")


def test_different_sizes_are_refused_before_anything_is_allocated():
    results, cores, _ = nvshmem_ranks(2, lambda t, g: t.allocate(256 * (1 + g.rank)))
    all_same_error(results, TransportError, "rank 0 asks for 256 bytes, rank 1 for 512")
    assert all("buffer" not in core.calls for core in cores)


# --- torch symmetric memory ---------------------------------------------------------------------


class FakeSymm:
    """``torch.distributed._symmetric_memory`` of ranks that are threads."""

    def __init__(self, size: int, offset: int = 0, fault: str = ""):
        import torch.distributed._symmetric_memory as real

        self.real, self.size, self.offset, self.fault = real, size, offset, fault
        self.tensors: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(size)

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        inspect.signature(self.real.empty).bind(*size, dtype=dtype, device=device)
        assert device == GPU
        return torch.from_numpy(aligned(*size).view(np.ndarray))

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Any:
        inspect.signature(self.real.rendezvous).bind(tensor, group)
        rank = group.rank
        self.tensors[rank] = tensor
        self.barrier.wait(10)
        if self.fault == "raise" and rank == 1:
            raise RuntimeError("handle export failed")
        pointers = [self.tensors[r].data_ptr() - self.offset for r in range(self.size)]
        if self.fault == "null":
            pointers[1 - rank] = 0
        return SimpleNamespace(
            rank=0 if self.fault == "rank" else rank,
            buffer_ptrs=pointers,
            real=self.real._SymmetricMemory.buffer_ptrs,
        )


def torch_ranks(size: int, **options: Any) -> tuple[list[Any], FakeSymm]:
    symm = FakeSymm(size, **options)

    def main(group):
        group.process_group = group
        transport = torch_symm.TorchTransport(group, GPU, symm=symm)
        block = transport.allocate(4096)
        transport.free(block)
        transport.free(block)
        transport.close()
        return block

    return run_ranks(size, main), symm


@pytest.mark.parametrize("offset", [0, 512])
def test_torch_addresses_are_the_peers_blocks(offset):
    results, symm = torch_ranks(3, offset=offset)
    expected = tuple(symm.tensors[rank].data_ptr() for rank in range(3))
    for rank, block in enumerate(results):
        assert block.peers == expected and block.allocation.address == expected[rank]


def test_torch_failures_reach_every_rank():
    results, _ = torch_ranks(2, fault="raise")
    assert all(isinstance(result, MegaMoEError) for result in results)
    assert all("handle export failed" in str(result) for result in results)
    results, _ = torch_ranks(2, fault="null")
    all_same_error(results, TransportError, "0 → 1", "1 → 0")
    results, _ = torch_ranks(2, fault="rank")
    assert all(isinstance(result, MegaMoEError) for result in results)


# --- choice and agreement -----------------------------------------------------------------------

FINE = {"local": "the group has 2 processes", "nvshmem": None, "torch": None}


def test_the_choice_is_the_first_that_works_on_every_rank():
    assert decide("auto", [FINE, FINE]) == (
        "nvshmem",
        "transport nvshmem for 2 PEs; not local: rank 0: the group has 2 processes; "
        "not torch: nvshmem comes first",
    )
    lacking = FINE | {"nvshmem": "nvshmem4py is not installed"}
    chosen, line = decide("auto", [FINE, lacking])
    assert chosen == "torch" and "not nvshmem: rank 1: nvshmem4py is not installed" in line
    assert decide("torch", [FINE, FINE])[0] == "torch"
    with pytest.raises(TransportError, match=r"'nvshmem': no transport .*rank 1: nvshmem4py"):
        decide("nvshmem", [FINE, lacking])
    with pytest.raises(ValueError, match="transport='mpi': must be one of 'auto', 'local'"):
        decide("mpi", [FINE])


def test_reasons_without_a_gpu_or_a_package(monkeypatch):
    assert reasons(SoloGroup(), CPU)["local"] is None
    assert "not a GPU" in str(reasons(SoloGroup(), CPU)["nvshmem"])
    assert "not initialised" in str(reasons(SoloGroup(), GPU)["torch"])
    monkeypatch.setattr(nvshmem.importlib.util, "find_spec", lambda name: None)
    assert "megamoe[nvshmem]" in str(reasons(SoloGroup(), GPU)["nvshmem"])


def test_ranks_must_agree():
    def body(group):
        agree(group, {"hidden": 64, "max_tokens": 64 if group.rank < 2 else 128})

    all_same_error(run_ranks(3, body), ValueError, "max_tokens: rank 0 has 64, rank 2 has 128")
    assert run_ranks(3, lambda group: agree(group, {"hidden": 64})) == [None] * 3


def test_one_ranks_error_is_everybodys():
    def body(group):
        fail_alike(group, "compiling", ValueError("bad") if group.rank == 1 else None)

    first, own, third = run_ranks(3, body)
    assert isinstance(own, ValueError) and str(own) == "bad"
    for other in (first, third):
        assert isinstance(other, MegaMoEError)
        assert str(other) == "compiling failed on rank 1: ValueError: bad"


def test_two_ranks_on_one_gpu_are_named():
    def body(group):
        preflight.check_one_gpu_a_rank(group, ("host", "GPU-1" if group.rank else "GPU-0"))

    assert run_ranks(2, body) == [None] * 2
    all_same_error(run_ranks(3, body), TransportError, "ranks 1 and 2 use the same GPU (GPU-1")


def test_groups_need_torch_distributed_only_for_several_pes():
    assert isinstance(group_of(None, num_pes=1), SoloGroup)
    with pytest.raises(MegaMoEError, match="init_process_group"):
        group_of(None, num_pes=2)
