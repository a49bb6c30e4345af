"""Health is progress: SERVING only while the event loop, every copy worker and every courier's poller move. Shell.

Twice in `stalled_seconds`, and at least each second, every part is asked for a tick. A copy worker runs an empty job,
and the oldest copy on its threads, on a GPU or between tiers has not run for long: of several threads others would run
the job; a courier polls while it lives, and sleeps between polls, several times a second however busy it is; the kernel
counts these waits, and a count that does not move is a courier that is stopped or stuck. (One that waits for its GPU
moves, and ends itself where one header takes 10 s to read.) An event loop that stands still cannot say so itself: its
health checks are not answered, and a thread writes down where it stands.

Time in which this whole process stood still is nobody's: all of it counts for the time between two looks at most.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from kvferry.daemon.observe.progress import Progress
from kvferry.daemon.peers.session import Session
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.daemon.sides.side import AnySide
from kvferry.waiting import OwnTime

log = logging.getLogger(__name__)

EVENT_LOOP = "event loop"


class HealthWatch:
    """`announce` is told whether the daemon serves, whenever that changes, and at first."""

    def __init__(self, sides: Mapping[str, AnySide], stalled_seconds: float, announce: Callable[[bool], None]) -> None:
        self.progress = Progress(stalled_seconds)
        self._pause = min(1.0, stalled_seconds / 2)  # seconds between two looks
        self._time = OwnTime(self._pause)
        self._sides = sides
        self._announce = announce
        self._asked: set[str] = set()  # copy workers whose empty job has not run yet
        self._waits: dict[str, tuple[int, int]] = {}  # by courier: pid, waits counted
        self._looks = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch_loop, name="kvferry-health", daemon=True)

    @property
    def stalled(self) -> list[str]:
        """The stalled parts, and for how long."""
        return [f"{part} for {seconds:.1f} s" for part, seconds in self.progress.stalled(self._time())]

    async def run(self) -> None:
        """Watches until cancelled."""
        self._thread.start()
        serving: bool | None = None
        try:
            while True:
                now = self._time()
                self._looks += 1
                self.progress.tick(EVENT_LOOP, now)
                parts = self._ask_copy_workers(now) | self._look_at_copies(now) | self._look_at_couriers(now)
                self.progress.keep({EVENT_LOOP} | parts)
                stalled = self.stalled
                self._replace_stalled_couriers(now)
                if serving is not (not stalled):
                    serving = not stalled
                    log.log(*((logging.INFO, "nothing stalls") if serving else (logging.ERROR, f"stalled: {stalled}")))
                    self._announce(serving)
                await asyncio.sleep(self._pause)
        finally:
            self._ended.set()
            await asyncio.to_thread(self._thread.join)

    def _ask_copy_workers(self, now: float) -> set[str]:
        parts = set()
        for side in self._sides.values():
            for name, executor in side.tiers.copy_workers().items():
                part = f"{side.role} {name}"
                parts.add(part)
                if not self.progress.known(part):
                    self.progress.tick(part, now)
                if part not in self._asked:
                    self._ask(part, executor)
        return parts

    def _ask(self, part: str, executor: Executor) -> None:
        loop = asyncio.get_running_loop()

        def answered() -> None:
            self._asked.discard(part)
            self.progress.tick(part, self._time())

        def job() -> None:
            if not self._ended.is_set():
                loop.call_soon_threadsafe(answered)

        try:
            executor.submit(job)
            self._asked.add(part)
        except RuntimeError:
            return  # it is being shut down

    def _look_at_copies(self, now: float) -> set[str]:
        parts = set()
        for side in self._sides.values():
            for name, age in side.tiers.late_copies(now).items():
                part = f"{side.role} {name}"
                parts.add(part)
                self.progress.tick(part, now - age)
        return parts

    def _look_at_couriers(self, now: float) -> set[str]:
        parts = set()
        for part, session in self._sessions():
            pid = session.courier_pid
            waits = None if pid is None else _waits_of(pid)
            if pid is None or waits is None:
                continue  # it starts, or is being reaped: both have deadlines
            parts.add(part)
            if self._waits.get(part) != (pid, waits):
                self._waits[part] = (pid, waits)
                self.progress.tick(part, now)
        self._waits = {part: seen for part, seen in self._waits.items() if part in parts}
        return parts

    def _replace_stalled_couriers(self, now: float) -> None:
        """Each costs its session, which is made anew with another one."""
        late = dict(self.progress.stalled(now))
        for part, session in self._sessions():
            if part in late and not session.closed:
                session.break_off(f"its courier has not moved for {late[part]:.1f} s")

    def _sessions(self) -> list[tuple[str, Session]]:
        found: list[tuple[str, Session]] = []
        for side in self._sides.values():
            if isinstance(side, DecodeSide):
                found += [(f"courier from {link.name}", link.session) for link in side.links.values() if link.session]
            elif isinstance(side, PrefillSide):
                found += [(f"courier to {each.remote} ({number})", each) for number, each in side.sessions.items()]
        return found

    def _watch_loop(self) -> None:
        """Watches the event loop in a thread: logs once for each time that it stands still."""
        stalled, looks, said = self.progress.stalled_seconds, 0, 0
        own = OwnTime(stalled / 4)
        since = own()
        while not self._ended.wait(stalled / 4):
            now = own()
            if self._looks != looks:
                looks, since = self._looks, now
            elif now - since > stalled and said != looks:
                said = looks
                log.critical("the event loop has not moved for %.1f s; it stands here:", now - since)
                faulthandler.dump_traceback(sys.stderr, all_threads=True)


def _waits_of(pid: int) -> int | None:
    """The number of times that the process has waited; None where it is gone."""
    try:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("voluntary_ctxt_switches:"):
                    return int(line.split()[1])
    except (OSError, ValueError):
        return None
    return None
