"""A kernel: parsed, checked and decoded once, launched any number of times."""

from __future__ import annotations

from megamoe.runtime.vgpu.errors import PtxSyntaxError
from megamoe.runtime.vgpu.program import Program
from megamoe.runtime.vgpu.ptx_ast import Entry, Module
from megamoe.runtime.vgpu.ptx_parser import parse_ptx


class Kernel:
    """One entry of a PTX module, ready to run."""

    def __init__(self, module: Module, entry: Entry) -> None:
        self.module, self.entry = module, entry
        self.program = Program(module, entry)

    @classmethod
    def from_ptx(cls, text: str, entry: str | None = None) -> Kernel:
        """Decode a kernel; anything that cannot be run is refused here, by line and opcode.

        ``entry`` is needed only if the module has several.
        """
        module = parse_ptx(text)
        if entry is None:
            if len(module.entries) != 1:
                names = ", ".join(module.entries) or "none"
                raise PtxSyntaxError(f"name the entry to run; the module has: {names}")
            entry = next(iter(module.entries))
        if entry not in module.entries:
            raise PtxSyntaxError(f"no entry {entry!r}; there are: {', '.join(module.entries)}")
        return cls(module, module.entries[entry])

    @property
    def name(self) -> str:
        """The entry's name."""
        return self.entry.name
