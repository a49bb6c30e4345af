"""The directions of a session: what each is asked by the session that has it. Shell."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import ClassVar, Protocol

from kvferry.daemon.memory.interface import PartCopies
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.courier.messages import Notification, PostDone


class Direction(Protocol):
    """One end of a session's direction, the sending or the receiving one: its state machine, its copies."""

    KINDS: ClassVar[frozenset[str]]
    """Messages that are for it."""
    moved_bytes: int
    """Of pages, into its slots or out of them."""

    def open_parts(self, link: CourierLink) -> PartCopies:
        """The copies between the link's slots and the pool. On a thread, since devices may be waited for. OSError,
        ValueError."""

    def on_up(self) -> None:
        """Called when both couriers are connected."""

    def on_message(self, kind: str, message: peer.PeerMessage) -> None:
        """A message of these kinds. SessionBroken ends the session."""

    def on_courier(self, event: PostDone | Notification) -> bool:
        """The courier's progress. Whether it is of this direction."""


def open_all(directions: Sequence[Direction], link: CourierLink, checksums: bool) -> list[PartCopies]:
    """The copies of each, all or none. Raises as `open_parts` and `begin_sums` do."""
    opened: list[PartCopies] = []
    with contextlib.ExitStack() as ends:
        for direction in directions:
            parts = direction.open_parts(link)
            ends.callback(parts.close)
            if checksums:
                parts.begin_sums()
            opened.append(parts)
        ends.pop_all()
    return opened
