"""The words of an engine's ranks, each a process of its own, made those of one worker.

Rank 0 says all of a request's opening (Admit, Begin), the others their part of it: what they had to wait for is over.
It is passed on when all have opened it; Progress as far as all have come; the last word (Finish, Aux, Abort) when all
have said theirs, so that no rank touches a page any more. One that aborts has it aborted: the others are told that it
failed, and answer. So they are where a rank does not come with it, and whoever asked for the prompt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.daemon.core.errors import RequestError, aborted, exhausted, invalid, precondition, unavailable
from kvferry.daemon.core.limits import name_of
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import REQUEST_ID_BYTES

MAX_OPEN = 1 << 16  # requests that not all ranks have ended
MAX_WAITING_BYTES = 64 << 20  # of rank 0's openings, for which other ranks are waited
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


@dataclass(frozen=True, slots=True)
class Refuse:
    """A prompt will not be begun, which somebody may have asked for."""

    name: common.RequestName
    error: RequestError


Word: TypeAlias = Pass | Tell | Refuse


@dataclass(slots=True)
class _Request:
    name: common.RequestName
    since: float
    progress: list[int]  # tokens, of each rank
    begins: bool  # it is a prompt of prefill's
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
        ranks = [rank for rank in sorted(self.opened) if rank not in self.last or self._is_vain(rank)]
        told: list[Word] = [_failed(rank, self.name, error) for rank in ranks]
        return [*told, Refuse(self.name, error)] if self.begins and not self.passed else told

    def _is_vain(self, rank: int) -> bool:
        return not self.passed and self.last[rank].kind == "aux"


@dataclass(slots=True)
class _Stow:
    """Ranks that want the blocks of a computed prompt back."""

    name: common.RequestName
    since: float
    ranks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Missing:
    """Ranks for which a request was not waited any longer."""

    since: float
    ranks: set[int]


class RankWords:
    """The requests of one engine of `ranks` ranks, as far as they are not passed on."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._requests: dict[tuple[bytes, int], _Request] = {}
        self._stows: dict[tuple[bytes, int], _Stow] = {}
        self._given_up: dict[tuple[bytes, int], _Missing] = {}  # requests that some rank may still open
        self._waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def take(self, rank: int, kind: str, message: wire.WorkerMessage, now: float) -> Sequence[Word]:
        """What follows from a rank's message, in order. RequestError: no rank may say that."""
        word, name = Pass(kind, message), getattr(message, kind).name
        if kind in OPENINGS or kind == "stow":
            try:
                name_of(name)  # before it is kept
            except RequestError as error:
                if len(name.request_id) != REQUEST_ID_BYTES:
                    raise
                return [_failed(rank, name, error)]
        if kind in OPENINGS:
            return self._open(rank, name, word, now)
        if kind == "stow":
            return self._stow(rank, name, word, now)
        if kind != "progress" and kind not in LAST_WORDS:
            if rank != 0:
                raise precondition(f"rank {rank} does not send {kind}: rank 0 does")
            return [word]  # the core refuses it of a request that is not open; fetch also into blocks of several ranks
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
        self._given_up = {key: gone for key, gone in self._given_up.items() if now < gone.since + OPEN_SECONDS}
        for request in list(self._requests.values()):  # in the order of their times
            if now < request.since + OPEN_SECONDS:
                break
            if not request.passed and not request.late:
                request.late = True
                if request.failure is None:
                    missing = sorted(set(range(self._ranks)) - request.opened)
                    words += request.fail(unavailable(f"ranks {missing} have not opened it within {OPEN_SECONDS:g} s"))
                self._given_up[_key(request.name)] = _Missing(now, set(range(self._ranks)) - request.opened)
                words += self._settle(request)
        return words

    def stood_still(self, seconds: float) -> None:
        """The daemon heard nobody for so long: what was said meanwhile is not late."""
        all_of_them: list[_Request | _Stow | _Missing]
        all_of_them = [*self._requests.values(), *self._stows.values(), *self._given_up.values()]
        for waiting in all_of_them:
            waiting.since += seconds

    def _open(self, rank: int, name: common.RequestName, word: Pass, now: float) -> Sequence[Word]:
        request = self._requests.get(_key(name))
        if request is None:
            if len(self) >= MAX_OPEN:
                return [_failed(rank, name, exhausted(f"{MAX_OPEN} requests wait for some rank; that is the bound"))]
            request = self._requests[_key(name)] = _Request(name, now, [0] * self._ranks, word.kind == "begin")
            self._stows.pop(_key(name), None)
            if self._is_late(rank, name):
                request.late = True
                request.failure = unavailable(f"the other ranks have waited for it for {OPEN_SECONDS:g} s")
        if rank in request.opened:
            return [_failed(rank, name, precondition("the name is in use: a new try takes the next attempt number"))]
        request.opened.add(rank)
        if rank == 0 and request.failure is None and (full := self._keep_opening(request, word)) is not None:
            return request.fail(full)
        if request.failure is not None:
            return [_failed(rank, name, request.failure)]
        if len(request.opened) < self._ranks:
            return []
        assert request.opening is not None, "all ranks have opened it, and rank 0 has not"
        request.passed = True
        self._waiting_bytes -= request.opening.message.ByteSize()
        return [request.opening]

    def _is_late(self, rank: int, name: common.RequestName) -> bool:
        """Whether the others have ended it while they waited for this rank."""
        gone = self._given_up.get(_key(name))
        if gone is None or rank not in gone.ranks:
            return False
        gone.ranks.remove(rank)
        return True

    def _keep_opening(self, request: _Request, word: Pass) -> RequestError | None:
        """The error: it is not kept."""
        nbytes = word.message.ByteSize()
        if self._waiting_bytes + nbytes > MAX_WAITING_BYTES:
            return exhausted(f"{self._waiting_bytes} bytes wait for some rank; {MAX_WAITING_BYTES} is the bound")
        request.opening = word
        self._waiting_bytes += nbytes
        return None

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
            if request.opening is not None:
                self._waiting_bytes -= request.opening.message.ByteSize()
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
