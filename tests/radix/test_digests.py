"""The digest chain against check vectors and an independent reference (hashlib, and CBOR written here)."""

import array
import hashlib
import math
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import _core
from kvferry.radix import cbor
from kvferry.radix.digests import (
    DIGEST_BYTES,
    MAX_PAGE_SIZE,
    DigestChain,
    chain_digests,
    prompt_digests,
    root_digest,
    tail_digest,
)

ROOT = bytes.fromhex("9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0")
FIRST = bytes.fromhex("dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749")
SECOND = bytes.fromhex("c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c")


# --- the reference, which shares nothing with the code under test


def ref_head(major: int, n: int) -> bytes:
    if n <= 23:
        return struct.pack(">B", major * 32 + n)
    if n <= 0xFF:
        return struct.pack(">BB", major * 32 + 24, n)
    if n <= 0xFFFF:
        return struct.pack(">BH", major * 32 + 25, n)
    if n <= 0xFFFFFFFF:
        return struct.pack(">BI", major * 32 + 26, n)
    return struct.pack(">BQ", major * 32 + 27, n)


def ref_cbor(value: Any) -> bytes:
    if value is None or value is True or value is False:
        return {None: b"\xf6", True: b"\xf5", False: b"\xf4"}[value]
    if isinstance(value, int):
        if -(2**64) <= value < 2**64:
            return ref_head(0, value) if value >= 0 else ref_head(1, ~value)
        tag, magnitude = (2, value) if value >= 0 else (3, ~value)
        digits = f"{magnitude:x}"
        return ref_head(6, tag) + ref_cbor(bytes.fromhex("0" * (len(digits) % 2) + digits))
    if isinstance(value, float):
        if math.isnan(value):
            return bytes.fromhex("f97e00")
        with np.errstate(over="ignore"):
            if float(np.float16(value)) == value:
                return b"\xf9" + np.float16(value).tobytes()[::-1]
            if float(np.float32(value)) == value:
                return b"\xfa" + np.float32(value).tobytes()[::-1]
        return b"\xfb" + struct.pack(">d", value)
    if isinstance(value, bytes):
        return ref_head(2, len(value)) + value
    if isinstance(value, str):
        return ref_head(3, len(value.encode())) + value.encode()
    return ref_head(4, len(value)) + b"".join(map(ref_cbor, value))


def ref_chain(tokens: Sequence[int], page_size: int, parent: bytes, extras: dict[int, Any]) -> list[bytes]:
    """Digests of all pages, the last of which may be partial."""
    digests = []
    for page, start in enumerate(range(0, len(tokens), page_size)):
        message = ref_cbor([parent, list(tokens[start : start + page_size]), extras.get(page)])
        parent = hashlib.sha256(message).digest()
        digests.append(parent)
    return digests


def core_chain(tokens: np.ndarray[Any, Any], page_size: int, parent: bytes, name: Any = "auto") -> bytes:
    view = _core.TokenView.of(tokens)
    assert view is not None
    return _core.chain_digests(view, b"", page_size, parent, b"\xf6", {}, 0, name)[0]


EDGES = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1]
TOKEN = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1), st.integers(0, 300))
SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=30), st.binary(max_size=300)
)
KEY = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple), max_leaves=8
)
KEYS = st.lists(KEY, min_size=1, max_size=4)


@pytest.fixture(params=_core.sha256_implementations())
def implementation(request: pytest.FixtureRequest) -> Any:
    return request.param


# --- check vectors


def test_check_vectors() -> None:
    assert root_digest() == ROOT
    assert [bytes(d) for d in chain_digests(list(range(32)), page_size=16)] == [FIRST, SECOND]


def test_resumes_from_a_parent() -> None:
    assert chain_digests(range(16, 32), page_size=16, parent=FIRST).tobytes() == SECOND


def test_seeded_root() -> None:
    assert root_digest("42") == hashlib.sha256(b"\x6242").digest()


@pytest.mark.parametrize("length", [0, 1, 3, 55, 56, 63, 64, 65, 119, 120, 128, 1000, 65537])
def test_sha256_implementations_agree_with_hashlib(implementation: Any, length: int) -> None:
    data = bytes(i * 31 % 251 for i in range(length))
    assert _core.sha256(data, implementation) == hashlib.sha256(data).digest()


# --- against the reference


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(TOKEN, max_size=140),
    page_size=st.integers(1, 70),
    parent=st.one_of(st.none(), st.binary(min_size=32, max_size=32)),
)
def test_chain_and_tail_equal_the_reference(tokens: list[int], page_size: int, parent: bytes | None) -> None:
    expected = ref_chain(tokens, page_size, parent or ROOT, {})
    full = len(tokens) // page_size
    for name in _core.sha256_implementations():
        assert core_chain(np.array(tokens, np.uint32), page_size, parent or ROOT, name) == b"".join(expected[:full])
    made = chain_digests(tokens, page_size=page_size, parent=parent)
    assert made.shape == (full, DIGEST_BYTES)
    assert made.dtype == np.uint8
    assert made.tobytes() == b"".join(expected[:full])
    last = made[-1].tobytes() if full else parent
    tail = tail_digest(tokens[full * page_size :], page_size=page_size, parent=last)
    assert tail == b"".join(expected[full:])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), tokens=st.lists(TOKEN, min_size=1, max_size=60), page_size=st.integers(1, 20))
