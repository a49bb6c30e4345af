"""Groups of credits that go back to the sender: several in a message, since to send and read one costs both daemons far
more time than its few bytes.

The sender is never left waiting for what is kept here, which is fewer than a quarter of a rank's credits: the others
are in parts on their way, or with the sender, which can then go on. Ranks move at one pace: the first whose group is
full takes along those of all others, so that more ranks do not mean more messages.
"""

from __future__ import annotations

from kvferry.transfer.protocol.slots import Credit

GROUPS = 4  # of a rank's slots; with fewer than twice as many slots each goes back by itself


class CreditGroups:
    """One per receiver. slots: of each rank."""

    def __init__(self, slots: int, ranks: int) -> None:
        if slots < 1 or ranks < 1:
            raise ValueError(f"slots is {slots} and ranks {ranks}, must be at least 1")
        self._slots = slots
        self._size = max(1, slots // GROUPS)
        self._waiting: list[list[Credit]] = [[] for _ in range(ranks)]

    def __len__(self) -> int:
        """The number of credits that are kept."""
        return sum(map(len, self._waiting))

    def add(self, credit: Credit) -> list[Credit]:
        """The group that it completes, with what is kept of other ranks, to be sent now; else nothing."""
        waiting = self._waiting[credit.slot // self._slots]
        waiting.append(credit)
        return self.rest() if len(waiting) >= self._size else []

    def rest(self) -> list[Credit]:
        """All that are kept, to be sent now. Also for when no transfer is open: the next begins with every slot."""
        kept = [credit for waiting in self._waiting for credit in waiting]
        for waiting in self._waiting:
            waiting.clear()
        return kept
