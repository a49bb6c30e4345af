"""The copy engine's CPU path: every byte that should move moves, no other byte changes, bad bounds move nothing."""

import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry import _core

POISON = 0xA5
Bytes = NDArray[np.uint8]


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def poisoned(nbytes: int) -> Bytes:
    return np.full(nbytes, POISON, np.uint8)


@st.composite
def page_copies(draw: st.DrawFn) -> tuple[int, int, list[int], int, int, int]:
    """pool pages, page bytes, page ids, byte offset, bytes, offset in the other buffer"""
    pages = draw(st.integers(1, 12))
    page_bytes = draw(st.integers(1, 40))
    ids = draw(st.lists(st.integers(0, pages - 1), unique=True, min_size=1, max_size=pages))
    byte_offset = draw(st.integers(0, len(ids) * page_bytes))
    nbytes = draw(st.integers(0, len(ids) * page_bytes - byte_offset))
    return pages, page_bytes, ids, byte_offset, nbytes, draw(st.integers(0, 20))


@settings(max_examples=200, deadline=None)
@given(page_copies())
def test_gather(case: tuple[int, int, list[int], int, int, int]) -> None:
    pages, page_bytes, ids, byte_offset, nbytes, at = case
    pool = pattern(pages * page_bytes)
    before = pool.copy()
    slot = poisoned(at + nbytes + 17)
    _core.gather_pages(slot, at, pool, np.array(ids, np.int64), page_bytes, byte_offset, nbytes)
    virtual = pool.reshape(pages, page_bytes)[ids].reshape(-1)
    expected = poisoned(len(slot))
    expected[at : at + nbytes] = virtual[byte_offset : byte_offset + nbytes]
    assert (slot == expected).all()
    assert (pool == before).all()


@settings(max_examples=200, deadline=None)
@given(page_copies())
def test_scatter(case: tuple[int, int, list[int], int, int, int]) -> None:
    pages, page_bytes, ids, byte_offset, nbytes, at = case
    pool = poisoned(pages * page_bytes + 13)
    slot = pattern(at + nbytes)
    _core.scatter_pages(pool, ids, page_bytes, byte_offset, slot, at, nbytes)
    virtual = poisoned(len(ids) * page_bytes)
    virtual[byte_offset : byte_offset + nbytes] = slot[at : at + nbytes]
    expected = poisoned(len(pool))
    expected[: pages * page_bytes].reshape(pages, page_bytes)[ids] = virtual.reshape(len(ids), page_bytes)
    assert (pool == expected).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 64])
def test_threads_move_the_same_bytes(threads: int) -> None:
    page_bytes, pages = 300_007, 31
    ids = np.random.default_rng(1).permutation(pages)[:23].astype(np.uint32)
    pool = pattern(pages * page_bytes)
    offset, nbytes = 123_457, 22 * page_bytes - 99
    slot = poisoned(nbytes + 64)
    _core.gather_pages(slot, 32, pool, ids, page_bytes, offset, nbytes, threads=threads)
    virtual = pool.reshape(pages, page_bytes)[ids].reshape(-1)
    assert (slot[32:-32] == virtual[offset : offset + nbytes]).all()
    assert (slot[:32] == POISON).all()
    assert (slot[-32:] == POISON).all()

    back = poisoned(len(pool))
    _core.scatter_pages(back, ids, page_bytes, offset, slot, 32, nbytes, threads=threads)
    moved = back.reshape(pages, page_bytes)[ids].reshape(-1)
    assert (moved[offset : offset + nbytes] == virtual[offset : offset + nbytes]).all()
    assert (moved[:offset] == POISON).all()
    assert (moved[offset + nbytes :] == POISON).all()
    others = np.setdiff1d(np.arange(pages), ids)
    assert (back.reshape(pages, page_bytes)[others] == POISON).all()


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.int32, np.uint32, list, tuple])
def test_kinds_of_page_ids(kind: Any) -> None:
    ids = kind([2, 0]) if kind in (list, tuple) else np.array([2, 0], kind)
    slot = bytearray(8)
    _core.gather_pages(slot, 0, bytes(range(16)), ids, 4, 0, 8)
    assert bytes(slot) == bytes([8, 9, 10, 11, 0, 1, 2, 3])


@pytest.mark.parametrize("ids", [np.zeros(1, np.int16), np.zeros(1, np.float64), np.zeros((1, 1), np.int64), [1.5], 3])
def test_bad_kinds_of_page_ids(ids: Any) -> None:
    with pytest.raises(TypeError):
        _core.gather_pages(bytearray(4), 0, bytes(16), ids, 4, 0, 4)


