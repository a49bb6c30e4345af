"""Two daemons, two synthetic workers that check every byte, real gRPC, real NIXL."""

from __future__ import annotations

import random
from collections.abc import Iterator

import grpc
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, SystemSpec, start_replicas
from tests.support.engines import Engines, settled, stats
from tests.support.stacks import SmallSystem, running_stack

PAGE = 16
MIB = 1 << 20
PAGE_BYTES = 4096  # of the synthetic worker's default geometry at page size 16


def ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(32_000) for _ in range(n)]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Replica, Replica]]:
    """Prefill and decode, for requests that need no system of their own."""
    with running_stack() as stack:
        prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE))
        yield prefills[0], decodes[0]


def test_warm_up_requests_leave_nothing(pair: tuple[Replica, Replica]) -> None:
    cached = [settled(replica).pool.cached for replica in pair]
    prompt = ids(random.Random(6), 10 * PAGE)
    with Engines(*pair) as engines:
        for _ in range(2):
            turn = engines.turn(prompt, 40, warmup=True)
            assert turn.error is None, turn.details
            assert (turn.matched, turn.prefill_matched, turn.delta_pages) == (0, 0, 10)
    assert [settled(replica).pool.cached for replica in pair] == cached


def test_each_turn_moves_only_its_delta(stack: Stack) -> None:
    """Turn k matches the page-aligned floor of what turn k-1 left, and bytes over NIXL are delta pages and headers."""
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE, decode_pool_bytes=8 * MIB))
    rng = random.Random(1)
    system_prompt = ids(rng, 70)
    expected_pages = prompt_tokens = matched_tokens = 0
    with Engines(prefills[0], decodes[0]) as engines:
        for conversation in range(3):
            history, left = system_prompt + ids(rng, 30 + conversation), 0
            for turn_number in range(4):
                turn = engines.turn(history, 21 + turn_number)
                assert turn.error is None, turn.details
                assert len(turn.output) == 21 + turn_number
                shared = len(system_prompt) // PAGE * PAGE if conversation else 0
                want = left // PAGE * PAGE if turn_number else shared
                assert turn.matched == want
                assert turn.delta_pages == -(-len(history) // PAGE) - want // PAGE
                assert turn.delta_bytes == turn.delta_pages * PAGE_BYTES
                expected_pages += turn.delta_pages
                prompt_tokens += len(history)
                matched_tokens += want
                history = history + turn.output
                left = len(history) - 1  # the last token's KV was never computed
                history = history + ids(rng, 17)
    decode, prefill = settled(decodes[0]), settled(prefills[0])
    for side in (decode, prefill):
        assert side.transfers.delta_pages == expected_pages
        assert side.transfers.delta_bytes == expected_pages * PAGE_BYTES
        assert side.transfers.wire_bytes == expected_pages * PAGE_BYTES + 64 * side.transfers.parts
        assert side.transfers.completed == 12
        assert side.transfers.asked_again == 0
    assert decode.requests.queried_tokens == prompt_tokens
    assert decode.requests.hit_tokens == matched_tokens
    assert decode.transfers.saved_bytes == matched_tokens // PAGE * PAGE_BYTES


def test_a_full_hit_sends_no_page(pair: tuple[Replica, Replica]) -> None:
    before = settled(pair[1]).transfers.delta_pages
    prompt = ids(random.Random(2), 5 * PAGE)
    with Engines(*pair) as engines:
        first, second = engines.turn(prompt, 5), engines.turn(prompt, 5)
    assert (first.matched, first.delta_pages) == (0, 5)
    assert (second.matched, second.delta_pages) == (5 * PAGE, 0)
    assert first.output == second.output
    assert second.prefill_matched == 4 * PAGE  # the last token's logits are needed
    assert settled(pair[1]).transfers.delta_pages == before + 5
    settled(pair[0])


def test_pages_larger_than_a_slot_travel_in_parts(stack: Stack) -> None:
    spec = SmallSystem(
        page_size=PAGE,
        decode_flags=["--slot-bytes", "5000"],
        prefill_flags=["--slot-bytes", "6000"],
        worker_flags=["--synthetic-kv-heads", "2"],
    )
    prefills, decodes = start_replicas(stack, spec)
    with Engines(prefills[0], decodes[0]) as engines:
        turn = engines.turn(ids(random.Random(3), 100), 3)
        assert turn.error is None, turn.details
    decode = settled(decodes[0])
    assert decode.transfers.delta_pages == 7
    payload = (5000 + 256 - 64) // 16 * 16  # a slot has room for its header, and parts are multiples of 16 bytes
    parts = -(-7 * 8192 // payload)
    assert decode.transfers.parts == parts == 12
    assert decode.transfers.wire_bytes == 7 * 8192 + parts * 64


@pytest.mark.nightly
def test_more_requests_than_slots_and_small_pools(stack: Stack) -> None:
    """129 at a time through 8 slots, each pool a tenth of the load: every one ends, every byte is checked."""
    rng = random.Random(4)
    prompts = [ids(rng, rng.randrange(40, 200)) for _ in range(129)]
    pages = sum(-(-(len(prompt) + 19) // PAGE) for prompt in prompts)
    pool = pages // 10 * PAGE_BYTES
    flags = ["--slots", "8"]
    spec = SystemSpec(
        page_size=PAGE, decode_pool_bytes=pool, prefill_pool_bytes=pool, decode_flags=flags, prefill_flags=flags
    )
    prefills, decodes = start_replicas(stack, spec)
    with Engines(prefills[0], decodes[0]) as engines:
        turns = engines.turns(prompts, 20)
    assert [turn.details for turn in turns if turn.error] == []
    assert all(len(turn.output) == 20 for turn in turns)
    decode, prefill = settled(decodes[0]), settled(prefills[0])
    assert decode.requests.finished == prefill.requests.finished == 129
    assert decode.pool.evicted > 0
    assert prefill.pool.evicted > 0


@pytest.mark.nightly
def test_many_requests_with_one_new_prefix_move_it_once(stack: Stack) -> None:
    rng = random.Random(5)
    prefix = ids(rng, 20 * PAGE)
    prompts = [prefix + ids(rng, 10) for _ in range(32)]
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE))
    with Engines(prefills[0], decodes[0]) as engines:
        turns = engines.turns(prompts, 4)
    assert [turn.details for turn in turns if turn.error] == []
    assert settled(decodes[0]).transfers.delta_pages == 20 + 32
    settled(prefills[0])


def test_what_cannot_be_gets_a_clear_answer(stack: Stack) -> None:
    spec = SystemSpec(page_size=PAGE, decode_pool_bytes=20 * PAGE_BYTES, prefill_pool_bytes=20 * PAGE_BYTES)
    prefills, decodes = start_replicas(stack, spec)
    with Engines(prefills[0], decodes[0]) as engines:
        too_large = engines.turn(list(range(300)), 40)
        assert too_large.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "needs 22 pages; the pool has 20" in too_large.details
        differs = engines.turn(list(range(40)), 4, prefill_tokens=list(range(1, 41)))
        assert differs.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "last_full_digest differs" in differs.details
        fits = engines.turn(list(range(200)), 20)
        assert fits.error is None, fits.details
    assert settled(decodes[0]).transfers.delta_pages == 13
    settled(prefills[0])


def test_a_request_without_a_prefill_server_is_computed_where_it_is_decoded(pair: tuple[Replica, Replica]) -> None:
    before = settled(pair[1]).transfers.delta_pages
    prompt = list(range(100))
    with Engines(*pair) as engines, Engines(None, pair[1]) as alone:
        first = engines.turn(prompt, 10)
        again = alone.turn(prompt, 10)
        longer = alone.turn(prompt + first.output + [5] * 40, 10)
    assert again.output == first.output
    assert again.matched == 96
    assert longer.matched == 96
    assert settled(pair[1]).transfers.delta_pages == before + 7


@pytest.mark.nightly
def test_reuse_off_moves_everything_every_time(stack: Stack) -> None:
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE, decode_flags=["--reuse", "off"]))
    with Engines(prefills[0], decodes[0]) as engines:
        for _ in range(2):
            turn = engines.turn(list(range(100)), 4)
            assert (turn.matched, turn.delta_pages) == (0, 7)
    assert settled(decodes[0]).pool.cached == 0


@pytest.mark.parametrize(
    ("spec", "field", "remedy"),
    [
        (SmallSystem(page_size=16, decode_flags=["--page-size", "32"]), "geometry.page_size", "--page-size"),
        pytest.param(
            SmallSystem(page_size=16, decode_worker_flags=["--dtype", "bfloat16"]),
            "geometry.dtype",
            "--dtype",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            SmallSystem(page_size=16, decode_worker_flags=["--synthetic-layers", "3"]),
            "geometry.layers",
            "same model",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            SmallSystem(page_size=16, decode_worker_flags=["--revision", "2"]),
            "revision",
            "same weights",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_the_handshake(stack: Stack, spec: SystemSpec, field: str, remedy: str) -> None:
    prefills, decodes = start_replicas(stack, spec)
    with Engines(prefills[0], decodes[0]) as engines:
        turn = engines.turn(list(range(64)), 4, deadline_s=2)
    assert turn.code is grpc.StatusCode.FAILED_PRECONDITION
    assert field in turn.details
    assert remedy in turn.details
    peer = stats(decodes[0]).peers[0]
    assert peer.state != "up"
    assert field in peer.error
