"""PE sessions whose ``cuda`` device records instead of driving a GPU."""

from __future__ import annotations

from typing import Any

import torch
from cache_helpers import problem

from megamoe.cute_kernels.abi import PARAMETERS
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.wgrad_tables import WgradConfig
from megamoe.cute_kernels.workspace import symmetric_block
from megamoe.runtime.devices.cuda import CudaDevice
from megamoe.runtime.devices.driver import Driver
from megamoe.runtime.devices.recording import WGRAD_ENTRY, RecordingApi, stub_image
from megamoe.runtime.session import PeSession
from megamoe.runtime.transports.local import allocate_symmetric

CPU = torch.device("cpu")
STREAM = 0x77


def recording_api(**options: Any) -> RecordingApi:
    def sizes(entry: str) -> tuple[int, ...]:
        return tuple(parameter.nbytes for parameter in stub_image(entry=entry).parameters)

    options.setdefault("entry_bytes", {WGRAD_ENTRY: sizes(WGRAD_ENTRY)})
    return RecordingApi(parameter_bytes=sizes("megamoe_forward"), **options)


def stub_compile(*, problem: Problem, config: Any, arch: str) -> Image:
    """A stub whose entry names the kernel."""
    entry = WGRAD_ENTRY if isinstance(config, WgradConfig) else f"megamoe_{problem.mode}"
    return stub_image(entry=entry, arch=arch)


def device(api: RecordingApi, index: int = 0, **options: Any) -> CudaDevice:
    options.setdefault("stream", lambda: STREAM)
    return CudaDevice(index, driver=Driver(api), memory=CPU, **options)


def pe_session(api: RecordingApi, p: Problem | None = None, **options: Any) -> PeSession:
    """PE 0 of a one-PE problem."""
    p = p or problem(num_pes=1, experts_per_pe=8)
    gpu = device(api)
    (block,) = allocate_symmetric([gpu], symmetric_block(p).nbytes)
    settings: dict[str, Any] = {"grid": 132, "image": stub_image()} | options
    return PeSession(
        problem=p,
        device=gpu,
        symmetric=block,
        pe=0,
        replicas=[[(0, expert)] for expert in range(p.num_experts)],
        **settings,
    )


def bind(session: PeSession) -> Any:
    p = session.problem
    experts = session.local_experts
    return session.bind_weights(
        w13=torch.zeros(experts, 2 * p.intermediate, p.hidden, dtype=torch.bfloat16),
        w2=torch.zeros(experts, p.hidden, p.intermediate, dtype=torch.bfloat16),
    )


def arguments(p: Problem, tokens: int, ids_dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    """Arguments of ``PeSession.launch``."""
    return {
        "x_TH": torch.zeros(tokens, p.hidden, dtype=torch.bfloat16),
        "topk_ids_TK": torch.zeros(tokens, p.top_k, dtype=ids_dtype),
        "topk_weights_TK": torch.zeros(tokens, p.top_k),
        "y_TH": torch.zeros(tokens, p.hidden, dtype=torch.bfloat16),
    }


def launched(api: RecordingApi, number: int = -1) -> dict[str, int]:
    """Parameters of a recorded launch by name."""
    values = api.launches[number].parameters
    return {
        name: int.from_bytes(data, "little")
        for (name, _, _), data in zip(PARAMETERS, values, strict=True)
    }