def test_shared_memory_and_memoryviews() -> None:
    with mmap.mmap(-1, 4096) as memory:
        view = memoryview(memory)
        _core.scatter_pages(view, [1, 3], 16, 0, bytes(range(32)), 0, 32)
        assert bytes(view[16:32]) == bytes(range(16))
        assert bytes(view[48:64]) == bytes(range(16, 32))
        view.release()  # and with it closing works: no call keeps the buffer


def test_a_repeated_page_may_be_gathered() -> None:
    slot = bytearray(4)
    _core.gather_pages(slot, 0, b"abcd", [1, 1], 2, 0, 4)
    assert bytes(slot) == b"cdcd"


GOOD = {"dst_offset": 0, "page_ids": [0, 3], "page_bytes": 8, "byte_offset": 0, "nbytes": 16, "threads": 1}
BAD = [
    ({"page_ids": [0, 4]}, IndexError, r"page_ids\[1\]: 4, must be in \[0, 4\)"),
    ({"page_ids": [0, -1]}, IndexError, r"page_ids\[1\]: -1"),
    ({"page_ids": np.array([0, 2**64 - 1], np.uint64)}, IndexError, r"page_ids\[1\]"),
    ({"page_ids": [2**40] * 2}, IndexError, r"page_ids\[0\]"),
    ({"page_ids": []}, ValueError, "byte_offset: 0 with nbytes 16"),
    ({"page_bytes": 0}, ValueError, "page_bytes: 0, must be in"),
    ({"page_bytes": -8}, ValueError, "page_bytes: -8"),
    ({"page_bytes": 2**62}, IndexError, r"page_ids\[0\]: 0, must be in \[0, 0\)"),
    ({"byte_offset": -1}, ValueError, "byte_offset: -1"),
    ({"byte_offset": 1}, ValueError, "byte_offset: 1 with nbytes 16 ends behind the 16 bytes"),
    ({"byte_offset": 2**63 - 1}, ValueError, "byte_offset"),
    ({"nbytes": -1}, ValueError, "nbytes: -1"),
    ({"nbytes": 2**63 - 1}, ValueError, "nbytes"),
    ({"nbytes": 17}, ValueError, "nbytes 17 ends behind the 16 bytes"),
    ({"dst_offset": 1}, ValueError, "_offset: 1 with nbytes 16 ends behind the 16 bytes"),
    ({"dst_offset": -1}, ValueError, "_offset: -1"),
    ({"threads": 0}, ValueError, r"threads: 0, must be in \[1, 64\]"),
    ({"threads": 65}, ValueError, "threads: 65"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_bounds_move_nothing(change: dict[str, Any], error: type[Exception], message: str) -> None:
    case = GOOD | change
    slot, pool = poisoned(16), pattern(35)
    with pytest.raises(error, match=message):
        _core.gather_pages(slot, src=pool, **case)
    assert (slot == POISON).all()
    pool[:] = POISON
    offset = case.pop("dst_offset")
    with pytest.raises(error, match=message):
        _core.scatter_pages(pool, src=pattern(16), src_offset=offset, **case)
    assert (pool == POISON).all()


def test_a_page_that_is_not_reached_is_checked_too() -> None:
    slot = poisoned(4)
    with pytest.raises(IndexError, match=r"page_ids\[1\]: 9"):
        _core.gather_pages(slot, 0, bytes(16), [0, 9], 4, 0, 4)


def test_a_page_named_twice_is_not_scattered_to() -> None:
    pool = poisoned(16)
    with pytest.raises(ValueError, match="page_ids: 1 is named twice"):
        _core.scatter_pages(pool, [1, 0, 1], 4, 0, bytes(12), 0, 12)
    assert (pool == POISON).all()
    _core.scatter_pages(pool, [1, 0, 1], 4, 4, bytes(12), 0, 8)  # the first of the two is not in the range


def test_overlap_is_refused() -> None:
    memory = pattern(64)
    before = memory.copy()
    with pytest.raises(ValueError, match="dst: overlaps a page"):
        _core.gather_pages(memory, 12, memory, [1], 8, 0, 8)
    with pytest.raises(ValueError, match="src: overlaps a page"):
        _core.scatter_pages(memory, [1], 8, 0, memory, 12, 8)
    assert (memory == before).all()
    _core.gather_pages(memory, 16, memory, [1], 8, 0, 8)  # beside each other is no overlap
    assert (memory[16:24] == before[8:16]).all()


def test_buffers_must_be_fit() -> None:
    with pytest.raises(TypeError, match="dst: not a writable"):
        _core.gather_pages(bytes(4), 0, bytes(4), [0], 4, 0, 4)
    with pytest.raises(TypeError, match="src: not a contiguous"):
        _core.gather_pages(bytearray(4), 0, np.zeros(8, np.uint8)[::2], [0], 4, 0, 4)
    with pytest.raises(TypeError, match="dst: not a writable"):
        _core.scatter_pages("pool", [0], 4, 0, bytes(4), 0, 4)  # type: ignore[arg-type]


# --- the general form


def address(buffer: Bytes) -> int:
    return int(buffer.ctypes.data)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("scale", [1, 40_000])
def test_copy_list(threads: int, scale: int) -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(0, 9, 40) * scale
    starts = np.concatenate([[0], np.cumsum(sizes + scale)[:-1]])  # a poisoned gap behind each item
    total = int((sizes + scale).sum())
    src, dst, expected = pattern(total), poisoned(total), poisoned(total)
    order = rng.permutation(40)
    for i in order:
        expected[starts[i] : starts[i] + sizes[i]] = src[starts[i] : starts[i] + sizes[i]]
    to, by, size = (np.ascontiguousarray(a[order]) for a in (starts + address(dst), starts + address(src), sizes))
    _core.copy_list(to, by, size, threads=threads)
    assert (dst == expected).all()


def test_copy_list_of_nothing() -> None:
    nothing = np.empty(0, np.int64)
    _core.copy_list(nothing, nothing, nothing)
    zero = np.zeros(2, np.int64)
    _core.copy_list(zero, zero, zero)


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("sizes", 1, -1, r"sizes\[1\]: -1"),
        ("sizes", 1, 2**63 - 1, r"sizes\[1\]|no memory"),
        ("dst", 1, 0, r"dst_addresses\[1\]: 0"),
        ("src", 1, -5, r"src_addresses\[1\]: -5"),
        ("src", 1, 2**63 - 2, r"src_addresses\[1\]"),
    ],
)
def test_bad_lists_move_nothing(field: str, index: int, value: int, message: str) -> None:
    src, dst = pattern(32), poisoned(32)
    arrays = {
        "dst": np.array([address(dst), address(dst) + 16], np.int64),
        "src": np.array([address(src), address(src) + 16], np.int64),
        "sizes": np.array([8, 8], np.int64),
    }
    arrays[field][index] = value
    with pytest.raises(ValueError, match=message):
        _core.copy_list(arrays["dst"], arrays["src"], arrays["sizes"])
    assert (dst == POISON).all()


