"""Conversations that move from one decode server to another: prefill servers fetch what the first one holds. The
synthetic workers check every byte of what they are told is held."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, SystemSpec
from tests.support.engines import Engines, Turn, settled
from tests.support.stacks import SmallSystem
from tests.system.serving.ranks import ids
from tests.system.way_back.conversations import ALWAYS, started

PAGE = 16
PAGE_BYTES = 4096  # of the synthetic worker's default geometry at page size 16


def system(prefills: int, *, prefill: Sequence[str] = (), decode: Sequence[str] = ()) -> SystemSpec:
    return SmallSystem(
        page_size=PAGE,
        prefills=prefills,
        decodes=2,
        prefill_flags=[*ALWAYS, "--checksums", "on", *prefill],
        decode_flags=[*ALWAYS, "--checksums", "on", *decode],
    )


def moved(prefills: Sequence[Replica], decodes: Sequence[Replica], turns: int) -> list[tuple[Turn, int]]:
    """One conversation, each turn at the other decode server, the prefill servers in turn; with the tokens that the
    other decode server holds of each turn's prompt."""
    rng = random.Random(1)
    history, done, held = ids(rng, 100), list[tuple[Turn, int]](), 0
    for number in range(turns):
        with Engines(prefills[number % len(prefills)], decodes[number % 2]) as engines:
            turn = engines.turn(history, 20)
        assert turn.error is None, turn.details
        done.append((turn, held))
        history = history + turn.output
        held = (len(history) - 1) // PAGE * PAGE  # KV of the last token was never computed
        history += ids(rng, 30)
    return done


def test_a_conversation_that_moves_is_fetched_from_where_it_was(stack: Stack) -> None:
    prefills, decodes = started(stack, system(2))
    (first, _), (second, held) = moved(prefills, decodes, 2)
    assert first.prefill_matched == 0 and second.matched == 0, "the second decode server has never seen it"
    assert second.prefill_matched == held > 0, "all that the first one holds, its output too"
    asked, holder, cold = (settled(each).way_back for each in (prefills[1], *decodes))
    assert asked.fetched_tokens == asked.elsewhere_tokens == held
    assert (asked.look_ups.found, asked.look_ups.pages, asked.look_ups.late) == (1, held // PAGE, 0)
    assert (holder.look_ups.found, holder.transfers.completed) == (1, 1)
    assert holder.transfers.delta_bytes == asked.transfers.delta_bytes == held // PAGE * PAGE_BYTES
    assert (cold.look_ups.found, cold.transfers.completed) == (0, 0)
    assert holder.transfers.aborted == asked.transfers.aborted == asked.transfers.mismatched_parts == 0


@pytest.mark.nightly
def test_what_one_prefill_server_never_saw_comes_from_the_other_decode_server(stack: Stack) -> None:
    """It has kept the prompts; only decode servers have what was generated."""
    prefills, decodes = started(stack, system(1))
    turns = moved(prefills, decodes, 4)
    assert [turn.prefill_matched for turn, _ in turns] == [held for _, held in turns]
    back = settled(prefills[0]).way_back
    assert 0 < back.elsewhere_tokens == back.fetched_tokens < sum(held for _, held in turns)
    for each in decodes:
        settled(each)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [("--look-ups", "off"), ("--closed-peer", "prefill-1")])
def test_decode_servers_tell_only_whom_they_are_to(stack: Stack, settings: tuple[str, str]) -> None:
    prefills, decodes = started(stack, system(2, decode=settings))
    (_, _), (second, held) = moved(prefills, decodes, 2)
    assert second.prefill_matched == 0 < held
    assert settled(prefills[1]).way_back.look_ups.found == 0


@pytest.mark.nightly
def test_ranks_that_share_the_heads_differently(stack: Stack) -> None:
    prefills, decodes = started(stack, system(2, prefill=("--ranks", "2"), decode=("--ranks", "1")))
    turns = moved(prefills, decodes, 4)
    assert [turn.prefill_matched for turn, _ in turns] == [held for _, held in turns]
    assert sum(settled(each).way_back.elsewhere_tokens for each in prefills) > 0
