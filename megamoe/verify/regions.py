"""Addresses of a finding as elements of the workspace table instead of bytes of a block."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.saved import dgrad_block, saved_block
from megamoe.cute_kernels.workspace import DTYPE_BYTES, Block, local_block, symmetric_block
from megamoe.runtime.vgpu.findings import Finding

_BYTE = re.compile(r"\b(local|symmetric|saved|dgrad)\[(\d+)\]")


def element(block: Block, byte: int) -> str:
    """The region and index of a byte of a block.

    >>> block = Block.of(("a", "u32", (3,)), ("b", "bf16", (2, 8)))
    >>> element(block, 256 + 2 * 11), element(block, 250)
    ('b[1, 3]', '[250]')
    """
    for region in block.regions:
        if 0 <= byte - region.offset < region.nbytes:
            index = (byte - region.offset) // DTYPE_BYTES[region.dtype]
            places = []
            for position, size in enumerate(region.shape):
                step = math.prod(region.shape[position + 1 :])
                places.append(str(index // step % size))
            return f"{region.name}[{', '.join(places)}]"
    return f"[{byte}]"


def named(text: str, problem: Problem, config: KernelConfig | None = None) -> str:
    """``local[…]`` and the like in a text become elements of their regions, ``saved.x[…]`` of the
    blocks that a training call keeps; ``config`` of the kernel, where that has regions of its own.
    """
    blocks = {
        "local": local_block(problem, config),
        "symmetric": symmetric_block(problem),
        "saved": saved_block(problem),
        "dgrad": dgrad_block(problem),
    }

    def told(match: re.Match[str]) -> str:
        block = match[1]
        owner = f"{block}." if block in ("saved", "dgrad") else ""
        return owner + element(blocks[block], int(match[2]))

    return _BYTE.sub(told, text)


def named_finding(
    finding: Finding, problem: Problem, config: KernelConfig | None = None
) -> Finding:
    """A finding that names workspace regions."""
    return replace(
        finding,
        message=named(finding.message, problem, config),
        where=named(finding.where, problem, config),
        missing_edge=named(finding.missing_edge, problem, config),
    )


def region_of(finding: Finding) -> str:
    """The region of a named finding: ``pool_x`` of ``pool_x[3, 5]``."""
    return re.split(r"[\[+]", finding.where, maxsplit=1)[0]
