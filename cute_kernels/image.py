"""A compiled kernel as plain data: code, launch signature, and what the compiler reported.

Nothing here imports the compiler, so a machine without it can hold, load and launch images.
"""

import re
from dataclasses import dataclass, field

from megamoe.cute_kernels.kernel_config import KernelConfig

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.S)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+[\w$]+(?:\[(\d+)\])?")
_REQNTID = re.compile(r"\.reqntid\s+(\d+)")
_WGMMA = re.compile(r"\bwgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)((?:\.[\w:]+)+)")
_SETMAXNREG = re.compile(r"\bsetmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_NOTE = re.compile(r"\(C\d{4}\)[^\n]*")
SETMAXNREG_IGNORED = ("C7506", "C7507")
"""ptxas notes that say it ignored ``setmaxnreg``."""
SERIALISED_WGMMA = ("C7510", "C7511", "C7512", "C7513", "C7514")
"""ptxas notes that say WGMMA was serialised."""


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: name, bytes, byte offset in the parameter block."""

    name: str
    nbytes: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Image:
    """What ``build.compile_forward`` returns.

    Args:
        entry: name of the kernel in the code.
        arch: e.g. ``"sm_90a"``.
        ptx, cubin: the code.
        parameters: launch signature in order.
        threads: threads of a CTA.
        smem_bytes: dynamic shared memory of a launch.
        registers: registers a thread is launched with.
        spill_bytes: bytes of spill stores plus loads.
        setmaxnreg: values of the ``setmaxnreg`` instructions, as (direction, registers).
        mma_instructions: static count of WGMMA instructions by shape and types.
        notes: ptxas notes (C7xxx lines).
        compile_seconds: trace and compile time.
        config: what it was compiled with; the host sizes its side of a launch by it.
    """

    entry: str
    arch: str
    ptx: str
    cubin: bytes
    parameters: tuple[Parameter, ...]
    threads: int
    smem_bytes: int
    registers: int
    spill_bytes: int
    setmaxnreg: tuple[tuple[str, int], ...]
    mma_instructions: dict[str, int]
    notes: tuple[str, ...]
    compile_seconds: float
    config: KernelConfig = field(default_factory=KernelConfig)

    @property
    def setmaxnreg_kept(self) -> bool:
        """True if the kernel reallocates registers and ptxas did not ignore it."""
        return bool(self.setmaxnreg) and not self._noted(SETMAXNREG_IGNORED)

    @property
    def setmaxnreg_state(self) -> str:
        """``"kept"``, ``"IGNORED"``, or ``"unused"`` in a form that never reallocates."""
        if self.setmaxnreg_kept:
            return "kept"
        return "IGNORED" if self.setmaxnreg or self.config.reallocates else "unused"

    @property
    def wgmma_serialised(self) -> bool:
        """True if ptxas serialised the asynchronous matrix products."""
        return self._noted(SERIALISED_WGMMA)

    @property
    def sound(self) -> bool:
        """True if nothing spills, ``setmaxnreg`` acts and WGMMA is asynchronous."""
        kept = self.setmaxnreg_state != "IGNORED"
        return self.spill_bytes == 0 and kept and not self.wgmma_serialised

    def _noted(self, codes: tuple[str, ...]) -> bool:
        return any(code in note for note in self.notes for code in codes)


def parse_signature(ptx: str, names: tuple[str, ...]) -> tuple[str, tuple[Parameter, ...], int]:
    """Entry name, parameters (with ``names`` in order) and threads of a CTA from a PTX header.

    Raises:
        ValueError: not exactly one entry, or another number of parameters than ``names``.
    """
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise ValueError(f"ptx: {len(entries)} entries, expected one")
    entry, body = entries[0]
    offset = 0
    parameters = []
    found = _PARAM.findall(body)
    if len(found) != len(names):
        raise ValueError(f"ptx: entry {entry} has {len(found)} parameters, expected {len(names)}")
    for name, (align, kind, count) in zip(names, found, strict=True):
        size = int(re.sub(r"\D", "", kind)) // 8 * int(count or 1)
        alignment = int(align or size)
        offset = -(-offset // alignment) * alignment
        parameters.append(Parameter(name, size, offset))
        offset += size
    threads = _REQNTID.search(ptx)
    if threads is None:
        raise ValueError(f"ptx: entry {entry} does not state its number of threads (.reqntid)")
    return entry, tuple(parameters), int(threads.group(1))


def describe(ptx: str, remarks: str) -> dict:
    """Report fields of an image from the PTX and the assembler's remarks.

    Raises:
        ValueError: the remarks hold no register or spill line.
    """
    used, spills = _USED.search(remarks), _SPILLS.findall(remarks)
    if used is None or not spills:
        raise ValueError(f"remarks: no register or spill report in {remarks!r}")
    mma: dict[str, int] = {}
    for shape, types in _WGMMA.findall(ptx):
        mma[shape + types] = mma.get(shape + types, 0) + 1
    return {
        "registers": int(used.group(1)),
        "spill_bytes": sum(int(store) + int(load) for store, load in spills),
        "setmaxnreg": tuple((way, int(count)) for way, count in _SETMAXNREG.findall(ptx)),
        "mma_instructions": mma,
        "notes": tuple(dict.fromkeys(_NOTE.findall(remarks))),
    }
