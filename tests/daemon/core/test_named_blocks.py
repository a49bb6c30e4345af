"""The blocks that requests name: which of a prompt's pages they are, and what is refused."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import BlockShape, NamedBlocks
from kvferry.proto import worker_pb2 as wire

SHAPE = BlockShape(blocks=20, block_tokens=4, page_size=8)


def admit(
    tokens: int, blocks: list[int], start: int = 0, held: int | None = None, prefill: str = "p"
) -> tuple[int, ...]:
    held = start // 8 * 8 if held is None else held
    request = wire.Admit(tokens=tokens, blocks=blocks, blocks_from=start, held_tokens=held, prefill=prefill)
    return SHAPE.of_admit(request)


def test_blocks_of_pages() -> None:
    assert SHAPE.per_page == 2
    assert admit(16, [3, 1, 4, 15]) == (3, 1, 4, 15)
    assert admit(17, [3, 1, 4, 15, 9]) == (3, 1, 4, 15, 9, -1), "the last page has no more tokens"
    assert admit(16, [4], start=12) == (-1, -1, -1, 4), "what is before them is the engine's own"
    assert admit(24, [4, 5], start=8, prefill="") == (-1, -1, 4, 5, -1, -1), "without a prefill they may end before"
    assert admit(16, [], start=16) == (-1, -1, -1, -1), "the engine has all, and wants the first token"
    assert admit(16, [7, 6, 5, 4], held=16, prefill="") == (7, 6, 5, 4), "they are handed in"


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("blocks has 20; the engine has blocks 0 to 19", {"tokens": 8, "blocks": [0, 20]}),
        ("blocks has 1 entries twice; a prompt's blocks are distinct", {"tokens": 8, "blocks": [3, 3]}),
        ("blocks_from is 2; it must be a multiple of 4", {"tokens": 8, "blocks": [3], "start": 2}),
        ("blocks_from is 8; it must be a multiple of 4 below the prompt's 8", {"tokens": 8, "blocks": [3], "start": 8}),
        ("blocks_from is 12; it must be a multiple of 4 below", {"tokens": 12, "blocks": [], "start": 12}),
        ("blocks_from is 8; it must be a multiple of 4 below", {"tokens": 8, "blocks": [], "start": 8, "prefill": ""}),
        ("blocks has 0 entries from token 0 on; it must have 1 to 2", {"tokens": 8, "blocks": []}),
        ("blocks has 3 entries from token 0 on; it must have 1 to 2", {"tokens": 8, "blocks": [1, 2, 3]}),
        ("blocks has 2 entries from token 4 on; it must have 1 to 1", {"tokens": 8, "blocks": [1, 2], "start": 4}),
        ("held_tokens is 8; with blocks_from 0 it is 0", {"tokens": 16, "blocks": [0, 1, 2, 3], "held": 8}),
        ("held_tokens is 0; with blocks_from 12 it is 8", {"tokens": 16, "blocks": [3], "start": 12, "held": 0}),
        ("held_tokens is 16; with blocks_from 0 it is 0", {"tokens": 16, "blocks": [0, 1, 2, 3], "held": 16}),
        ("blocks has 1 entries; they must go on to the prompt's end", {"tokens": 8, "blocks": [1]}),
        (
            "blocks has 1 entries; they must go on to the prompt's end",
            {"tokens": 8, "blocks": [1], "held": 8, "prefill": ""},
        ),
        (
            "blocks_from is 4; of what the worker hands in it is 0",
            {"tokens": 8, "blocks": [1], "start": 4, "held": 8, "prefill": ""},
        ),
    ],
)
def test_what_an_admit_may_not_name(words: str, arguments: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=words):
        admit(**arguments)  # type: ignore[arg-type]


def test_blocks_that_are_named_one_after_the_other() -> None:
    named = SHAPE.of_begin(wire.Begin(tokens=22, blocks=[5]))
    assert named.tokens == 4 and named.of_pages(range(3)) == (5, -1, -1, -1, -1, -1)
    assert named.add([]) == range(0)
    assert named.add([7, 6]) == range(2), "a page of which there was one block before is of more now"
    assert named.of_pages(range(2)) == (5, 7, 6, -1)
    assert named.add([1]) == range(1, 2)
    assert named.add([0, 19]) == range(2, 3)
    assert named.tokens == 24 and named.of_pages(range(1, 3)) == (6, 1, 0, 19)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([1, 2, 3], "blocks has 3 entries behind 2; the prompt has 4"),
        ([20], "blocks has 20; the engine has blocks 0 to 19"),
        ([3, 3], "blocks has 1 entries twice"),
        ([9], "blocks has 9, which was named before"),
    ],
)
def test_what_may_not_follow(more: list[int], words: str) -> None:
    named = NamedBlocks(SHAPE, 16)
    named.add([8, 9])
    with pytest.raises(RequestError, match=words):
        named.add(more)
    assert named.tokens == 8 and named.of_pages(range(2)) == (8, 9, -1, -1), "nothing has changed"
    with pytest.raises(RequestError, match="blocks has 3 entries behind 0; the prompt has 2"):
        SHAPE.of_begin(wire.Begin(tokens=8, blocks=[1, 2, 3]))
