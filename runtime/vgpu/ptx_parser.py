"""PTX text to a :class:`Module`.

Scopes (``{ }``) may reuse register and label names: registers get their own slot in the flat
register file, labels are resolved when their scope closes.
"""

from __future__ import annotations

import re
import struct

from megamoe.runtime.vgpu.errors import PtxSyntaxError, UnsupportedInstruction
from megamoe.runtime.vgpu.ptx_ast import (
    Entry,
    Imm,
    Instruction,
    Label,
    Mem,
    Module,
    Not,
    Pair,
    Param,
    Reg,
    Sink,
    Special,
    Sym,
    Variable,
    Vec,
)

_TOKEN = re.compile(
    r"""(?P<ws>[ \t\r\f]+)|(?P<nl>\n)
    |(?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16})
    |(?P<dec>\d+\.\d+(?:[eE][-+]?\d+)?)
    |(?P<num>0[xX][0-9a-fA-F]+U?|\d+U?(?![\w]))
    |(?P<word>[.%$A-Za-z_][\w$%.]*(?:::[\w.$]+)*)
    |(?P<str>"[^"]*")
    |(?P<punct>[{}\[\]();,:+\-!@|=<>*~&])""",
    re.X,
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TYPE_BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b128": 16, "pred": 1}
for _k in "us":
    _TYPE_BYTES.update({f"{_k}8": 1, f"{_k}16": 2, f"{_k}32": 4, f"{_k}64": 8})
_TYPE_BYTES.update({"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4})
_LINKAGE = {".visible", ".weak", ".extern", ".common"}
_SPACES = {".shared", ".global", ".const", ".local"}
_SPECIAL = re.compile(
    r"(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|clock64|globaltimer|globaltimer_lo"
    r"|globaltimer_hi|lanemask_(eq|le|lt|ge|gt)|cluster_ctarank|cluster_nctarank"
    r"|is_explicit_cluster|dynamic_smem_size|total_smem_size|aggr_smem_size)$"
)


def _strip(text: str) -> str:
    return _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)


def _tokens(text: str) -> list[tuple[str, str, int]]:
    out = []
    line, pos, end = 1, 0, len(text)
    match = _TOKEN.match
    while pos < end:
        m = match(text, pos)
        if m is None:
            raise PtxSyntaxError(f"line {line}: unexpected text {text[pos : pos + 20]!r}")
        kind = m.lastgroup
        if kind == "nl":
            line += 1
        elif kind != "ws":
            out.append((kind, m.group(), line))
        pos = m.end()
    out.append(("eof", "", line))
    return out


class _Scope:
    def __init__(self) -> None:
        self.regs: dict[str, Reg] = {}
        self.ranges: dict[str, tuple[int, int, int]] = {}
        self.labels: dict[str, int] = {}
        self.pending: list[Instruction] = []


class _Parser:
    def __init__(self, text: str) -> None:
        self.toks = _tokens(_strip(text))
        self.pos = 0
        self.module = Module("", "")
        self.entry: Entry | None = None
        self.scopes: list[_Scope] = []
        self.loc: tuple[int, int, int] | None = None

    # -- token helpers -----------------------------------------------------------------------
    def peek(self) -> str:
        return self.toks[self.pos][1]

    def next(self) -> str:
        tok = self.toks[self.pos][1]
        self.pos += 1
        return tok

    def line(self) -> int:
        return self.toks[self.pos][2]

    def expect(self, text: str) -> None:
        if self.peek() != text:
            raise self.error(f"expected {text!r}, found {self.peek()!r}")
        self.pos += 1

    def error(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"PTX line {self.line()}: {message}")

    def skip_line(self) -> list[str]:
        line, out = self.line(), []
        while self.toks[self.pos][2] == line and self.toks[self.pos][0] != "eof":
            out.append(self.next())
        return out

    def skip_braces(self) -> None:
        self.expect("{")
        depth = 1
        while depth:
            tok = self.next()
            if tok == "":
                raise self.error("unclosed {")
            depth += (tok == "{") - (tok == "}")

    def integer(self) -> int:
        sign = 1
        while self.peek() in "+-" and self.peek():
            sign = -sign if self.next() == "-" else sign
        tok = self.next()
        try:
            return sign * int(tok.rstrip("U"), 0)
        except ValueError:
            raise self.error(f"expected a number, found {tok!r}") from None

    # -- module level ------------------------------------------------------------------------
    def parse(self) -> Module:
        while self.toks[self.pos][0] != "eof":
            tok = self.next()
            if tok == ".version":
                self.module.version = self.next()
            elif tok == ".target":
                self.module.target = self.next()
                while self.peek() == ",":
                    self.next()
                    self.next()
            elif tok == ".address_size":
                if self.next() != "64":
                    raise self.error("only 64-bit PTX is supported")
            elif tok == ".file":
                rest = self.skip_line()
                self.module.files[int(rest[0])] = rest[1].strip('"')
            elif tok == ".loc":
                self.skip_line()
            elif tok == ".section":
                self.next()
                self.skip_braces()
            elif tok in _LINKAGE or tok in _SPACES or tok in (".entry", ".func"):
                self.pos -= 1
                self.declaration()
            elif tok != ";":
                self.pos -= 1
                raise self.error(f"unexpected {tok!r} at module level")
        return self.module

    def declaration(self) -> None:
        extern = False
        while self.peek() in _LINKAGE:
            extern |= self.next() == ".extern"
        if self.peek() == ".entry":
            self.next()
            self.parse_entry()
        elif self.peek() == ".func":
            while self.peek() not in ("{", ";"):
                self.next()
            if self.peek() == "{":
                self.skip_braces()
            else:
                self.next()
        elif self.peek() in _SPACES:
            var = self.variable(extern)
            self.module.variables[var.name] = var
        else:
            raise self.error(f"unexpected {self.peek()!r}")

    def variable(self, extern: bool) -> Variable:
        space = self.next()[1:]
        align, elem, vec = 0, 0, 1
        while self.peek().startswith("."):
            word = self.next()[1:]
            if word == "align":
                align = self.integer()
            elif word in ("v2", "v4"):
                vec = int(word[1])
            elif word in _TYPE_BYTES:
                elem = _TYPE_BYTES[word]
            elif word.startswith("attribute"):
                raise self.error("variable attributes are not supported")
            else:
                raise self.error(f"unknown variable type .{word}")
        name, count = self.next(), vec
        while self.peek() == "[":
            self.next()
            count *= 0 if self.peek() == "]" else self.integer()
            self.expect("]")
        init = b""
        if self.peek() == "=":
            self.next()
            init = b"".join(v.to_bytes(elem, "little") for v in self.initialiser(elem))
        self.expect(";")
        return Variable(
            name, space, align or elem * vec, max(count * elem, len(init)), extern, init
        )

    def initialiser(self, elem: int) -> list[int]:
        if self.peek() != "{":
            op = self.operand()
            if not isinstance(op, Imm):
                raise self.error("initialisers with addresses are not supported")
            return [op.value & ((1 << (8 * elem)) - 1)]
        self.next()
        out: list[int] = []
        while self.peek() != "}":
            out += self.initialiser(elem)
            if self.peek() == ",":
                self.next()
        self.next()
        return out

    # -- entries -----------------------------------------------------------------------------
    def parse_entry(self) -> None:
        entry = Entry(self.next(), self.line())
        # Slot 0 is the carry bit of add.cc and its kin.
        entry.registers.append(Reg(0, 1, "%carry"))
        self.entry, self.loc = entry, None
        if self.peek() == "(":
            self.next()
            self.parameters(entry)
        while self.peek() != "{":
            word = self.next()
            if word == ";":
                return
            if not word.startswith("."):
                raise self.error(f"unexpected {word!r} in the entry header")
            values = []
            while self.toks[self.pos][0] == "num":
                values.append(self.integer())
                if self.peek() == ",":
                    self.next()
            entry.directives[word[1:]] = tuple(values)
        self.next()
        self.body()
        self.module.entries[entry.name] = entry

    def parameters(self, entry: Entry) -> None:
        offset = 0
        while self.peek() != ")":
            self.expect(".param")
            align, kind = 0, ""
            while self.peek().startswith("."):
                word = self.next()[1:]
                if word == "align":
                    align = self.integer()
                elif word in _TYPE_BYTES:
                    kind = word
                elif word not in ("ptr", "global", "shared", "const", "local"):
                    raise self.error(f"unknown parameter attribute .{word}")
            name, size = self.next(), _TYPE_BYTES[kind]
            align = align or size
            if self.peek() == "[":
                self.next()
                size *= self.integer()
                self.expect("]")
            offset = -(-offset // align) * align
            entry.params.append(Param(name, offset, size, align, kind))
            offset += size
            if self.peek() == ",":
                self.next()
        self.next()

    def body(self) -> None:
        assert self.entry is not None
        self.scopes = [_Scope()]
        while True:
            tok = self.peek()
            if tok == "}":
                self.next()
                self.close_scope()
                if not self.scopes:
                    return
            elif tok == "{":
                self.next()
                self.scopes.append(_Scope())
            elif tok == ";":
                self.next()
            elif tok == ".loc":
                words = self.skip_line()
                self.loc = (int(words[1]), int(words[2]), int(words[3]))
            elif tok == ".reg":
                self.next()
                self.registers()
            elif tok == ".pragma":
                self.next()
                self.next()
                self.expect(";")
            elif tok in _SPACES:
                var = self.variable(False)
                self.entry.variables[var.name] = var
            elif tok == ".extern":
                self.next()
                var = self.variable(True)
                self.entry.variables[var.name] = var
            elif self.toks[self.pos + 1][1] == ":" and self.toks[self.pos][0] == "word":
                self.scopes[-1].labels[self.next()] = len(self.entry.instructions)
                self.next()
            elif tok == "":
                raise self.error("the entry is not closed")
            else:
                self.instruction()

    def close_scope(self) -> None:
        assert self.entry is not None
        scope = self.scopes.pop()
        for ins in scope.pending:
            for i, op in enumerate(ins.operands):
                if isinstance(op, Sym) and op.name in scope.labels:
                    ins.operands[i] = Label(scope.labels[op.name], op.name)
        left = [ins for ins in scope.pending if any(self.is_label(op) for op in ins.operands)]
        if self.scopes:
            self.scopes[-1].pending += left
        elif left:
            raise PtxSyntaxError(f"PTX line {left[0].line}: unknown name in {left[0].operands}")

    def is_label(self, op: object) -> bool:
        return isinstance(op, Sym) and not self.known(op.name)

    def known(self, name: str) -> bool:
        assert self.entry is not None
        return (
            name in self.entry.variables
            or name in self.module.variables
            or any(p.name == name for p in self.entry.params)
        )

    def registers(self) -> None:
        assert self.entry is not None
        kind = self.next()[1:]
        if kind in ("v2", "v4") or kind not in _TYPE_BYTES:
            raise self.error(f"register type .{kind} is not supported")
        width = 1 if kind == "pred" else 8 * _TYPE_BYTES[kind]
        scope, regs = self.scopes[-1], self.entry.registers
        while True:
            name = self.next()
            if self.peek() == "<":
                self.next()
                count = self.integer()
                self.expect(">")
                names = [f"{name}{i}" for i in range(count)]
            else:
                names = [name]
            for n in names:
                scope.regs[n] = Reg(len(regs), max(width, 16) if width > 1 else 1, n)
                regs.append(scope.regs[n])
            if self.next() == ";":
                return

    def instruction(self) -> None:
        assert self.entry is not None
        line = self.line()
        guard, negated = None, False
        if self.peek() == "@":
            self.next()
            if self.peek() == "!":
                self.next()
                negated = True
            guard = self.name(self.next())
            if not isinstance(guard, Reg):
                raise self.error("the guard is not a predicate register")
        opcode = self.next()
        if opcode.partition(".")[0] == "call":
            # Its operands name functions and prototypes, which mean nothing here.
            raise UnsupportedInstruction(
                f"PTX line {line}: {opcode}: opcode 'call' is not supported"
            )
        operands: list = []
        while self.peek() != ";":
            operands.append(self.operand())
            if self.peek() == ",":
                self.next()
            elif self.peek() != ";":
                raise self.error(f"unexpected {self.peek()!r} after an operand of {opcode}")
        self.next()
        ins = Instruction(opcode, operands, line, guard, negated, self.loc)
        ins.index = len(self.entry.instructions)
        self.entry.instructions.append(ins)
        if any(self.is_label(op) for op in operands):
            self.scopes[-1].pending.append(ins)

    # -- operands ----------------------------------------------------------------------------
    def name(self, word: str) -> object:
        for scope in reversed(self.scopes):
            reg = scope.regs.get(word)
            if reg is not None:
                return reg
        if word == "_":
            return Sink()
        if word.startswith("%"):
            if _SPECIAL.match(word[1:]):
                return Special(word[1:])
            raise self.error(f"unknown register {word}")
        if word == "WARP_SZ":
            return Imm(32)
        return Sym(word)

    def operand(self) -> object:
        tok = self.peek()
        if tok == "[":
            return self.memory()
        if tok == "{":
            self.next()
            items = []
            while self.peek() != "}":
                items.append(self.operand())
                if self.peek() == ",":
                    self.next()
            self.next()
            return Vec(tuple(items))
        if tok == "!":
            self.next()
            return Not(self.operand())
        if tok == "-" or self.toks[self.pos][0] in ("num", "float", "dec"):
            return self.number()
        if self.toks[self.pos][0] != "word":
            raise self.error(f"unexpected operand {tok!r}")
        first = self.name(self.next())
        if self.peek() == "|":
            self.next()
            return Pair(first, self.name(self.next()))
        if self.peek() in ("+", "-") and isinstance(first, Sym):
            return Sym(first.name, self.integer())
        return first

    def number(self) -> Imm:
        sign = 1
        if self.peek() == "-":
            self.next()
            sign = -1
        kind, tok, _ = self.toks[self.pos]
        self.pos += 1
        if kind == "float":
            return Imm(int(tok[2:], 16), "f32" if tok[1] in "fF" else "f64")
        if kind == "dec":
            return Imm(int.from_bytes(struct.pack("<d", sign * float(tok)), "little"), "f64")
        text = tok.rstrip("U")
        # A leading zero means octal in PTX; Python spells that 0o.
        octal = len(text) > 1 and text[0] == "0" and text[1] not in "xXbB"
        return Imm(sign * int(text, 8 if octal else 0))

    def memory(self) -> Mem:
        self.expect("[")
        base = self.operand()
        offset = 0
        if self.peek() in ("+", "-"):
            offset = self.integer()
        if isinstance(base, Sym) and base.offset:
            base, offset = Sym(base.name), offset + base.offset
        if isinstance(base, Sym) and not self.known(base.name):
            raise self.error(f"unknown variable {base.name}")
        extra = []
        while self.peek() == ",":
            self.next()
            extra.append(self.operand())
        self.expect("]")
        return Mem(base, offset, tuple(extra))


def parse_ptx(text: str) -> Module:
    """Parse PTX text; raises :class:`PtxSyntaxError` with the line."""
    return _Parser(text).parse()