def test_extra_keys_equal_the_reference(data: st.DataObject, tokens: list[int], page_size: int) -> None:
    pages = -(-len(tokens) // page_size)
    extra = data.draw(st.dictionaries(st.integers(0, pages - 1), KEYS, max_size=3))
    expected = ref_chain(tokens, page_size, ROOT, extra)
    made = prompt_digests(tokens, page_size=page_size, extra=extra)
    assert made.digests + made.tail == b"".join(expected)
    assert made.tokens == len(tokens)
    assert chain_digests(tokens, page_size=page_size, extra=extra).tobytes() == made.digests
    keys = data.draw(KEYS)
    expected = ref_chain(tokens, page_size, ROOT, dict.fromkeys(range(pages), keys))
    made = prompt_digests(tokens, page_size=page_size, extra=keys)
    assert made.digests + made.tail == b"".join(expected)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 20), turns=st.lists(st.lists(TOKEN, max_size=50), max_size=5))
def test_extending_equals_hashing_at_once(data: st.DataObject, page_size: int, turns: list[list[int]]) -> None:
    extra = data.draw(st.dictionaries(st.integers(0, 8), KEYS, max_size=3))
    chain = DigestChain(page_size=page_size, extra=extra)
    history: list[int] = []
    for turn in turns:
        chain.extend(turn)
        history += turn
        expected = ref_chain(history, page_size, ROOT, extra)
        full = len(history) // page_size
        assert chain.tokens == len(history)
        assert chain.pages == full
        assert chain.digests == b"".join(expected[:full])
        assert chain.tail_digest == b"".join(expected[full:])


@given(KEY)
@settings(max_examples=300, deadline=None)
def test_cbor_equals_the_reference(key: Any) -> None:
    assert cbor.encode(key) == ref_cbor(key)


@pytest.mark.parametrize(
    ("value", "encoded"),  # RFC 8949, appendix A
    [
        (2**64 - 1, "1bffffffffffffffff"),
        (2**64, "c249010000000000000000"),
        (-(2**64), "3bffffffffffffffff"),
        (-(2**64) - 1, "c349010000000000000000"),
        (-1000, "3903e7"),
        (-0.0, "f98000"),
        (1.5, "f93e00"),
        (65504.0, "f97bff"),
        (100000.0, "fa47c35000"),
        (3.4028234663852886e38, "fa7f7fffff"),
        (1.0e300, "fb7e37e43c8800759c"),
        (5.960464477539063e-08, "f90001"),
        (math.inf, "f97c00"),
        (-math.inf, "f9fc00"),
        (math.nan, "f97e00"),
        ("\u00fc", "62c3bc"),
        ([1, [2, 3], (4, 5)], "8301820203820405"),
    ],
)
def test_cbor_examples(value: Any, encoded: str) -> None:
    assert cbor.encode(value).hex() == encoded


def test_no_keys_are_null() -> None:
    plain = chain_digests(range(8), page_size=4).tobytes()
    assert chain_digests(range(8), page_size=4, extra=[]).tobytes() == plain
    assert chain_digests(range(8), page_size=4, extra={}).tobytes() == plain
    assert chain_digests(range(8), page_size=4, extra={1: None}).tobytes() == plain


def test_a_salt_in_page_0_changes_every_page() -> None:
    plain = chain_digests(range(64), page_size=16)
    salted = chain_digests(range(64), page_size=16, extra={0: [("cache_salt", "a")]})
    assert (plain != salted).any(axis=1).all()


