"""Memory that is made in a thread for somebody who has left meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvferry.daemon.memory.making import make_in_thread


def test_what_nobody_has_is_undone_in_a_thread() -> None:
    """To let it go may take as long as to make it."""
    began, go_on = threading.Event(), threading.Event()
    undone: list[tuple[str, int]] = []

    def make() -> str:
        began.set()
        assert go_on.wait(20)
        return "made"

    async def story() -> None:
        making = asyncio.create_task(make_in_thread(make, lambda made: undone.append((made, threading.get_ident()))))
        assert await asyncio.to_thread(began.wait, 20)
        making.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await making

    asyncio.run(story())
    ((made, thread),) = undone
    assert made == "made" and thread != threading.get_ident()
