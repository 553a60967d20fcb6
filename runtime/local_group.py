"""All PEs of a group in one process: sessions that share a transport and run together."""

from collections.abc import Callable, Sequence

import torch

from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.workspace import symmetric_block
from megamoe.runtime.devices.base import Device
from megamoe.runtime.errors import MegaMoEError
from megamoe.runtime.session import BoundWeights, PeSession
from megamoe.runtime.transports.local import allocate_symmetric


class LocalGroup:
    """P sessions, one a device, in one process.

    Args:
        problem, image: what was compiled.
        devices: one per PE.
        run: executes what has been launched on all devices (a vgpu world's ``run``, a CUDA
            synchronise) and returns its report.
        placement, grid, timeout_s, check_invalid_ids: as for ``PeSession``.
    """

    def __init__(
        self,
        *,
        problem: Problem,
        image: Image,
        devices: Sequence[Device],
        run: Callable[[], object],
        placement: Sequence[tuple[int, int]],
        grid: int,
        timeout_s: float,
        check_invalid_ids: bool = False,
    ):
        if len(devices) != problem.num_pes:
            raise ValueError(f"devices: got {len(devices)}, num_pes is {problem.num_pes}")
        self._run = run
        blocks = allocate_symmetric(devices, symmetric_block(problem).nbytes)
        self.sessions = [
            PeSession(
                problem=problem,
                image=image,
                device=device,
                symmetric=block,
                pe=pe,
                placement=placement,
                grid=grid,
                timeout_s=timeout_s,
                check_invalid_ids=check_invalid_ids,
            )
            for pe, (device, block) in enumerate(zip(devices, blocks, strict=True))
        ]

    def bind_weights(
        self, w13: Sequence[torch.Tensor], w2: Sequence[torch.Tensor]
    ) -> list[BoundWeights]:
        """Per-PE local weights ``[L, 2I, H]`` and ``[L, H, I]``, read in place at every call."""
        return [
            session.bind_weights(w13_LGH=w13_LGH, w2_LHI=w2_LHI)
            for session, w13_LGH, w2_LHI in zip(self.sessions, w13, w2, strict=True)
        ]

    def forward(
        self,
        weights: Sequence[BoundWeights],
        *,
        x: Sequence[torch.Tensor],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        y: Sequence[torch.Tensor],
    ) -> object:
        """One call on every PE; fills ``y`` and returns the report of the run.

        Raises:
            MegaMoEError: what the kernels reported; if several PEs did, the first one's error
                with the others' texts as notes.
        """
        for pe, session in enumerate(self.sessions):
            session.launch(
                weights[pe],
                x_TH=x[pe],
                topk_ids_TK=topk_ids[pe],
                topk_weights_TK=topk_weights[pe],
                y_TH=y[pe],
            )
        report = self._run()
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
