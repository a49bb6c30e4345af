"""Recovery from a fault, measured: by daemons' statistics, and by the turns that clients completed."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from kvferry.daemon.cli.stats import fetch
from kvferry.proto import cache_pb2
from tests.support.engines import OPTIONS

LOOK_S = 0.05  # between looks at a daemon's statistics
BEFORE_S = 10.0  # over which the rate of turns is taken before a fault
WINDOW_S = 5.0  # over which it is taken behind one: some dozens of turns on two cores
BACK_SHARE = 0.9
WORKER_SEEN_S, PEER_SEEN_S, RELEASED_S = 1.0, 5.0, 10.0  # at most
_CHANNEL = [*OPTIONS, ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]


@dataclass(frozen=True)
class Row:
    """How one fault was survived; seconds from it, None where there was nothing to see."""

    fault: str
    ok: int
    failed: int
    wrong: int
    seen: float | None  # all that were to lose something had seen that
    released: float | None  # no daemon held anything any more for requests from before the fault, or for lost workers
    served: float | None  # all routes had answered again
    rate_back: float | None  # from then on, turns were completed about as fast as before
    rate: float | None  # turns a second before the fault

    def __str__(self) -> str:
        times = (self.seen, self.released, self.served, self.rate_back, self.rate)
        shown = "".join(f"{'-' if each is None else f'{each:.2f}':>11}" for each in times)
        return f"{self.fault:<32}{self.ok:>6}{self.failed:>8}{self.wrong:>7}{shown}"


HEAD = f"{'fault':<32}{'ok':>6}{'failed':>8}{'wrong':>7}" + "".join(
    f"{name:>11}" for name in ("seen s", "released s", "served s", "rate back", "turns/s")
)
COLUMNS = f"""\
requests by outcome, from the fault until all routes served again. Seconds from the fault until
seen: the daemons that lost a worker or a peer by it showed that (looked at every {LOOK_S:g} s)
released: no daemon held locks or pages for a request from before it, orphaned pages, or a lost worker without proof
served: turns by way of each prefill replica, and of none, were answered again
rate back: at least {BACK_SHARE:.0%} as many turns a second were completed as in the {BEFORE_S:g} s before it (turns/s),
    in every {WINDOW_S:g} s that begin between then and the end of `served`
-: there was nothing to see, or it was not taken
"""


class Look(NamedTuple):
    """At one daemon."""

    at: float
    oldest: float  # when the oldest request came that holds pages or locks; infinite: there is none
    unproven: int  # orphaned pages and lost workers
    unexplained: int  # locks beyond one a request
    workers: int  # that are here
    up: frozenset[str]  # peers

    def holds(self, before: float) -> bool:
        """What is not explained by requests that came later than `before`."""
        return self.oldest < before or self.unproven > 0 or self.unexplained > 0


def look(at: float, side: cache_pb2.SideStats) -> Look:
    requests, pool, quarantine = side.requests, side.pool, side.quarantine
    return Look(
        at,
        at - requests.oldest_seconds if requests.oldest_seconds else float("inf"),
        pool.orphaned + quarantine.orphaned_pages + quarantine.lost_workers,
        max(0, pool.locks - requests.running - requests.waiting),
        side.workers - quarantine.lost_workers,
        frozenset(peer.name for peer in side.peers if peer.state == "up"),
    )


class Watch:
    """A context: looks at daemons (name to Unix address) all the time; those that do not answer are not seen."""

    def __init__(self, daemons: Mapping[str, str]) -> None:
        self._looks: dict[str, list[Look]] = {name: [] for name in daemons}
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._look_at, args=each, name="watch") for each in daemons.items()]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + 10
        while not all(self._looks.values()):
            if time.monotonic() > end:
                self.__exit__()
                raise AssertionError("a daemon has no statistics")
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(10)

    def _look_at(self, name: str, address: str) -> None:
        with grpc.insecure_channel(address, _CHANNEL) as channel:
            while not self._over.wait(LOOK_S):
                try:
                    side = fetch(channel).sides[0]
                except grpc.RpcError:
                    continue
                self._looks[name].append(look(time.monotonic(), side))

    def seen(self, lost: Iterable[str], at: float) -> float | None:
        """When all had seen that a worker or daemon was lost; None: it is not to be seen, or somebody has not."""
        moments: list[float | None] = []
        for part in lost:
            daemon = part.removesuffix("-worker")
            if part != daemon:
                before = self._before(daemon, at)
                moments.append(next((x.at for x in self._since(daemon, at) if x.workers < before.workers), None))
                continue
            for other in self._looks:
                if other != daemon and daemon in self._before(other, at).up:
                    moments.append(next((x.at for x in self._since(other, at) if daemon not in x.up), None))
        found = [moment for moment in moments if moment is not None]
        return max(found) - at if found and len(found) == len(moments) else None

    def wait_for_release(self, at: float, seconds: float) -> float | None:
        """Of all that was held at that time, or by what was lost since; seconds, None: nothing was seen to be."""
        began = time.monotonic()
        while True:
            last = {name: looks[-1] for name, looks in self._looks.items()}
            if all(each.at >= began and not each.holds(at) for each in last.values()):
                break
            assert time.monotonic() < began + seconds, f"still held: {last}"
            time.sleep(LOOK_S)
        ends = [end for name in self._looks if (end := self._released(name, at)) is not None]
        return max(ends) - at if ends else None

    def _released(self, name: str, at: float) -> float | None:
        """The first look of this daemon behind the last one that found something held."""
        looks = self._since(name, at)
        held = [i for i, each in enumerate(looks) if each.holds(at)]
        return looks[held[-1] + 1].at if held and held[-1] + 1 < len(looks) else None

    def _since(self, name: str, at: float) -> list[Look]:
        return [each for each in self._looks[name] if each.at >= at]

    def _before(self, name: str, at: float) -> Look:
        return [each for each in self._looks[name] if each.at < at][-1]


def rate_back(ended: Sequence[float], at: float, served: float, now: float, rate: float) -> float | None:
    """From when on turns were completed at the share of this rate, in every window that begins until all routes served
    again; None: it cannot be told yet. `ended`: of turns, ascending.
    """
    enough = BACK_SHARE * rate * WINDOW_S
    back: float | None = None
    for begin in [at, *(each for each in ended if each > at)]:
        if begin + WINDOW_S > now:
            return None
        if bisect_right(ended, begin + WINDOW_S) - bisect_left(ended, begin) < enough:
            back = None
        elif back is None:
            back = begin
        if back is not None and begin >= served:
            return back
    return None


def late(row: Row, seen_within: float | None) -> str:
    """What of the fault's recovery is later than it may be; empty: nothing. seen_within: None: nothing is lost."""
    found = []
    if seen_within is not None and (row.seen is None or row.seen > seen_within):
        found.append(f"seen after {row.seen} s, not within {seen_within:g} s")
    if row.released is not None and row.released > RELEASED_S:
        found.append(f"released after {row.released} s, not within {RELEASED_S:g} s")
    return f"{row.fault}: {'; '.join(found)}" if found else ""
