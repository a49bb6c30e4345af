"""Nothing is on its way any more."""

from __future__ import annotations

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
