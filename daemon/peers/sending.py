"""The sending end of a session: the decode daemon's asks for the prefill core, parts gathered from its pool.

Stages that it times: `rendezvous`, from an Ask to the gather of its first part, so the worker's computing too; of each
part `gather`, the copy, and `write`, from the post until the courier says that it is done at the peer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar, Protocol

from kvferry.daemon.core.effects import EndSend, OpenSend, SendEffect, SendProgress
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import Name
from kvferry.daemon.memory.interface import PartCopies
from kvferry.daemon.peers.receiving import Receiving
from kvferry.daemon.peers.session import OUTGOING_BYTES, Session, SessionBroken, SessionMeters, SessionSetup
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.courier.messages import Notification, PostDone
from kvferry.transfer.geometry.rank_lanes import Lane
from kvferry.transfer.protocol.sender import Completed, Failed, Gather, Sender, TransferEnded
from kvferry.transfer.protocol.slots import HEADER_BYTES, Credit


class SendingEvents(Protocol):
    """The owner of the pages, as it is told of the session."""

    def on_ask(self, sending: Sending, ask: peer.Ask) -> None: ...

    def on_ask_end(self, sending: Sending, transfer: int) -> None: ...

    def on_done(self, sending: Sending, name: peer.Done) -> None: ...

    def on_lookup(self, sending: Sending, lookup: peer.Lookup) -> None: ...

    def on_send_completed(self, sending: Sending, transfer: int) -> None: ...

    def on_send_ended(self, sending: Sending, transfer: int) -> None: ...

    def on_send_failed(self, sending: Sending, transfer: int, message: str) -> None: ...


class Sending:
    """The sending direction of a session."""

    KINDS: ClassVar[frozenset[str]] = frozenset(("credits", "ask", "ask_end", "done", "lookup"))

    def __init__(
        self,
        session: Session,
        meters: SessionMeters,
        *,
        number: int,
        send_slots: int,
        remote_epoch: int,
        events: SendingEvents,
        lanes: Sequence[Lane],
    ) -> None:
        """send_slots: of each rank."""
        self.session = session
        self.number = number
        self._lanes = lanes
        self._send_slots = send_slots
        self._remote_epoch = remote_epoch
        self._events = events
        self._counters = meters.counters
        self._latencies = meters.latencies
        self._traces = meters.traces
        self._asked: dict[int, float] = {}  # transfers of which nothing was gathered yet
        self._posted: dict[int, tuple[float, int]] = {}  # posts in flight: since when, and their transfers
        self._gathering = 0  # gathers that run
        self.sender: Sender | None = None
        self.moved_bytes = 0  # of pages, into slots
        self._direction = session.join(self)

    # -- the owner's words ---------------------------------------------------------------------------------------

    def perform(self, effect: SendEffect) -> None:
        """Carries out what its owner's core left. SessionBroken, ValueError: the session must end."""
        if isinstance(effect, OpenSend):
            self.open(effect)
        elif isinstance(effect, SendProgress):
            self.progress(effect.transfer, effect.pages_ready)
        elif isinstance(effect, EndSend):
            self.end(effect.transfer)
        else:
            self.fail(effect.transfer, effect.error)

    def open(self, effect: OpenSend) -> None:
        sender = self._sender()
        pages = len(effect.page_ids)
        ids, from_rows = effect.page_ids, effect.from_rows
        sender.open(effect.transfer, first_page=effect.first_page, pages=pages, page_ids=ids, from_rows=from_rows)
        sender.progress(effect.transfer, effect.pages_ready)
        self._pump()

    def progress(self, transfer: int, pages_ready: int) -> None:
        self._sender().progress(transfer, pages_ready)
        self._pump()

    def end(self, transfer: int) -> None:
        """Posts no more of the transfer; on_send_ended follows, and the peer is told."""
        if self.sender is None:
            self._ended(transfer)
            return
        self.sender.end(transfer)
        self._pump()

    def fail(self, transfer: int, error: RequestError) -> None:
        self._asked.pop(transfer, None)
        self.session.send(peer.PeerMessage(ask_failed=peer.AskFailed(transfer=transfer, error=error.to_proto())))

    def aux(self, name: Name, blob: bytes) -> None:
        self.session.send(peer.PeerMessage(aux=peer.PeerAux(name=name.to_proto(), blob=blob)))

    # -- the session's events ------------------------------------------------------------------------------------

    def open_parts(self, link: CourierLink) -> PartCopies:
        return self.session.memory.sending(link, self._lanes)

    def on_up(self) -> None:
        self.sender = Sender(
            lanes=self._lanes,
            slot_bytes=self.session.slot_bytes,
            send_slots=self._send_slots,
            remote_slots=self.session.remote_rank_slots,
            epoch=self._remote_epoch,
        )

    def on_message(self, kind: str, message: peer.PeerMessage) -> None:
        if kind == "credits":
            self._sender().credits([Credit(c.slot, c.generation) for c in message.credits.credits])
            self._pump()
        elif kind == "ask":
            self._sender()
            self._asked[message.ask.transfer] = time.monotonic()
            self._events.on_ask(self, message.ask)
        elif kind == "ask_end":
            self._events.on_ask_end(self, message.ask_end.transfer)
        elif kind == "lookup":
            self._events.on_lookup(self, message.lookup)
        else:
            self._events.on_done(self, message.done)

    def on_courier(self, event: PostDone | Notification) -> bool:
        if not isinstance(event, PostDone):
            return False
        (posted, transfer), done = self._posted.pop(event.post_id), time.monotonic()
        self._latencies.add_stage("write", done - posted)
        self._traces.part((self.number, transfer), "write", posted, done)
        self._sender().posted_done(event.post_id)
        self._pump()
        return True

    @property
    def _parts(self) -> PartCopies:
        return self.session.parts(self._direction)

    def _sender(self) -> Sender:
        if self.sender is None:
            raise SessionBroken("the peer asked before the session was up")
        return self.sender

    def _pump(self) -> None:
        sender = self._sender()
        if not self.session.closed:
            # What waits behind others gains nothing, and would keep the first one's post waiting.
            for gather in sender.next_actions(self._parts.gathers_at_once - self._gathering):
                self._gather(gather)
            self.session.expect(self._direction, self._gathering + len(self._posted))
        for event in sender.poll_events():
            if isinstance(event, Completed):
                self._asked.pop(event.transfer, None)  # one without pages
                self._counters.pages += event.pages
                self._events.on_send_completed(self, event.transfer)
            elif isinstance(event, TransferEnded):
                self._ended(event.transfer)
            elif isinstance(event, Failed):
                self._events.on_send_failed(self, event.transfer, event.message)

    def _ended(self, transfer: int) -> None:
        self._asked.pop(transfer, None)
        self.session.send(peer.PeerMessage(ask_ended=peer.AskEnded(transfer=transfer)))
        self._events.on_send_ended(self, transfer)

    def _gather(self, gather: Gather) -> None:
        slot, begin = gather.send_slot, time.monotonic()
        if (asked := self._asked.pop(gather.transfer, None)) is not None:
            self._latencies.add_stage("rendezvous", begin - asked)

        def done(problem: str) -> None:
            self.session.copy_ends()
            self._gathering -= 1
            gathered = time.monotonic()
            self._latencies.add_stage("gather", gathered - begin)
            self._traces.part((self.number, gather.transfer), "gather", begin, gathered)
            sender = self._sender()
            if problem:
                sender.gather_failed(slot, problem)
            else:
                post = sender.gathered(slot)
                if post is not None and not self.session.closed:
                    self._counters.parts += 1
                    self._counters.payload_bytes += post.nbytes - HEADER_BYTES
                    self._counters.wire_bytes += post.nbytes
                    self._posted[post.post_id] = (gathered, gather.transfer)
                    self.session.link.post(post.post_id, slot, post.remote_slot, post.nbytes, post.notification)
            self._pump()

        self.session.copy_begins()
        self._counters.copied_bytes += gather.nbytes
        self.moved_bytes += gather.nbytes
        self._gathering += 1
        self._parts.gather(gather, done)


class SendingSession(Session):
    """A prefill daemon's end of a session: it sends, and may fetch."""

    def __init__(
        self,
        setup: SessionSetup,
        meters: SessionMeters,
        *,
        number: int,
        send_slots: int,
        remote_epoch: int,
        events: SendingEvents,
    ) -> None:
        super().__init__(setup)
        self.number = number
        self.fetching: Receiving | None = None  # where there is a way back
        self.sending = Sending(
            self,
            meters,
            number=number,
            send_slots=send_slots,
            remote_epoch=remote_epoch,
            events=events,
            lanes=setup.lanes,
        )

    def look_up(self, message: peer.Lookup) -> None:
        """Sends it, unless so much waits for the peer that look-ups could break the session off: then no answer
        comes."""
        if self._outgoing_bytes <= OUTGOING_BYTES // 4:
            self.send(peer.PeerMessage(lookup=message))
