"""One transfer as the sender keeps it."""

from __future__ import annotations

from collections.abc import Sequence


class Outgoing:
    """The state of a transfer: how far it has come on every lane, and what of it is under way."""

    __slots__ = (
        "ended",
        "failure",
        "first_page",
        "from_rows",
        "gathers",
        "page_ids",
        "posted",
        "queued",
        "ready",
        "sent",
        "unsent",
    )

    def __init__(self, first_page: int, page_ids: Sequence[int], lanes: int, from_rows: bool) -> None:
        self.first_page = first_page
        self.page_ids = page_ids
        self.from_rows = from_rows
        self.unsent = lanes  # lanes whose cursor is not at the run's end
        self.ready = 0  # pages from the run's start that are final in the pool
        self.sent = [0] * lanes  # the cursors: bytes from the run's start given to gathers
        self.gathers = 0  # running
        self.posted = 0  # posts in flight
        self.queued = [False] * lanes  # whether it stands in the lane's round
        self.ended = False
        self.failure: str | None = None

    @property
    def closed(self) -> bool:
        return self.ended or self.failure is not None
