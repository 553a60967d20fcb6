"""What host and kernel agree on at a launch: parameters, tensor-map order, the status record.

Plain data: a machine without the compiler can launch images with it.
"""

from enum import IntEnum

FORWARD_ARCHS = ("sm_90a",)
"""Architectures with a forward kernel."""

PARAMETERS: tuple[tuple[str, str, str], ...] = (
    ("x", "u64", "address of the caller's rows [T, H] bf16"),
    ("x_stride", "u64", "bytes between rows of x"),
    ("stage_x", "u32", "1: copy x into the symmetric region; 0: it is there already"),
    ("ids", "u64", "address of topk_ids [T, K]"),
    ("ids_wide", "u32", "1: ids are int64; 0: int32"),
    ("weights", "u64", "address of topk_weights [T, K] fp32"),
    ("tokens", "u64", "address of T, int32"),
    ("y", "u64", "address of the output [T, H] bf16, contiguous"),
    ("residual", "u64", "address of rows [T, H] bf16 added to y, or 0"),
    ("bias13", "u64", "address of the fc1 bias [E_local, rows], or 0"),
    ("bias2", "u64", "address of the fc2 bias [E_local, H], or 0"),
    ("symmetric", "u64", "this PE's symmetric block"),
    ("local", "u64", "this PE's local block"),
    ("maps", "u64", "address of the tensor maps, 128 bytes each (tensor_maps.py)"),
    ("pe", "u32", "this PE"),
    ("timeout_ns", "u64", "deadline of cross-CTA waits, 0 = none"),
    ("status", "u64", "address of the status record, in memory the host reads without waiting"),
    ("saved", "u64", "what a training call keeps (saved.py), or 0"),
    ("dgrad", "u64", "what dgrad leaves for wgrad (saved.py), or 0"),
    ("d_topk", "u64", "dgrad: address of d_topk_weights [T, K] fp32, or 0"),
)
"""Launch parameters in order: name, width, meaning. The host packs them from this table. dgrad
takes the gradient of y as ``x`` and writes the gradient of x to ``y``."""

WGRAD_MAX_SAVED = 8
"""Saved calls that one wgrad launch may sum over."""
WGRAD_PARAMETERS: tuple[tuple[str, str, str], ...] = (
    ("w13", "u64", "gradient of w13, or 0: not wanted"),
    ("w13_stride", "u64", "bytes between experts; 0: w13 is a table of addresses, u64 [experts]"),
    ("w2", "u64", "gradient of w2, or 0"),
    ("w2_stride", "u64", "as w13_stride"),
    ("b13", "u64", "gradient of the fc1 bias, or 0"),
    ("b13_stride", "u64", "as w13_stride"),
    ("b2", "u64", "gradient of the fc2 bias, or 0"),
    ("b2_stride", "u64", "as w13_stride"),
    ("accumulate", "u32", "1: add to what is there; 0: overwrite it"),
    ("first_slot", "u32", "first expert slot of this PE"),
    ("experts", "u32", "experts of this PE"),
    ("num_saved", "u32", "saved calls to sum over, 1 to WGRAD_MAX_SAVED"),
    *(
        (f"saved_{i}", "u64", "address of the saved call's entry (wgrad_tables.py)")
        for i in range(WGRAD_MAX_SAVED)
    ),
)
"""Launch parameters of wgrad, as ``PARAMETERS``."""

WGRAD_MAPS = ("x", "gate", "up", "dy", "wact", "dgu")
"""Order of the tensor maps of a saved call; those that a problem does not use are left out of
its products, and repeat another."""


class Phase(IntEnum):
    """Who waits for what, in a status record."""

    NONE = 0
    COUNT = 1
    ARRIVE = 2
    X_READY = 3
    H_READY = 4
    DONE = 5
    Y_READY = 6
    FREE = 7


PHASE_TEXT = {
    Phase.COUNT: "dispatch-send waits for the row counts of another CTA of this PE",
    Phase.ARRIVE: "recv-and-place waits for the route of the peer",
    Phase.X_READY: "load waits for the rows of a pool block",
    Phase.H_READY: "load waits for the activations of a pool block",
    Phase.Y_READY: "combine-send waits for the expert outputs of a pool block",
    Phase.FREE: "recv-and-place waits for a block of the ring pool to be free",
    Phase.DONE: "reduce waits for expert outputs of a token",
}


class Status(IntEnum):
    """Codes of the status record."""

    OK = 0
    TIMEOUT = 1
    CAPACITY = 2


class StatusWord(IntEnum):
    """Words of the status record (int32). TIMEOUT and CAPACITY use the first eight."""

    CODE = 0
    PHASE = 1
    PEER = 2
    EPOCH = 3
    EXPECTED = 4
    SEEN = 5
    INDEX = 6
    CTA = 7
    INVALID_IDS = 8
    INVALID_TOKEN = 9
    INVALID_SLOT = 10
    INVALID_ID = 11
