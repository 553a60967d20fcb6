"""PTX tokens and operands: the lower half of the parser."""

from __future__ import annotations

import re
import struct

from megamoe.runtime.vgpu.errors import PtxSyntaxError
from megamoe.runtime.vgpu.ptx_ast import (
    Entry,
    Imm,
    Instruction,
    Mem,
    Module,
    Not,
    Pair,
    Reg,
    Sink,
    Special,
    Sym,
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
TYPE_BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b128": 16, "pred": 1}
for _k in "us":
    TYPE_BYTES.update({f"{_k}8": 1, f"{_k}16": 2, f"{_k}32": 4, f"{_k}64": 8})
TYPE_BYTES.update({"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4})
_SPECIAL = re.compile(
    r"(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|clock64|globaltimer|globaltimer_lo"
    r"|globaltimer_hi|lanemask_(eq|le|lt|ge|gt)|cluster_ctarank|cluster_nctarank"
    r"|is_explicit_cluster|dynamic_smem_size|total_smem_size|aggr_smem_size)$"
)


def strip_comments(text: str) -> str:
    """Remove comments, keep line numbers."""
    return _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)


def tokens(text: str) -> list[tuple[str, str, int]]:
    """(kind, text, line) of every token, with a last one of kind ``eof``."""
    out: list[tuple[str, str, int]] = []
    line, pos, end = 1, 0, len(text)
    match = _TOKEN.match
    while pos < end:
        m = match(text, pos)
        if m is None:
            raise PtxSyntaxError(f"line {line}: unexpected text {text[pos : pos + 20]!r}")
        kind = m.lastgroup or ""
        if kind == "nl":
            line += 1
        elif kind != "ws":
            out.append((kind, m.group(), line))
        pos = m.end()
    out.append(("eof", "", line))
    return out


class Scope:
    """One pair of braces: its registers and labels, and instructions with open names."""

    def __init__(self) -> None:
        self.regs: dict[str, Reg] = {}
        self.ranges: dict[str, tuple[int, int, int]] = {}
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}
        self.pending: list[Instruction] = []


class TokenParser:
    """A cursor over the tokens, with what is needed to read operands."""

    def __init__(self, text: str) -> None:
        self.toks = tokens(strip_comments(text))
        self.pos = 0
        self.module = Module("", "")
        self.entry: Entry | None = None
        self.scopes: list[Scope] = []
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

    def known(self, name: str) -> bool:
        assert self.entry is not None
        return (
            name in self.entry.variables
            or name in self.module.variables
            or any(p.name == name for p in self.entry.params)
        )
