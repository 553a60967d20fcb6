"""The steps of the GPU check. Each takes the backend and returns what goes into the report."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from baseline import grouped_moe
from gpu_backend import Backend
from gpu_cases import CASES, PES, PROBES, SHAPES, SMALL, Call, Case, Shape, digest
from gpu_probes import row_copies

from megamoe import MegaMoE, Session
from megamoe.error_bound import error_bound
from megamoe.reference import moe_oracle
from megamoe.testing_gpu import OneGpuMoE

SOAK_CALLS = 1000
SOAK_SEEDS = 8
SANITIZER_SECONDS = 75


class CheckFailed(AssertionError):
    """A step's results are wrong."""


def expect(backend: Backend, condition: bool, text: str) -> None:
    """Results of a dry run are not computed, so they are not judged."""
    if not backend.dry and not condition:
        raise CheckFailed(text)


def layer_for(backend: Backend, call: Call) -> OneGpuMoE:
    """The case's layer, its PEs sharing the GPU."""
    w13, w2 = call.per_pe_weights()
    return OneGpuMoE(
        call.cfg,
        w13=[tensor.to(backend.memory).contiguous() for tensor in w13],
        w2=[tensor.to(backend.memory).contiguous() for tensor in w2],
        devices=backend.devices(call.cfg.num_pes),
        synchronize=backend.synchronize,
        cache=backend.images,
    )


def judge(backend: Backend, case: Case, call: Call, y: list[torch.Tensor]) -> dict[str, Any]:
    """Compare with the oracle: every bit on integers, the derived bound otherwise."""
    pes = call.cfg.num_pes
    if backend.dry and pes > 1:
        return {"digest": ""}  # nothing was computed, and once is enough to run the code below
    y = [y_TH.cpu() for y_TH in y]
    if case.exact:
        want = moe_oracle(call.cfg, **call.oracle, rounding="kernel")
        wrong = sum(
            int((a.view(torch.int16) != b.view(torch.int16)).sum())
            for a, b in zip(y, want, strict=True)
        )
        expect(backend, wrong == 0, f"{case.name}, {pes} PEs: {wrong} values differ")
        return {"digest": digest(y), "wrong_values": wrong}
    exact = moe_oracle(call.cfg, **call.oracle)
    bound = error_bound(call.cfg, **call.oracle)
    share = 0.0
    for a, b, limit in zip(y, exact, bound, strict=True):
        if a.numel():
            share = max(share, float(((a.double() - b).abs() / limit).max()))
    expect(backend, share <= 1, f"{case.name}, {pes} PEs: {share:.2f} of the error bound")
    return {"share_of_bound": share}


def correctness(backend: Backend, expected: dict[str, str]) -> dict[str, Any]:
    """12 cases on 1, 2, 4 and 8 PEs; integer cases also against what vgpu computed."""
    results, compared = {}, 0
    for case in CASES:
        for pes in PES:
            call = case.call(pes)
            layer = layer_for(backend, call)
            moved = call.to(backend.memory)
            y = layer.forward(
                x=moved.x,
                topk_ids=moved.topk_ids,
                topk_weights=moved.topk_weights,
                in_place=case.in_place,
            )
            name = f"{case.name}/{pes}"
            results[name] = judge(backend, case, call, y)
            if name in expected:
                compared += 1
                same = results[name]["digest"] == expected[name]
                expect(backend, same, f"{name}: not the bits that vgpu computed")
            layer.close()
    return {"cases": results, "compared_with_vgpu": compared}


