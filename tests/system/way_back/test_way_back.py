"""The way back between real daemons: prefill servers that keep nothing fetch what the decode daemon holds. The
synthetic workers check every byte of what they are told is held, before they compute behind it."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, SystemSpec
from kvferry.proto import cache_pb2
from kvferry.workers.models.transformer import kv_shape
from tests.support import tiny_models
from tests.support.engines import Engines, courier_pids, settled, stats, wait_until
from tests.support.reference import Comparison, Conversation
from tests.support.stacks import SmallSystem
from tests.system.serving.ranks import ids
from tests.system.way_back.conversations import ALWAYS, converse, started

PAGE = 16
PAGE_BYTES = 4096  # of the synthetic worker's default geometry at page size 16


def system(prefills: int = 1, setting: str = "always", *flags: str, pages: int = 4096) -> SystemSpec:
    both = ["--way-back", setting, *flags]
    return SmallSystem(
        page_size=PAGE,
        prefills=prefills,
        prefill_pool_bytes=pages * PAGE_BYTES,
        prefill_flags=both,
        decode_flags=both,
    )


def choices(side: cache_pb2.SideStats) -> dict[str, int]:
    return {choice.reason: choice.count for choice in side.way_back.choices}


def restarted(stack: Stack, prefill: Replica, *flags: str) -> Replica:
    """The daemon at the same addresses, with nothing in its pool, and a new worker."""
    words = ["serve", "--role", "prefill", "--name", prefill.name, "--listen", prefill.daemon_address]
    words += ["--socket", prefill.socket, "--page-size", str(PAGE), *flags]
    daemon = stack.start(prefill.name, words)
    address = stack.ready(daemon)
    words = ["worker", "prefill", "--socket", prefill.socket, "--listen", "127.0.0.1:0", "--synthetic"]
    worker = stack.start(f"{prefill.name}-worker", words)
    return Replica(prefill.name, daemon, worker, address, stack.ready(worker), prefill.socket)


@pytest.mark.parametrize(
    ("servers", "checksums"),
    [pytest.param(3, "off", marks=pytest.mark.nightly), pytest.param(3, "on", marks=pytest.mark.nightly), (2, "on")],
)
def test_any_prefill_server_takes_any_turn_as_if_it_had_kept_everything(
    stack: Stack, servers: int, checksums: str
) -> None:
    prefills, decodes = started(stack, system(servers, "always", "--checksums", checksums))
    turns = converse(decodes[0], prefills, 6, seed=1)
    assert turns[0].prefill_matched == 0
    for turn in turns[1:]:
        assert turn.matched > 0 and turn.prefill_matched == turn.matched, "all that decode holds, its output too"
    back = [settled(prefill).way_back for prefill in prefills]
    sent = settled(decodes[0]).way_back.transfers
    fetched = sum(each.fetched_tokens for each in back)
    assert fetched == PAGE * sum(each.transfers.delta_pages for each in back) == PAGE * sent.delta_pages > 0
    assert sum(each.transfers.delta_bytes for each in back) == sent.delta_bytes == sent.delta_pages * PAGE_BYTES
    assert sum(each.transfers.completed for each in back) == sent.completed == 5
    assert sum(each.transfers.mismatched_parts + each.transfers.aborted for each in back) == sent.aborted == 0


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_restarted_prefill_daemon_fetches(stack: Stack, how: str) -> None:
    prefills, decodes = started(stack, system())
    rng = random.Random(2)
    history = ids(rng, 20 * PAGE)
    with Engines(prefills[0], decodes[0]) as engines:
        first = engines.turn(history, 20)
    assert first.error is None and first.prefill_matched == 0
    if how == "SIGTERM":
        assert stack.stop(prefills[0].daemon) == 0
    else:
        stack.kill(prefills[0].daemon)
    stack.stop(prefills[0].worker)
    again = restarted(stack, prefills[0], *ALWAYS)
    wait_until(lambda: [peer.state for peer in stats(decodes[0]).peers] == ["up"])
    history = history + first.output + ids(rng, 30)
    with Engines(again, decodes[0]) as engines:
        turn = engines.turn(history, 20)
    assert turn.error is None, turn.details
    assert turn.prefill_matched == turn.matched == (20 * PAGE + 19) // PAGE * PAGE
    side = settled(again)
    assert choices(side) == {"fetched": 1} and side.way_back.fetched_tokens == turn.matched


@pytest.mark.nightly
def test_a_request_that_is_continued_goes_on_from_all_that_decode_holds(stack: Stack) -> None:
    """Its output, the end of its prompt now, was never at a prefill server; of its first prompt one knows."""
    prefills, decodes = started(stack, system(2, "always", "--checksums", "on"))
    prompt, held = ids(random.Random(8), 100), 0
    for prefill in (prefills[0], prefills[1], prefills[0]):
        with Engines(prefill, decodes[0]) as engines:
            turn = engines.turn(prompt, 20)
        assert turn.error is None and len(turn.output) == 20, turn.details
        assert turn.prefill_matched == turn.matched == held
        prompt = prompt + turn.output
        held = (len(prompt) - 1) // PAGE * PAGE  # KV of the last token was never computed
    fetched = [settled(prefill).way_back.fetched_tokens for prefill in prefills]
    assert fetched == [139 // PAGE * PAGE - 100 // PAGE * PAGE, 119 // PAGE * PAGE]
    assert settled(decodes[0]).way_back.transfers.completed == 2


@pytest.mark.nightly
def test_what_was_measured_decides(stack: Stack) -> None:
    """An engine that computes slowly fetches; both estimates are in the statistics."""
    spec = system(2, "auto")
    slow = ["--synthetic-prefill-us", "10000", "--chunk-tokens", "64"]
    spec = SmallSystem(
        page_size=PAGE,
        prefills=2,
        prefill_flags=spec.prefill_flags,
        decode_flags=spec.decode_flags,
        prefill_worker_flags=slow,
    )
    prefills, decodes = started(stack, spec)
    rng = random.Random(3)
    history = ids(rng, 30 * PAGE)
    with Engines(prefills[0], decodes[0]) as engines:
        first = engines.turn(history, 20)
    with Engines(prefills[1], decodes[0]) as engines:
        engines.turn(ids(rng, 10 * PAGE), 4)  # it measures its engine
        turn = engines.turn(history + first.output + ids(rng, 5), 4)
    assert turn.error is None, turn.details
    back = settled(prefills[1]).way_back
    assert turn.prefill_matched == turn.matched > 0, back
    assert 40 < back.tokens_per_second < 120 and (back.setting, back.off_because) == ("auto", "")
    assert (
        2 * back.fetch_seconds < back.compute_seconds == pytest.approx(turn.matched / back.tokens_per_second, rel=0.5)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("who", [pytest.param("prefill", marks=pytest.mark.nightly), "decode"])
def test_both_must_have_it(stack: Stack, who: str) -> None:
    spec = SmallSystem(
        page_size=PAGE,
        prefills=2,
        prefill_flags=ALWAYS if who == "prefill" else (),
        decode_flags=ALWAYS if who == "decode" else (),
    )
    prefills, decodes = started(stack, spec)
    turns = converse(decodes[0], prefills, 2, seed=4)
    assert turns[1].matched > 0 and turns[1].prefill_matched == 0
    for replica in (*prefills, *decodes):
        back = settled(replica).way_back
        assert (back.fetched_tokens, back.transfers.completed, back.transfers.wire_bytes) == (0, 0, 0)


@pytest.mark.nightly
def test_ranks_that_share_the_heads_differently(stack: Stack) -> None:
    """Lanes of the way back carry the heads that one of decode's ranks and one of prefill's have in common."""
    both = ["--way-back", "always", "--checksums", "on"]
    spec = SmallSystem(
        page_size=PAGE, prefills=2, prefill_flags=[*both, "--ranks", "2"], decode_flags=[*both, "--ranks", "1"]
    )
    prefills, decodes = started(stack, spec)
    turns = converse(decodes[0], prefills, 4, seed=5)
    assert [turn.prefill_matched for turn in turns] == [turn.matched for turn in turns] and turns[-1].matched > 0
    assert sum(settled(prefill).way_back.fetched_tokens for prefill in prefills) > 0
    settled(decodes[0])


@pytest.mark.nightly
def test_small_pools_many_at_a_time_and_couriers_that_die(stack: Stack) -> None:
    """What is evicted at prefill comes back while other prompts go the other way; nothing is lost or left behind."""
    prefills, decodes = started(stack, system(2, "always", "--checksums", "on", pages=80))
    rng = random.Random(6)
    histories = [ids(rng, 10 * PAGE + i) for i in range(12)]
    dying = threading.Event()

    def kill_couriers() -> None:
        while not dying.wait(0.7):
            for pid in courier_pids(rng.choice(prefills).daemon.popen.pid)[:1]:
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_couriers)
    thread.start()
    answered = 0
    try:
        for number in range(6):
            with Engines(prefills[number % 2], decodes[0]) as engines:
                for i, turn in enumerate(engines.turns(histories, 8, deadline_s=10.0)):
                    if turn.error is None:
                        answered += 1
                        histories[i] = histories[i] + turn.output + ids(rng, 10)
                    else:
                        assert turn.code is not None and turn.code.name == "UNAVAILABLE", turn.details
    finally:
        dying.set()
        thread.join()
    assert answered >= 12
    sides = [settled(replica, 20.0) for replica in (*prefills, *decodes)]
    assert sum(side.way_back.fetched_tokens for side in sides) > 0
    assert all(side.transfers.mismatched_parts + side.way_back.transfers.mismatched_parts == 0 for side in sides)


@pytest.mark.nightly
def test_tokens_equal_one_engines(stack: Stack, tmp_path: Path) -> None:
    """Pages that the decode server computed stand where the prefill server's would."""
    model = tiny_models.random_model("qwen2")
    model.save_pretrained(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True).eval()
    shape = kv_shape(plain)
    pool = 64 * PAGE * shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
    flags = [*ALWAYS, "--checksums", "on"]
    spec = SystemSpec(
        model=str(tmp_path),
        page_size=PAGE,
        prefills=2,
        prefill_pool_bytes=pool,
        decode_pool_bytes=pool,
        prefill_flags=flags,
        decode_flags=flags,
        worker_flags=["--revision", "1", "--chunk-tokens", "48"],
    )
    prefills, decodes = started(stack, spec)
    rng, comparison, conversation = random.Random(7), Comparison(), Conversation(plain)
    history: list[int] = [rng.randrange(tiny_models.VOCABULARY) for _ in range(80)]
    for number in range(4):
        with Engines(prefills[number % 2], decodes[0]) as engines:
            turn = engines.turn(history, 16)
        assert turn.error is None, turn.details
        assert turn.prefill_matched == turn.matched
        conversation.compare(history, turn, comparison)
        history = history + turn.output + [rng.randrange(tiny_models.VOCABULARY) for _ in range(20)]
    torch.set_num_threads(threads)
    assert comparison.mistakes == [] and comparison.tokens == 4 * 16
    assert all(settled(prefill).way_back.fetched_tokens > 0 for prefill in prefills)
