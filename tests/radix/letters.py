"""Paths as words: a letter stands for a page, and its digest is chained to those of the letters before it."""

from __future__ import annotations

import hashlib


def digest(path: str) -> bytes:
    value = b"root"
    for letter in path:
        value = hashlib.sha256(value + letter.encode()).digest()
    return value


def chain(path: str) -> bytes:
    return b"".join(digest(path[: n + 1]) for n in range(len(path)))
