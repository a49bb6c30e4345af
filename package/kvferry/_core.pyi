from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

Sha256 = Literal["auto", "sha-ni", "portable"]
Ids = Sequence[int] | NDArray[np.int64] | NDArray[np.uint64] | NDArray[np.int32] | NDArray[np.uint32]

MAX_PAGE_SIZE: int

def sha256_implementations() -> list[str]: ...
def sha256(data: Buffer, implementation: Sha256 = "auto") -> bytes: ...
def chain_digests(
    tokens: NDArray[np.uint32],
    page_size: int,
    parent: bytes,
    extra: bytes,
    page_extras: dict[int, bytes],
    implementation: Sha256 = "auto",
) -> NDArray[np.uint8]:
    """Digests of the full pages of `tokens`, (n, 32); GIL released.

    extra: third item of each page, encoded as CBOR; page_extras: the same for single pages, by index in this call.
    ValueError: page_size or parent out of bounds, implementation that this processor lacks.
    """

def gather_pages(
    dst: Buffer,
    dst_offset: int,
    src: Buffer,
    page_ids: Ids,
    page_bytes: int,
    byte_offset: int,
    nbytes: int,
    threads: int = 1,
) -> None:
    """Pool to slot: the pages of `src` named by page_ids, one behind the other, are a virtual byte string; its
    [byte_offset, byte_offset + nbytes) goes to dst[dst_offset:]. GIL released.

    IndexError (page id) or ValueError (any other bound, or dst overlaps a page) before a byte has moved.
    """

def scatter_pages(
    dst: Buffer,
    page_ids: Ids,
    page_bytes: int,
    byte_offset: int,
    src: Buffer,
    src_offset: int,
    nbytes: int,
    threads: int = 1,
) -> None:
    """Slot to pool, the reverse of `gather_pages`; a page named twice is a ValueError as well."""

def copy_list(
    dst_addresses: NDArray[np.int64], src_addresses: NDArray[np.int64], sizes: NDArray[np.int64], threads: int = 1
) -> None:
    """Copies sizes[i] bytes from src_addresses[i] to dst_addresses[i]; GIL released. Addresses are the caller's word.

    No item may overlap another item's destination. ValueError: lengths differ, negative size, an item over itself.
    """

def zero_ranges(dst: Buffer, offset: int, fragments: int, stride: int, fragment_bytes: int, start: int) -> None:
    """Zeroes bytes [start, fragment_bytes) of each fragment; fragment f begins at offset + f * stride. GIL released."""
