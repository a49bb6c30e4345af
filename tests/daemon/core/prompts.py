"""Prompts of the models of the cores: symbols that stand for pages, and the digests of their chain."""

from __future__ import annotations

import hashlib

PROMPTS = [[0, 1, 0, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0, 0, 0], [1, 0, 0]]


def chain(symbols: list[int]) -> list[bytes]:
    digests, parent = [], b"root"
    for symbol in symbols:
        parent = hashlib.sha256(parent + bytes([symbol])).digest()
        digests.append(parent)
    return digests