def test_lists_of_unequal_length() -> None:
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="sizes: 1 items, but dst_addresses has 2 and src_addresses has 1"):
        _core.copy_list(two, one, one)


def test_an_item_over_itself() -> None:
    memory = pattern(32)
    before = memory.copy()
    at = address(memory)
    with pytest.raises(ValueError, match=r"dst_addresses\[0\]: overlaps"):
        _core.copy_list(np.array([at + 4]), np.array([at]), np.array([8]))
    assert (memory == before).all()


# --- zeroing


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_zero_ranges(data: st.DataObject) -> None:
    fragment_bytes = data.draw(st.integers(0, 30))
    start = data.draw(st.integers(0, fragment_bytes))
    stride = fragment_bytes + data.draw(st.integers(0, 5)) or 1
    fragments = data.draw(st.integers(0, 8))
    offset = data.draw(st.integers(0, 10))
    memory = poisoned(offset + fragments * stride + 3)
    _core.zero_ranges(memory, offset, fragments, stride, fragment_bytes, start)
    expected = poisoned(len(memory))
    for fragment in range(fragments):
        at = offset + fragment * stride
        expected[at + start : at + fragment_bytes] = 0
    assert (memory == expected).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": -1}, "offset: -1"),
        ({"offset": 17}, "fragments: 2 of stride 8 from offset 17 end behind the 32 bytes"),
        ({"fragments": 5}, "fragments: 5"),
        ({"fragments": 2**62}, "fragments"),
        ({"stride": 2**62}, "fragments: 2 of stride"),
        ({"stride": 7}, "stride: 7, must be in"),
        ({"fragment_bytes": 33}, "fragment_bytes: 33"),
        ({"start": 9}, "start: 9"),
        ({"start": -1}, "start: -1"),
    ],
)
def test_bad_zero_ranges_zero_nothing(change: dict[str, int], message: str) -> None:
    memory = poisoned(32)
    case = {"offset": 0, "fragments": 2, "stride": 8, "fragment_bytes": 8, "start": 0} | change
    with pytest.raises(ValueError, match=message):
        _core.zero_ranges(memory, **case)
    assert (memory == POISON).all()


def test_zeroing_wants_a_writable_buffer() -> None:
    with pytest.raises(TypeError, match="dst: not a writable"):
        _core.zero_ranges(bytes(8), 0, 1, 8, 8, 0)
