"""From accumulators to memory order: pieces of 32 tokens × 64 columns in swizzled shared memory.

Each math warpgroup works alone: its own 128-thread barrier, staging buffers, row entries and
counts. Tokens become rows of memory by a transposed stmatrix into a buffer with the 128-byte
swizzle, from which a piece leaves by one TMA store or by 16-byte stores to peers.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_copies, ptx_values
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.smem import (
    PIECE_BYTES,
    PIECE_TOKENS,
    ROW_ENTRY_BYTES,
    STAGING_BUFFERS,
)
from megamoe.cute_kernels.sync import NamedBarrier

GROUP_THREADS = 128
GROUP_WARPS = 4
GROUP_COLUMNS = 64
PIECES = BLOCK_M // PIECE_TOKENS
PIECE_OCTETS = PIECE_TOKENS // 8
VALUES = 16
"""Values of one thread in a piece: 4 token octets, 2 rows, 2 tokens."""
HALF_ACCUMULATORS = 64
"""Distance of the accumulators of the tile's two halves of 128 weight rows."""


@cute.jit
def group_barrier(group: Int32):
    """Barrier of one math warpgroup; ids are static, or ptxas would count all sixteen."""
    if group == 0:
        cute.arch.barrier(barrier_id=int(NamedBarrier.MATH_0), number_of_threads=GROUP_THREADS)
    else:
        cute.arch.barrier(barrier_id=int(NamedBarrier.MATH_1), number_of_threads=GROUP_THREADS)


def staging(c: Context, group: Int32, buffer: int) -> Int32:
    """Shared address of a staging buffer."""
    return c.smem + c.shared.staging + (group * STAGING_BUFFERS + buffer) * PIECE_BYTES


def row_entries(c: Context, group: Int32) -> Int32:
    """Shared address of the warpgroup's table of one entry per row of the block."""
    return c.smem + c.shared.row_entries + group * BLOCK_M * ROW_ENTRY_BYTES


@cute.jit
def store_piece(buffer: Int32, thread: Int32, values: cute.Tensor, paired: cutlass.Constexpr[bool]):
    """Transposed stmatrix of 16 values a thread, order: token parity + 2·r + 4·octet.

    ``r`` is the row half (row, row + 8) of the warp's 16 weight rows. With ``paired`` rows it is
    the tile half, and the 8 columns of a matrix stand in the order of lanes 4p … 4p + 3: position
    p holds column (p >> 1) + 4·(p & 1), which one shuffle a register puts right.

    Lane l names the row of matrix l / 8: matrices are (r 0, 1) × (octet o, o + 1); memory row =
    token, 16-byte chunk = 8 columns, chunk index XOR (token mod 8).
    """
    lane = thread % 32
    warp = thread // 32
    r = (lane // 8) & 1
    chunk = warp * 2 + r
    if cutlass.const_expr(paired):
        chunk = r * 4 + warp
    for pair in cutlass.range_constexpr(PIECE_OCTETS // 2):
        token = (2 * pair + lane // 16) * 8 + lane % 8
        address = buffer + token * 128 + ((chunk ^ (token & 7)) << 4)
        packed = []
        for i in cutlass.range_constexpr(4):
            # Matrix i: r = i % 2, octet 2·pair + i / 2.
            first = 2 * (i % 2) + 4 * (2 * pair + i // 2)
            bits = ptx_values.pack_bf16x2(values[first], values[first + 1])
            if cutlass.const_expr(paired):
                bits = cute.arch.shuffle_sync(bits, paired_source(lane))
            packed.append(bits)
        ptx_values.stmatrix_x4_trans(address, packed[0], packed[1], packed[2], packed[3])


@cute.jit
def store_narrow_piece(
    buffer: Int32, thread: Int32, values: cute.Tensor, paired: cutlass.Constexpr[bool]
):
    """Transposed stmatrix of 8 values a thread, order: token parity + 2·octet: 32 tokens × 32
    columns, 8 of each warp, under the 64-byte swizzle: chunk index XOR (token / 2 mod 4). Matrices
    are the four octets, so lane l names the row of token l. ``paired`` as in ``store_piece``."""
    lane = thread % 32
    address = buffer + lane * 64 + (((thread // 32) ^ ((lane >> 1) & 3)) << 4)
    packed = []
    for octet in cutlass.range_constexpr(PIECE_OCTETS):
        bits = ptx_values.pack_bf16x2(values[2 * octet], values[2 * octet + 1])
        if cutlass.const_expr(paired):
            bits = cute.arch.shuffle_sync(bits, paired_source(lane))
        packed.append(bits)
    ptx_values.stmatrix_x4_trans(address, packed[0], packed[1], packed[2], packed[3])


def paired_source(lane: Int32) -> Int32:
    """The lane whose value a lane must hold, so that columns of paired rows stand in order."""
    column = lane >> 2
    return ((2 * (column & 3) + (column >> 2)) << 2) | (lane & 3)


def make_values() -> cute.Tensor:
    """Registers for the values of a piece."""
    return cute.make_rmem_tensor((VALUES,), Float32)


@cute.jit
def store_piece_by_tma(
    tensor_map: Int64,
    column: Int32,
    row: Int32,
    buffer: Int32,
    thread: Int32,
    group: Int32,
    values: cute.Tensor,
    paired: cutlass.Constexpr[bool],
    columns: cutlass.Constexpr[int] = GROUP_COLUMNS,
):
    """Stage a piece of ``columns`` columns and store it at (column, row) of a pool; thread 0 owns
    the bulk groups.

    The buffer may still be read by the store two pieces back; that one is waited for first.
    """
    if thread == 0:
        ptx_copies.bulk_wait_read(STAGING_BUFFERS - 1)
    group_barrier(group)
    if cutlass.const_expr(columns == GROUP_COLUMNS):
        store_piece(buffer, thread, values, paired)
    else:
        store_narrow_piece(buffer, thread, values, paired)
    ptx_copies.fence_proxy_async_shared()
    group_barrier(group)
    if thread == 0:
        ptx_copies.tma_store_2d(tensor_map, column, row, buffer)
        ptx_copies.bulk_commit()


@cute.jit
def finish_stores(counter: Int64, thread: Int32):
    """Wait for the tile's stores (completion includes the proxy fence), count the tile's half in
    ``counter``. The buffers are free behind the next barrier of the warpgroup: the first one of
    each epilogue comes before its first access to a buffer."""
    if thread == 0:
        ptx_copies.bulk_wait(0)
        ptx.red_release(counter, Int32(1), "gpu")
