"""A guard: a line that keeps wrong bytes or stuck requests out, how it is broken, and which tests must notice."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Guard:
    """`symbol`: the function or Class.method of `file` (Python), or a text that the C++ function begins with. In it
    `before` stands exactly once. `reason`: why the mutant may survive; empty: it must not."""

    name: str
    file: str
    symbol: str
    before: str
    after: str
    tests: tuple[str, ...]  # paths, or paths::names, of pytest
    reason: str = ""

    @property
    def compiled(self) -> bool:
        """Whether the extension is to be built for it."""
        return self.file.startswith("csrc/")

    def broken(self, root: Path) -> str:
        """The file's text with the guard broken. NoLongerApplies names what is not there."""
        text = (root / self.file).read_text()
        start, end = _span_of_c(text, self.symbol) if self.compiled else _span_of_python(text, self.symbol)
        found = text.count(self.before, start, end)
        if found != 1:
            raise NoLongerApplies(f"{self.name}: {self.file}:{self.symbol} has {self.before!r} {found} times, not once")
        at = text.index(self.before, start, end)
        return text[:at] + self.after + text[at + len(self.before) :]


class NoLongerApplies(Exception):
    """The code has changed under a guard's description."""


@cache
def _parsed(text: str) -> ast.Module:
    """Many guards stand in one file."""
    return ast.parse(text)


def _span_of_python(text: str, symbol: str) -> tuple[int, int]:
    """Where the function, method or class lies in the text, in characters."""
    node: ast.AST = _parsed(text)
    for name in symbol.split("."):
        inner = [
            child
            for child in getattr(node, "body", [])
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == name
        ]
        if not inner:
            raise NoLongerApplies(f"there is no {symbol}")
        node = inner[-1]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.end_lineno is not None
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: node.lineno - 1])), sum(map(len, lines[: node.end_lineno]))


def _span_of_c(text: str, symbol: str) -> tuple[int, int]:
    """From the symbol's text to the end of its function, a closing brace at the line's start."""
    if text.count(symbol) != 1:
        raise NoLongerApplies(f"{symbol!r} stands {text.count(symbol)} times, not once")
    start = text.index(symbol)
    end = text.find("\n}", start)
    return start, len(text) if end < 0 else end + 2
