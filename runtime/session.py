"""One PE's workspace, launch and status for one compiled problem.

The public ``megamoe.Session`` builds one of these per process; ``LocalGroup`` builds P of them.

Legend: T tokens, H hidden, I intermediate, E experts, L local experts, K top-k, P PEs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megamoe.cute_kernels.abi import StatusWord
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.saved import TRAINING_MODES
from megamoe.cute_kernels.workspace import (
    STATUS_WORDS,
    Block,
    local_block,
    symmetric_block,
)
from megamoe.runtime.devices.base import Allocation, Device
from megamoe.runtime.errors import MegaMoEError, SessionClosed
from megamoe.runtime.launch import ParameterPacker
from megamoe.runtime.maps import encode_maps
from megamoe.runtime.routing_tables import Replicas, routing_tables
from megamoe.runtime.status import raise_on_status
from megamoe.runtime.training import (
    NO_TRAINING,
    TrainingCalls,
    TrainingImages,
    TrainingLaunch,
)
from megamoe.runtime.transports.base import SymmetricBlock
from megamoe.runtime.weights import BoundWeights, checked_weights

TORCH_DTYPES = {
    "u32": torch.int32,
    "i32": torch.int32,
    "u64": torch.int64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "u8": torch.uint8,
}
DEFAULT_TIMEOUT_S = 300.0
WORD_BYTES = 4


def region_view(block: Block, allocation: Allocation, name: str) -> torch.Tensor:
    """A region of a block as a tensor of its table shape (unsigned words as signed)."""
    region = block[name]
    raw = allocation.bytes_N[region.offset : region.offset + region.nbytes]
    return raw.view(TORCH_DTYPES[region.dtype]).view(region.shape)


class _Mode:
    """One kernel of the session, ready to launch."""

    def __init__(self, image: Image, device: Device, grid: int):
        self.enqueue = device.prepare(image, grid=grid)
        self.packer = ParameterPacker(image.parameters)


class PeSession:
    """One PE's side of a group of sessions that call in the same order.

    Nothing here is allocated, loaded or waited for after construction and ``bind_weights``. Calls
    of one session must be ordered: one stream, or streams ordered by events.

    Args:
        problem, image: what was compiled; the same on every PE.
        device: where this PE runs.
        symmetric: this PE's symmetric block and its peers' addresses.
        pe: this PE.
        replicas: for every expert the (PE, local index) of each of its slots.
        grid: CTAs of a launch.
        timeout_s: deadline of waits for other CTAs and PEs, 0 = none.
        check_invalid_ids: report ids ≥ E (else they are only masked).
        training: the images of a training session, or None: forward only. The symmetric block must
            be large enough for all modes (``saved.mode_kernels``).

    Raises:
        ValueError: grid or timeout_s out of range. MegaMoEError: the device refuses the image.
    """

    def __init__(
        self,
        *,
        problem: Problem,
        image: Image,
        device: Device,
        symmetric: SymmetricBlock,
        pe: int,
        replicas: Replicas,
        grid: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        check_invalid_ids: bool = False,
        training: TrainingImages | None = None,
    ):
        if grid < 1:
            raise ValueError(f"grid={grid}: must be at least 1")
        if timeout_s < 0:
            raise ValueError(f"timeout_s={timeout_s}: must be 0 (none) or positive")
        self.problem, self.image, self.device, self.pe = problem, image, device, pe
        self.grid = grid
        self.timeout_s = timeout_s
        self.check_invalid_ids = check_invalid_ids
        self.poisoned: str | None = None
        self.closed = False
        self.local_experts = sum(owner == pe for slots in replicas for owner, _ in slots)
        self._symmetric_table = symmetric_block(problem)
        self._local_table = local_block(problem, image.config)
        self._symmetric = symmetric
        images = {"forward": image}
        if training is not None:
            images |= {mode: training.modes[mode] for mode in TRAINING_MODES}
        self._modes = {mode: _Mode(each, device, grid) for mode, each in images.items()}
        local_bytes = max(
            local_block(replace(problem, mode=mode), each.config).nbytes
            for mode, each in images.items()
        )
        self._local = device.allocate(local_bytes, "local")
        # 0, 1, … Tmax: a launch points to its T, so T costs no copy and a graph keeps its own.
        self._counts = device.allocate(WORD_BYTES * (problem.max_tokens + 1), "token_counts")
        self._status = device.allocate_shared(WORD_BYTES * STATUS_WORDS, "status")
        self._status_words = self._status.bytes_N.numpy().view(np.int32)
        self._bound: list[BoundWeights] = []
        self._training: TrainingCalls | None = None
        if training is not None:
            self._training = TrainingCalls(self, training, local=self._local.address)
        self._initialise(replicas)
        self._input_address = self.input_view_TH.data_ptr()
        self._fixed = {
            "symmetric": symmetric.allocation.address,
            "local": self._local.address,
            "pe": pe,
            "timeout_ns": int(timeout_s * 1e9),
            "status": self._status.address,
        }

    def _initialise(self, replicas: Replicas) -> None:
        """Counters to zero, tables filled. Must be complete on all PEs before the first launch."""
        for name in ("arrive", "done"):
            self.symmetric_view(name).zero_()
        # Nobody counts for experts that this PE lacks, but a saving forward copies whole rows.
        self.symmetric_view("primary_count")[..., self.local_experts :].zero_()
        for region in self._local_table.regions:
            if region.name == "expert_map":
                break
            self.local_view(region.name).zero_()
        if self.image.config.split_k > 1:
            self.local_view("parts").zero_()
        for name, values in routing_tables(replicas, pe=self.pe, num_pes=self.problem.num_pes):
            self.local_view(name).copy_(torch.tensor(values, dtype=torch.int32))
        self.local_view("peers").copy_(torch.tensor(self._symmetric.peers, dtype=torch.int64))
        every_T = torch.arange(self.problem.max_tokens + 1, dtype=torch.int32)
        self._counts.bytes_N.view(torch.int32).copy_(every_T)
        self.clear_status()
        self.device.synchronize()

    def symmetric_view(self, name: str) -> torch.Tensor:
        """A symmetric region of this PE."""
        return region_view(self._symmetric_table, self._symmetric.allocation, name)

    def local_view(self, name: str) -> torch.Tensor:
        """A local region of this PE."""
        return region_view(self._local_table, self._local, name)

    @property
    def training(self) -> TrainingCalls:
        """What a training session can do besides.

        Raises:
            MegaMoEError: it was built for the forward only.
        """
        self._check_open()
        if self._training is None:
            raise MegaMoEError("gradients: build the session with training=True")
        return self._training

    @property
    def input_view_TH(self) -> torch.Tensor:
        """The symmetric x region ``[Tmax, H]``: rows written here are sent without a copy."""
        return self.symmetric_view("x")

    def bind_weights(
        self,
        *,
        w13: torch.Tensor,
        w2: torch.Tensor,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
    ) -> BoundWeights:
        """Encode the tensor maps of this PE's weights; shapes as in ``weights.checked_weights``.

        Raises:
            ValueError: another shape or dtype than the session's, or not contiguous.
            SessionClosed: after ``close()``.
        """
        self._check_open()
        given = {"w13": w13, "w2": w2, "b13": b13, "b2": b2}
        return self._bind(checked_weights(self.problem, self.local_experts, given))

    def bind_nothing(self) -> BoundWeights:
        """Weights for a call in which no PE brings a token."""
        return self._bind({})

    def _bind(self, tensors: dict[str, torch.Tensor]) -> BoundWeights:
        experts = self.local_experts if tensors else 0
        addresses = dict.fromkeys(tensors, 0)
        if experts > 0:
            for name, tensor in tensors.items():
                addresses[name] = self.device.address_of(tensor, name, keep=True)
                if addresses[name] % 16:
                    raise ValueError(f"{name}: address {addresses[name]:#x}, must be 16-aligned")
        maps = encode_maps(
            self.device,
            self.problem,
            self.image.config,
            experts=experts,
            weights=addresses,
            bases={"local": self._local.address},
        )
        bound = BoundWeights(tensors, addresses, maps)
        self._bound.append(bound)
        return bound

    def release_weights(self, bound: BoundWeights) -> None:
        """Free the tensor maps of weights that moved; no launch may use them any more."""
        self._bound.remove(bound)
        self.device.synchronize()
        if self._training is not None:
            self._training.pool.forget(bound)
        self.device.free(bound.maps)
        for address in bound.addresses.values():
            if address:
                self.device.forget(address)

    def launch(
        self,
        weights: BoundWeights,
        *,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        y_TH: torch.Tensor,
        residual_TH: torch.Tensor | None = None,
        num_tokens: torch.Tensor | None = None,
        training: TrainingLaunch | None = None,
    ) -> None:
        """Enqueue one launch, a forward one unless ``training`` says otherwise. Arguments are
        checked by the caller (``megamoe.checks``).

        Args:
            x_TH: rows; (a prefix of) ``input_view_TH`` is sent as it is, others are staged by the
                kernel.
            residual_TH: contiguous bf16 rows added to y.
            num_tokens: int32 [1] in device memory, read by the kernel: T of this call when a
                captured graph is replayed with another T; the other tensors then have Tmax rows.

        Raises:
            MegaMoEError: what the kernel reported since the last look, or the session is unusable.
        """
        self.check_usable()
        kernel = self._modes["forward" if training is None else training.mode]
        address_of = self.device.address_of
        tokens = x_TH.shape[0]
        if num_tokens is None:
            count = self._counts.address + WORD_BYTES * tokens
        else:
            count = address_of(num_tokens, "tokens")
        in_place = x_TH.data_ptr() == self._input_address
        more = NO_TRAINING if training is None else training.parameters(address_of)
        block = kernel.packer.pack(
            {
                "x": address_of(x_TH, "x"),
                "x_stride": x_TH.stride(0) * x_TH.element_size(),
                "stage_x": int(not in_place and tokens > 0),
                "ids": address_of(topk_ids_TK, "topk_ids"),
                "ids_wide": int(topk_ids_TK.dtype == torch.int64),
                "weights": address_of(topk_weights_TK, "topk_weights"),
                "tokens": count,
                "y": address_of(y_TH, "y"),
                "residual": 0 if residual_TH is None else address_of(residual_TH, "residual"),
                "bias13": weights.addresses.get("b13", 0),
                "bias2": weights.addresses.get("b2", 0),
                "maps": weights.maps.address,
                **self._fixed,
                **more,
            }
        )
        kernel.enqueue(block)

    def check_usable(self) -> None:
        """Raise what the kernel reported since the last look, or that the session is closed."""
        self._check_open()
        if self.poisoned is not None or self._reported():
            raise_on_status(self)

    def _check_open(self) -> None:
        if self.closed:
            raise SessionClosed(f"the session of PE {self.pe} is closed; build a new one")

    def _reported(self) -> bool:
        """True if the kernel has reported something. Host memory: nothing is waited for."""
        words = self._status_words
        return bool(
            words[StatusWord.CODE] or (self.check_invalid_ids and words[StatusWord.INVALID_IDS])
        )

    def set_timeout(self, timeout_s: float) -> None:
        """Give the launches from now on another deadline of waits, 0 = none."""
        self.timeout_s = timeout_s
        self._fixed["timeout_ns"] = int(timeout_s * 1e9)

    def status_words(self) -> dict[StatusWord, int]:
        """The status record as it is now; complete once the launches that wrote it have ended."""
        return dict(zip(StatusWord, self._status_words.tolist(), strict=False))

    def clear_status(self) -> None:
        """Forget a reported error that leaves the session usable."""
        self._status_words[:] = 0

    def raise_on_status(self) -> None:
        """Raise what the kernel reported since the last look.

        Raises:
            MegaMoETimeout, PoolCapacityError, InvalidExpertId.
        """
        raise_on_status(self)

    def close(self) -> None:
        """Free this PE's local memory; not collective, idempotent. The symmetric block belongs to
        the transport."""
        if self.closed:
            return
        for bound in list(self._bound):
            self.release_weights(bound)
        self.device.synchronize()
        self.closed = True
        if self._training is not None:
            self._training.close()
        for allocation in (self._local, self._counts, self._status):
            self.device.free(allocation)
