"""The cache of recent prompts: it answers as `prompt_digests` does, hashes no page twice, keeps to its bounds."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import _core
from kvferry.radix.digests import DIGEST_BYTES, DigestChain, prompt_digests
from kvferry.radix.prompt_cache import PromptCache, _Run


class Counted(PromptCache):
    """Counts the full pages that are hashed."""

    hashed = 0

    def _hash(self, tokens: array[int], *rest: Any) -> bytes:
        self.hashed += len(tokens) // self._page_size
        return super()._hash(tokens, *rest)


def check(cache: PromptCache, page_size: int) -> None:
    """Recounts everything that is kept, and hashes it anew where no extra keys are."""
    runs: list[_Run] = []
    stack: list[tuple[_Run, bytes, tuple[int, ...]]] = [(root, b"", ()) for root in cache._roots.values()]
    position = {run: i for i, run in enumerate(cache._order)}
    for name, root in cache._roots.items():
        assert root.key == name and root.parent is None and root.children
    while stack:
        run, path, before = stack.pop()
        if run.parent is not None:
            runs.append(run)
            path, tokens = path + bytes(run.digests), (*before, *run.tokens)
            assert run.tokens and len(run.tokens) % page_size == 0
            assert len(run.digests) == len(run.tokens) // page_size * DIGEST_BYTES
            assert run.parent.children[run.key] is run and run.key == run.tokens[:page_size].tobytes()
            assert run.parent.parent is None or position[run.parent] > position[run]
            if _root_of(run).key == b"\xf6":
                assert prompt_digests(tokens, page_size=page_size).digests == path
        else:
            tokens = before
        stack += [(child, path, tokens) for child in run.children.values()]
    assert set(runs) == set(cache._order) and len(runs) == cache.runs
    assert cache.tokens == sum(len(run.tokens) for run in runs)
    assert cache.tokens <= cache._max_tokens and cache.runs <= cache._max_runs


def _root_of(run: _Run) -> _Run:
    while run.parent is not None:
        run = run.parent
    return run


def a_prompt(seed: int, tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, 128_000, tokens)


# --- the same answer as without it

CONTAINERS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    iter,
    np.array,
    lambda tokens: np.array(tokens, np.int32),
    lambda tokens: np.array(tokens, np.uint32),
    lambda tokens: np.array(tokens, np.uint64),
    lambda tokens: np.array(tokens, ">i8"),
    lambda tokens: np.repeat(np.array(tokens, np.uint32), 2)[::2],
    lambda tokens: memoryview(array("I", tokens)),
    lambda tokens: np.array(tokens, np.int64).data,
]
EXTRAS = [None, None, None, ["lora"], {0: ["salt"]}, {0: ["other"]}, {1: ["image"]}]


@settings(max_examples=120, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 5), max_tokens=st.integers(0, 120), max_runs=st.integers(0, 12))
def test_equals_prompt_digests(data: st.DataObject, page_size: int, max_tokens: int, max_runs: int) -> None:
    cache = PromptCache(page_size=page_size, max_tokens=max_tokens, max_runs=max_runs)
    prompts: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 12))):
        kept = data.draw(st.sampled_from(prompts))  # begins as an earlier prompt, and may be that prompt
        more = data.draw(st.lists(st.sampled_from([0, 1, 2**31 - 1]), max_size=20))
        prompt = kept[: data.draw(st.integers(0, len(kept)))] + more
        prompts.append(prompt)
        extra = data.draw(st.sampled_from(EXTRAS))
        expected: Any
        try:
            expected = prompt_digests(prompt, page_size=page_size, extra=extra)
        except ValueError as error:  # page 1 has keys and is not there
            expected = str(error)
        before = (cache.tokens, cache.runs)
        try:
            made: Any = cache.digests(data.draw(st.sampled_from(CONTAINERS))(prompt), extra=extra)
        except ValueError as error:
            made = str(error)
            assert (cache.tokens, cache.runs) == before
        assert made == expected
        check(cache, page_size)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 700),
    at=st.integers(0, 699),
    dtype=st.sampled_from([np.int32, np.int64, np.uint32, np.uint64]),
    page_size=st.sampled_from([1, 7, 64]),
)
def test_one_token_differs(length: int, at: int, dtype: Any, page_size: int) -> None:
    first = a_prompt(1, 700).astype(dtype)
    second = first[:length].copy()
    if at < length:
        second[at] ^= 1
    cache = Counted(page_size=page_size)
    cache.digests(first)
    cache.hashed = 0
    assert cache.digests(second) == prompt_digests(second, page_size=page_size)
    assert cache.hashed == (length // page_size - at // page_size if at < length else 0)
    check(cache, page_size)


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**32 + 1, -(2**32)])
def test_a_token_that_equals_a_held_one_in_32_bits_only(wrong: int) -> None:
    held = np.full(256, wrong & 0xFFFFFFFF, np.uint32)
    cache = PromptCache(page_size=16)
    cache.digests(held)
    tokens = held.astype(np.int64)
    tokens[200] = wrong
    with pytest.raises(ValueError, match=rf"tokens\[200\]: {wrong}, must be in \[0, 4294967295\]"):
        cache.digests(tokens)


def test_begins_at_its_parent() -> None:
    tokens = a_prompt(2, 100)
    parent = b"p" * 32
    chain = DigestChain(page_size=16, parent=parent)
    chain.extend(tokens)
    cache = PromptCache(page_size=16, parent=parent)
    for _ in range(2):
        assert cache.digests(tokens) == (chain.digests, chain.tail_digest, 100)


def test_the_caller_may_change_its_array() -> None:
    tokens = np.arange(64, dtype=np.uint32)
    cache = PromptCache(page_size=16)
    cache.digests(tokens)
    tokens[:] = 7
    assert cache.digests(tokens) == prompt_digests(tokens, page_size=16)
    assert cache.digests(range(64)) == prompt_digests(range(64), page_size=16)


def test_no_tokens_and_less_than_a_page() -> None:
    cache = PromptCache(page_size=16)
    assert cache.digests([]) == (b"", b"", 0)
    assert cache.digests(range(15)) == prompt_digests(range(15), page_size=16)
    assert (cache.tokens, cache.runs) == (0, 0)


# --- nothing is hashed twice


def test_a_conversation_hashes_each_page_once() -> None:
    cache = Counted(page_size=64)
    body = a_prompt(3, 7000)
    for end in range(1000, 7001, 600):
        assert cache.digests(body[:end]) == prompt_digests(body[:end], page_size=64)
    assert cache.hashed == 7000 // 64
    assert (cache.tokens, cache.runs) == (7000 // 64 * 64, 1)  # the extension has taken the shorter one's place


def test_shared_prefixes_are_kept_once() -> None:
    cache = Counted(page_size=64)
    heads = [a_prompt(head, 3000) for head in range(3)]
    for i in range(30):
        cache.digests(np.concatenate([heads[i % 3], a_prompt(100 + i, 500)]))
    in_common = 3000 // 64
    assert cache.hashed == 3 * in_common + 30 * (3500 // 64 - in_common)
    assert cache.tokens == cache.hashed * 64
    assert cache.runs == 3 + 30
    check(cache, 64)


def test_other_extra_keys_share_nothing() -> None:
    cache = Counted(page_size=16)
    tokens = a_prompt(4, 160)
    extras: list[Any] = [None, ["a"], ["b"], {0: ["a"]}, {1: ["a"]}, {0: ["a"], 1: ["a"]}]
    for extra in extras + extras:
        assert cache.digests(tokens, extra=extra) == prompt_digests(tokens, page_size=16, extra=extra)
    assert cache.hashed == len(extras) * 10
    assert cache.digests(tokens, extra={1: ["a"], 0: ["a"]}) == prompt_digests(tokens, page_size=16, extra=extras[-1])
    assert cache.hashed == len(extras) * 10


# --- bounds


def test_least_recently_used_goes_first() -> None:
    cache = Counted(page_size=16, max_tokens=16 * 30)
    a, b, c, d = (a_prompt(seed, 160) for seed in range(4))
    for prompt in (a, b, c, a, d):  # b goes for d
        cache.digests(prompt)
    assert (cache.tokens, cache.runs, cache.hashed) == (480, 3, 40)
    for prompt in (a, c, d):
        cache.digests(prompt)
    assert cache.hashed == 40
    cache.digests(b)
    assert cache.hashed == 50


def test_a_shared_prefix_outlives_its_suffixes() -> None:
    cache = Counted(page_size=16, max_runs=3)
    head = a_prompt(5, 320)
    for i in range(10):
        cache.digests(np.concatenate([head, a_prompt(100 + i, 160)]))
    assert cache.runs == 3
    assert cache.hashed == 20 + 10 * 10
    check(cache, 16)


def test_a_prompt_above_the_bound_leaves_the_others() -> None:
    cache = Counted(page_size=16, max_tokens=160)
    small, large = a_prompt(6, 160), a_prompt(7, 192)
    cache.digests(small)
    assert cache.digests(large) == prompt_digests(large, page_size=16)
    assert (cache.tokens, cache.hashed) == (160, 22)
    cache.digests(small)
    assert cache.hashed == 22


def test_clear() -> None:
    cache = Counted(page_size=16)
    for _ in range(2):
        cache.digests(range(64))
        assert (cache.tokens, cache.runs) == (64, 1)
        cache.clear()
        assert (cache.tokens, cache.runs) == (0, 0)
    assert cache.hashed == 8


# --- what is refused


@pytest.mark.parametrize(
    ("tokens", "extra", "error", "message"),
    [
        (np.append(np.arange(40), -1), None, ValueError, r"tokens\[40\]: -1, must be in"),
        ([*range(40), 2**32], None, ValueError, r"tokens\[40\]: 4294967296"),
        ([1.5], None, TypeError, r"tokens\[0\]: 1.5"),
        (b"abcd", None, TypeError, "tokens: bytes"),
        (np.zeros((2, 2), np.int64), None, ValueError, "2 dimensions"),
        (range(40), {9: ["a"]}, ValueError, "page index 9, must be < 3"),
        (range(40), "a", TypeError, "extra: str"),
        (range(40), {0: [object()]}, TypeError, r"extra\[0\]\[0\]: object"),
    ],
)
def test_bad_arguments_leave_the_cache_as_it_was(tokens: Any, extra: Any, error: Any, message: str) -> None:
    cache = Counted(page_size=16)
    cache.digests(range(32))
    with pytest.raises(error, match=message):
        cache.digests(tokens, extra=extra)
    assert (cache.tokens, cache.runs) == (32, 1)
    cache.digests(range(32))
    assert cache.hashed == 2
    check(cache, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"page_size": 0}, "page_size: 0, must be in"),
        ({"page_size": 16, "parent": b"x"}, "parent: 1 bytes, must be 32"),
        ({"page_size": 16, "max_tokens": -1}, "max_tokens: -1, must be >= 0"),
        ({"page_size": 16, "max_runs": -1}, "max_runs: -1, must be >= 0"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptCache(**arguments)


# --- the C++ view of tokens


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 500])
def test_common_finds_the_first_difference(dtype: Any, length: int) -> None:
    held: Any = a_prompt(8, 500).astype(np.uint32)
    for at in {0, length // 2, max(length - 1, 0)}:
        tokens = held[:length].astype(dtype)
        tokens[at : at + 1] += 1
        view = _core.TokenView.of(tokens)
        assert view is not None
        assert view.common(0, held) == min(at, length)
        assert view.common(length, held) == 0


def test_bounds_of_a_view() -> None:
    view = _core.TokenView.of([1, 2, 3])
    assert view is not None and len(view) == 3
    assert view.narrow(1, 3) == np.array([2, 3], np.uint32).tobytes()
    for begin, end in ((-1, 2), (0, 4), (2, 1), (4, 4)):
        with pytest.raises(ValueError, match="must be in"):
            view.narrow(begin, end)
    with pytest.raises(ValueError, match="begin: 4, must be in"):
        view.common(4, b"")


def test_a_view_holds_its_buffer() -> None:
    tokens = array("q", range(8))
    view = _core.TokenView.of(tokens)
    with pytest.raises(BufferError):
        tokens.append(8)
    del view
    tokens.append(8)


@pytest.mark.parametrize("tokens", [b"abcd", bytearray(8), "abcd", 5, None, [True], [-1], [2**32], np.zeros(4)])
def test_what_no_view_is_of(tokens: Any) -> None:
    assert _core.TokenView.of(tokens) is None