def soak(backend: Backend, expected: dict[str, str]) -> dict[str, Any]:
    """Many calls in a row on 4 PEs, each PE delayed at random, T changing; all outputs checked."""
    pes, rng = 4, random.Random(0)
    calls = [SMALL.call(pes, seed=seed) for seed in range(SOAK_SEEDS)]
    layer = layer_for(backend, calls[0])
    # One set of weights, so the answers of the other seeds are computed with it.
    want, moved, out = [], [], []
    for call in calls:
        inputs = call.oracle | {"w13": calls[0].w13, "w2": calls[0].w2}
        want.append(moe_oracle(call.cfg, **inputs, rounding="kernel"))
        moved.append(call.to(backend.memory))
        out.append([torch.full_like(x_TH, float("nan")) for x_TH in moved[-1].x])
    backend.synchronize()
    wrong = 0
    for number in range(SOAK_CALLS):
        which = number % SOAK_SEEDS
        order = list(range(pes))
        rng.shuffle(order)
        for pe in order:
            backend.delay(layer.devices[pe], rng.choice((0, 0, 1_000, 20_000, 200_000)))
            layer.enqueue(
                pe,
                x=moved[which].x[pe],
                topk_ids=moved[which].topk_ids[pe],
                topk_weights=moved[which].topk_weights[pe],
                out=out[which][pe],
            )
        if which == SOAK_SEEDS - 1:
            backend.synchronize()
            for got, right in zip(out, want, strict=True):
                for a, b in zip(got, right, strict=True):
                    same = a.cpu().view(torch.int16) == b.view(torch.int16)
                    wrong += int((~same).sum())
                    a.fill_(float("nan"))
            backend.synchronize()
    for session in layer.group.sessions:
        session.raise_on_status()
    layer.close()
    expect(backend, wrong == 0, f"soak: {wrong} values differ in {SOAK_CALLS} calls")
    return {"calls": SOAK_CALLS, "pes": pes, "wrong_values": wrong}


def graph(backend: Backend, expected: dict[str, str]) -> dict[str, Any]:
    """One captured call, replayed with another T, other ids and other rows each time."""
    call = SMALL.call(1)
    cfg, where = call.cfg, backend.memory
    session = Session(cfg, device=backend.whole_device(), cache=backend.images, timeout_s=20)
    wrong, replays = 0, 20
    with torch.inference_mode():
        layer = MegaMoE(cfg, call.w13.to(where), call.w2.to(where), session=session)
        x = torch.zeros(cfg.max_tokens, cfg.hidden, dtype=torch.bfloat16, device=where)
        ids = torch.zeros(cfg.max_tokens, cfg.top_k, dtype=torch.int32, device=where)
        weights = torch.zeros(cfg.max_tokens, cfg.top_k, device=where)
        count = torch.zeros(1, dtype=torch.int32, device=where)
        out = torch.zeros_like(x)

        def once() -> None:
            layer(x, ids, weights, num_tokens=count, out=out)

        once()
        backend.synchronize()
        replay = backend.capture(once)
        for seed in range(replays):
            new = SMALL.call(1, seed=seed)
            tokens = new.x[0].shape[0]
            x[:tokens].copy_(new.x[0])
            ids[:tokens].copy_(new.topk_ids[0])
            weights[:tokens].copy_(new.topk_weights[0])
            count.fill_(tokens)
            replay()
            backend.synchronize()
            inputs = new.oracle | {"w13": call.w13, "w2": call.w2}
            (right,) = moe_oracle(cfg, **inputs, rounding="kernel")
            same = out[:tokens].cpu().view(torch.int16) == right.view(torch.int16)
            wrong += int((~same).sum())
        session.check()
    session.close()
    expect(backend, wrong == 0, f"graph: {wrong} values differ in {replays} replays")
    return {"replays": replays, "wrong_values": wrong}


