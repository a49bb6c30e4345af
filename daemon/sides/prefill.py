"""The prefill role: workers' prompts, and the sessions that decode daemons have opened. Shell around PrefillCore."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvferry.daemon.config.model import DaemonConfig, closed_namespaces
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import Latencies
from kvferry.daemon.core.effects import (
    Effect,
    EndSend,
    FailAsk,
    LookUp,
    OpenSend,
    SendAux,
    SendProgress,
    StartFetch,
    StopFetch,
    WakeAt,
    ZeroTail,
)
from kvferry.daemon.core.errors import RequestError, precondition, unavailable
from kvferry.daemon.core.limits import Name, check_priority, check_prompt, name_of
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.core.way_back.choice import OFF, WayBackLimits
from kvferry.daemon.peers.handshake import (
    back_lanes,
    courier_config,
    has_way_back,
    looks_up,
    part_checksums,
    ranks_of,
)
from kvferry.daemon.peers.sending import Sending, SendingSession
from kvferry.daemon.peers.session import SessionBroken, SessionMeters, SessionSetup, SessionTimes
from kvferry.daemon.sides.fetching import PrefillFetches
from kvferry.daemon.sides.side import Side
from kvferry.daemon.sides.workers import Worker
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.kv_geometry import Layout
from kvferry.transfer.geometry.rank_lanes import lanes_of

_FOR_SESSIONS = (OpenSend, SendProgress, EndSend, FailAsk, SendAux)


class PrefillSide(Side[PrefillCore]):
    role = "prefill"

    def __init__(self, config: DaemonConfig, incarnation: bytes, now: Callable[[], float]) -> None:
        super().__init__(config, incarnation, now)
        self.sessions: dict[int, SendingSession] = {}
        self._numbers = itertools.count(1)
        self._latencies = Latencies()
        self.fetches = PrefillFetches(self)

    def make_core(self, cache: Cache) -> PrefillCore:
        config = self.config
        setting = config.way_back if has_way_back(config) else OFF
        way_back = WayBackLimits(setting, self.tiers.page_bytes, closed_namespaces(config))
        return PrefillCore(cache, PrefillLimits(config.queue, config.reuse, config.overtakes, way_back))

    @property
    def fetch_tokens(self) -> int:
        return self.ready_core.limits.way_back.least_tokens

    @property
    def latencies(self) -> Latencies:
        """Stages of sending only."""
        return self._latencies

    def end_sessions(self, reason: str) -> None:
        for session in self.sessions.values():
            session.break_off(reason)

    @property
    def open_sessions(self) -> int:
        return len(self.sessions)

    # -- workers -------------------------------------------------------------------------------------------------

    def handle(self, worker: Worker, kind: str, message: wire.WorkerMessage) -> None:
        core, now, number = self.ready_core, self.now(), worker.number
        if kind not in ("begin", "fetch", "progress", "aux", "stow", "abort"):
            raise precondition(f"a prefill worker does not send {kind}")
        name = self.name_of(worker, getattr(message, kind).name)
        if name is None:
            return
        try:
            if kind == "begin":
                self._begin(worker, name, message.begin, now)
            elif kind == "fetch":
                core.fetch(number, name, message.fetch, now)
            elif kind == "progress":
                core.progress(number, name, message.progress.tokens, now, message.progress.blocks)
            elif kind == "aux":
                core.aux(number, name, message.aux.blob, now)
            elif kind == "stow":
                # An engine that came later may have smaller blocks, of which a last page lacks some.
                core.stow(number, name, now, can=self.tiers.stows and self.tiers.can_be_sent)
            else:
                core.abort(number, name, now)
        except RequestError as error:
            self.fail(worker, name, error)
        self.flush()

    def _begin(self, worker: Worker, name: Name, request: wire.Begin, now: float) -> None:
        # First: whatever is refused below is answered with Failed, which ends a span.
        self.traces.opened(worker.number, name, request.traceparent, request.tokens)
        try:
            self._check_begin(request)
            shape = self.tiers.block_shape(len(request.blocks))
            blocks = None if shape is None else shape.of_begin(request)
            deadline = self.deadline_of(request.deadline_ms)
            self.ready_core.begin(worker.number, worker.namespace_id, name, request, deadline, now, blocks)
        except RequestError as error:
            self.begin_refused(name, error)
            raise
        self.traces.looked_up(worker.number, name, now)

    def begin_refused(self, name: Name, error: RequestError) -> None:
        self.ready_core.begin_refused(name, error)
        self.flush()

    def _check_begin(self, request: wire.Begin) -> None:
        if self.draining:
            raise unavailable("the daemon is shutting down; send the request to another one")
        self.check_quarantine()
        check_priority(request.priority)
        check_prompt(
            tokens=request.tokens,
            digests=request.digests,
            tail_digest=request.tail_digest,
            page_size=self.config.page_size,
            max_tokens=self.config.max_tokens,
        )

    # -- effects -------------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, ZeroTail):
            self._zero_tail(effect)
            return
        if isinstance(effect, StartFetch | StopFetch | LookUp | WakeAt):
            self.fetches.perform(effect)
            return
        assert isinstance(effect, _FOR_SESSIONS)
        session = self.sessions.get(effect.session)
        if session is None:
            # It is over, with all its copies; its sender holds nothing.
            if isinstance(effect, EndSend):
                self.ready_core.send_ended(effect.session, effect.transfer, self.now())
        elif isinstance(effect, SendAux):
            session.sending.aux(effect.name, effect.blob)
        else:
            if isinstance(effect, FailAsk):
                self._send_over(session.sending, effect.transfer, effect.error.message)
            session.sending.perform(effect)

    def _zero_tail(self, effect: ZeroTail) -> None:
        """Clears a page's tail. What gathers the page later is behind that, and need not wait for its end."""
        memory = self.tiers.memory
        if memory.shape.geometry.layout is Layout.ENGINE and memory.block_table is None:
            self.ready_core.tail_zeroed(effect.name, self.now())  # only the engine knows where a token's bytes lie
            return

        def done(problem: str) -> None:
            if self._closed:
                return
            if problem:
                self._cannot_go_on(f"a page's tail could not be cleared: {problem}")
                return
            self.ready_core.tail_zeroed(effect.name, self.now())
            self.flush()

        try:
            memory.zero_tail(effect.page, effect.tokens, done)
        except OSError as error:  # it may hold another tenant's bytes: nothing that sends it may go on
            self._zeroing = True
            raise AssertionError(f"a page's tail could not be cleared: {error}") from error

    def effect_failed(self, effect: Effect, message: str) -> None:
        assert isinstance(effect, (*_FOR_SESSIONS, StartFetch, StopFetch, LookUp))
        session = self.sessions.get(effect.session)
        if session is not None:
            session.break_off(message)

    # -- sessions (SendingEvents) --------------------------------------------------------------------------------

    def new_session(self, own: peer.PeerHello, hello: peer.PeerHello) -> SendingSession:
        """The session for a decode daemon whose Hello was checked; `own` is the answer."""
        config, memory, ranks = self.config, self.tiers.memory, ranks_of(hello)
        geometry = memory.shape.geometry
        back = back_lanes(own, hello, lambda: lanes_of(geometry, ranks, config.ranks))
        setup = SessionSetup(
            remote=hello.daemon,
            courier=courier_config(config, receive_slots=config.slots if back else 0, send_slots=config.slots),
            memory=memory,
            lanes=lanes_of(geometry, config.ranks, ranks),
            back_lanes=back,
            looks_up=looks_up(own, hello),
            remote_ranks=ranks,
            checksums=part_checksums(own, hello),
            times=SessionTimes(config.heartbeat_seconds, config.peer_lost_seconds),
        )
        session = SendingSession(
            setup,
            SessionMeters(self.ready_core.transfer_counters, self._latencies, self.traces),
            number=next(self._numbers),
            send_slots=config.slots,
            remote_epoch=hello.epoch,
            events=self,
        )
        if back:
            session.fetching = self.fetches.join(session)
        self.sessions[session.number] = session
        return session

    def session_over(self, session: SendingSession) -> None:
        """Forgets a session after its `run`: no copy of it runs and its courier is reaped."""
        self.traces.session_ended(session.number)
        self.ready_core.session_down(session.number, self.now())
        self.flush()
        del self.sessions[session.number]
        self.flush()

    def on_ask(self, sending: Sending, ask: peer.Ask) -> None:
        try:
            name = name_of(ask.name)
        except RequestError as error:
            sending.fail(ask.transfer, error)
            return
        if self.draining and name not in self.ready_core.entries:
            sending.fail(ask.transfer, unavailable("the prefill daemon is shutting down"))
            return
        self.traces.asked_for(sending.number, ask.transfer, ask.traceparent, ask.pages)
        self.ready_core.ask(sending.number, name, ask, self.deadline_of(ask.remaining_ms), self.now())
        self.flush()

    def on_ask_end(self, sending: Sending, transfer: int) -> None:
        self.ready_core.ask_end(sending.number, transfer)
        self.flush()

    def on_done(self, sending: Sending, done: peer.Done) -> None:
        try:
            name = name_of(done.name)
        except RequestError:
            sending.session.break_off("done: a name that cannot be")
            return
        self.ready_core.done(sending.number, name, self.now())
        self.flush()

    def on_lookup(self, sending: Sending, lookup: peer.Lookup) -> None:
        raise SessionBroken("the peer sent lookup, which this side does not take")

    # -- what comes back -------------------------------------------------------------------------------------------

    def on_fetched(self, transfer: int, prompt_pages: Sequence[int]) -> None:
        self.ready_core.fetch_arrived(transfer, prompt_pages, self.now())
        self.flush()

    def on_fetch_drained(self, transfer: int) -> None:
        self.ready_core.fetch_drained(transfer, self.now())
        self.flush()

    def _send_over(self, sending: Sending, transfer: int, error: str = "") -> None:
        self.traces.transfer_ended((sending.number, transfer), error)

    def on_send_completed(self, sending: Sending, transfer: int) -> None:
        self._send_over(sending, transfer)
        self.ready_core.send_completed(sending.number, transfer, self.now())
        self.flush()

    def on_send_ended(self, sending: Sending, transfer: int) -> None:
        self._send_over(sending, transfer)
        self.ready_core.send_ended(sending.number, transfer, self.now())
        self.flush()

    def on_send_failed(self, sending: Sending, transfer: int, message: str) -> None:
        self._send_over(sending, transfer, message)
        sending.fail(transfer, unavailable(f"the pages could not be read: {message}"))
        self.ready_core.send_ended(sending.number, transfer, self.now())
        self.flush()
