"""Paths as words: a letter stands for a page, and its digest is chained to those of the letters before it."""

from __future__ import annotations

import hashlib


def chain(path: str) -> bytes:
    """The digests of all pages of the path."""
    digests, value = [], b"root"
    for letter in path:
        value = hashlib.sha256(value + letter.encode()).digest()
        digests.append(value)
    return b"".join(digests)


def digest(path: str) -> bytes:
    """The last page's digest; of no page the root's."""
    return chain(path)[-32:] or b"root"
