"""Pages that are read before a step is launched: which, and until when they are believed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.connectors.sglang import read_ahead
from kvferry.connectors.sglang.read_ahead import PagesRead

PAGE = 4


def new_request(row: int, start: int, end: int) -> Any:
    sender = SimpleNamespace(pages_read=None)
    extent = SimpleNamespace(end=end)
    return SimpleNamespace(req_pool_idx=row, start_send_idx=start, extend_range=extent, disagg_kv_sender=sender)


def test_each_prompt_has_its_own_pages() -> None:
    rows = torch.tensor(
        [[40, 41, 42, 43, 8, 9, 10, 11, 20, 21], [4, 5, 6, 7, 12, 13, 14, 15, 60, 61]], dtype=torch.int32
    )
    first, second = new_request(0, 0, 10), new_request(1, 4, 9)
    read_ahead.read([first, second], rows, PAGE)
    rows.zero_()
    for request, tokens, pages in ((first, 10, [10, 2, 5]), (first, 8, [10, 2]), (second, 5, [3, 15])):
        with read_ahead.being_sent(request):
            found = read_ahead.pages_being_sent(tokens, PAGE)
        assert found is not None and found.tolist() == pages
    assert read_ahead.pages_being_sent(4, PAGE) is None, "no prompt is being sent"
    with read_ahead.being_sent(new_request(0, 0, 8)):
        assert read_ahead.pages_being_sent(4, PAGE) is None, "nothing was read of it"


def test_more_than_was_read_is_not_guessed() -> None:
    read = PagesRead(2 * PAGE, 7 * PAGE - 1, torch.arange(7, 12), None)
    for start, tokens, pages in ((3, 2 * PAGE + 1, [8, 9, 10]), (2, 5 * PAGE - 1, [7, 8, 9, 10, 11])):
        found = read.of(start * PAGE, tokens, PAGE)
        assert found is not None and found.tolist() == pages
    for start, tokens in ((PAGE, PAGE), (2 * PAGE, 5 * PAGE), (3 * PAGE - 1, PAGE)):
        assert read.of(start, tokens, PAGE) is None


class Allocator:
    def __init__(self) -> None:
        self.freed: list[int] = []

    def free(self, slots: Any) -> None:
        self.freed += slots.tolist()


@pytest.mark.parametrize("shadowed", [False, True])
@pytest.mark.parametrize("slots", [[], [8, 9]])
def test_what_the_radix_cache_frees_of_a_prompt_is_forgotten(slots: list[int], shadowed: bool) -> None:
    allocator, request = Allocator(), new_request(0, 0, 8)
    request.disagg_kv_sender.pages_read = read = PagesRead(0, 8, torch.arange(2), None)
    own: list[int] = []
    if shadowed:
        vars(allocator)["free"] = lambda slots: own.extend(slots.tolist())
    with contextlib.suppress(RuntimeError), read_ahead.until_others_are_there(request, allocator):
        allocator.free(torch.tensor(slots))
        raise RuntimeError
    assert request.disagg_kv_sender.pages_read is (None if slots else read)
    assert (own if shadowed else allocator.freed) == slots
    request.disagg_kv_sender.pages_read = read
    allocator.free(torch.tensor([4]))
    assert request.disagg_kv_sender.pages_read is read and ("free" in vars(allocator)) is shadowed
