"""What is over: nothing is on its way any more, and nothing is left of a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvferry.daemon.core.decode import DecodeCore
from kvferry.daemon.core.prefill import PrefillCore
from kvferry.daemon.peers.sending import Sending
from kvferry.transfer.protocol.receiver import Receiver
from tests.simulation.clock import expect


def check_receiver(receiver: Receiver, who: str) -> None:
    """Nothing is on its way to it."""
    receiver.check()
    expect(not receiver.transfers(), f"{who}: the receiver holds transfers {receiver.transfers()}")
    free, slots = receiver.free_credits, receiver.slots * receiver.ranks
    expect(free == slots, f"{who}: {free} of {slots} slots are granted")


def check_sender(sending: Sending, slots: int, who: str) -> None:
    """Nothing is on its way from it. slots: of its own, on each rank."""
    sender, granted = sending.sender, sending.session.remote_slots
    assert sender is not None
    sender.check()
    expect(not sender.transfers(), f"{who}: the sender holds transfers {sender.transfers()}")
    credits = sender.free_credits
    expect(credits == granted, f"{who}: the sender has {credits} of {granted} credits")
    free, own = sender.free_send_slots, slots * len(sender._free_slots)  # of ranks that send
    expect(free == own, f"{who}: {free} of {own} sending slots are free")


def check_fetches(core: PrefillCore, sessions: Mapping[int, object], who: str) -> None:
    """At any moment: whatever the core believes of the way back is of sessions that are there."""
    fetches = core.fetches
    _are_there((fetch.session for fetch in fetches._open.values()), sessions, f"{who}: fetches")
    _are_there((*fetches._sessions, *fetches.look_ups._sessions), sessions, f"{who}: ways back")


def check_returns(core: DecodeCore, sessions: Mapping[int, object], who: str) -> None:
    """Likewise, of what goes back and is lent."""
    returns = core.returns._returns
    _are_there((key[0] for key in (*returns._open, *returns.loans._open)), sessions, f"{who}: sends back")


def _are_there(some: Iterable[int], sessions: Mapping[int, object], what: str) -> None:
    gone = set(some) - sessions.keys()
    expect(not gone, f"{what} of sessions {gone}, which are over")
