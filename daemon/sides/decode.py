"""The decode role: workers' admissions, and a link to each prefill daemon. Shell around DecodeCore."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.daemon.config.model import DaemonConfig, closed_namespaces
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import Latencies
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import (
    Effect,
    EndSend,
    FailAsk,
    OpenSend,
    SendDone,
    SendProgress,
    StartTransfer,
    StopTransfer,
    VerifyRows,
)
from kvferry.daemon.core.errors import RequestError, precondition, unavailable
from kvferry.daemon.core.limits import NO_BLOCKS, Name, check_priority, check_prompt, hands_in
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.peers.dialing import Dial, dial_plainly
from kvferry.daemon.peers.link import FoundPeerLink, PeerLink
from kvferry.daemon.sides.returning import DecodeReturns
from kvferry.daemon.sides.side import Side
from kvferry.daemon.sides.workers import Worker
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.tree import RESTORE


class DecodeSide(Side[DecodeCore]):
    role = "decode"

    def __init__(
        self, config: DaemonConfig, incarnation: bytes, now: Callable[[], float], dial: Dial = dial_plainly
    ) -> None:
        super().__init__(config, incarnation, now)
        self.dial = dial
        self.links = {name: PeerLink(name, address, self) for name, address in config.peers.items()}
        self.returns = DecodeReturns(self)

    # -- peers that are found while it runs (discovery.Peers) ----------------------------------------------------

    def room_for_peers(self) -> int:
        first, last = self.config.ucx_ports
        return max(0, min(self.config.max_peers, last - first + 1) - len(self.links))

    def link_of(self, name: str) -> PeerLink | None:
        return self.links.get(name)

    def add_peer(self, name: str, address: str) -> PeerLink:
        link = self.links[name] = FoundPeerLink(name, address, self)
        return link

    def remove_peer(self, name: str, error: RequestError) -> None:
        """Forgets the peer; its link's `run` has ended."""
        del self.links[name]
        self.on_link_down(name, error)

    def make_core(self, cache: Cache) -> DecodeCore:
        limits = DecodeLimits(
            max_tokens=self.config.max_tokens,
            admission_seconds=self.config.admission_seconds,
            page_bytes=self.tiers.page_bytes,
            queue=self.config.queue,
            reuse=self.config.reuse,
            overtakes=self.config.overtakes,
            overcommit=self.config.overcommit,
            growth_seconds=self.config.transfer_seconds,
            closed_namespaces=closed_namespaces(self.config),
        )
        return DecodeCore(cache, limits)

    @property
    def latencies(self) -> Latencies:
        return self.ready_core.latencies

    def end_sessions(self, reason: str) -> None:
        for link in self.links.values():
            if link.session is not None:
                link.session.break_off(reason)

    @property
    def open_sessions(self) -> int:
        return sum(link.session is not None for link in self.links.values())

    # -- workers -------------------------------------------------------------------------------------------------

    def handle(self, worker: Worker, kind: str, message: wire.WorkerMessage) -> None:
        core, now, number = self.ready_core, self.now(), worker.number
        if kind not in ("admit", "progress", "page_tokens", "grow", "finish", "abort"):
            raise precondition(f"a decode worker does not send {kind}")
        name = self.name_of(worker, getattr(message, kind).name)
        if name is None:
            return
        try:
            if kind == "admit":
                self._admit(worker, name, message.admit, now)
            elif kind == "progress":
                core.filled(number, name, message.progress.tokens, now)
            elif kind == "page_tokens":
                told = message.page_tokens
                core.page_tokens(number, name, told.first_token, told.tokens, now)
            elif kind == "grow":
                core.grow(number, name, message.grow.tokens, now)
            elif kind == "finish":
                finish = message.finish
                tokens = finish.page_tokens if finish.HasField("page_tokens") else None
                core.finish(number, name, finish.tokens, finish.digests, now, finish.continues, tokens)
            else:
                core.abort(number, name, now)
        except RequestError as error:
            self.fail(worker, name, error)
        self.flush()

    def _admit(self, worker: Worker, name: Name, request: wire.Admit, now: float) -> None:
        # First: whatever is refused below is answered with Failed, which ends a span.
        last = "ready" if request.ends_itself and not hands_in(request) else "ended"
        self.traces.opened(worker.number, name, request.traceparent, request.tokens, last)
        if self.draining and not self.ready_core.comes_back(worker.number, name):
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
        if request.prefill and request.prefill not in self.links:
            known = ", ".join(sorted(self.links)) or "none"
            if self.config.peer_service:
                where = self.config.peer_service
                raise unavailable(f"prefill is {request.prefill[:128]!r}; found at {where} by now are: {known}")
            raise precondition(f"prefill is {request.prefill[:128]!r}; the configured peers are: {known}")
        self.tiers.block_shape(len(request.held_blocks), "held_blocks")
        shape = self.tiers.block_shape(len(request.blocks))
        blocks = NO_BLOCKS if shape is None else shape.named_by(request)
        deadline = self.deadline_of(request.deadline_ms)
        self.ready_core.admit(worker.number, worker.namespace_id, name, request, deadline, now, blocks)
        self.ready_core.latencies.add_stage("match", self.now() - now)
        self.traces.looked_up(worker.number, name, now)

    # -- effects -------------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, OpenSend | SendProgress | EndSend | FailAsk | VerifyRows):
            self.returns.perform(effect)
            return
        assert isinstance(effect, StartTransfer | StopTransfer | SendDone), f"a decode core left {effect}"
        link = self.links.get(effect.prefill)
        if isinstance(effect, StartTransfer):
            if link is None:  # it was forgotten since the request was admitted
                self.on_link_down(effect.prefill, unavailable(f"prefill daemon {effect.prefill!r} is gone"))
            else:
                effect.ask.traceparent = self.traces.asked(effect.ask)
                link.start_transfer(effect)
        elif isinstance(effect, StopTransfer):
            if link is None or link.stop_transfer(effect.transfer, effect.reason):
                self.on_drained(effect.transfer)
        elif link is not None:
            link.send_done(effect.name)

    def on_copy_starts(self, started: CopyStarted) -> None:
        if started.copy.kind != RESTORE:
            return
        pages, leases = started.copy.device, self.ready_core.leases.values()

        def owner() -> tuple[int, Name] | None:
            return next(((lease.worker, lease.name) for lease in leases if pages[0] in lease.pages), None)

        self.traces.restore_begins(started.number, len(pages), owner)

    def effect_failed(self, effect: Effect, message: str) -> None:
        if isinstance(effect, OpenSend | SendProgress | EndSend | FailAsk):
            self.returns.effect_failed(effect, message)
            return
        assert isinstance(effect, StartTransfer | StopTransfer | SendDone)
        link = self.links.get(effect.prefill)
        if link is not None and link.session is not None:
            link.session.break_off(message)

    def remaining_ms(self, name: Name) -> int:
        lease = self.ready_core.leases.get(name)
        return 0 if lease is None else max(1, int((lease.deadline - self.now()) * 1000))

    # -- the links' events (ReceivedPages) -----------------------------------------------------------------------

    def on_pages(self, transfer: int, prompt_pages: Sequence[int]) -> None:
        self.ready_core.pages_arrived(transfer, prompt_pages, self.now())
        self.flush()

    def on_complete(self, transfer: int) -> None:
        self._transfer_over(transfer)
        self.ready_core.transfer_completed(transfer, self.now())
        self.flush()

    def on_drained(self, transfer: int) -> None:
        self._transfer_over(transfer)
        self.ready_core.transfer_drained(transfer, self.now())
        self.flush()

    def on_broken(self, transfer: int, message: str) -> None:
        self._transfer_over(transfer, message)
        self.ready_core.transfer_broken(transfer, message, self.now())
        self.flush()

    def on_ask_failed(self, transfer: int, error: RequestError) -> None:
        self._transfer_over(transfer, error.message)
        self.ready_core.transfer_failed(transfer, error, self.now())
        self.flush()

    def _transfer_over(self, transfer: int, error: str = "") -> None:
        self.traces.transfer_ended(transfer, error)

    def on_aux(self, prefill: str, name: Name, blob: bytes) -> None:
        self.ready_core.aux(prefill, name, blob, self.now())
        self.flush()

    def on_link_down(self, prefill: str, error: RequestError) -> None:
        if self.core is not None:
            self.core.prefill_down(prefill, error, self.now())
            self.flush()
