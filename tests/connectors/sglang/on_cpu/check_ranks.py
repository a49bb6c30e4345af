"""Tensor-parallel engines of SGLang's classes: each rank is a process with its share of the heads, and one daemon has
the ranks of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.connectors.sglang.rank_process import RankPair
from tests.connectors.sglang.rig import PAGE, new_prompt
from tests.support.devices import DeviceStack

RANKS = {"prefill": 2, "decode": 2}


@pytest.fixture(scope="module")
def pair(one_rank: None) -> Iterator[RankPair]:
    with DeviceStack() as stack, ExitStack() as patches:
        made = RankPair(stack, patches, ranks=RANKS, deadline_seconds=6)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("tokens", [1, PAGE, 5 * PAGE + 3])
def test_each_rank_has_its_heads(pair: RankPair, tokens: int) -> None:
    pair.decode.finished(pair.exchanged(new_prompt(tokens), chunk=2 * PAGE + 3))
