"""Which warp does what after dispatch-send. Plain data, for the kernel and for reports."""

from megamoe.cute_kernels.kernel_config import KernelConfig

LOAD_WARP = 0
PLACE_WARP = 1
"""First of the recv-and-place warps; combine-send and reduce warps follow them."""


def roles_of(config: KernelConfig) -> dict[int, str]:
    """Warp → role. The first ``send_warps`` of the reduce warps do combine-send before they
    reduce, if rows are pre-reduced.

    >>> list(roles_of(KernelConfig()).values())[:5]
    ['load', 'recv-and-place', 'reduce', 'reduce', 'math']
    """
    roles = {LOAD_WARP: "load"}
    for warp in range(PLACE_WARP, config.warps):
        if warp < first_reduce_warp(config):
            roles[warp] = "recv-and-place"
        else:
            roles[warp] = "reduce" if warp < config.service_warps else "math"
    return roles


def first_reduce_warp(config: KernelConfig) -> int:
    """First warp that sums."""
    return PLACE_WARP + config.place_warps
