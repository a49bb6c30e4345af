"""Digests of kvferry's pages from an engine's block hashes: a page is `blocks_per_page` blocks, its digest the last
one's."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.connectors.orders import PromptPages
from kvferry.radix.digests import DIGEST_BYTES, tail_digest


def page_digests(block_hashes: Sequence[bytes], blocks_per_page: int, pages: int) -> bytes:
    """32 bytes for each of the first `pages` pages. ValueError: fewer are hashed, or a hash has another length."""
    if blocks_per_page < 1 or pages < 0:
        raise ValueError(f"blocks_per_page is {blocks_per_page} and pages {pages}; they must be at least 1 and 0")
    need = pages * blocks_per_page
    if len(block_hashes) < need:
        raise ValueError(f"block_hashes has {len(block_hashes)} entries; {pages} pages need {need}")
    digests = b"".join(block_hashes[blocks_per_page - 1 : need : blocks_per_page])
    if len(digests) != pages * DIGEST_BYTES:
        raise ValueError(f"block_hashes: {pages} of them have {len(digests)} bytes; each must have {DIGEST_BYTES}")
    return digests


def prompt_of(
    block_hashes: Sequence[bytes],
    tokens: Sequence[int],
    count: int,
    *,
    page_size: int,
    blocks_per_page: int,
    root: bytes,
) -> PromptPages:
    """The pages of the first `count` of `tokens`; the tail, which engines do not hash, is hashed here, at most one page
    of it."""
    full = count // page_size
    digests = page_digests(block_hashes, blocks_per_page, full)
    parent = digests[-DIGEST_BYTES:] or root
    tail = tail_digest(list(tokens[full * page_size : count]), page_size=page_size, parent=parent)
    return PromptPages(digests, count, tail)
