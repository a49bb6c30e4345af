"""Drives the workers' Engine services directly, with token ids, as a front end would: both halves at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc

from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import Replica
from kvferry.proto import cache_pb2, common_pb2, engine_pb2
from kvferry.proto.engine_pb2_grpc import EngineStub

OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    # Ports come again: nobody inherits the back-off of a channel to a process of another test.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass
class Turn:
    output: list[int] = field(default_factory=list)
    matched: int = 0
    delta_pages: int = 0
    delta_bytes: int = 0
    prefill_matched: int = 0
    chunk_ends: list[int] = field(default_factory=list)
    error: grpc.RpcError | None = None
    reason: str = ""
    abandoned: bool = False  # its client left before its end

    @property
    def code(self) -> grpc.StatusCode | None:
        return self.error.code() if self.error is not None else None

    @property
    def details(self) -> str:
        return self.error.details() if self.error is not None else ""


class Engines:
    """A context over the channels to one prefill and one decode worker."""

    def __init__(self, prefill: Replica | None, decode: Replica) -> None:
        self.prefill_name = prefill.name if prefill else ""
        self._channels = [grpc.insecure_channel(r.worker_address, OPTIONS) for r in (prefill, decode) if r]
        self._prefill = EngineStub(self._channels[0]) if prefill else None
        self._decode = EngineStub(self._channels[-1])
        self._pool = ThreadPoolExecutor(300)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
        for channel in self._channels:
            channel.close()

    def turn(
        self,
        tokens: list[int],
        max_new: int,
        *,
        deadline_s: float = 30.0,
        sampling: engine_pb2.Sampling | None = None,
        prefill_tokens: list[int] | None = None,
        priority: int = 0,
        warmup: bool = False,
        abandon_after: float | None = None,
    ) -> Turn:
        """One request to its end; errors are in the result. abandon_after: seconds after which its client leaves."""
        name = common_pb2.RequestName(request_id=os.urandom(16), attempt=1)
        milliseconds = int(deadline_s * 1000)
        turn = Turn()
        reply = None
        if self._prefill is not None:
            request = engine_pb2.PrefillRequest(
                name=name,
                tokens=prefill_tokens or tokens,
                sampling=sampling,
                deadline_ms=milliseconds,
                priority=priority,
                warmup=warmup,
            )
            reply = self._prefill.Prefill.future(request, timeout=deadline_s + 30)
        decode = engine_pb2.DecodeRequest(
            name=name,
            tokens=tokens,
            sampling=sampling,
            max_new_tokens=max_new,
            prefill=self.prefill_name,
            deadline_ms=milliseconds,
            priority=priority,
            warmup=warmup,
        )
        events = self._decode.Decode(decode, timeout=deadline_s + 30)
        leaving = None
        if abandon_after is not None:
            leaving = threading.Timer(abandon_after, lambda: (events.cancel(), reply and reply.cancel()))
            leaving.start()
        try:
            for event in events:
                kind = event.WhichOneof("kind")
                if kind == "started":
                    turn.matched = event.started.matched_tokens
                    turn.delta_pages, turn.delta_bytes = event.started.delta_pages, event.started.delta_bytes
                elif kind == "generated":
                    turn.output += event.generated.tokens
                elif kind == "ending":
                    turn.reason = event.ending.reason
            if reply is not None:
                done = reply.result()
                turn.prefill_matched, turn.chunk_ends = done.matched_tokens, list(done.chunk_ends)
        except grpc.RpcError as error:
            turn.error = error
            if reply is not None:
                reply.cancel()
        except grpc.FutureCancelledError:
            turn.abandoned = True
        finally:
            if leaving is not None:
                leaving.cancel()
                leaving.join()
        turn.abandoned |= abandon_after is not None and turn.code is grpc.StatusCode.CANCELLED
        return turn

    def turns(
        self,
        prompts: list[list[int]],
        max_new: int,
        *,
        deadline_s: float = 60.0,
        sampling: engine_pb2.Sampling | None = None,
    ) -> list[Turn]:
        """All at a time."""
        one = partial(self.turn, max_new=max_new, deadline_s=deadline_s, sampling=sampling)
        return list(self._pool.map(one, prompts))


def stats(replica: Replica) -> cache_pb2.SideStats:
    with grpc.insecure_channel(replica.daemon_address, OPTIONS) as channel:
        return fetch(channel).sides[0]


def side_stats(socket: str) -> cache_pb2.SideStats:
    """The first side's statistics, by the daemon's Unix socket."""
    with grpc.insecure_channel(f"unix:{socket}", OPTIONS) as channel:
        return fetch(channel).sides[0]


def grown(replica: Replica, seconds: float = 20.0) -> cache_pb2.SideStats:
    """Statistics once its host tier is there, and has taken in what its file held; asserts that this comes to pass."""
    deadline = time.monotonic() + seconds
    while True:
        side = stats(replica)
        if side.host.pages == side.host.asked_pages and side.host.leased == 0:
            return side
        assert time.monotonic() < deadline, side.host
        time.sleep(0.05)


def settled(replica: Replica, seconds: float = 10.0) -> cache_pb2.SideStats:
    """Statistics once nothing is held any more; asserts that this comes to pass. Of both roles: see `both_settled`."""
    return _settled(replica, seconds)[0]


def both_settled(replica: Replica, seconds: float = 10.0) -> tuple[cache_pb2.SideStats, cache_pb2.SideStats]:
    """Likewise, of a daemon with both roles: (prefill, decode)."""
    decode, prefill = _settled(replica, seconds)
    assert (decode.role, prefill.role) == (common_pb2.ROLE_DECODE, common_pb2.ROLE_PREFILL)
    return prefill, decode


def _settled(replica: Replica, seconds: float) -> list[cache_pb2.SideStats]:
    deadline = time.monotonic() + seconds
    while True:
        with grpc.insecure_channel(replica.daemon_address, OPTIONS) as channel:
            sides = list(fetch(channel).sides)
        if not any(map(_holds_anything, sides)):
            for side in sides:
                assert side.pool.free + side.pool.cached == side.pool.pages
                assert side.pool.evictable == side.pool.cached
            return sides
        if time.monotonic() > deadline:
            raise AssertionError(f"still held after {seconds} s:\n{sides}")
        threading.Event().wait(0.05)


def _holds_anything(side: cache_pb2.SideStats) -> bool:
    pool = side.pool
    busy = pool.locks + pool.leased + pool.arriving + pool.orphaned + pool.promised
    busy += pool.spilling + pool.restoring + side.tiers.copies
    busy += side.requests.running + side.requests.waiting
    busy += side.transfers.active + side.way_back.transfers.active
    return busy > 0 or any(peer.free_credits != peer.slots for peer in side.peers if peer.state == "up")


def wait_until(condition: Callable[[], bool], seconds: float = 10.0, what: str = "what is waited for") -> None:
    deadline = time.monotonic() + seconds
    while not _holds(condition):
        assert time.monotonic() < deadline, f"after {seconds} s not: {what}"
        time.sleep(0.02)


def _holds(condition: Callable[[], bool]) -> bool:
    """Whether it does; a daemon that answers too late, on a loaded host, is to be asked again."""
    try:
        return condition()
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return False


@contextmanager
def standing_still(pids: Iterable[int]) -> Iterator[None]:
    """They are stopped, and go on at the end."""
    stopped = list(pids)
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def courier_pids(daemon: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as line, open(f"/proc/{entry}/stat") as stat:
                    if (
                        b"kvferry.transfer.courier.main" in line.read()
                        and int(stat.read().rsplit(")", 1)[1].split()[1]) == daemon
                    ):
                        found.append(int(entry))
            except (OSError, ValueError):
                continue
    return found


def describe(replica: Replica) -> engine_pb2.DescribeReply:
    with grpc.insecure_channel(replica.worker_address, OPTIONS) as channel:
        return EngineStub(channel).Describe(engine_pb2.DescribeRequest(), timeout=5)
