"""The words of an engine's ranks, each a process of its own, made those of one worker.

Rank 0 says all of a request's opening (Admit, Begin), the others their part of it: what they had to wait for is over.
It is passed on when all have opened it; Progress as far as all have come; the last word (Finish, Aux, Abort) when all
have said theirs, so that no rank touches a page any more. One that aborts has it aborted: the others are told that it
failed, and answer. So they are where a rank does not come with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.daemon.core.errors import RequestError, aborted, exhausted, invalid, precondition, unavailable
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire

MAX_OPEN = 1 << 16  # requests that not all ranks have ended
OPEN_SECONDS = 10.0  # between a request's first rank and its last: they have it of one step of the engine's
OPENINGS = ("admit", "begin")
LAST_WORDS = ("finish", "aux", "abort")


@dataclass(frozen=True, slots=True)
class Pass:
    """A message for the side, as of one worker."""

    kind: str
    message: wire.WorkerMessage


@dataclass(frozen=True, slots=True)
class Tell:
    """An event for one rank alone."""

    rank: int
    event: wire.WorkerEvent


Word: TypeAlias = Pass | Tell


@dataclass(slots=True)
class _Request:
    name: common.RequestName
    since: float
    progress: list[int]  # tokens, of each rank
    opened: set[int] = field(default_factory=set)
    opening: Pass | None = None  # rank 0's
    passed: bool = False  # the opening is
    passed_tokens: int = 0  # of progress
    blocks: list[int] = field(default_factory=list)  # that rank 0 has named, and that are not passed
    last: dict[int, Pass] = field(default_factory=dict)  # words, by rank
    failure: RequestError | None = None  # what the other ranks were told
    late: bool = False  # nobody waits any more for ranks that have not opened it

    def fail(self, error: RequestError) -> list[Word]:
        """Tells it to the ranks that have it open, or wait for the end of what they handed in and nobody has."""
        self.failure = error
        told = [rank for rank in sorted(self.opened) if rank not in self.last or self._is_vain(rank)]
        return [_failed(rank, self.name, error) for rank in told]

    def _is_vain(self, rank: int) -> bool:
        return not self.passed and self.last[rank].kind == "aux"


@dataclass(slots=True)
class _Stow:
    """Ranks that want the blocks of a computed prompt back."""

    name: common.RequestName
    since: float
    ranks: set[int] = field(default_factory=set)


class RankWords:
    """The requests of one engine of `ranks` ranks, as far as they are not passed on."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._requests: dict[tuple[bytes, int], _Request] = {}
        self._stows: dict[tuple[bytes, int], _Stow] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def take(self, rank: int, kind: str, message: wire.WorkerMessage, now: float) -> Sequence[Word]:
        """What follows from a rank's message, in order. RequestError: no rank may say that."""
        word, name = Pass(kind, message), getattr(message, kind).name
        if kind in OPENINGS:
            return self._open(rank, name, word, now)
        if kind == "stow":
            return self._stow(rank, name, word, now)
        if kind != "progress" and kind not in LAST_WORDS:
            if rank != 0:
                raise precondition(f"rank {rank} does not send {kind}: rank 0 does")
            return [word]
        request = self._requests.get(_key(name))
        if request is None and kind == "abort":  # all had ended it; it answers what it was told since
            return [word]
        if request is None or rank not in request.opened:
            return [_failed(rank, name, precondition(f"{kind} of a request that rank {rank} has not opened"))]
        if kind == "progress":
            return self._progress(rank, request, name, message.progress)
        return self._end(rank, request, word)

    def tick(self, now: float) -> Sequence[Word]:
        """Gives up what some rank has not opened within OPEN_SECONDS: it was without a session when it was to."""
        words = self._late_stows(now)
        for request in list(self._requests.values()):  # in the order of their times
            if now < request.since + OPEN_SECONDS:
                break
            if not request.passed and not request.late:
                request.late = True
                if request.failure is None:
                    missing = sorted(set(range(self._ranks)) - request.opened)
                    words += request.fail(unavailable(f"ranks {missing} have not opened it within {OPEN_SECONDS:g} s"))
                words += self._settle(request)
        return words

    def _open(self, rank: int, name: common.RequestName, word: Pass, now: float) -> Sequence[Word]:
        request = self._requests.get(_key(name))
        if request is None:
            if len(self) >= MAX_OPEN:
                raise exhausted(f"{MAX_OPEN} requests wait for some rank of the engine; that is the bound")
            request = self._requests[_key(name)] = _Request(name, now, [0] * self._ranks)
            self._stows.pop(_key(name), None)
        if rank in request.opened:
            return [_failed(rank, name, precondition("the name is in use: a new try takes the next attempt number"))]
        request.opened.add(rank)
        if rank == 0:
            request.opening = word
        if request.failure is not None:
            return [_failed(rank, name, request.failure)]
        if len(request.opened) < self._ranks:
            return []
        assert request.opening is not None, "all ranks have opened it, and rank 0 has not"
        request.passed = True
        return [request.opening]

    def _stow(self, rank: int, name: common.RequestName, word: Pass, now: float) -> Sequence[Word]:
        """Behind each rank's last word, so when all have said it, all have said theirs."""
        request = self._requests.get(_key(name))
        if request is not None and rank not in request.last:
            return [_failed(rank, name, precondition("stow before aux"))]
        if _key(name) not in self._stows and len(self._stows) >= MAX_OPEN:
            raise exhausted(f"{MAX_OPEN} requests wait for some rank's stow; that is the bound")
        stow = self._stows.setdefault(_key(name), _Stow(name, now))
        stow.ranks.add(rank)
        if len(stow.ranks) < self._ranks:
            return []
        del self._stows[_key(name)]
        return [word]

    def _late_stows(self, now: float) -> list[Word]:
        """The blocks stay the daemon's of which not all ranks have wanted to have them back within OPEN_SECONDS."""
        late = [key for key, stow in self._stows.items() if now >= stow.since + OPEN_SECONDS]
        gone = [self._stows.pop(key) for key in late]
        told = [(rank, wire.Stowed(name=stow.name)) for stow in gone for rank in sorted(stow.ranks)]
        return [Tell(rank, wire.WorkerEvent(stowed=stowed)) for rank, stowed in told]

    def _end(self, rank: int, request: _Request, word: Pass) -> Sequence[Word]:
        request.last[rank] = word
        words: list[Word] = []
        if word.kind == "abort" and request.failure is None:
            words += request.fail(aborted(f"rank {rank} of the engine has aborted it"))
        return [*words, *self._settle(request)]

    def _settle(self, request: _Request) -> Sequence[Word]:
        """What follows once all ranks that are waited for have said their last words."""
        if len(request.last) < (len(request.opened) if request.late else self._ranks):
            return []
        del self._requests[_key(request.name)]
        if not request.passed:
            ended = wire.WorkerEvent(ended=wire.Ended(name=request.name))
            return [Tell(rank, ended) for rank in request.last]
        return [next((word for word in request.last.values() if word.kind == "abort"), request.last[0])]

    def _progress(
        self, rank: int, request: _Request, name: common.RequestName, progress: wire.Progress
    ) -> Sequence[Word]:
        if rank in request.last:
            return [_failed(rank, name, precondition("progress behind the end"))]
        request.progress[rank] = progress.tokens
        if rank == 0:
            request.blocks += progress.blocks
            assert request.opening is not None
            tokens = getattr(request.opening.message, request.opening.kind).tokens
            if len(request.blocks) > tokens:
                raise invalid(f"progress.blocks: {len(request.blocks)} are named of {tokens} tokens")
        if (tokens := min(request.progress)) <= request.passed_tokens:
            return []
        request.passed_tokens = tokens
        blocks, request.blocks = request.blocks, []
        together = wire.Progress(name=name, tokens=tokens, blocks=blocks)
        return [Pass("progress", wire.WorkerMessage(progress=together))]


def _key(name: common.RequestName) -> tuple[bytes, int]:
    return name.request_id, name.attempt


def _failed(rank: int, name: common.RequestName, error: RequestError) -> Tell:
    return Tell(rank, wire.WorkerEvent(failed=wire.Failed(name=name, error=error.to_proto())))
