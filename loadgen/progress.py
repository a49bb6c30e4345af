"""What a run shows while it goes on, on a terminal only."""

from __future__ import annotations

from collections import deque
from statistics import median
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.loadgen.runner import TurnRecord

RECENT = 200  # requests of which the median is shown


class Live:
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
        self._done = 0
        self._failed = 0

    def __enter__(self) -> Live:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_turn(self, turn: TurnRecord) -> None:
        if self._progress.disable:
            return
        self._done += 1
        self._failed += turn.error is not None
        if turn.first_s is not None:
            self._firsts.append(turn.first_s)
        first = 1000 * median(self._firsts) if self._firsts else 0.0
        rate = self._done / max(turn.end_s, 1e-9)
        self._progress.update(self._task, advance=1, failed=self._failed, rate=rate, first=first)
