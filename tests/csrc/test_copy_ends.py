"""The ends of GPU copies as the event loop hears them, over the fake driver."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry._core import GpuCopy, GpuCopyEngine
from kvferry.daemon.memory import gpu_completions as copy_ends
from kvferry.daemon.memory.gpu import issue
from kvferry.daemon.memory.gpu_completions import CopyEnds

NOT_READY = 600


def copier(library: str) -> Callable[[], GpuCopy]:
    engine = GpuCopyEngine(0, library)
    memory, slot = engine.allocate(64), engine.allocate(64)
    pages = engine.pages(np.array([memory.address]), np.array([16]), 16, 4)

    def gather(held: object = memory) -> GpuCopy:
        return engine.gather_part(pages, np.array([1]), 0, 16, slot.address)

    return gather


@pytest.mark.parametrize("slow", [False, True], ids=["seen by the loop", "waited for by the thread"])
def test_an_end_that_cannot_be_dealt_with_keeps_no_other_one_back(fake: ctypes.CDLL, library: str, slow: bool) -> None:
    copy = copier(library)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        reported: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: reported.append(context))
        ends = CopyEnds()
        told: list[str] = []
        all_told = asyncio.Event()

        def tell(what: str) -> None:
            told.append(what)
            if len(told) == 3:
                all_told.set()

        def broken(problem: str) -> None:
            tell("broken")
            raise RuntimeError("injected")

        def well(problem: str) -> None:
            tell("well" + problem)

        for _ in range(3):
            all_told.clear()
            told.clear()
            if slow:
                fake.fake_answer(b"event_query", NOT_READY)
            for done in (broken, broken, well):
                ends.issue(copy, done)
            if slow:
                while len(ends._given) < 3:
                    await asyncio.sleep(0.001)
                fake.fake_answer(b"event_query", 0)
            await asyncio.wait_for(all_told.wait(), 20)
            assert sorted(told) == ["broken", "broken", "well"]
            assert len(ends) == 0
            while ends._turning:  # it falls asleep, and is woken by the next one
                await asyncio.sleep(0.001)
        assert [str(context["exception"]) for context in reported] == ["injected"] * 6
        ends.close()

    asyncio.run(story())


def test_a_copy_too_many_does_not_begin(fake: ctypes.CDLL, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is told that it failed gives its pages and its slot to others."""
    monkeypatch.setattr(copy_ends, "MAX_COPIES", 2)
    copy = copier(library)

    async def story() -> None:
        fake.fake_answer(b"event_query", NOT_READY)
        ends = CopyEnds()
        refused: list[str] = []
        for _ in range(2):
            issue(ends, copy, lambda problem: None)
        begun = fake.fake_calls(b"launch")
        issue(ends, copy, refused.append)
        await asyncio.sleep(0)
        assert refused == ["ValueError: copies that run are 2; they must be 2 at most"]
        assert fake.fake_calls(b"launch") == begun
        fake.fake_answer(b"event_query", 0)
        ends.close()

    asyncio.run(story())
