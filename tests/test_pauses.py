"""A process that serves is not stopped by collections of what was there before."""

from __future__ import annotations

import gc

from kvferry.pauses import short_collections


def test_what_was_there_is_not_looked_at_while_it_serves() -> None:
    gc.unfreeze()  # what tests/conftest.py froze
    with short_collections():
        old = len(gc.get_objects())
        assert gc.get_freeze_count() > 10_000 > old
        kept: list[object] = [[] for _ in range(100)]
        assert len(gc.get_objects()) >= old + len(kept), "what comes later is"
    assert gc.get_freeze_count() == 0
    gc.freeze()
