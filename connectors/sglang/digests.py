"""The names of SGLang's pages: the chain of its own host and storage tiers.

A page's digest is SHA-256 over its parent's 32 bytes and its token ids as little-endian uint32; the first page has no
parent at all. SGLang 0.5.16 leaves a request's `extra_key` out. Here it is the first page's parent, hashed, so that
pages of tenants or cache salts that SGLang keeps apart are never each other's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.connectors.orders import PromptPages
from kvferry.radix.digests import DIGEST_BYTES

ALGORITHM = "sglang_sha256"
NO_PARENT = bytes(DIGEST_BYTES)  # in the facts, which must say one
_EXTRA_KEY = b"kvferry-sglang-extra-key\0"
MAX_TOKEN = (1 << 32) - 1


def seed_of(request: Any) -> bytes:
    """The parent of the first page of an SGLang request; empty: there is none."""
    salt = getattr(request, "cache_salt", None)  # of later versions; before, it is in the extra key
    if not (request.extra_key or salt):
        return b""
    return hashlib.sha256(_EXTRA_KEY + repr((request.extra_key, salt)).encode()).digest()


def prompt_pages(token_ids: Sequence[int], page_size: int, seed: bytes = b"") -> PromptPages:
    """The digests of a prompt's full pages and of the rest. ValueError where an id is no uint32."""
    ids = np.asarray(token_ids, dtype=np.int64)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_TOKEN:
        raise ValueError(f"token ids are {int(ids.min())} to {int(ids.max())}; they must be 0 to {MAX_TOKEN}")
    raw = memoryview(ids.astype("<u4").tobytes())
    each, full = 4 * page_size, len(ids) // page_size
    digests, parent = bytearray(), seed
    for start in range(0, full * each, each):
        parent = hashlib.sha256(parent + raw[start : start + each]).digest()
        digests += parent
    tail = hashlib.sha256(parent + raw[full * each :]).digest() if len(ids) % page_size else b""
    return PromptPages(bytes(digests), len(ids), tail)
