"""Keeps the collector of garbage from stopping a process that serves."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """A full one looks at all that was imported and made before: tens of milliseconds in which nothing is served.

    Of the whole process: entered once, when what lasts is there."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
