"""The scheduler's half of a connector: which tokens come from where, decided without ever waiting. No I/O.

What the daemon holds is looked up when the engine asks, and not locked before the worker's half loads it: what is gone
by then is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.connectors import params as transfer_params
from kvferry.connectors.orders import Forget, News, Order, Orders
from kvferry.connectors.params import TransferParams
from kvferry.connectors.prompt_chain import AheadChain, KeysBetween, PromptChain, Unnamed
from kvferry.connectors.weights_epoch import WeightsEpoch
from kvferry.connectors.worth import Worth
from kvferry.radix.digests import DIGEST_BYTES

_log = logging.getLogger(__name__)


class EngineRequest(Protocol):
    """The part of vLLM's Request that is read here."""

    request_id: str
    priority: int
    num_computed_tokens: int
    num_in_flight_tokens: int

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, object] | None: ...
    @property
    def trace_headers(self) -> Mapping[str, str] | None: ...
    @property
    def skip_reading_prefix_cache(self) -> bool | None: ...
    @property
    def resumable(self) -> bool: ...


class DaemonView(Protocol):
    """What is known of the daemon beside the engine. Nothing here waits."""

    @property
    def up(self) -> bool:
        """The daemon lives, as far as is known."""

    @property
    def daemon(self) -> str:
        """The daemon's name; empty while it is not known."""

    @property
    def most_pages(self) -> int:
        """The most pages that a prompt may have there; 0 while it is not known."""

    @property
    def keeps(self) -> bool:
        """The daemon keeps pages that are handed in."""

    @property
    def fetch_tokens(self) -> int:
        """Lacking tokens of a prompt from which on the daemon may fetch them; 0: it fetches nothing."""

    def held_pages(self, digests: bytes) -> int:
        """The first pages of a prompt that the daemon can read just now."""

    def set_namespace(self, namespace_id: bytes) -> None:
        """Takes the namespace that the engine's workers say: what is held there is found from now on."""

    def ask_again(self) -> None:
        """Asks for the daemon's name and bounds again: it may be another daemon."""

    def flush(self) -> None:
        """Has the daemon free what nothing holds, when it can be asked to."""


UNKNOWN = -1
WORTH_JOINING = 512  # tokens that another request's load brings, from which on it is waited for


@dataclass(frozen=True, slots=True)
class Shape:
    block_tokens: int
    blocks_per_page: int

    @property
    def page_size(self) -> int:
        return self.block_tokens * self.blocks_per_page


@dataclass(slots=True, eq=False)
class Tracked:
    request: EngineRequest
    params: TransferParams | None
    chain: PromptChain
    found: int = 0  # tokens that the last answer rested on; UNKNOWN: the daemon is still to say
    settled: bool = False  # nothing more is fetched for it
    loading: bool = False  # the worker has been told to, and has not reported
    begun: bool = False  # prefill: the worker knows it
    held: int = 0  # tokens that the engine had itself when it last asked; decode: when its load was put off
    near: int = 0  # prefill: tokens that the daemon had itself when the prompt was begun for what may be fetched
    hurried: bool = False  # prefill: it is not held up for what may be fetched, which is seldom any
    lines_up: float | None = None  # prefill: until when it waits to be begun, where many others wait
    waits: bool = False  # prefill: it was begun before it has blocks, for what may be fetched
    saved: int = 0  # prefill: tokens that the worker was told of
    unsent: bool = False  # prefill: the worker has failed to send it, or will
    storing: bool = False
    since: int = -1  # tokens that it had when it was first computed, where another connector may have loaded them
    behind: str = ""  # decode: the request for whose load its own was put off
    until: float = 0.0  # and by when it is loaded in any case; 0: it was not
    alone: bool = False  # nothing of it is fetched or kept: what its pages are named is not known
    elsewhere: bool = False  # another connector loads into its blocks, and reports it
    bad: bool = False  # its load has not ended well, on some rank
    first: int | None = None  # decode: the reply's first token, where its load brought it; prefill: that it was told


