"""A session: one PE's workspace, launch and status for one compiled problem.

Legend: T tokens, H hidden, I intermediate, E experts, L local experts, K top-k, P PEs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamoe.cute_kernels.abi import MAPS, StatusWord
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.tensor_maps import pool_specs, weight_specs
from megamoe.cute_kernels.workspace import TENSOR_MAP_BYTES, Block, local_block, symmetric_block
from megamoe.runtime.devices.base import Allocation, Device
from megamoe.runtime.launch import pack_parameters
from megamoe.runtime.status import raise_on_status
from megamoe.runtime.transports.local import SymmetricBlock

TORCH_DTYPES = {
    "u32": torch.int32,
    "i32": torch.int32,
    "u64": torch.int64,
    "bf16": torch.bfloat16,
    "u8": torch.uint8,
}
DEFAULT_TIMEOUT_S = 300.0


def region_view(block: Block, allocation: Allocation, name: str) -> torch.Tensor:
    """A region of a block as a tensor of its table shape (unsigned words as signed)."""
    region = block[name]
    raw = allocation.bytes_N[region.offset : region.offset + region.nbytes]
    return raw.view(TORCH_DTYPES[region.dtype]).view(region.shape)


@dataclass(frozen=True)
class BoundWeights:
    """Weights a session can run with: their tensor maps in device memory, and the tensors, which
    are read in place at every call."""

    w13_LGH: torch.Tensor
    w2_LHI: torch.Tensor
    maps: Allocation


class Session:
    """One PE's side of a group of sessions that call in the same order.

    Args:
        problem, image: what was compiled; the same on every PE.
        device: where this PE runs.
        symmetric: this PE's symmetric block and its peers' addresses.
        pe: this PE.
        placement: (PE, local index) of every expert.
        grid: CTAs of a launch.
        timeout_s: deadline of waits for other CTAs and PEs, 0 = none.
        check_invalid_ids: report ids ≥ E (else they are only masked).
    """

    def __init__(
        self,
        *,
        problem: Problem,
        image: Image,
        device: Device,
        symmetric: SymmetricBlock,
        pe: int,
        placement: Sequence[tuple[int, int]],
        grid: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        check_invalid_ids: bool = False,
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
        self._symmetric_table = symmetric_block(problem)
        self._local_table = local_block(problem)
        self._symmetric = symmetric
        self._local = device.allocate(self._local_table.nbytes, "local")
        self._initialise(placement)
        self.local_experts = sum(owner == pe for owner, _ in placement)

    def _initialise(self, placement: Sequence[tuple[int, int]]) -> None:
        """Counters to zero, tables filled. Must be complete on all PEs before the first launch."""
        for name in ("arrive", "done"):
            self.symmetric_view(name).zero_()
        for region in self._local_table.regions:
            if region.name == "expert_map":
                break
            self.local_view(region.name).zero_()
        owners = [pe for pe, _ in placement]
        packed = [pe << 16 | local for pe, local in placement]
        self.local_view("expert_map").copy_(torch.tensor(packed, dtype=torch.int32))
        counts = [owners.count(pe) for pe in range(self.problem.num_pes)]
        bases = [sum(counts[:pe]) for pe in range(self.problem.num_pes + 1)]
        self.local_view("slot_base").copy_(torch.tensor(bases, dtype=torch.int32))
        self.local_view("peers").copy_(torch.tensor(self._symmetric.peers, dtype=torch.int64))

    def symmetric_view(self, name: str) -> torch.Tensor:
        """A symmetric region of this PE."""
        return region_view(self._symmetric_table, self._symmetric.allocation, name)

    def local_view(self, name: str) -> torch.Tensor:
        """A local region of this PE."""
        return region_view(self._local_table, self._local, name)

    @property
    def input_view_TH(self) -> torch.Tensor:
        """The symmetric x region ``[Tmax, H]``: rows written here are sent without a copy."""
        return self.symmetric_view("x")

    def bind_weights(self, *, w13_LGH: torch.Tensor, w2_LHI: torch.Tensor) -> BoundWeights:
        """Encode the tensor maps of ``w13 [L, 2I, H]`` (gate first) and ``w2 [L, H, I]``.

        Raises:
            ValueError: another shape or dtype than the session's, or not contiguous.
        """
        p, experts = self.problem, self.local_experts
        shapes = {
            "w13": (w13_LGH, (experts, 2 * p.intermediate, p.hidden)),
            "w2": (w2_LHI, (experts, p.hidden, p.intermediate)),
        }
        for name, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16:
                raise ValueError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)}, must be bfloat16 {shape}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: strides {tensor.stride()}, must be contiguous")
        pool_x = self._local.address + self._local_table["pool_x"].offset
        pool_h = self._local.address + self._local_table["pool_h"].offset
        addresses = {"pool_x": pool_x, "pool_h": pool_h, "pool_h_store": pool_h}
        specs = dict(zip(MAPS[2:], pool_specs(p), strict=True))
        if experts > 0:
            specs |= zip(MAPS[:2], weight_specs(p, experts), strict=True)
            addresses["w13"] = self.device.address_of(w13_LGH, "w13", keep=True)
            addresses["w2"] = self.device.address_of(w2_LHI, "w2", keep=True)
        maps = self.device.allocate(len(MAPS) * TENSOR_MAP_BYTES, "maps")
        for i, name in enumerate(MAPS):
            # A PE without experts runs no tile; its weight maps only have to be well formed.
            known = name if name in specs else "pool_x"
            data = self.device.encode_tensor_map(specs[known], addresses[known])
            begin = i * TENSOR_MAP_BYTES
            maps.bytes_N[begin : begin + TENSOR_MAP_BYTES] = torch.frombuffer(
                bytearray(data), dtype=torch.uint8
            )
        return BoundWeights(w13_LGH, w2_LHI, maps)

    def launch(
        self,
        weights: BoundWeights,
        *,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        y_TH: torch.Tensor,
    ) -> None:
        """Enqueue one forward launch. Arguments are checked by the caller (``megamoe.checks``).

        ``x_TH`` may be (a prefix of) ``input_view_TH``; other rows are staged by the kernel.

        Raises:
            MegaMoETimeout: an earlier call of this session timed out.
        """
        raise_on_status(self)
        tokens = x_TH.shape[0]
        self.local_view("tokens").fill_(tokens)
        row_bytes = x_TH.element_size()
        in_place = x_TH.data_ptr() == self.input_view_TH.data_ptr()
        parameters = {
            "x": self.device.address_of(x_TH, "x"),
            "x_stride": x_TH.stride(0) * row_bytes,
            "stage_x": int(not in_place and tokens > 0),
            "ids": self.device.address_of(topk_ids_TK, "topk_ids"),
            "ids_wide": int(topk_ids_TK.dtype == torch.int64),
            "weights": self.device.address_of(topk_weights_TK, "topk_weights"),
            "tokens": self._local.address + self._local_table["tokens"].offset,
            "y": self.device.address_of(y_TH, "y"),
            "symmetric": self._symmetric.allocation.address,
            "local": self._local.address,
            "maps": weights.maps.address,
            "pe": self.pe,
            "timeout_ns": int(self.timeout_s * 1e9),
        }
        packed = pack_parameters(self.image, parameters)
        self.device.launch(self.image, grid=self.grid, parameters=packed)

    def status_words(self) -> dict[StatusWord, int]:
        """The status record; reading it waits for nothing."""
        return dict(zip(StatusWord, self.local_view("status").tolist(), strict=False))

    def clear_status(self) -> None:
        """Forget a reported error that leaves the session usable."""
        self.local_view("status").zero_()

    def raise_on_status(self) -> None:
        """Raise what the kernel reported since the last look.

        Raises:
            MegaMoETimeout, PoolCapacityError, InvalidExpertId.
        """
        raise_on_status(self)
