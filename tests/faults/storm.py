"""Real daemons, workers and couriers under load, whose processes are killed, stopped and ended, and started anew.

Each decode worker checks every byte of every page that it is given, and its output follows from the prompt: so a turn
is right, wrong, or has failed and says why. A table tells how each fault was survived.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from kvferry.daemon.cli.stack import Process, Stack, lasting_port
from kvferry.daemon.cli.system import Replica
from kvferry.radix.digests import prompt_digests
from kvferry.workers.models.interface import Prompt
from kvferry.workers.models.synthetic import output_token
from tests.faults.recovery import BEFORE_S, HEAD, Row, Watch, rate_back
from tests.support.engines import Engines, Turn, courier_pids
from tests.support.stacks import shm_dir_of

PAGE = 16
CLEAN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)
CONVERSATIONS = 24
NEW_TOKENS = 24
DEADLINE_S = 8.0


@dataclass
class Part:
    """A process that is started again as it was, at the same address."""

    name: str
    words: list[str]
    process: Process
    address: str = ""


@dataclass
class Seen:
    started: float
    ended: float
    outcome: str  # "ok", "failed" or "wrong"
    why: str
    replica: str  # the prefill one; "": none


Place = Callable[[str], tuple[Sequence[str], str]]
"""Of a process by its name: a command that starts it in its place, and the address on which it listens there."""


def anywhere(name: str) -> tuple[Sequence[str], str]:
    return (), "127.0.0.1"


@dataclass(frozen=True)
class Pace:
    """Microseconds of the synthetic model: of a prompt's token, and of an output's. 0: as fast as it can."""

    prefill_us: int = 100
    decode_us: int = 3000


WITH_FLIPS = str(Path(__file__).parents[1] / "support" / "with_flips.py")


def among_flips(name: str) -> tuple[Sequence[str], str]:
    """(a Place) A bit flips in some of the parts that the decode daemon receives."""
    flips = ["env", "FLIP_EVERY=20", sys.executable, WITH_FLIPS]
    return (flips if name == "decode-0" else ()), "127.0.0.1"


class Storm:
    """A context: two prefill replicas and a decode one, and clients that never rest until `calm`."""

    def __init__(
        self,
        stack: Stack,
        *,
        clients: int = 4,
        seed: int = 0,
        host_tier: bool = True,
        place: Place = anywhere,
        pace: Pace | None = None,
        deadline_s: float = DEADLINE_S,
        flags: Sequence[str] = (),
    ) -> None:
        """flags: of every daemon."""
        self.stack = stack
        self.shm_dir = shm_dir_of(stack)
        os.mkdir(self.shm_dir, 0o700)
        self._pace = pace or Pace()
        self._deadline_s = deadline_s
        self._place = place
        self._flags = flags
        self.parts: dict[str, Part] = {}
        self.rows: list[Row] = []
        self.seen: list[Seen] = []
        self.wrong: list[str] = []
        self._open: dict[int, float] = {}  # turns in flight: their start
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._resting = threading.Event()
        self._start_system(["--host-bytes", "256KiB"] if host_tier else [])
        self._threads = [
            threading.Thread(target=self._client, args=(seed * 1000 + i,), name=f"client-{i}") for i in range(clients)
        ]

    def __enter__(self) -> Storm:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.calm()

    def calm(self) -> None:
        """No new turns; those in flight end."""
        self._resting.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a turn never ended"

    # -- the system --------------------------------------------------------------------------------------------------

    def _start_system(self, tier: Sequence[str]) -> None:
        pool = ["--pool-bytes", "512KiB"]
        for name in ("prefill-0", "prefill-1"):
            self._start(name, self._daemon("prefill", name, [*pool, *tier]))
        peers = [
            word for name in ("prefill-0", "prefill-1") for word in ("--peer", f"{name}={self.parts[name].address}")
        ]
        self._start("decode-0", self._daemon("decode", "decode-0", [*peers, *pool, *tier]))
        for name in ("prefill-0", "prefill-1", "decode-0"):
            role = name.partition("-")[0]
            pace = self._pace.decode_us if role == "decode" else self._pace.prefill_us
            slow = [f"--synthetic-{role}-us", str(pace)]
            words = ["worker", role, "--socket", self._socket(name), "--listen", "127.0.0.1:0", "--synthetic", *slow]
            self._start(f"{name}-worker", words)

    def _daemon(self, role: str, name: str, words: Sequence[str]) -> list[str]:
        listen = f"{self._place(name)[1]}:0"
        common = ["--name", name, "--listen", listen, "--socket", self._socket(name), "--page-size", str(PAGE)]
        common += ["--shm-dir", self.shm_dir, "--metrics", "off"]
        words = ["--insecure", "--checksums", "on", "--zero-freed", "on", *self._flags, *words]
        return ["serve", "--role", role, *common, *words]

    def _socket(self, name: str) -> str:
        return os.path.join(self.stack.folder, f"{name}.sock")

    def _start(self, name: str, words: list[str]) -> None:
        port = lasting_port(self._place(name)[1])
        words = [f"{word[:-1]}{port}" if word.endswith(":0") else word for word in words]
        part = self.parts[name] = Part(name, words, self.stack.start(name, words, prefix=self._place(name)[0]))
        part.address = self.stack.ready(part.process)

    def replica(self, name: str) -> Replica:
        daemon, worker = self.parts[name], self.parts[f"{name}-worker"]
        unix = f"unix:{self._socket(name)}"  # wherever its network is
        return Replica(name, daemon.process, worker.process, unix, worker.address, self._socket(name))

    # -- load --------------------------------------------------------------------------------------------------------

    def _client(self, seed: int) -> None:
        chance = random.Random(seed)
        decode = self.replica("decode-0")
        with (
            Engines(self.replica("prefill-0"), decode) as one,
            Engines(self.replica("prefill-1"), decode) as two,
            Engines(None, decode) as none,
        ):
            histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
            while not self._resting.is_set():
                index = chance.randrange(CONVERSATIONS)
                if len(histories[index]) > 400:
                    histories[index] = []
                start = [7] * (4 * PAGE) if chance.random() < 0.5 else [(index + seed) % 30_000]
                prompt = (histories[index] or start) + [chance.randrange(30_000) for _ in range(chance.randint(1, 80))]
                engines = chance.choice((one, two, one, two, none))
                if self._turn(engines, prompt, chance):
                    histories[index] = prompt + expected(prompt, NEW_TOKENS)
                else:
                    time.sleep(0.05)

    def _turn(self, engines: Engines, prompt: list[int], chance: random.Random) -> bool:
        began, number = time.monotonic(), chance.getrandbits(64)
        with self._lock:
            self._open[number] = began
        turn = engines.turn(prompt, NEW_TOKENS, deadline_s=self._deadline_s)
        outcome, why = judge(prompt, turn)
        with self._lock:
            del self._open[number]
            self.seen.append(Seen(began, time.monotonic(), outcome, why, engines.prefill_name))
            if outcome == "wrong":
                self.wrong.append(why)
        return outcome == "ok"

    # -- faults ------------------------------------------------------------------------------------------------------

    def suffer(
        self,
        what: str,
        fault: Callable[[], Callable[[], None] | None],
        *,
        lasting: float = 0.0,
        loses: Sequence[str] = (),
        rates: bool = False,
    ) -> Row:
        """Injects the fault, lasts it, mends it by what it returned, and waits until every replica serves again.

        loses: the processes that others are to see as lost. rates: takes those before and behind it, which lasts.
        """
        daemons = {name: self.replica(name).daemon_address for name in self.parts if not name.endswith("-worker")}
        with Watch(daemons) as watch:
            before = time.monotonic()
            self.wait_for_service(before, 60)
            watch.wait_for_release(before, 60)  # what an earlier fault left is not this one's
            if rates:
                time.sleep(BEFORE_S)
            with self._lock:
                first = len(self.seen)
            at = time.monotonic()
            mend = fault()
            time.sleep(lasting)
            if mend is not None:
                mend()
            back = self.wait_for_service(time.monotonic(), 60)
            self._wait_for_those_before(at)
            with self._lock:
                seen = self.seen[first:]
            released = watch.wait_for_release(at, 60)
            lost = watch.seen(loses, at)
        rate = len([each for each in self._completed() if at - BEFORE_S <= each < at]) / BEFORE_S if rates else None
        row = Row(
            what,
            sum(each.outcome == "ok" for each in seen),
            sum(each.outcome == "failed" for each in seen),
            sum(each.outcome == "wrong" for each in seen),
            lost,
            released,
            back - at,
            self._wait_for_rate(at, back, rate) - at if rate is not None else None,
            rate,
        )
        self.rows.append(row)
        return row

    def _completed(self) -> list[float]:
        with self._lock:
            return sorted(each.ended for each in self.seen if each.outcome == "ok")

    def _wait_for_rate(self, at: float, served: float, rate: float) -> float:
        end = time.monotonic() + 120
        while (back := rate_back(self._completed(), at, served, time.monotonic(), rate)) is None:
            assert time.monotonic() < end, f"{rate:.1f} turns a second before the fault, and never again"
            time.sleep(0.2)
        return back

    def wait_for_service(self, since: float, seconds: float) -> float:
        """Until each kind of route has answered a turn that began later than `since`; when the last of them had."""
        routes = ("prefill-0", "prefill-1", "")
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                good = [each for each in self.seen if each.started >= since and each.outcome == "ok"]
            firsts = [min((each.ended for each in good if each.replica == route), default=None) for route in routes]
            if all(first is not None for first in firsts):
                return max(first for first in firsts if first is not None)
            assert time.monotonic() < end, f"not every replica serves after {seconds} s: {self.last_failures()}"
            time.sleep(0.05)

    def _wait_for_those_before(self, at: float) -> None:
        end = time.monotonic() + 2 * DEADLINE_S + 40
        while True:
            with self._lock:
                left = [began for began in self._open.values() if began < at]
            if not left:
                return
            assert time.monotonic() < end, "a turn never ended"
            time.sleep(0.02)

    def last_failures(self) -> list[str]:
        with self._lock:
            return [each.why for each in self.seen if each.outcome != "ok"][-5:]

    def kill(self, name: str) -> Callable[[], None]:
        """SIGKILL; a daemon's worker goes with it, as its supervisor would have it. Returns how to mend it."""
        return self._end(name, signal.SIGKILL)

    def terminate(self, name: str) -> Callable[[], None]:
        return self._end(name, signal.SIGTERM)

    def _end(self, name: str, number: signal.Signals) -> Callable[[], None]:
        names = [name] if name.endswith("-worker") else [name, f"{name}-worker"]
        self.parts[name].process.popen.send_signal(number)

        def mend() -> None:
            for each in reversed(names):
                if each != name:  # its daemon is gone
                    self.parts[each].process.popen.send_signal(signal.SIGTERM)
                self.parts[each].process.popen.wait(60)
            for each in names:
                self._restart(each)

        return mend

    def _restart(self, name: str) -> None:
        part = self.parts[name]
        part.process = self.stack.start(name, part.words, prefix=self._place(name)[0])
        assert self.stack.ready(part.process) == part.address

    def stop(self, name: str) -> Callable[[], None]:
        """SIGSTOP; mended by SIGCONT."""
        pid = self.parts[name].process.popen.pid
        os.kill(pid, signal.SIGSTOP)
        return lambda: os.kill(pid, signal.SIGCONT)

    def kill_courier(self, name: str) -> None:
        self._kill_couriers(name, 1)

    def kill_couriers(self, name: str) -> int:
        """All that it has; how many."""
        return self._kill_couriers(name, None)

    def _kill_couriers(self, name: str, most: int | None) -> int:
        pids = courier_pids(self.parts[name].process.popen.pid)[:most]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return len(pids)

    def stop_courier(self, name: str) -> Callable[[], None]:
        pids = courier_pids(self.parts[name].process.popen.pid)[:1]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

        def mend() -> None:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:  # it was ended with its session
                    continue

        return mend

    def any_fault(self) -> tuple[str, Callable[[], Callable[[], None] | None], float]:
        """One of all, for long storms."""
        part = self._random.choice(sorted(self.parts))
        daemon = part.removesuffix("-worker")
        kinds: list[tuple[str, Callable[[], Callable[[], None] | None], float]] = [
            (f"SIGKILL {part}", lambda: self.kill(part), self._random.uniform(0, 1)),
            (f"SIGTERM {part}", lambda: self.terminate(part), 0.0),
            (f"SIGSTOP {part}", lambda: self.stop(part), self._random.uniform(0.1, 5)),
            (f"SIGKILL a courier of {daemon}", lambda: self.kill_courier(daemon), 0.0),
            (f"SIGSTOP a courier of {daemon}", lambda: self.stop_courier(daemon), self._random.uniform(0.1, 5)),
        ]
        return self._random.choice(kinds)

    def table(self) -> str:
        return table_of(self.rows)


def table_of(rows: Sequence[Row]) -> str:
    return "\n".join([HEAD, *map(str, rows)])


def expected(prompt: list[int], count: int) -> list[int]:
    array = np.array(prompt, dtype=np.uint32)
    digests = prompt_digests(array, page_size=PAGE)
    return [output_token(Prompt(array, digests.digests, digests.tail), index) for index in range(count)]


def judge(prompt: list[int], turn: Turn) -> tuple[str, str]:
    want = expected(prompt, NEW_TOKENS)
    if turn.output != want[: len(turn.output)]:
        return "wrong", f"prompt of {len(prompt)} tokens: {turn.output}, not {want}"
    if turn.error is None:
        return ("ok", "") if len(turn.output) == NEW_TOKENS else ("wrong", f"{len(turn.output)} tokens and no error")
    if turn.code in CLEAN:
        return "failed", f"{turn.code}: {turn.details}"
    return "wrong", f"{turn.code}: {turn.details}"


__all__ = ["PAGE", "Pace", "Storm", "among_flips", "judge"]
