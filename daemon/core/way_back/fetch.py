"""One request's fetch: what could be fetched, and what has come. Core: no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.daemon.core.prefill_entry import Entry


@dataclass(frozen=True, slots=True)
class Offer:
    session: int  # of the decode daemon that holds them
    end: int  # of the pages that can be fetched
    seconds: float  # that the fetch may take


@dataclass(slots=True, eq=False)
class Fetch:
    """One request's fetch, from its Ask until no copy of it runs."""

    number: int  # of the transfer
    entry: Entry
    session: int
    first_page: int
    page_ids: tuple[int, ...]
    deadline: float
    there: bytearray  # by page, whether it has arrived
    stopped: str = ""  # why it drains
    blocks: frozenset[int] = frozenset()  # of an engine's, that it writes

    @property
    def end(self) -> int:
        return self.first_page + len(self.page_ids)

    @property
    def ready(self) -> int:
        """The first page of the prompt that has not arrived; `end`: all have."""
        missing = self.there.find(0)
        return self.end if missing < 0 else self.first_page + missing
