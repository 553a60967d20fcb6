"""The allow-list: instruction families and the modifiers each may carry.

Everything else is refused by name, with its PTX line. A family is the part of the opcode that
selects the operation; the longest listed family that the opcode starts with wins. Decoders see
only what passed here and refuse combinations that make no sense.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.runtime.vgpu.errors import UnsupportedInstruction
from megamoe.runtime.vgpu.ptx_ast import Instruction

_INT = "u16 u32 u64 s16 s32 s64"
_BITS = "b16 b32 b64"
_FLOAT = "f32 f64 f16 f16x2 bf16 bf16x2"
_SCOPES = "cta cluster gpu sys"
_CMP = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan"
_SPACES = "global shared shared::cta shared::cluster param param::entry const local"
_CACHE = (
    "ca cg cs lu cv wb wt nc L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last"
    " L1::no_allocate L2::evict_last L2::evict_normal L2::evict_first L2::cache_hint L2::64B"
    " L2::128B L2::256B"
)
_MEMTYPES = f"b8 u8 s8 {_BITS} {_INT} f32 f64 v2 v4 v8"
_MBAR = "shared shared::cta shared::cluster b64 cta cluster release acquire relaxed"
_BULK = "L2::cache_hint mbarrier::complete_tx::bytes bulk_group multicast::cluster"
_REDOPS = "add min max inc dec and or xor noftz f16 bf16 f32 f64 u32 s32 u64 s64 b32 b64"
_TENSOR = "1d 2d 3d 4d 5d tile"

_TABLE = {
    # integer and logic
    "add": f"{_INT} {_FLOAT} rn rz rm rp ftz sat",
    "sub": f"{_INT} {_FLOAT} rn rz rm rp ftz sat",
    "add.cc": "u32 s32 u64 s64",
    "sub.cc": "u32 s32 u64 s64",
    "mad.lo.cc": "u32 s32 u64 s64",
    "mad.hi.cc": "u32 s32 u64 s64",
    "madc": "lo hi cc u32 s32 u64 s64",
    "addc": "u32 s32 u64 s64 cc",
    "subc": "u32 s32 u64 s64 cc",
    "mul": f"lo hi wide {_INT} {_FLOAT} rn rz rm rp ftz sat",
    "mad": f"lo hi wide {_INT} f32 f64 rn ftz sat",
    "mul24": "lo hi u32 s32",
    "mad24": "lo hi u32 s32",
    "sad": _INT,
    "div": f"{_INT} f32 f64 rn full approx ftz",
    "rem": _INT,
    "min": f"{_INT} {_FLOAT} ftz NaN relu",
    "max": f"{_INT} {_FLOAT} ftz NaN relu",
    "abs": f"s16 s32 s64 {_FLOAT} ftz",
    "neg": f"s16 s32 s64 {_FLOAT} ftz",
    "and": f"pred {_BITS}",
    "or": f"pred {_BITS}",
    "xor": f"pred {_BITS}",
    "not": f"pred {_BITS}",
    "cnot": _BITS,
    "lop3": "b32",
    "shl": _BITS,
    "shr": f"{_BITS} {_INT}",
    "shf": "l r wrap clamp b32",
    "bfe": "u32 s32 u64 s64",
    "bfi": "b32 b64",
    "bfind": "u32 s32 u64 s64 shiftamt",
    "brev": "b32 b64",
    "clz": "b32 b64",
    "popc": "b32 b64",
    "prmt": "b32 f4e b4e rc8 ecl ecr rc16",
    "dp4a": "u32 s32",
    "dp2a": "u32 s32 lo hi",
    "setp": f"{_CMP} and or xor {_INT} {_BITS} {_FLOAT} ftz",
    "set": f"{_CMP} and or xor {_INT} {_BITS} {_FLOAT} ftz",
    "selp": f"{_INT} {_BITS} f32 f64",
    "slct": f"{_INT} {_BITS} f32 f64 ftz",
    "mov": f"pred {_INT} {_BITS} f32 f64 f16 bf16 f16x2 bf16x2",
    "cvt": (
        f"u8 s8 {_INT} {_FLOAT} rn rz rm rp rna rni rzi rmi rpi ftz sat satfinite relu tf32"
        " e4m3x2 e5m2x2"
    ),
    "cvt.pack": "sat u8 s8 u16 s16 s32 b32",
    "cvta": "to global shared shared::cta shared::cluster local const param u64 u32",
    # float
    "fma": f"{_FLOAT} rn rz rm rp ftz sat relu",
    "ex2": "approx ftz f32 f16 f16x2 bf16 bf16x2",
    "lg2": "approx ftz f32",
    "rcp": "approx ftz rn f32 f64",
    "sqrt": "approx ftz rn f32 f64",
    "rsqrt": "approx ftz f32 f64",
    "tanh": "approx f32 f16 f16x2 bf16 bf16x2",
    "sin": "approx ftz f32",
    "cos": "approx ftz f32",
    "copysign": "f32 f64",
    "testp": "finite infinite number notanumber normal subnormal f32 f64",
    # control
    "bra": "uni",
    "brx.idx": "uni",
    "ret": "uni",
    "exit": "",
    "trap": "",
    "brkpt": "",
    "nanosleep": "u32",
    "pmevent": "",
    # warp
    "elect.sync": "",
    "vote.sync": "all any uni ballot pred b32",
    "match.any.sync": "b32 b64",
    "match.all.sync": "b32 b64",
    "shfl.sync": "idx up down bfly b32",
    "redux.sync": "add min max and or xor u32 s32 b32",
    "activemask": "b32",
    # barriers and fences
    "bar.sync": "",
    "bar.arrive": "",
    "bar.red": "popc and or u32 pred",
    "bar.cta.sync": "",
    "bar.cta.arrive": "",
    "bar.cta.red": "popc and or u32 pred",
    "barrier.sync": "aligned",
    "barrier.arrive": "aligned",
    "barrier.red": "popc and or u32 pred aligned",
    "barrier.cta.sync": "aligned",
    "barrier.cta.arrive": "aligned",
    "barrier.cta.red": "popc and or u32 pred aligned",
    "bar.warp.sync": "",
    "barrier.cluster.arrive": "release relaxed aligned",
    "barrier.cluster.wait": "acquire aligned",
    "membar": "cta gl sys gpu",
    "fence": f"acq_rel sc acquire release sync_restrict::shared::cta sync_restrict::shared::cluster"
    f" {_SCOPES}",
    "fence.proxy": "alias async async.global async.shared::cta async.shared::cluster global"
    " shared::cta shared::cluster async::generic acquire release sync_restrict::shared::cta"
    " sync_restrict::shared::cluster cluster",
    "fence.proxy.tensormap::generic": f"acquire release {_SCOPES}",
    "fence.mbarrier_init": "release cluster",
    "griddepcontrol": "wait launch_dependents",
    # memory
    "ld": f"weak volatile relaxed acquire mmio {_SCOPES} {_SPACES} {_CACHE} {_MEMTYPES}",
    "ldu": f"global {_MEMTYPES}",
    "st": f"weak volatile relaxed release mmio {_SCOPES} {_SPACES} {_CACHE} {_MEMTYPES}",
    "atom": f"relaxed acquire release acq_rel {_SCOPES} {_SPACES} {_REDOPS} exch cas bf16x2 f16x2"
    " b16 L2::cache_hint v2 v4",
    "red": f"relaxed release {_SCOPES} {_SPACES} {_REDOPS} bf16x2 f16x2 L2::cache_hint v2 v4",
    "red.async": "relaxed cluster mbarrier::complete_tx::bytes shared::cluster inc dec min max add"
    " and or xor u32 s32 u64 b32",
    "st.async": "weak shared::cluster mbarrier::complete_tx::bytes v2 v4 b32 b64 u32 u64 s32 s64"
    " f32 f64",
    "prefetch": "global local L1 L2 L2::evict_last L2::evict_normal tensormap const param",
    "prefetchu": "L1",
    "isspacep": "global shared shared::cta shared::cluster local const param",
    "mapa": "shared::cluster u32 u64",
    "getctarank": "shared::cluster u32 u64",
    "createpolicy.fractional": "L2::evict_last L2::evict_normal L2::evict_first"
    " L2::evict_unchanged b64",
    "discard": "global L2",
    "applypriority": "global L2::evict_normal",
    # mbarrier
    "mbarrier.init": _MBAR,
    "mbarrier.inval": _MBAR,
    "mbarrier.arrive": f"{_MBAR} expect_tx noComplete",
    "mbarrier.arrive_drop": f"{_MBAR} expect_tx",
    "mbarrier.expect_tx": _MBAR,
    "mbarrier.complete_tx": _MBAR,
    "mbarrier.test_wait": f"{_MBAR} parity",
    "mbarrier.try_wait": f"{_MBAR} parity",
    "mbarrier.pending_count": "b64",
    # asynchronous copies
    "cp.async": "ca cg shared shared::cta global L2::64B L2::128B L2::256B L2::cache_hint",
    "cp.async.commit_group": "",
    "cp.async.wait_group": "",
    "cp.async.wait_all": "",
    "cp.async.mbarrier.arrive": "noinc shared shared::cta b64",
    "cp.async.bulk": f"shared::cta shared::cluster global {_BULK}",
    "cp.async.bulk.prefetch": "L2 global L2::cache_hint",
    "cp.async.bulk.prefetch.tensor": f"L2 global L2::cache_hint {_TENSOR}",
    "cp.async.bulk.tensor": f"shared::cta shared::cluster global {_TENSOR} {_BULK}",
    "cp.async.bulk.commit_group": "",
    "cp.async.bulk.wait_group": "read",
    "cp.reduce.async.bulk": f"shared::cta shared::cluster global {_BULK} {_REDOPS}",
    "cp.reduce.async.bulk.tensor": f"shared::cta global {_TENSOR} bulk_group L2::cache_hint"
    " add min max inc dec and or xor",
    "tensormap.replace": "tile global_address global_dim global_stride box_dim element_stride"
    " global shared::cta b1024 b32 b64",
    "tensormap.cp_fenceproxy": "global shared::cta tensormap::generic release cta cluster gpu sys"
    " sync aligned",
    # matrix
    "wgmma.fence": "sync aligned",
    "wgmma.commit_group": "sync aligned",
    "wgmma.wait_group": "sync aligned",
    "wgmma.mma_async": "sync aligned f32 f16 s32 bf16 tf32 e4m3 e5m2 s8 u8 satfinite"
    + "".join(f" m64n{n}k{k}" for n in range(8, 257, 8) for k in (8, 16, 32)),
    "ldmatrix": "sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16",
    "stmatrix": "sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16",
    "movmatrix": "sync aligned m8n8 trans b16",
    "mma": "sync aligned m16n8k16 row col f32 f16 bf16",
    "setmaxnreg": "inc dec sync aligned u32",
}

FAMILIES: dict[str, frozenset[str]] = {k: frozenset(v.split()) for k, v in _TABLE.items()}


@dataclass(frozen=True)
class Opcode:
    """An opcode split into its family and its modifiers, in the order written."""

    family: str
    mods: tuple[str, ...]

    def has(self, mod: str) -> bool:
        """True if the modifier is written."""
        return mod in self.mods


def unsupported(ins: Instruction, why: str) -> UnsupportedInstruction:
    """The error for an instruction that cannot be run, with its line."""
    return UnsupportedInstruction(f"PTX line {ins.line}: {ins.opcode}: {why}")


def classify(ins: Instruction) -> Opcode:
    """Split an opcode; raises :class:`UnsupportedInstruction` for anything not listed."""
    parts = ins.opcode.split(".")
    for n in range(len(parts), 0, -1):
        family = ".".join(parts[:n])
        allowed = FAMILIES.get(family)
        if allowed is None:
            continue
        mods = tuple(parts[n:])
        for mod in mods:
            if mod not in allowed:
                raise unsupported(ins, f"modifier .{mod} is not supported on {family}")
        return Opcode(family, mods)
    raise unsupported(ins, f"opcode {parts[0]!r} is not supported")