# --- what is taken as tokens


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(range(32)),
        range(32),
        array.array("I", range(32)),
        memoryview(array.array("I", range(32))),
        np.arange(32, dtype=np.uint32),
        np.arange(32, dtype=np.int64),
        np.arange(32, dtype=np.int32),
        np.arange(32, dtype=np.uint64),
        np.arange(32, dtype=np.uint8),
        np.arange(32, dtype=">u4"),
        np.arange(64, dtype=np.uint32)[:32],
        np.repeat(np.arange(32, dtype=np.uint32), 2)[::2],
        list(np.arange(32)),
        np.frombuffer(b"_" + np.arange(32, dtype=np.uint32).tobytes(), np.uint32, offset=1),  # not aligned
        (i for i in range(32)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_token_kinds(tokens: Any) -> None:
    assert chain_digests(tokens, page_size=16).tobytes() == FIRST + SECOND


def test_a_read_only_array_is_taken() -> None:
    tokens = np.arange(32, dtype=np.uint32)
    tokens.flags.writeable = False
    assert chain_digests(tokens, page_size=16).tobytes() == FIRST + SECOND


def test_no_tokens() -> None:
    for tokens in ([], np.empty(0), ()):
        assert chain_digests(tokens, page_size=16).shape == (0, DIGEST_BYTES)
    assert prompt_digests([], page_size=16) == (b"", b"", 0)
    assert tail_digest([], page_size=16) == b""


def test_the_chain_keeps_no_view_of_the_callers_array() -> None:
    tokens = np.arange(20, dtype=np.uint32)
    chain = DigestChain(page_size=16)
    chain.extend(tokens)
    tokens[:] = 0
    chain.extend(range(20, 32))
    assert chain.digests == FIRST + SECOND


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, -1], ValueError, r"tokens\[1\]: -1"),
        ([0, 2**32], ValueError, r"tokens\[1\]: 4294967296, must be in \[0, 4294967295\]"),
        (np.array([5, 2**32]), ValueError, r"tokens\[1\]: 4294967296"),
        (np.array([-3], np.int32), ValueError, r"tokens\[0\]: -3"),
        (np.array([5] * 300 + [-7]), ValueError, r"tokens\[300\]: -7"),
        (np.array([5] * 128 + [-7] * 9, np.int32), ValueError, r"tokens\[128\]: -7"),
        ([2**63, -1], ValueError, r"tokens\[0\]: 9223372036854775808"),
        ([1, 2**70], ValueError, r"tokens\[1\]: 1180591620717411303424"),
        (np.array([2**64 - 1], np.uint64), ValueError, r"tokens\[0\]: 18446744073709551615"),
        ([1.0, 2.0], TypeError, r"tokens\[0\]: 1.0"),
        ([1, "a"], TypeError, r"tokens\[1\]: 'a'"),
        ([True, False], TypeError, r"tokens\[0\]: True"),
        (b"abcd", TypeError, "tokens: bytes"),
        (np.zeros((2, 2), np.uint32), ValueError, "tokens: 2 dimensions"),
        (np.zeros(3, np.float32), TypeError, r"tokens\[0\]"),
    ],
)
def test_bad_tokens(tokens: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chain_digests(tokens, page_size=1)


def test_bad_tokens_leave_the_chain_as_it_was() -> None:
    chain = DigestChain(page_size=16)
    chain.extend(range(20))
    before = (chain.digests, chain.tail_digest, chain.tokens)
    for bad in ([1, -1], np.array([1, -1]), np.array([1.5])):
        with pytest.raises((ValueError, TypeError), match="tokens"):
            chain.extend(bad)
    assert (chain.digests, chain.tail_digest, chain.tokens) == before


@pytest.mark.parametrize("page_size", [0, -1, MAX_PAGE_SIZE + 1])
def test_bad_page_size(page_size: int) -> None:
    for call in (chain_digests, tail_digest, prompt_digests):
        with pytest.raises(ValueError, match=f"page_size: {page_size}, must be in"):
            call([1, 2], page_size=page_size)
    with pytest.raises(ValueError, match="page_size"):
        core_chain(np.zeros(1, np.uint32), page_size, ROOT)


def test_largest_page() -> None:
    tokens = np.arange(MAX_PAGE_SIZE, dtype=np.uint32)
    expected = ref_chain(tokens.tolist(), MAX_PAGE_SIZE, ROOT, {})
    assert chain_digests(tokens, page_size=MAX_PAGE_SIZE).tobytes() == b"".join(expected)


def test_bad_parent() -> None:
    with pytest.raises(ValueError, match="parent: 31 bytes, must be 32"):
        chain_digests([1], page_size=1, parent=b"x" * 31)
    with pytest.raises(ValueError, match="parent: 33 bytes"):
        core_chain(np.zeros(1, np.uint32), 1, b"x" * 33)


def test_a_whole_page_is_no_tail() -> None:
    with pytest.raises(ValueError, match="tokens: 4 of them, must be fewer than page_size"):
        tail_digest([1, 2, 3, 4], page_size=4)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = [1]
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ("salt", TypeError, "extra: str, must be None or a list"),
        ([object()], TypeError, r"extra\[0\]: object, must be"),
        ([1, [{}]], TypeError, r"extra\[1\]\[0\]: dict"),
        ({0: "salt"}, TypeError, r"extra\[0\]: str"),
        ({-1: [1]}, ValueError, "page index -1, must be >= 0"),
        ({2: [1]}, ValueError, "page index 2, must be < 2"),
        ({"0": [1]}, TypeError, "page index '0'"),
        (["\ud800"], ValueError, r"extra\[0\]: .* not encodable"),
        (_nested(20), ValueError, "nested deeper than 16"),
    ],
)
def test_bad_extra(extra: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prompt_digests(range(6), page_size=4, extra=extra)
    with pytest.raises(error, match=message):
        chain_digests(range(6), page_size=4, extra=extra)


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="implementation: 'md5'"):
        _core.sha256(b"", "md5")  # type: ignore[arg-type]


def test_other_threads_run_while_it_hashes() -> None:
    # Without the GIL released, the counter could not move between the two readings around one call.
    tokens = np.zeros(1 << 21, np.uint32)
    stop = threading.Event()
    counted = [0]

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        for _ in range(20):  # a busy machine may give the other thread no time in one call
            before = counted[0]
            core_chain(tokens, 16, ROOT, "portable")
            if counted[0] - before > 1000:
                return
        pytest.fail("no other thread ran")
    finally:
        stop.set()
        thread.join(10)
