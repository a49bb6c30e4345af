"""What a prefill daemon asks decode daemons for whose prompt it is not: how much of it they hold. Core: no I/O.

Only sessions that are open and have agreed on look-ups are asked, a bounded number for a prompt and of prompts at a
time. Nothing is held anywhere for an answer; who waits for one has a deadline of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from kvferry.daemon.core.counters import LookUpCounters
from kvferry.daemon.core.effects import LookUp, Outbox
from kvferry.daemon.core.prefill_entry import BegunPrompt, Entry
from kvferry.proto import peer_pb2 as peer
from kvferry.proto.limits import MAX_LOOKED_UP_PAGES
from kvferry.radix.digests import DIGEST_BYTES

MOST_ASKED = 8  # daemons, for a prompt
MOST_OPEN = 64  # prompts that wait for answers


@dataclass(slots=True, eq=False)
class _Search:
    """The look-up of one prompt."""

    entry: Entry
    pages: int  # looked up
    waits: set[int]  # sessions that have not answered
    found: dict[int, int] = field(default_factory=dict)  # pages, by session


class LookUps:
    """excluded: namespaces of which nobody is told."""

    def __init__(self, outbox: Outbox, excluded: Container[bytes]) -> None:
        self.counters = LookUpCounters()
        self._outbox = outbox
        self._excluded = excluded
        self._sessions: list[int] = []  # that can be asked; those that found something last come first
        self._open: dict[int, _Search] = {}  # by number
        self._next = 1

    def __len__(self) -> int:
        return len(self._open)

    def session_up(self, session: int) -> None:
        """The session's decode daemon answers look-ups."""
        self._sessions.append(session)

    def begin(self, entry: Entry, prompt: BegunPrompt, pages: int, worth: Callable[[int], bool]) -> bool:
        """Asks who has the prompt's first `pages` pages, of all for whom it is `worth` it. False: nobody is asked."""
        pages = min(pages, MAX_LOOKED_UP_PAGES)
        if len(self._open) >= MOST_OPEN or prompt.namespace_id in self._excluded:
            return False
        asked = [session for session in self._sessions if session != entry.session and worth(session)][:MOST_ASKED]
        if not asked:
            return False
        number, self._next = self._next, self._next + 1
        self._open[number] = _Search(entry, pages, set(asked))
        message = peer.Lookup(
            lookup=number, namespace_id=prompt.namespace_id, digests=prompt.digests[: pages * DIGEST_BYTES]
        )
        for session in asked:
            self._outbox.put(LookUp(session, message))
        return True

    def heard(self, session: int, number: int, pages: int) -> Entry | None:
        """The answer of a session. Whose look-up needs no more of them; None: more are awaited, or it is over."""
        search = self._open.get(number)
        if search is None or session not in search.waits:
            return None
        search.waits.discard(session)
        search.found[session] = pages = min(pages, search.pages)
        self.counters.heard(pages)
        self._sessions.remove(session)
        self._sessions.insert(0 if pages else len(self._sessions), session)
        return None if search.waits and pages < search.pages else search.entry

    def take(self, entry: Entry) -> dict[int, int]:
        """Ends the entry's look-up, if there is one: the pages found, by session."""
        number = self._number_of(entry)
        return {} if number is None else self._open.pop(number).found

    def timed_out(self, entry: Entry) -> None:
        """No more answers are waited for: who gave none is asked last from now on."""
        if (number := self._number_of(entry)) is not None:
            silent = self._open[number].waits
            self.counters.late += len(silent)
            self._sessions.sort(key=silent.__contains__)

    def _number_of(self, entry: Entry) -> int | None:
        return next((number for number, search in self._open.items() if search.entry is entry), None)

    def session_down(self, session: int) -> Sequence[Entry]:
        """The session is over. Whose look-ups need no more answers for that."""
        if session in self._sessions:
            self._sessions.remove(session)
        over = []
        for search in self._open.values():
            search.found.pop(session, None)
            if session in search.waits:
                search.waits.discard(session)
                self.counters.late += 1
                over += [] if search.waits else [search.entry]
        return over
