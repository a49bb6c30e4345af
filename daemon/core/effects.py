"""Orders of a core to the shells: the only way out of it. They are carried out in the order given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Send an event on a worker's stream."""

    worker: int
    event: wire.WorkerEvent


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Decode: open the transfer at the receiver (`page_ids` are the pool's, in prompt order) and send the Ask to the
    prefill daemon.
    """

    prefill: str
    ask: peer.Ask
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopTransfer:
    """Decode: want no more of it. `transfer_drained` must follow once no copy into its pages runs."""

    prefill: str
    transfer: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendDone:
    """Decode: the prefill daemon may unlock the request's pages."""

    prefill: str
    name: Name


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Prefill: open the transfer at the session's receiver, as for StartTransfer, and ask the decode daemon for it."""

    session: int
    ask: peer.Ask
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopFetch:
    """Prefill: want no more of it. `fetch_drained` must follow once no copy into its pages runs."""

    session: int
    transfer: int
    reason: str


@dataclass(frozen=True, slots=True)
class LookUp:
    """Prefill: ask the session's decode daemon what it holds of this."""

    session: int
    message: peer.Lookup


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Prefill: call `wake` then."""

    at: float


@dataclass(frozen=True, slots=True)
class OpenSend:
    """Start sending; `page_ids` are the pool's, in prompt order from `first_page`; the first `pages_ready` prompt pages
    are final. `from_rows`: they are rows of the host tier.
    """

    session: int
    transfer: int
    first_page: int
    page_ids: tuple[int, ...]
    pages_ready: int
    from_rows: bool = False


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Decode: look whether these rows of the host tier are as they were written. `verified` must follow, unless the
    tier ends."""

    session: int
    transfer: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendProgress:
    session: int
    transfer: int
    pages_ready: int


@dataclass(frozen=True, slots=True)
class EndSend:
    """Post no more for it. `send_ended` must follow once no gather from its pages runs."""

    session: int
    transfer: int


@dataclass(frozen=True, slots=True)
class FailAsk:
    session: int
    transfer: int
    error: RequestError


@dataclass(frozen=True, slots=True)
class SendAux:
    session: int
    name: Name
    blob: bytes


@dataclass(frozen=True, slots=True)
class ZeroTail:
    """Prefill: zero the bytes of `page` behind its first `tokens` tokens, before anything of it is sent. `tail_zeroed`
    must follow.
    """

    name: Name
    page: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ZeroPages:
    """Clear these pages, which held what somebody else left. No later effect is carried out before that is done: so it
    does not matter if their request ends meanwhile, since the next one's effects, another clearing first, come later.
    """

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BindPages:
    """These pages are blocks of the engine's from now on, an equal number each, in order; -1: none."""

    pages: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForgetRows:
    """Forget these rows of the host tier, which were freed: what its file says of them is void."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartCopy:
    """Move pages between the tiers. `copy_ended` must follow."""

    started: CopyStarted


Effect: TypeAlias = (
    ToWorker
    | ZeroPages
    | BindPages
    | ForgetRows
    | StartCopy
    | StartTransfer
    | StopTransfer
    | SendDone
    | StartFetch
    | StopFetch
    | LookUp
    | WakeAt
    | OpenSend
    | SendProgress
    | VerifyRows
    | EndSend
    | FailAsk
    | SendAux
    | ZeroTail
)


SendEffect: TypeAlias = OpenSend | SendProgress | EndSend | FailAsk  # of either role: to a session's sender


def tier_effects(cache: Cache) -> list[Effect]:
    """Copies that the cache has started and rows that it has freed since the last time."""
    effects: list[Effect] = []
    if forgotten := cache.take_forgotten():
        effects.append(ForgetRows(forgotten))
    effects += [StartCopy(started) for started in cache.copies.take_started()]
    return effects


class Outbox:
    """The effects that a core leaves, in order, until its shell takes them."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._effects: list[Effect] = []

    def put(self, effect: Effect) -> None:
        self._effects.append(effect)

    def tell(self, worker: int, event: wire.WorkerEvent) -> None:
        self._effects.append(ToWorker(worker, event))

    def tell_ended(self, worker: int, name: Name) -> None:
        self.tell(worker, wire.WorkerEvent(ended=wire.Ended(name=name.to_proto())))

    def end_step(self) -> None:
        """Adds what the cache has begun in the step."""
        self._effects += tier_effects(self._cache)

    def take(self) -> list[Effect]:
        """All of them; the clearing of pages that the steps took comes first."""
        effects, self._effects = self._effects, []
        unclean = self._cache.take_unclean()
        return [ZeroPages(unclean), *effects] if unclean else effects
