"""PTX text to a :class:`Module`.

Scopes (``{ }``) may reuse register and label names: registers get their own slot in the flat
register file, labels are resolved when their scope closes.
"""

from __future__ import annotations

from megamoe.runtime.vgpu.errors import PtxSyntaxError, UnsupportedInstruction
from megamoe.runtime.vgpu.ptx_ast import (
    Entry,
    Imm,
    Instruction,
    Label,
    Module,
    Param,
    Reg,
    Sym,
    Variable,
    Vec,
)
from megamoe.runtime.vgpu.ptx_tokens import TYPE_BYTES, Scope, TokenParser

_LINKAGE = {".visible", ".weak", ".extern", ".common"}
_SPACES = {".shared", ".global", ".const", ".local"}


class _Parser(TokenParser):
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
            elif word in TYPE_BYTES:
                elem = TYPE_BYTES[word]
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
                elif word in TYPE_BYTES:
                    kind = word
                elif word not in ("ptr", "global", "shared", "const", "local"):
                    raise self.error(f"unknown parameter attribute .{word}")
            name, size = self.next(), TYPE_BYTES[kind]
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
        self.scopes = [Scope()]
        while True:
            tok = self.peek()
            if tok == "}":
                self.next()
                self.close_scope()
                if not self.scopes:
                    return
            elif tok == "{":
                self.next()
                self.scopes.append(Scope())
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
                name = self.next()
                self.next()
                if self.peek() == ".branchtargets":
                    self.branch_targets(name)
                else:
                    self.scopes[-1].labels[name] = len(self.entry.instructions)
            elif tok == "":
                raise self.error("the entry is not closed")
            else:
                self.instruction()

    def branch_targets(self, name: str) -> None:
        """``name: .branchtargets L0, L1, ...;``"""
        self.next()
        names = [self.next()]
        while self.peek() == ",":
            self.next()
            names.append(self.next())
        self.expect(";")
        self.scopes[-1].tables[name] = names

    def close_scope(self) -> None:
        assert self.entry is not None
        scope = self.scopes.pop()
        for ins in scope.pending:
            for i, op in enumerate(ins.operands):
                if isinstance(op, Sym) and op.name in scope.labels:
                    ins.operands[i] = Label(scope.labels[op.name], op.name)
                elif isinstance(op, Sym) and op.name in scope.tables:
                    names = scope.tables[op.name]
                    missing = [n for n in names if n not in scope.labels]
                    if missing:
                        raise PtxSyntaxError(f"PTX line {ins.line}: unknown label {missing[0]}")
                    ins.operands[i] = Vec(tuple(Label(scope.labels[n], n) for n in names))
        left = [ins for ins in scope.pending if any(self.is_label(op) for op in ins.operands)]
        if self.scopes:
            self.scopes[-1].pending += left
        elif left:
            raise PtxSyntaxError(f"PTX line {left[0].line}: unknown name in {left[0].operands}")

    def is_label(self, op: object) -> bool:
        return isinstance(op, Sym) and not self.known(op.name)

    def registers(self) -> None:
        assert self.entry is not None
        kind = self.next()[1:]
        if kind not in TYPE_BYTES or TYPE_BYTES[kind] > 8:
            raise self.error(f"register type .{kind} is not supported")
        width = 1 if kind == "pred" else 8 * TYPE_BYTES[kind]
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
        guard: Reg | None = None
        negated = False
        if self.peek() == "@":
            self.next()
            if self.peek() == "!":
                self.next()
                negated = True
            found = self.name(self.next())
            if not isinstance(found, Reg) or found.width != 1:
                raise self.error("the guard is not a predicate register")
            guard = found
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


def parse_ptx(text: str) -> Module:
    """Parse PTX text; raises :class:`PtxSyntaxError` with the line."""
    return _Parser(text).parse()
