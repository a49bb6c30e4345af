"""Tensor parallelism in whole systems: the pools of a daemon's ranks are segments of this machine, the synthetic
workers write and check every byte on every rank."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.daemon.cli.stack import Stack, StackError
from kvferry.daemon.cli.system import start_replicas
from tests.support.engines import Engines, grown, settled, stats
from tests.system.serving.ranks import PAGE, SLOTS, Case, chat_over_both_tiers, ids, spec_of, started_again

CASES = {
    "1 to 2": Case(1, 2, ("page", "layer")),
    "latents and an indexer, 2 to 4": Case(2, 4, ("layer", "page"), heads=1, tensors=1, indexer=132, slot_bytes=4096),
}
NIGHTLY = {
    "an engine's heads, 2 to 4": Case(2, 4, ("page", "page"), layout="engine-hnd"),
    "2 to 1": Case(2, 1, ("layer-blocks", "page"), layout="hnd", slot_bytes=4096),  # a row takes several parts
    "an engine's pages, 2 to 2": Case(2, 2, ("page", "page"), layout="engine-nhd", slot_bytes=4096),
    "an engine's latents and an indexer, 1 to 2": Case(
        1, 2, ("page", "page"), layout="engine-hnd", heads=1, tensors=1, indexer=132
    ),
    "2 to 4": Case(2, 4, ("layer", "page")),
    "4 to 2": Case(4, 2, ("layer", "layer"), layout="hnd"),
    "2 to 2": Case(2, 2, ("page", "layer-blocks"), slot_bytes=5000),
    "grouped queries, 1 to 4": Case(1, 4, ("page", "layer"), heads=2),
    "grouped queries, 4 to 2": Case(4, 2, ("layer", "page"), heads=2),
    "an engine's heads, 1 to 2": Case(1, 2, ("page", "page"), layout="engine-hnd"),
    "an engine's heads, 2 to 1": Case(2, 1, ("page", "page"), layout="engine-hnd"),
    "an engine's heads, 4 to 2": Case(4, 2, ("page", "page"), layout="engine-hnd", slot_bytes=4096),
    "an engine's heads, 8 to 2": Case(8, 2, ("page", "page"), layout="engine-hnd"),
    "an engine's grouped queries, 4 to 2": Case(4, 2, ("page", "page"), layout="engine-hnd", heads=2),
    "an engine's grouped queries, 2 to 8": Case(2, 8, ("page", "page"), layout="engine-nhd", heads=2),
    "heads and an indexer, 2 to 1": Case(2, 1, ("page", "layer-blocks"), layout="hnd", indexer=132),
    "an engine's heads and an indexer, 1 to 4": Case(1, 4, ("page", "page"), layout="engine-hnd", indexer=20),
    "latent attention, 2 to 1": Case(2, 1, ("page", "page"), heads=1, tensors=1),
    "latent attention, 1 to 2": Case(1, 2, ("layer", "page"), heads=1, tensors=1),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in CASES.items()]
    + [pytest.param(case, id=name, marks=pytest.mark.nightly) for name, case in NIGHTLY.items()],
)
def test_chats_between_ranks_over_both_tiers(stack: Stack, case: Case) -> None:
    """Each turn moves only its delta, pools smaller than the chats lose nothing, and bytes are counted over ranks."""
    prefills, decodes = start_replicas(stack, spec_of(case))
    prefill, decode = chat_over_both_tiers(prefills[0], decodes[0], case)
    for side in (decode, prefill):
        assert side.host.page_bytes == case.row_bytes
        assert [(peer.slots, peer.free_credits) for peer in side.peers] == [(SLOTS * case.decode, SLOTS * case.decode)]
    assert (decode.pool.pages, decode.pool.page_bytes) == (40, case.page_bytes(case.decode))
    assert (prefill.pool.pages, prefill.pool.page_bytes) == (40, case.page_bytes(case.prefill))


@pytest.mark.nightly
def test_ranks_that_cannot_share_the_heads_are_refused(stack: Stack) -> None:
    with pytest.raises(StackError, match=r"ranks is 3; it must divide geometry\.kv_heads = 4"):
        start_replicas(stack, spec_of(Case(1, 3, ("page", "page"))))


@pytest.mark.nightly
def test_an_engine_that_alone_knows_its_heads_is_refused_to_unlike_ranks(stack: Stack) -> None:
    """And it is said what to set."""
    prefills, decodes = start_replicas(stack, spec_of(Case(1, 2, ("page", "page"), layout="engine-nhd")))
    with Engines(prefills[0], decodes[0]) as engines:
        turn = engines.turn(ids(random.Random(1), 40), 3, deadline_s=5)
    for word in ("ranks is 1 of prefill and 2 of decode", "geometry.head_runs is 0", "VLLM_KV_CACHE_LAYOUT=HND"):
        assert word in turn.details


@pytest.mark.nightly
def test_a_restarted_daemon_finds_what_its_ranks_had(stack: Stack, tmp_path: Path) -> None:
    """In an engine's layout, in its file."""
    case = Case(1, 2, ("page", "page"), layout="engine-hnd")
    system = spec_of(case)
    system = replace(system, decode_flags=[*system.decode_flags, "--host-dir", str(tmp_path)])
    prefills, decodes = start_replicas(stack, system)
    rng = random.Random(4)
    prompts = [ids(rng, 10 * PAGE) for _ in range(6)]
    with Engines(prefills[0], decodes[0]) as engines:
        first = [engines.turn(prompt, 5) for prompt in prompts]
        settled(decodes[0])
    assert stack.stop(decodes[0].daemon) == 0
    stack.stop(decodes[0].worker)
    decode = started_again(stack, decodes[0], prefills[0], system)
    assert grown(decode).tiers.recovered_pages == 6 * 10
    with Engines(prefills[0], decode) as engines:
        again = [engines.turn(prompt, 5) for prompt in prompts]
    assert [turn.output for turn in again] == [turn.output for turn in first]
    assert all(turn.matched == 10 * PAGE for turn in again)
    tiers = settled(decode).tiers
    assert tiers.restored_pages == 6 * 10 and tiers.mismatched_pages == 0


@pytest.mark.nightly
def test_a_peer_whose_ranks_end_and_come_again(stack: Stack) -> None:
    """A session that breaks with parts on several lanes under way; the next one asks again for what is missing."""
    case = Case(2, 4, ("layer", "page"), slot_bytes=4096)
    prefills, decodes = start_replicas(stack, spec_of(case, decode_pages=400))
    rng = random.Random(3)
    with Engines(prefills[0], decodes[0]) as engines:
        assert engines.turn(ids(rng, 300), 3).error is None
        stack.kill(prefills[0].daemon)
        assert engines.turn(ids(rng, 300), 3, deadline_s=5).error is not None
    assert settled(decodes[0], 20.0).pool.pages == 400
    assert stats(decodes[0]).transfers.delta_pages >= 19
