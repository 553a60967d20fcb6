"""Encoding the tensor maps of a launch into device memory."""

from collections.abc import Mapping

import torch

from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.saved import dgrad_block, saved_block
from megamoe.cute_kernels.tensor_maps import map_table
from megamoe.cute_kernels.workspace import local_block
from megamoe.runtime.devices.base import Allocation, Device


def encode_maps(
    device: Device,
    p: Problem,
    config: KernelConfig,
    *,
    experts: int,
    weights: Mapping[str, int],
    bases: Mapping[str, int],
) -> Allocation:
    """The maps of ``map_table(p, config, experts)``, in its order, ready for a launch.

    Args:
        config: what the kernel was compiled with.
        experts: experts of this PE.
        weights: addresses of ``w13`` and ``w2``; unused without experts.
        bases: addresses of the blocks ``local`` and, in training modes, ``saved`` and ``dgrad``.
    """
    tables = {"local": local_block(p), "saved": saved_block(p), "dgrad": dgrad_block(p)}
    data = b""
    for entry in map_table(p, config, experts).values():
        if entry.block == "weights":
            # Without experts no tile is run; the map only has to be well formed.
            address = weights[entry.region] if experts else bases["local"]
        else:
            address = bases[entry.block] + tables[entry.block][entry.region].offset
        data += device.encode_tensor_map(entry.spec, address)
    maps = device.allocate(len(data), "maps")
    maps.bytes_N.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    device.synchronize()
    return maps
