"""All PEs of a group in one process: sessions that share a transport and run together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.saved import TRAINING_MODES
from megamoe.cute_kernels.workspace import symmetric_block
from megamoe.runtime.devices.base import Device
from megamoe.runtime.errors import MegaMoEError
from megamoe.runtime.routing_tables import Replicas
from megamoe.runtime.saved import Saved
from megamoe.runtime.session import PeSession
from megamoe.runtime.training import Gradients, TrainingImages
from megamoe.runtime.transports.local import allocate_symmetric
from megamoe.runtime.weights import BoundWeights


class LocalGroup:
    """P sessions, one a device, in one process.

    Args:
        problem, image: what was compiled.
        devices: one per PE.
        run: executes what has been launched on all devices (a vgpu world's ``run``, a CUDA
            synchronise) and returns its report.
        replicas, grid, timeout_s, check_invalid_ids, training: as for ``PeSession``.

    ``last_report`` is the report of the last run, also after a call that raised what the kernels
    reported.
    """

    def __init__(
        self,
        *,
        problem: Problem,
        image: Image,
        devices: Sequence[Device],
        run: Callable[[], object],
        replicas: Replicas,
        grid: int,
        timeout_s: float,
        check_invalid_ids: bool = False,
        training: TrainingImages | None = None,
    ):
        if len(devices) != problem.num_pes:
            raise ValueError(f"devices: got {len(devices)}, num_pes is {problem.num_pes}")
        self._run = run
        self.last_report: object = None
        modes = ("forward",) if training is None else ("forward", *TRAINING_MODES)
        symmetric = max(symmetric_block(replace(problem, mode=mode)).nbytes for mode in modes)
        blocks = allocate_symmetric(devices, symmetric)
        self.sessions = [
            PeSession(
                problem=problem,
                image=image,
                device=device,
                symmetric=block,
                pe=pe,
                replicas=replicas,
                grid=grid,
                timeout_s=timeout_s,
                check_invalid_ids=check_invalid_ids,
                training=training,
            )
            for pe, (device, block) in enumerate(zip(devices, blocks, strict=True))
        ]

    def bind_weights(self, **weights: Sequence[torch.Tensor] | None) -> list[BoundWeights]:
        """Per-PE local weights, read in place at every call; names and shapes as for
        ``PeSession.bind_weights``."""
        given = {name: tensors for name, tensors in weights.items() if tensors is not None}
        return [
            session.bind_weights(**{name: tensors[pe] for name, tensors in given.items()})
            for pe, session in enumerate(self.sessions)
        ]

    def forward(
        self,
        weights: Sequence[BoundWeights],
        *,
        x: Sequence[torch.Tensor],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        y: Sequence[torch.Tensor],
        residual: Sequence[torch.Tensor] | None = None,
    ) -> object:
        """One call on every PE; fills ``y`` and returns the report of the run.

        Raises:
            MegaMoEError: what the kernels reported; if several PEs did, the first one's error
                with the others' texts as notes.
        """
        calls = _calls(x, topk_ids, topk_weights, y, residual)
        for pe, session in enumerate(self.sessions):
            session.launch(weights[pe], **calls[pe])
        return self._finish()

    def save(
        self,
        weights: Sequence[BoundWeights],
        *,
        x: Sequence[torch.Tensor],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        y: Sequence[torch.Tensor],
        residual: Sequence[torch.Tensor] | None = None,
        caller: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> tuple[object, list[Saved]]:
        """``forward``, keeping what the backward needs; the report, and the state of each PE."""
        calls = _calls(x, topk_ids, topk_weights, y, residual)
        saved = [
            session.training.save(
                weights[pe], **calls[pe], caller=None if caller is None else caller[pe]
            )
            for pe, session in enumerate(self.sessions)
        ]
        return self._finish(), saved

    def dgrad(
        self,
        saved: Sequence[Saved],
        *,
        dy: Sequence[torch.Tensor],
        dx: Sequence[torch.Tensor],
        d_topk_weights: Sequence[torch.Tensor],
    ) -> object:
        """The dgrad of one call on every PE; fills ``dx`` and ``d_topk_weights``.

        Raises:
            SavedStateError: see ``TrainingCalls.dgrad``. MegaMoEError: as ``forward``.
        """
        for pe, session in enumerate(self.sessions):
            session.training.dgrad(
                saved[pe], dy_TH=dy[pe], dx_TH=dx[pe], d_topk_TK=d_topk_weights[pe]
            )
        return self._finish()

    def wgrad(
        self,
        saved: Sequence[Sequence[Saved]],
        grads: Sequence[Mapping[str, Gradients]],
        *,
        accumulate: bool,
    ) -> object:
        """The wgrad of calls on every PE, into ``grads`` of each PE.

        Args:
            saved: the calls, each with one state per PE.

        Raises:
            SavedStateError, ValueError: see ``TrainingCalls.wgrad``.
        """
        for pe, session in enumerate(self.sessions):
            mine = [call[pe] for call in saved]
            session.training.wgrad(mine, grads[pe], accumulate=accumulate)
        return self._finish()

    def _finish(self) -> object:
        """Run what was launched; the report, or what the kernels reported."""
        report = self.last_report = self._run()
        errors = []
        for session in self.sessions:
            try:
                session.raise_on_status()
            except MegaMoEError as error:
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(str(other))
            raise errors[0]
        return report


def _calls(
    x: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    y: Sequence[torch.Tensor],
    residual: Sequence[torch.Tensor] | None,
) -> list[dict[str, Any]]:
    """Each PE's arguments of a forward launch."""
    return [
        {
            "x_TH": x[pe],
            "topk_ids_TK": topk_ids[pe],
            "topk_weights_TK": topk_weights[pe],
            "y_TH": y[pe],
            "residual_TH": None if residual is None else residual[pe],
        }
        for pe in range(len(x))
    ]
