"""One call of a case in the mode of its kernel, and what it should give.

A case of the saving forward is right if y is, and if the shipped dgrad makes the right gradients of
what it saved. A case of dgrad begins with the shipped saving forward, which always succeeds: what
the case must fail with is about dgrad.

Legend: T tokens, H hidden, K top-k.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.reference_backward import moe_backward_oracle
from megamoe.runtime.saved import Saved
from megamoe.runtime.session import DEFAULT_TIMEOUT_S
from megamoe.testing import VgpuMoE
from megamoe.verify.cases import Case, call, differing, expected
from megamoe.verify.inputs import Inputs


def output_gradients(data: Inputs) -> list[torch.Tensor]:
    """dy of every PE: small integers."""
    rng = torch.Generator().manual_seed(17)
    return [torch.randint(-1, 2, x.shape, generator=rng).bfloat16() for x in data.x]


def expected_outputs(case: Case, data: Inputs) -> list[torch.Tensor]:
    """What `attempt` compares with: y of every PE; with ``"save"`` also, with ``"dgrad"`` instead,
    dx and the gradients of the router weights."""
    y = [] if case.mode == "dgrad" else expected(case, data)
    if case.mode == "forward":
        return y
    made = moe_backward_oracle(
        case.cfg, dy=output_gradients(data), **data.kwargs, dtype=torch.float32, rounding="kernel"
    )
    return [*y, *made.dx, *made.d_topk_weights]


def attempt(
    moe: VgpuMoE,
    case: Case,
    data: Inputs,
    want: list[torch.Tensor] | None,
    *,
    in_place: bool,
    reports: list[Any],
) -> str:
    """Make the call.

    Args:
        want: `expected_outputs`, or None if nothing is compared.
        in_place: the input of the case's kernel lies in the session's own view.
        reports: get the report of every run that ended well.

    Returns:
        What is wrong with the outputs, in words; or nothing.

    Raises:
        MegaMoEError, VgpuError: what the kernels reported, or vgpu of them.
    """
    if case.mode != "dgrad" and case.fails == "absent":
        reports.append(_without_last(moe, data, save=case.mode == "save"))
        return ""
    if case.mode == "forward":
        result = call(moe, data, in_place=in_place)
        reports.append(result.report)
        return "" if want is None else differing(result.y, want)
    backward = case.mode == "dgrad"
    if backward:
        _set_timeout(moe, DEFAULT_TIMEOUT_S)
    done = call(moe, data, in_place=in_place and not backward, save_for_backward=True)
    reports.append(done.report)
    assert done.saved is not None
    _set_timeout(moe, case.timeout_s)
    dy = output_gradients(data)
    if case.fails == "absent":
        reports.append(_dgrad_without_last(moe, data, dy, done.saved))
        return ""
    if in_place and backward:
        views = [session.input_view_TH for session in moe.group.sessions]
        dy = [view[: t.shape[0]].copy_(t) for view, t in zip(views, dy, strict=True)]
    back = moe.backward_dgrad(dy, done.saved)
    reports.append(back.report)
    for saved in done.saved:
        saved.free()
    got = [*([] if backward else done.y), *back.dx, *back.d_topk_weights]
    return "" if want is None else unequal(got, want)


def unequal(got: list[torch.Tensor], want: list[torch.Tensor]) -> str:
    """Where numbers differ, in words; zeros may differ in sign, NaN is never equal."""
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        off = int((a != b.to(a.dtype)).sum()) if a.shape == b.shape else -1
        if off:
            return f"output {number}: {off} of {a.numel()} values differ"
    return ""


def _set_timeout(moe: VgpuMoE, timeout_s: float) -> None:
    for session in moe.group.sessions:
        session.set_timeout(timeout_s)


def _without_last(moe: VgpuMoE, data: Inputs, *, save: bool) -> Any:
    """Launch on every PE but the last, which gives them nothing to go on."""
    for pe, session in enumerate(moe.group.sessions[:-1]):
        launch = session.training.save if save else session.launch
        launch(
            moe.weights[pe],
            x_TH=data.x[pe],
            topk_ids_TK=data.topk_ids[pe],
            topk_weights_TK=data.topk_weights[pe],
            y_TH=torch.empty_like(data.x[pe]),
        )
    return _run_without_last(moe)


def _dgrad_without_last(
    moe: VgpuMoE, data: Inputs, dy: list[torch.Tensor], saved: list[Saved]
) -> Any:
    for pe, session in enumerate(moe.group.sessions[:-1]):
        session.training.dgrad(
            saved[pe],
            dy_TH=dy[pe],
            dx_TH=torch.empty_like(data.x[pe]),
            d_topk_TK=torch.empty_like(data.topk_weights[pe]),
        )
    return _run_without_last(moe)


def _run_without_last(moe: VgpuMoE) -> Any:
    moe.group.last_report = moe.world.run()
    for session in moe.group.sessions[:-1]:
        session.raise_on_status()
    return moe.group.last_report
