"""Benchmarks are scripts: each finds its neighbours by its own folder, and folders have modules of the same names."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

BENCH = Path(__file__).resolve().parents[2] / "bench"


@contextlib.contextmanager
def imported(folder: str, names: Sequence[str]) -> Iterator[SimpleNamespace]:
    """The modules of these names out of a folder of bench, which nobody else finds by them afterwards."""
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(BENCH / folder))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCH / folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)
