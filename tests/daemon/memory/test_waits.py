"""Copies on several devices or threads are over when the last one is, and failed when one has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry._core import GpuError
from kvferry.daemon.memory.gpu import _when_all
from kvferry.daemon.memory.gpu_completions import CopyEnds
from kvferry.daemon.memory.gpu_ranks import run_all
from kvferry.daemon.memory.shared import SharedPoolMemory
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float16", page_size=16)
PAGES = 6


class Copy:
    """On a device. `late`: it is not over when a wait of bounded length ends."""

    def __init__(self, *, late: bool = False, fails: bool = False) -> None:
        self.late, self.fails = late, fails
        self.over = False

    def wait_for(self, seconds: float) -> bool:
        if not self.late:
            self.wait()
        return self.over

    def done(self) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        self.over = True
        if self.fails:
            raise GpuError("launch: OTHER")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_no_copy_runs_any_more_behind_the_wait(late: bool, failing: int | None) -> None:
    copies: Any = [Copy(late=late, fails=number == failing) for number in range(3)]
    issues: Any = [lambda copy=copy: copy for copy in copies]
    if failing is None:
        run_all(issues)
    else:
        with pytest.raises(OSError, match="launch: OTHER"):
            run_all(issues)
    assert all(copy.over for copy in copies)


def test_a_copy_that_cannot_be_issued_waits_for_those_before_it() -> None:
    copies: Any = [Copy(fails=True), Copy()]

    def refused() -> Any:
        raise GpuError("refused")

    with pytest.raises(OSError, match="could not be issued: refused"):
        run_all([*(lambda copy=copy: copy for copy in copies), refused])
    assert all(copy.over for copy in copies)


@pytest.mark.parametrize("problems", [["", "", ""], ["", "a", ""], ["a", "", "b"]])
def test_the_last_end_is_told_with_all_that_went_wrong(problems: list[str]) -> None:
    told: list[str] = []
    ended = _when_all(len(problems), told.append)
    for problem in problems:
        assert told == []
        ended(problem)
    assert told == ["; ".join(filter(None, problems))]


def test_the_loop_is_told_that_a_copy_failed() -> None:
    """And nobody is told of an end behind `stop`."""

    async def story(ends: CopyEnds) -> None:
        told: list[str] = []
        copies: Any = [Copy(fails=True), Copy(), Copy()]
        for number, copy in enumerate(copies[:2]):
            ends.issue(lambda copy=copy: copy, lambda problem, number=number: told.append(f"{number}{problem}"))
        while len(told) < 2:
            await asyncio.sleep(0)
        assert sorted(told) == ["0GpuError: launch: OTHER", "1"]
        ends.issue(lambda: copies[2], told.append)
        ends.stop()
        for _ in range(3):
            await asyncio.sleep(0)
        ends._tell(copies[2:])  # as by the thread, which was about to
        assert len(told) == 2
        ends.close()
        assert copies[2].over and len(ends) == 0

    ends = CopyEnds()
    try:
        asyncio.run(story(ends))
    finally:
        ends.close()


class Looked(Copy):
    """One that runs until it is told to have ended, and counts who looks."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.over


def test_no_look_is_at_a_copy_behind_one_of_its_stream_that_runs() -> None:
    async def story(ends: CopyEnds) -> None:
        told: list[int] = []
        first, second, other, alone, beside = copies = [Looked() for _ in range(5)]
        for number, (copy, stream) in enumerate(zip(copies, ("a", "a", "b", None, None), strict=True)):
            issued: Any = copy
            ends.issue(lambda issued=issued: issued, lambda _, number=number: told.append(number), stream)
        await asyncio.sleep(0)
        assert [copy.looks for copy in copies] == [1, 0, 1, 1, 1]
        for copy in (second, first, other, beside):
            copy.over = True
        while len(told) < 4:
            await asyncio.sleep(0)
        assert told == [0, 1, 2, 4]
        alone.over = True
        while len(ends):
            await asyncio.sleep(0)

    ends = CopyEnds()
    try:
        asyncio.run(asyncio.wait_for(story(ends), 10))
    finally:
        ends.close()


def test_pages_on_copy_threads_are_clear_when_all_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the threads fails: nobody is told that the pages are clear."""
    memory = SharedPoolMemory.create(PoolShape(GEOMETRY, 1, StorageOrder.PAGE_MAJOR, PAGES), str(tmp_path), "a", 3)

    async def story() -> str:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        memory.zero_pages(np.array([0, 1, PAGES]), done.set_result)
        return await asyncio.wait_for(done, 10)

    assert str(PAGES) in asyncio.run(story())
    memory.close()
