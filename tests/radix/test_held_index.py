"""The index of held pages that other processes read: what is in it, and what is no index."""

from __future__ import annotations

import hashlib
import mmap
import struct

import pytest

from kvferry._core import HeldIndex, HeldIndexReader
from kvferry.radix.pool import PagePool, PageState

NAMESPACE = hashlib.sha256(b"model").digest()


def digests(pages: int, prompt: int = 0) -> bytes:
    return b"".join(hashlib.sha256(struct.pack("<II", prompt, page)).digest() for page in range(pages))


def indexed(pool: PagePool) -> tuple[HeldIndex, HeldIndexReader]:
    memory = mmap.mmap(-1, HeldIndex.bytes_for(pool.pages))
    index = HeldIndex(memory)
    pool.publish(index)
    return index, HeldIndexReader(memory)


def test_a_page_is_held_from_when_it_is_readable_until_it_is_not() -> None:
    pool = PagePool(8)
    _, reader = indexed(pool)
    pages, names = pool.allocate(4), digests(4)
    pool.name_pages(pages, names, NAMESPACE)
    assert reader.held_pages(names, NAMESPACE) == 0
    pool.move(pages[:3], PageState.LEASED, PageState.CACHED)
    assert reader.held_pages(names, NAMESPACE) == 3
    assert reader.held_pages(names, bytes(32)) == 0, "another model's"
    assert reader.held_pages(digests(4, prompt=1), NAMESPACE) == 0
    pool.move(pages[1:2], PageState.CACHED, PageState.SPILLING)
    assert reader.held_pages(names, NAMESPACE) == 3
    pool.free_pages(pages[1:2])
    assert reader.held_pages(names, NAMESPACE) == 1, "a prompt is read from its first page on"
    (again,) = pool.allocate(1)
    pool.move([again], PageState.LEASED, PageState.CACHED)
    assert reader.held_pages(names, NAMESPACE) == 1, "nobody has named it since"


def test_a_page_of_two_tiers_is_held_until_it_has_left_both() -> None:
    device, host = PagePool(2), PagePool(2, "host")
    index, reader = indexed(device)
    host.publish(index)
    for pool in (device, host):
        pool.name_pages(pool.allocate(1), digests(1), NAMESPACE)
        pool.move([0], PageState.LEASED, PageState.CACHED)
    device.free_pages([0])
    assert reader.held_pages(digests(1), NAMESPACE) == 1
    host.free_pages([0])
    assert reader.held_pages(digests(1), NAMESPACE) == 0


def test_an_index_that_comes_later_has_what_is_readable_already() -> None:
    pool = PagePool(4)
    pool.name_pages(pool.allocate(4), digests(4), NAMESPACE)
    pool.move([0, 1], PageState.LEASED, PageState.CACHED)
    _, first = indexed(pool)
    _, second = indexed(pool)
    pool.move([2], PageState.LEASED, PageState.CACHED)
    assert (first.held_pages(digests(4), NAMESPACE), second.held_pages(digests(4), NAMESPACE)) == (2, 3)


def test_every_page_of_a_full_pool_has_its_place() -> None:
    pages = 100_000
    pool = PagePool(pages)
    _, reader = indexed(pool)
    names = digests(pages)
    pool.name_pages(pool.allocate(pages), names, NAMESPACE)
    pool.move(range(pages), PageState.LEASED, PageState.CACHED)
    assert reader.held_pages(names, NAMESPACE) == pages
    pool.free_pages(range(pages))
    assert all(reader.held_pages(names[32 * page : 32 * page + 32], NAMESPACE) == 0 for page in range(0, pages, 97))


def test_a_readable_page_keeps_its_name() -> None:
    pool = PagePool(1)
    pool.name_pages(pool.allocate(1), digests(1), NAMESPACE)
    pool.move([0], PageState.LEASED, PageState.CACHED)
    with pytest.raises(AssertionError, match="page 0 is readable under another name"):
        pool.name_pages([0], digests(1, prompt=1), NAMESPACE)


def test_memory_that_is_published_to_is_not_let_go() -> None:
    pool = PagePool(1)
    index, _ = indexed(pool)
    with pytest.raises(AssertionError, match="1 pools publish to it"):
        index.close()
    pool.publish(None)
    index.close()
    with pytest.raises(ValueError, match="closed"):
        index.beat(1)
    with pytest.raises(ValueError, match="closed"):
        pool.publish(index)


def test_beats_are_read() -> None:
    index, reader = indexed(PagePool(1))
    assert reader.last_beat == 0
    index.beat(12345)
    assert reader.last_beat == 12345


def test_what_is_no_index_is_refused() -> None:
    memory = mmap.mmap(-1, HeldIndex.bytes_for(64))
    for wrong in (memory, bytes(16)):
        with pytest.raises(ValueError, match="memory"):
            HeldIndexReader(wrong)
    HeldIndex(memory)
    HeldIndexReader(memory)
    for buckets in (0, 3, 1 << 20, 1 << 40):
        struct.pack_into("<Q", memory, 8, buckets)
        with pytest.raises(ValueError, match=f"no index of {buckets} buckets"):
            HeldIndexReader(memory)
    with pytest.raises(ValueError, match="pages is 0"):
        HeldIndex.bytes_for(0)
    with pytest.raises(ValueError, match="namespace_id has 3 bytes"):
        PagePool(1).name_pages([0], digests(1), b"abc")
    with pytest.raises(ValueError, match="pages has 1 entries; digests has 2"):
        PagePool(1).name_pages([0], digests(2), NAMESPACE)
