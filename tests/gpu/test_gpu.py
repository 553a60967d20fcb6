"""The shipped kernel on a real GPU (marker ``gpu``; see also ``perf/gpu_check.sh``)."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "perf"))

import gpu_cases
import gpu_steps

from megamoe import MegaMoE, MegaMoEError, Session

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pes", gpu_cases.PES)
@pytest.mark.parametrize("case", gpu_cases.CASES, ids=lambda case: case.name)
def test_case(backend, case, pes):
    call = case.call(pes)
    layer = gpu_steps.layer_for(backend, call)
    moved = call.to(backend.memory)
    y = layer.forward(
        x=moved.x,
        topk_ids=moved.topk_ids,
        topk_weights=moved.topk_weights,
        in_place=case.in_place,
    )
    gpu_steps.judge(backend, case, call, y)
    layer.close()


@pytest.mark.parametrize("step", [gpu_steps.soak, gpu_steps.graph], ids=lambda step: step.__name__)
def test_step(backend, step):
    step(backend, {})


def test_a_first_call_inside_a_capture_is_refused_and_the_capture_survives(backend):
    call = gpu_cases.SMALL.call(1, seed=2)
    where = backend.memory
    session = Session(call.cfg, cache=backend.images, timeout_s=20)
    layer = MegaMoE(call.cfg, call.w13.to(where), call.w2.to(where), session=session)
    moved = call.to(where)
    given = (moved.x[0], moved.topk_ids[0], moved.topk_weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        with pytest.raises(MegaMoEError, match="warm up first"):
            layer(*given)
    with torch.inference_mode():
        y = layer(*given)
    session.check()
    gpu_steps.judge(backend, gpu_cases.SMALL, call, [y])


def test_results_do_not_depend_on_the_stream_or_the_number_of_sms(backend):
    call = gpu_cases.SMALL.call(1, seed=2)
    moved, where, found = call.to(backend.memory), backend.memory, []
    for num_sms in (*gpu_cases.FEW_SMS, None):
        with Session(call.cfg, cache=backend.images, num_sms=num_sms, timeout_s=20) as session:
            layer = MegaMoE(call.cfg, call.w13.to(where), call.w2.to(where), session=session)
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                y = layer(moved.x[0], moved.topk_ids[0], moved.topk_weights[0])
                session.check()
            found.append(gpu_cases.digest([y]))
    assert len(set(found)) == 1


def test_a_missing_pe_is_named_in_time(backend):
    call = gpu_cases.SMALL.call(2, seed=2)
    layer = gpu_steps.layer_for(backend, call)
    session = layer.group.sessions[0]
    moved = call.to(backend.memory)
    session._fixed["timeout_ns"] = 10**8
    out = torch.empty_like(moved.x[0])
    backend.synchronize()
    layer.enqueue(
        0,
        x=moved.x[0],
        topk_ids=moved.topk_ids[0],
        topk_weights=moved.topk_weights[0],
        out=out,
    )
    backend.synchronize()
    with pytest.raises(MegaMoEError, match="route of the peer 1"):
        session.raise_on_status()
