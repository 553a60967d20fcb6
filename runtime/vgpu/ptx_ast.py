"""What a PTX module looks like after parsing: entries, declarations, instructions, operands."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reg:
    """A register: ``index`` in the entry's register file, ``width`` in bits (1: predicate)."""

    index: int
    width: int
    name: str


@dataclass(frozen=True)
class Special:
    """A read-only special register such as ``%tid.x`` (name without the percent sign)."""

    name: str


@dataclass(frozen=True)
class Imm:
    """An immediate. ``kind`` is ``int``, ``f32`` or ``f64``; floats are kept as raw bits."""

    value: int
    kind: str = "int"


@dataclass(frozen=True)
class Sym:
    """The address of a variable or kernel parameter, or a label's name before it is resolved."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Label:
    """A branch target: the index of the instruction it stands before."""

    target: int
    name: str


@dataclass(frozen=True)
class Sink:
    """The ``_`` destination."""


@dataclass(frozen=True)
class Vec:
    """``{a, b, ...}``."""

    items: tuple


@dataclass(frozen=True)
class Pair:
    """``a|b`` destinations."""

    first: object
    second: object


@dataclass(frozen=True)
class Not:
    """``!p`` used as an operand."""

    operand: object


@dataclass(frozen=True)
class Mem:
    """``[base+offset]`` or ``[base+offset, extra...]`` (tensor coordinates)."""

    base: object
    offset: int = 0
    extra: tuple = ()


@dataclass
class Instruction:
    """One instruction. ``opcode`` is the full dotted text; ``loc`` is (file, line, column)."""

    opcode: str
    operands: list
    line: int
    guard: Reg | None = None
    guard_negated: bool = False
    loc: tuple[int, int, int] | None = None
    index: int = -1


@dataclass(frozen=True)
class Param:
    """A kernel parameter: its byte offset in the parameter block, size and alignment."""

    name: str
    offset: int
    size: int
    align: int
    type: str


@dataclass
class Variable:
    """A ``.shared``, ``.global``, ``.const`` or ``.local`` declaration."""

    name: str
    space: str
    align: int
    size: int
    extern: bool = False
    init: bytes = b""


@dataclass
class Entry:
    """A kernel."""

    name: str
    line: int
    params: list[Param] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    registers: list[Reg] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        """Size of the parameter block."""
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass
class Module:
    """A parsed PTX file."""

    version: str
    target: str
    entries: dict[str, Entry] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
