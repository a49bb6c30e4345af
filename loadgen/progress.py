"""The display of a run while it goes on: a bar on a terminal, elsewhere lines."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from statistics import median
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.loadgen.runner import TurnRecord

RECENT = 200  # requests of which the median is shown
LINE_SECONDS = 10.0  # between lines, where there is no terminal


class Live:
    """A bar on a terminal, elsewhere a line every LINE_SECONDS. Used on a running event loop."""

    def __init__(self, console: Console, turns: int) -> None:
        self._progress = Progress(
            TextColumn("turns"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(
                "{task.fields[rate]:.1f}/s, first token {task.fields[first]:.0f} ms, {task.fields[failed]} failed"
            ),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("turns", total=turns, failed=0, rate=0.0, first=0.0)
        self._firsts: deque[float] = deque(maxlen=RECENT)
        self._console = console
        self._turns = turns
        self._began = time.monotonic()
        self._next_line: asyncio.TimerHandle | None = None
        self._done = 0
        self._failed = 0

    def __enter__(self) -> Live:
        self._began = time.monotonic()
        if self._progress.disable:
            self._next_line = asyncio.get_running_loop().call_later(LINE_SECONDS, self._line)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next_line is not None:
            self._next_line.cancel()
        self._progress.stop()

    def _line(self) -> None:
        passed = time.monotonic() - self._began
        self._console.print(
            f"{self._done}/{self._turns} turns in {passed:.0f} s, {self._done / passed:.1f}/s, "
            f"first token {self._first_ms:.0f} ms, {self._failed} failed",
            highlight=False,
            soft_wrap=True,
        )
        self._next_line = asyncio.get_running_loop().call_later(LINE_SECONDS, self._line)

    @property
    def _first_ms(self) -> float:
        return 1000 * median(self._firsts) if self._firsts else 0.0

    def on_turn(self, turn: TurnRecord) -> None:
        self._done += 1
        self._failed += turn.error is not None
        if turn.first_s is not None:
            self._firsts.append(turn.first_s)
        if self._progress.disable:
            return
        rate = self._done / max(turn.end_s, 1e-9)
        self._progress.update(self._task, advance=1, failed=self._failed, rate=rate, first=self._first_ms)