def sanitizer(backend: Backend, expected: dict[str, str]) -> dict[str, Any]:
    """memcheck and racecheck of compute-sanitizer on one small case, in a process of their own."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    results: dict[str, Any] = {}
    for name in ("memcheck", "racecheck"):
        command = [tool, "--tool", name, "--error-exitcode", "99", sys.executable]
        command += [str(Path(__file__).with_name("gpu_check.py")), "--one-case"]
        command += ["--images", str(backend.images.folder)]
        if backend.dry:
            results[name] = {"command": " ".join(command[:4])}
            continue
        if not Path(tool).exists():
            results[name] = {"skipped": "compute-sanitizer is not installed"}
            continue
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=SANITIZER_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            results[name] = {"skipped": f"not done after {SANITIZER_SECONDS} s"}
            continue
        results[name] = {"exit": ran.returncode, "tail": ran.stdout.splitlines()[-3:]}
        expect(backend, ran.returncode == 0, f"{name}: {ran.stdout[-2000:]}{ran.stderr[-500:]}")
    return results


def one_case(backend: Backend) -> None:
    """What runs under compute-sanitizer: the small case on one PE."""
    call = SMALL.call(1, seed=2)
    layer = layer_for(backend, call)
    moved = call.to(backend.memory)
    y = layer.forward(x=moved.x, topk_ids=moved.topk_ids, topk_weights=moved.topk_weights)
    judge(backend, SMALL, call, y)


def _timed(backend: Backend, shape: Shape, *, baseline: bool, **how: Any) -> dict[str, Any]:
    """Time of one call of a shape, and of the torch baseline, on the same inputs."""
    cfg, where = shape.cfg, backend.memory
    if backend.dry:  # the real sizes would fill a CPU machine's memory
        small = {"num_experts": cfg.top_k, "tokens": 2, "intermediate": 64}
        cfg = Shape(**(vars(shape) | small)).cfg
    rng = torch.Generator(device=where).manual_seed(0)

    def values(*size: int) -> torch.Tensor:
        if backend.dry:
            return torch.zeros(1, dtype=torch.bfloat16).expand(size).contiguous()
        return torch.randn(*size, generator=rng, device=where, dtype=torch.bfloat16) * 0.05

    result: dict[str, Any] = {"shape": shape.name, "tokens": shape.tokens}
    with torch.inference_mode():
        session = Session(cfg, device=backend.whole_device(), cache=backend.images, timeout_s=20)
        layer = MegaMoE(
            cfg,
            values(cfg.num_experts, *cfg.w13_shape),
            values(cfg.num_experts, *cfg.w2_shape),
            session=session,
        )
        x = values(cfg.max_tokens, cfg.hidden)
        scores = torch.rand(cfg.max_tokens, cfg.num_experts, generator=rng, device=where)
        ids = scores.argsort(dim=1)[:, : cfg.top_k].int().contiguous()
        weights = torch.rand(cfg.max_tokens, cfg.top_k, generator=rng, device=where)
        out = torch.empty_like(x)
        layer(x, ids, weights, out=out)
        if how.pop("in_place", False):
            session.input_view.copy_(x)
            x = session.input_view
        micros = backend.time_us(lambda: layer(x, ids, weights, out=out), **how)
        session.check()
        result |= {"us": micros, "tflops": shape.flops / micros / 1e6}
        if baseline:
            given = (x, ids, weights, layer.w13, layer.w2)
            result["torch_us"] = backend.time_us(lambda: grouped_moe(*given), **how)
            result["speedup"] = result["torch_us"] / micros
            error = (out.float() - grouped_moe(*given).float()).abs().max().item()
            scale = out.float().abs().max().item()
            result["largest_difference"] = error / scale if scale else 0.0
            expect(backend, error <= 0.05 * scale, f"{shape.name}: differs from torch by {error}")
        session.close()
    if backend.dry:  # host times of recorded calls are no figures
        result |= dict.fromkeys(result.keys() - {"shape", "tokens"})
    return result


def measurements(backend: Backend, expected: dict[str, str]) -> dict[str, Any]:
    """First figures for the model: row copies of one warp per SM (a probe of their own), then the
    shipped kernel where one part decides the time: row copies, latency, the main loop."""
    prefill = SHAPES[3]
    return {
        "row_copies": row_copies(backend),
        "kernel_without_arithmetic": [
            _timed(backend, shape, baseline=False) for shape in PROBES[:3]
        ],
        "one_token_us": _timed(backend, PROBES[3], baseline=False, flush=False)["us"],
        "main_loop": _timed(backend, prefill, baseline=False),
        # Rows that are in the symmetric region already leave the staging warps idle.
        "main_loop_without_staging": _timed(backend, prefill, baseline=False, in_place=True),
    }


def timings(backend: Backend, expected: dict[str, str]) -> dict[str, Any]:
    """Six shapes beside grouped GEMMs of torch on the same GPU."""
    return {"shapes": [_timed(backend, shape, baseline=True) for shape in SHAPES]}


STEPS = (
    ("correctness", correctness, 90),
    ("soak", soak, 60),
    ("graph", graph, 20),
    ("sanitizer", sanitizer, 2 * SANITIZER_SECONDS),
    ("measurements", measurements, 40),
    ("timings", timings, 60),
)
"""Name, function, seconds it may take; together below eight minutes."""
