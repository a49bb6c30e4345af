"""The GPU of each rank of a prefill and a decode engine of one host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations


def devices_of(devices: Sequence[str], sending: int, receiving: int) -> tuple[list[str], list[str]]:
    """Those of `sending` prefill ranks, the first, and of `receiving` decode ranks: the last, or where both do not
    have GPUs of their own, such that as many pairs of ranks that share heads as can be lie on two GPUs. ValueError."""
    for side, ranks in (("prefill", sending), ("decode", receiving)):
        if ranks > len(devices):
            raise ValueError(f"{side} has {ranks} ranks; there are {len(devices)} devices: {', '.join(devices)}")
    first = list(devices[:sending])
    if sending + receiving <= len(devices):
        return first, list(devices[-receiving:])
    pairs = pairs_of(sending, receiving)

    def between_two(order: Sequence[str]) -> int:
        return sum(first[one] != order[other] for one, other in pairs)

    return first, list(max(permutations(devices, receiving), key=between_two))


def pairs_of(sending: int, receiving: int) -> list[tuple[int, int]]:
    """The ranks that share heads, where no head is on two of a side: as many pairs as the larger side has ranks."""
    lanes = max(sending, receiving)
    return [(i * sending // lanes, i * receiving // lanes) for i in range(lanes)]
