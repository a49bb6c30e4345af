"""Credits go back in groups, and none is kept once nothing would complete its group."""

from __future__ import annotations

import pytest

from kvferry.transfer.protocol.credit_groups import CreditGroups
from kvferry.transfer.protocol.slots import Credit


@pytest.mark.parametrize(
    ("slots", "expected"), [(1, 1), (3, 3), (4, 4), (7, 7), (8, 4), (11, 5), (13, 4), (16, 4), (1024, 4)]
)
def test_many_slots_go_back_in_a_few_messages(slots: int, expected: int) -> None:
    groups = CreditGroups(slots, 1)
    credits = [Credit(slot, 1) for slot in range(slots)]
    messages = [group for credit in credits if (group := groups.add(credit))]
    assert len(messages) == expected
    assert len(groups) < max(1, slots / 4), "fewer than a quarter are kept"
    assert [credit for group in messages for credit in group] + groups.rest() == credits
    assert (len(groups), groups.rest()) == (0, [])


def test_a_rank_waits_for_no_other_and_takes_them_along() -> None:
    groups = CreditGroups(8, 2)
    assert [groups.add(Credit(slot, 5)) for slot in (0, 8)] == [[], []]
    assert groups.add(Credit(9, 5)) == [Credit(0, 5), Credit(8, 5), Credit(9, 5)]
    assert len(groups) == 0
    assert [groups.add(Credit(slot, 6)) for slot in (0, 1)] == [[], [Credit(0, 6), Credit(1, 6)]]


@pytest.mark.parametrize(("slots", "ranks"), [(0, 1), (1, 0)])
def test_what_cannot_be(slots: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"slots is {slots} and ranks {ranks}, must be at least 1"):
        CreditGroups(slots, ranks)
