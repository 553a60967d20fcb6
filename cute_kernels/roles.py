"""Which warp does what after dispatch-send. Plain data, for the kernel and for reports."""

LOAD_WARP = 0
PLACE_WARP = 1
REDUCE_WARP = 2
"""First of the two reduce warps."""
SEND_WARP = REDUCE_WARP
"""With the pre-reduced combine, combine-send before it reduces."""
FIRST_MATH_WARP = 4
WARPS = 12
ROLES = {
    LOAD_WARP: "load",
    PLACE_WARP: "recv-and-place",
    REDUCE_WARP: "reduce",
    REDUCE_WARP + 1: "reduce",
    **dict.fromkeys(range(FIRST_MATH_WARP, WARPS), "math"),
}
"""Warp → role."""
