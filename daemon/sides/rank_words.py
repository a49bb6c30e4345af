"""The words of an engine's ranks, each a process of its own, made those of one worker.

Rank 0 says all of a request's opening (Admit, Begin), the others their part of it: what they had to wait for is over.
It is passed on when all have opened it; Progress as far as all have come; Fetch when all have said it, so that nothing
that a rank had queued before touches the blocks; the last word (Finish, Aux, Abort) when all have said theirs, so that
no rank touches a page any more. One that aborts has it aborted: the others are told that it failed, and answer. So they
are where a rank does not come with it, and whoever asked for the prompt is.
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
MAX_WAITING_BYTES = 64 << 20  # of what rank 0 has said of them, and waits for other ranks
BLOCK_BYTES = 8  # of one that rank 0 has named
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
    opening: Pass | None = None  # rank 0's, until it is passed on
    tokens: int = 0  # of the prompt, as rank 0 has said
    nbytes: int = 0  # that it takes of what may wait
    passed: bool = False  # the opening is
    passed_tokens: int = 0  # of progress
    blocks: list[int] = field(default_factory=list)  # that rank 0 has named, and that are not passed
    fetches: dict[int, bool] = field(default_factory=dict)  # ranks that have said it: whether into blocks
    fetch: Pass | None = None  # rank 0's, until it is passed on
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
        word, name = Pass(kind, message), _copied(getattr(message, kind).name)
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
        if kind not in ("progress", "fetch", *LAST_WORDS):
            if rank != 0:
                raise precondition(f"rank {rank} does not send {kind}: rank 0 does")
            return [word]  # the core refuses it of a request that is not open
        request = self._requests.get(_key(name))
        if request is None and kind == "abort":  # all had ended it; it answers what it was told since
            return [word]
        if request is None or rank not in request.opened:
            return [_failed(rank, name, precondition(f"{kind} of a request that rank {rank} has not opened"))]
        if kind == "progress":
            return self._progress(rank, request, name, message.progress)
        if kind == "fetch":
            return self._fetch(rank, request, word, message.fetch)
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

    def stood_still(self, seconds: float, now: float) -> None:
        """The daemon heard nobody for so long before `now`: what was said meanwhile is not late."""
        all_of_them: list[_Request | _Stow | _Missing]
        all_of_them = [*self._requests.values(), *self._stows.values(), *self._given_up.values()]
        for waiting in all_of_them:
            waiting.since = min(waiting.since + seconds, now)

    def end(self, error: RequestError) -> Sequence[Word]:
        """The engine leaves: whoever asked for a prompt that was not passed on is told."""
        return [Refuse(each.name, error) for each in self._requests.values() if each.begins and not each.passed]

    def _open(self, rank: int, name: common.RequestName, word: Pass, now: float) -> Sequence[Word]:
        if word.kind == "admit" and word.message.admit.ends_itself:  # each rank says its last word
            return [_failed(rank, name, invalid("ends_itself is set; of an engine of several ranks it cannot be"))]
        request, late = self._requests.get(_key(name)), self._is_late(rank, name)
        if request is None:
            if len(self) >= MAX_OPEN:
                raise exhausted(f"{MAX_OPEN} requests wait for some rank of the engine; that is the bound")
            request = self._requests[_key(name)] = _Request(name, now, [0] * self._ranks, word.kind == "begin")
            self._stows.pop(_key(name), None)
            if late:
                request.late = True
                request.failure = unavailable(f"the other ranks have waited for it for {OPEN_SECONDS:g} s")
        if rank in request.opened:
            return [_failed(rank, name, precondition("the name is in use: a new try takes the next attempt number"))]
        request.opened.add(rank)
        if rank == 0:
            request.tokens = getattr(word.message, word.kind).tokens
            if request.failure is None:
                if not self._holds(request, word.message.ByteSize()):
                    return request.fail(_full())
                request.opening = word
        if request.failure is not None:
            failed = _failed(rank, name, request.failure)  # it may have been asked for since the others were told
            return [failed, Refuse(name, request.failure)] if request.begins else [failed]
        if len(request.opened) < self._ranks:
            return []
        assert request.opening is not None, "all ranks have opened it, and rank 0 has not"
        request.passed = True
        opening, request.opening = request.opening, None
        self._lets_go(request, opening.message.ByteSize())
        return [opening]

    def _is_late(self, rank: int, name: common.RequestName) -> bool:
        """Whether the others have ended it while they waited for this rank, which is waited for no more."""
        gone = self._given_up.get(_key(name))
        if gone is None or rank not in gone.ranks:
            return False
        gone.ranks.remove(rank)
        return True

    def _holds(self, request: _Request, nbytes: int) -> bool:
        """Whether there is room for so much more of it, which it has from now on."""
        if self._waiting_bytes + nbytes > MAX_WAITING_BYTES:
            return False
        request.nbytes += nbytes
        self._waiting_bytes += nbytes
        return True

    def _lets_go(self, request: _Request, nbytes: int) -> None:
        assert 0 <= nbytes <= request.nbytes
        request.nbytes -= nbytes
        self._waiting_bytes -= nbytes

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
        error: RequestError | None = None
        if word.kind == "abort":
            word, error = _abort(request.name), aborted(f"rank {rank} of the engine has aborted it")
        elif rank != 0:
            word = Pass(word.kind, wire.WorkerMessage())  # rank 0's is passed on
        elif not self._holds(request, word.message.ByteSize()):
            word, error = _abort(request.name), _full()
        request.last[rank] = word
        words: list[Word] = []
        if error is not None and request.failure is None:
            words += request.fail(error)
        return [*words, *self._settle(request)]

    def _settle(self, request: _Request) -> Sequence[Word]:
        """What follows once all ranks that are waited for have said their last words."""
        if len(request.last) < (len(request.opened) if request.late else self._ranks):
            return []
        del self._requests[_key(request.name)]
        self._lets_go(request, request.nbytes)
        if not request.passed:
            ended = wire.WorkerEvent(ended=wire.Ended(name=request.name))
            return [Tell(rank, ended) for rank in request.last]
        return [next((word for word in request.last.values() if word.kind == "abort"), request.last[0])]

    def _fetch(self, rank: int, request: _Request, word: Pass, fetch: wire.Fetch) -> Sequence[Word]:
        """Passes rank 0's on when all have said it; nothing is fetched where one has no blocks for it."""
        if rank in request.last or rank in request.fetches:
            return [_failed(rank, request.name, precondition("fetch comes once, and before the end"))]
        if request.failure is not None:  # the rank hears of it, and says its last word
            return []
        request.fetches[rank] = bool(fetch.blocks)
        if rank == 0:
            if not self._holds(request, word.message.ByteSize()):
                return request.fail(_full())
            request.fetch = word
        if len(request.fetches) < self._ranks:
            return []
        assert request.fetch is not None, "all ranks have said it, and rank 0 has not"
        together, request.fetch = request.fetch, None
        self._lets_go(request, together.message.ByteSize())
        if not all(request.fetches.values()):
            together = Pass("fetch", wire.WorkerMessage(fetch=wire.Fetch(name=request.name)))
        return [together]

    def _progress(
        self, rank: int, request: _Request, name: common.RequestName, progress: wire.Progress
    ) -> Sequence[Word]:
        if rank in request.last:
            return [_failed(rank, name, precondition("progress behind the end"))]
        if request.failure is not None:  # the rank hears of it, and says its last word
            return []
        request.progress[rank] = progress.tokens
        if rank == 0:
            request.blocks += progress.blocks
            if len(request.blocks) > request.tokens:
                raise invalid(f"progress.blocks: {len(request.blocks)} are named of {request.tokens} tokens")
            if not self._holds(request, BLOCK_BYTES * len(progress.blocks)):
                return request.fail(_full())
        if (tokens := min(request.progress)) <= request.passed_tokens:
            return []
        request.passed_tokens = tokens
        blocks, request.blocks = request.blocks, []
        self._lets_go(request, BLOCK_BYTES * len(blocks))
        together = wire.Progress(name=name, tokens=tokens, blocks=blocks)
        return [Pass("progress", wire.WorkerMessage(progress=together))]


def _copied(name: common.RequestName) -> common.RequestName:
    """One that does not keep its message alive."""
    return common.RequestName(request_id=name.request_id, attempt=name.attempt)


def _abort(name: common.RequestName) -> Pass:
    return Pass("abort", wire.WorkerMessage(abort=wire.Abort(name=name)))


def _full() -> RequestError:
    return exhausted(f"what waits for some rank of the engine would be more than {MAX_WAITING_BYTES} bytes")


def _key(name: common.RequestName) -> tuple[bytes, int]:
    return name.request_id, name.attempt


def _failed(rank: int, name: common.RequestName, error: RequestError) -> Tell:
    return Tell(rank, wire.WorkerEvent(failed=wire.Failed(name=name, error=error.to_proto())))
