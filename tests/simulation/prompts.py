"""Prompts, and the bytes of their pages, which follow from the digests: so any page can be judged on sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvferry.radix.digests import DIGEST_BYTES, DigestChain
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout

PAGE = 4  # tokens
GEOMETRY = KVGeometry(layers=1, kv_heads=4, head_dim=1, dtype="float16", page_size=PAGE, layout=Layout.PAGE_HND)
# Where the pages of a side are blocks of its engine's: the same bytes.
ENGINE_GEOMETRY = replace(GEOMETRY, layout=Layout.ENGINE)
PAGE_BYTES = GEOMETRY.page_bytes
GARBAGE = b"\xee" * PAGE_BYTES
_OTHERS = bytes(255 - byte for byte in range(256))


def content(digest: bytes) -> bytes:
    """Of a full page: no head's K or V has the bytes of another one's."""
    return digest + digest.translate(_OTHERS)


def partial_content(tail_digest: bytes, tokens: int, behind: bytes = b"\0") -> bytes:
    """Of a last page: what is behind its tokens is zeroed before it travels."""
    size, each = GEOMETRY.fragment_bytes, GEOMETRY.fragment_token_bytes
    kept, whole = tokens * each, content(tail_digest)
    parts = (whole[i : i + kept].ljust(size, behind) for i in range(0, PAGE_BYTES, size))
    return b"".join(parts)


class Prompt:
    """Tokens, their digests, and the bytes of their pages."""

    __slots__ = ("contents", "digests", "full", "tail", "tokens")

    def __init__(self, tokens: Sequence[int], root: bytes) -> None:
        chain = DigestChain(page_size=PAGE, parent=root)
        chain.extend(tokens)
        self.tokens = list(tokens)
        self.digests, self.tail = chain.digests, chain.tail_digest
        self.full = len(tokens) // PAGE
        self.contents = [content(self.digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]) for i in range(self.full)]
        if self.tail:
            self.contents.append(partial_content(self.tail, len(tokens) % PAGE))

    @property
    def blob(self) -> bytes:
        """What its prefill worker says with it."""
        return b"first token of " + (self.tail or self.digests[-DIGEST_BYTES:])