@dataclass(slots=True)
class SchedulerCounts:
    loads: int = 0
    load_tokens: int = 0
    joins: int = 0  # that were put off for another's load, which brings half of what they lack
    restores: int = 0
    restore_tokens: int = 0
    stores: int = 0
    begins: int = 0
    waits: int = 0  # of these, those that waited for what may be fetched
    fills: int = 0  # of these, those of which something was loaded then
    fill_tokens: int = 0
    not_asked: int = 0  # requests that the daemon was not asked for, since it was down
    resets: int = 0


class SchedulerSide:
    """The part of the scheduler's half that both roles share."""

    def __init__(
        self,
        shape: Shape,
        view: DaemonView,
        *,
        keys_of: Callable[[EngineRequest], KeysBetween | None],
        epoch: WeightsEpoch,
        default_prefill: str = "",
        looks_ahead: bool = False,
    ) -> None:
        self.shape = shape
        self.counts = SchedulerCounts()
        self._view = view
        self._keys_of = keys_of
        self._epoch = epoch
        self._default_prefill = default_prefill
        self._looks_ahead = looks_ahead  # a token's KV is also of the token behind it
        self.awaits_outcomes = False  # what a step computes is right only once the engine counts its outcome
        self.shares_blocks = True  # the engine finds blocks that another request has filled
        self.put_off_seconds = 15.0  # that a load may be put off for others
        self.now: Callable[[], float] = float  # the engine's connector gives a clock; without one time stands still
        self._sessions: dict[int, bool] = {}  # by rank: whether it has one with the daemon, as far as is known
        self._tracked: dict[str, Tracked] = {}
        self._arriving: dict[str, bytes] = {}  # page digests of what is loaded; prefill: or fetched ahead
        self._worth = Worth()  # prefill: waiting for what may be fetched
        self._waiting: set[str] = set()  # prefill: requests that were begun, and have no blocks yet
        self._orders: list[Order] = []

    @property
    def _session(self) -> bool:
        """Whether all ranks have one, as far as is known."""
        return all(self._sessions.values())

    @property
    def has_orders(self) -> bool:
        """Whether a step without preempted requests has anything to tell, or to note."""
        return bool(self._orders) or self.awaits_outcomes

    @property
    def has_first_tokens(self) -> bool:
        """Whether replies are to begin with tokens that have come."""
        return False

    @property
    def tracked(self) -> int:
        """Requests that are not over, or whose blocks the worker still has."""
        return len(self._tracked)

    def new_request(self, request: EngineRequest) -> None:
        """The first thing heard of a request."""
        raise NotImplementedError

    def matched(self, request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        """Tokens that come from outside behind the `computed` ones that the engine holds, and whether they come later.
        None: that is not known yet, and asked for again in the next step."""
        raise NotImplementedError

    def allocated(self, request: EngineRequest, blocks: Sequence[int], external: int) -> None:
        """The engine holds `blocks` for it; `external` of its tokens are to come from outside."""
        raise NotImplementedError

    def finished(self, request: EngineRequest, blocks: Sequence[int]) -> tuple[bool, dict[str, object] | None]:
        """Whether the worker reports when the blocks may be had back, and what the answer tells routers."""
        raise NotImplementedError

    def step(
        self, scheduled: Mapping[str, int], preempted: Sequence[str], blocks_of: Callable[[str], Sequence[int]]
    ) -> Orders:
        """The orders of this step, in which `scheduled` tokens of each request are computed."""
        orders, self._orders = self._orders, []
        return Orders(orders, tuple(preempted))

    def received(self, requests: Sequence[str]) -> None:
        """The worker has reported their loads."""
        for request in requests:
            self._arriving.pop(request, None)
            if (tracked := self._tracked.get(request)) is not None:
                tracked.loading = False
                if is_over(tracked):
                    del self._tracked[request]

    def sent(self, requests: Sequence[str]) -> None:
        """The worker has reported that it needs their blocks no more."""
        for request in requests:
            self._tracked.pop(request, None)

    def awaits(self, request: str) -> bool:
        """Whether the daemon is still to say what it has of it, or can fetch."""
        tracked = self._tracked.get(request)
        return tracked is not None and tracked.waits and tracked.found == UNKNOWN

    def hear(self, news: News) -> None:
        """Takes in what the worker's half has told."""
        if news.sessions:
            self._sessions.update(news.sessions)
            if self._session:
                self._view.ask_again()
        if news.namespace:
            self._view.set_namespace(news.namespace)
        for request in news.failed:
            if (tracked := self._tracked.get(request)) is not None:
                tracked.unsent = True
        for request, tokens in news.found.items():
            if self.awaits(request) and not (tracked := self._tracked[request]).unsent:
                tracked.found = min(tokens, self._most(tracked))  # it may be of one that had this id before
        for request, token in news.first.items():
            if (tracked := self._tracked.get(request)) is not None:
                tracked.first = token
        for request in news.bad:
            if (tracked := self._tracked.get(request)) is not None:
                tracked.bad = True

    def loads_elsewhere(self, request: str) -> None:
        """It is over while another connector of the engine loads into its blocks: nothing of them is kept, and the
        engine has them back by that one's report."""
        if (tracked := self._tracked.get(request)) is not None:
            tracked.alone = tracked.elsewhere = True

    def reset(self, *, emptied: bool) -> bool:
        """Everything computed until now is of other weights: nothing finds it again, and nothing of the requests that
        have any of it is fetched or kept. Requests that have none, or gave it back, are named anew. `emptied`: the
        engine holds no block, and finds none. Else the epoch has no name, the answer is False, and the reset is to be
        tried again: what the engine itself still finds would be taken for the new weights'."""
        if not emptied:
            _log.warning("the engine has blocks of before: its caches are not reset, and that is to be tried again")
        self._begin_epoch(named=emptied)
        self._view.flush()
        return emptied

    def _begin_epoch(self, *, named: bool) -> None:
        self._epoch.advance(named=named)
        for tracked in self._tracked.values():
            if _holds(tracked) or tracked.begun:
                tracked.alone = tracked.settled = tracked.unsent = True
            elif not tracked.alone:
                self._renew(tracked)
        self._orders.append(Forget())
        self.counts.resets += 1

    def hear_of_other_load(self) -> None:
        """Another connector loads into the engine's blocks, and may have kept over a reset what is of other weights:
        until the next one no other engine finds what this one computes, and what is under way is given up."""
        if self._epoch.name:
            _log.warning("another connector loads behind a reset to %r: that name is left", self._epoch.name)
            self._begin_epoch(named=False)

    # -- for the roles ---------------------------------------------------------------------------------------------

    def _mark(self, scheduled: Mapping[str, int], preempted: Sequence[str]) -> None:
        """Called first of a step: notes what requests that are computed for the first time, or anew, had before."""
        if not self.awaits_outcomes:
            return
        for request in preempted:
            if (tracked := self._tracked.get(request)) is not None:
                tracked.since = -1
        for request in scheduled:
            if (tracked := self._tracked.get(request)) is not None and tracked.since < 0:
                tracked.since = tracked.request.num_computed_tokens

    def _most(self, tracked: Tracked) -> int:
        """Tokens that may be fetched of it; the last one is computed in any case."""
        last, page = tracked.request.num_prompt_tokens - 1, self.shape.page_size
        return last // page * page

    def _for_whom(self, tracked: Tracked, computed: int, tokens: int) -> str:
        """The request for which half of what this one lacks of its first `tokens` comes, behind which the engine has
        it. Empty: there is none, or it brings too little, or the engine would take it later."""
        if not self._arriving or not self.shares_blocks:
            return ""
        page = self.shape.page_size
        pages = -(-(computed + tokens) // (2 * page))
        if pages * page - computed < WORTH_JOINING:
            return ""
        if not (last := tracked.chain.digest(pages - 1)):  # it names all before it, too
            return ""
        at, most = (pages - 1) * DIGEST_BYTES, tracked.request.priority
        for name, digests in self._arriving.items():
            if digests.startswith(last, at) and self._tracked[name].request.priority <= most:
                return name
        return ""

    def _held(self, tracked: Tracked, tokens: int, computed: int) -> tuple[int, bool]:
        """What `matched` answers, of what the daemon holds of the first `tokens`."""
        page = self.shape.page_size
        if tokens // page * page <= computed:
            return 0, False
        tracked.found = self._view.held_pages(tracked.chain.pages(tokens)) * page
        return answer(tracked.found, computed)

    def _tracked_anew(self, request: EngineRequest, params: TransferParams | None) -> Tracked:
        """Tracks it from now on, its prompt's digests made. A request that cannot be named is the engine's alone: that
        never ends the engine."""
        tracked = self._tracked[request.request_id] = Tracked(request, params, self._chain(request, params))
        self._name(tracked)
        return tracked

    def _chain(self, request: EngineRequest, params: TransferParams | None) -> PromptChain:
        keys, size, root = self._keys_of(request), self.shape.page_size, self._epoch.root
        if not self._looks_ahead:
            return PromptChain(request, size, keys, root)
        return AheadChain(request, size, keys, root, transfer_params.new_name() if params is None else params.name)

    def _name(self, tracked: Tracked) -> None:
        request = tracked.request
        if request.resumable:  # a session whose prompt changes under its name
            tracked.alone = True
        else:
            try:
                tracked.chain.prompt(request.num_prompt_tokens)
            except Unnamed as why:
                tracked.alone = True
                _log.warning("request %s is computed here alone: %s", request.request_id, why)
            except Exception:
                tracked.alone = True
                _log.exception("request %s is computed here alone: its prompt cannot be named", request.request_id)
        tracked.settled = tracked.alone

    def _renew(self, tracked: Tracked) -> None:
        """Names it by the present epoch; it has no block."""
        tracked.chain = self._chain(tracked.request, tracked.params)
        self._name(tracked)

    def _blocks(self, blocks: Sequence[int], start: int, end: int) -> tuple[int, ...]:
        """The blocks of tokens [start, end); `start` begins a block."""
        size = self.shape.block_tokens
        assert start % size == 0, f"token {start} begins no block of {size}"
        needed = blocks[start // size : -(-end // size)]
        assert len(needed) == -(-end // size) - start // size, f"{len(blocks)} blocks for {end} tokens"
        return tuple(needed)


def answer(found: int, computed: int) -> tuple[int, bool]:
    """What `matched` answers where the first `found` tokens can be loaded."""
    return (found - computed, True) if found > computed else (0, False)


def traceparent_of(request: EngineRequest) -> str:
    """The traceparent of the span that the engine traces the request in; empty where it does not."""
    return (request.trace_headers or {}).get("traceparent", "")


def counted(tracked: Tracked) -> int:
    """The first tokens of it whose blocks are right, as the engine has counted the outcome of their steps. That of its
    first step says whether what it had before was."""
    tokens = tracked.request.num_computed_tokens - tracked.request.num_in_flight_tokens
    return tokens if tokens > tracked.since else 0


def _holds(tracked: Tracked) -> bool:
    """Whether the engine, or the worker for it, has blocks with anything of it."""
    return tracked.loading or tracked.storing or tracked.request.num_computed_tokens > 0


def is_over(tracked: Tracked) -> bool:
    """Whether its request has finished, and only the worker's report was awaited."""
    return tracked.settled and tracked.storing and not tracked.loading
