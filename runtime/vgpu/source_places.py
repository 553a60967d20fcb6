"""PTX lines to source functions, by the ``.loc`` directives: names that survive recompiling."""

from __future__ import annotations

import ast
import bisect
import functools
import re
from pathlib import Path

WRAPPERS = frozenset({"ptx.py", "ptx_copies.py", "ptx_values.py", "context.py", "layout.py"})
"""Files whose functions say nothing about why an instruction is there: their callers do."""
HELPERS = frozenset({"sync.py", "pipelines.py", "staging.py"})
"""Files whose functions are named together with their callers."""

PACKAGE = Path(__file__).parents[2]

_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")


@functools.lru_cache(maxsize=256)
def functions_of(path: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, name) of the functions in a Python file; none if it is not there."""
    file = Path(path)
    if not file.is_file():
        return ()
    tree = ast.parse(file.read_text())
    found = [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return tuple(sorted(found))


def function_at(path: str, line: int) -> str:
    """The innermost function around a line; empty if there is none."""
    inside = [f for f in functions_of(path) if f[0] <= line <= f[1]]
    return inside[-1][2] if inside else ""


def here(path: str) -> str:
    """The kernels' file of this name in this package: a cached image names those of the checkout
    that compiled it, which were the same then, and may be gone or changed now.

    >>> Path(here("/elsewhere/cute_kernels/load.py")).is_file()
    True
    """
    own = PACKAGE.joinpath(*Path(path).parts[-2:])
    return str(own) if own.parent.name == "cute_kernels" and own.is_file() else path


class SourcePlaces:
    """``.loc`` directives of a PTX text. Those without a column name whole functions; they are
    left out."""

    def __init__(self, ptx: str, files: dict[int, str]) -> None:
        self.files = {number: here(path) for number, path in files.items()}
        self.lines: list[int] = []
        self.locs: list[tuple[int, int]] = []
        for number, text in enumerate(ptx.split("\n"), 1):
            match = _LOC.match(text)
            if match and int(match[2]) > 0 and int(match[3]) > 0:
                self.lines.append(number)
                self.locs.append((int(match[1]), int(match[2])))

    def of(self, line: int) -> tuple[str, str]:
        """(``file:function`` of the innermost kernel code, ``file:line``) of a PTX line.

        A helper's code is named after its caller, with the helper behind a slash.
        """
        at = bisect.bisect_left(self.lines, line) - 1
        if at < 0:
            return "?", "?"
        number, row = self.locs[at]
        source = f"{Path(self.files.get(number, '?')).name}:{row}"
        helper = ""
        while at >= 0:
            number, row = self.locs[at]
            path = self.files.get(number, "?")
            name = Path(path).name
            function = function_at(path, row) or str(row)
            if name in HELPERS:
                helper = helper or f"/{function}"
            elif name not in WRAPPERS:
                return f"{name}:{function}{helper}", source
            at -= 1
        return f"?{helper}", source
