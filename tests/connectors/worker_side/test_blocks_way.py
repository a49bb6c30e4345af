"""The worker's half over blocks of its engine's own, which real daemons copy from and into: in shared memory here."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.connectors.daemon_requests import RequestTools
from kvferry.connectors.orders import Begin, Cancel, Drop, Load, Release, Restore, Save, StorePages
from kvferry.daemon.memory.block_table import SHARING
from tests.connectors.engine_memory import BLOCK
from tests.connectors.worker_side.block_pair import BLOCKS, CANARY, BlockPair, SharedEngine
from tests.connectors.worker_side.engine_pair import (
    PAGE,
    PER_PAGE,
    exchange,
    new_name,
    new_prompt,
    received,
    sent,
    until,
)
from tests.support.devices import DeviceStack


@pytest.fixture(scope="module")
def pair() -> Iterator[BlockPair]:
    with DeviceStack() as stack:
        made = BlockPair(stack)
        try:
            for number in range(20):  # until the daemons' session is up
                exchange(made, f"first {number}", new_name(), new_prompt(PAGE), range(PER_PAGE), range(PER_PAGE))
                if made.sides["decode"].moved.loads:
                    break
                time.sleep(0.3)
            yield made
        finally:
            for side in made.sides.values():
                side.close()
            for engine in made.engines.values():
                assert isinstance(engine, SharedEngine)
                engine.file.unlink()


@pytest.fixture(params=["newest", "older"])
def daemons(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one waits for the word that a request is over."""
    if request.param == "older":
        monkeypatch.setattr(DaemonClient, "takes_alone", False)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def same(pair: BlockPair, theirs: range, ours: range, last: int) -> bool:
    prefill, decode = pair.of("prefill"), pair.of("decode")
    *full, end = zip(theirs, ours, strict=True)
    return prefill.beginning(end[0], last) == decode.block(end[1]) and all(
        prefill.block(a) == decode.block(b) for a, b in full
    )


@pytest.mark.usefixtures("daemons")
@pytest.mark.parametrize("tokens", [1, BLOCK, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + BLOCK + 3])
def test_prompts_go_from_blocks_to_blocks(pair: BlockPair, tokens: int) -> None:
    count = blocks_of(tokens)
    theirs, ours = range(30, 30 + count), range(10, 10 + count)
    before = pair.of("decode").memory.copy()
    assert exchange(pair, f"whole {tokens}", new_name(), new_prompt(tokens), theirs, ours) == set()
    assert same(pair, theirs, ours, (tokens - 1) % BLOCK + 1)
    others = [block for block in range(BLOCKS) if block not in ours]
    assert (pair.of("decode").memory[:, others] == before[:, others]).all()
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_chunks_name_the_blocks_that_follow(pair: BlockPair) -> None:
    tokens, half, name = 4 * PAGE, 2 * PAGE, new_name()
    prompt, theirs = new_prompt(tokens), tuple(range(20, 20 + blocks_of(tokens)))
    before = pair.stats("decode").transfers.delta_pages
    pair.give("decode", Load("chunks", name, prompt, "p", 0, (), tuple(range(blocks_of(tokens)))))
    pair.give("prefill", Begin("chunks", name, prompt), Save("chunks", half, theirs[: blocks_of(half)]))
    until(lambda: pair.stats("decode").transfers.delta_pages == before + 2)
    pair.give("prefill", Save("chunks", tokens, theirs))
    pair.give("prefill", Release("chunks", 7))
    assert received(pair.sides["decode"], "chunks") == set()
    news = pair.sides["decode"].reports.take_news()
    assert news is not None and news.first == {"chunks": 7}
    sent(pair.sides["prefill"], "chunks")
    assert same(pair, range(20, 20 + blocks_of(tokens)), range(blocks_of(tokens)), BLOCK)


def test_what_is_computed_before_its_push_has_begun_goes_at_once(pair: BlockPair) -> None:
    tokens, name = 2 * PAGE, new_name()
    prompt, theirs, ours = new_prompt(tokens), range(20, 20 + blocks_of(tokens)), range(blocks_of(tokens))
    pair.sides["prefill"]._loop.call_soon_threadsafe(time.sleep, 0.2)  # all that follows is heard in one turn
    pair.give("prefill", Begin("early", name, prompt), Save("early", tokens, tuple(theirs)))
    pair.give("prefill", Release("early", 7))
    pair.give("decode", Load("early", name, prompt, "p", 0, (), tuple(ours)))
    assert received(pair.sides["decode"], "early") == set()
    sent(pair.sides["prefill"], "early")
    assert same(pair, theirs, ours, BLOCK)


def test_the_last_word_is_said_once(pair: BlockPair) -> None:
    name, prompt = new_name(), new_prompt(PAGE)
    theirs, ours, side = range(20, 20 + PER_PAGE), range(PER_PAGE), pair.sides["prefill"]
    before = side.moved.failed
    pair.give("prefill", Begin("once", name, prompt), Save("once", PAGE, tuple(theirs)))
    pair.give("prefill", Release("once", 7))
    until(lambda: pair.stats("prefill").requests.running)
    pair.give("prefill", Save("once", PAGE, tuple(theirs)))
    pair.give("decode", Load("once", name, prompt, "p", 0, (), tuple(ours)))
    assert received(pair.sides["decode"], "once") == set()
    sent(side, "once")
    assert same(pair, theirs, ours, BLOCK) and side.moved.failed == before


def test_a_prompt_that_is_asked_for_late_has_the_time_of_who_asks(
    pair: BlockPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon keeps it until the ask's deadline: the engine's own is not the end of a prompt that it computes."""
    tools = pair.sides["prefill"]._tools
    monkeypatch.setattr(tools, "settings", replace(tools.settings, deadline_seconds=2.0))
    monkeypatch.setattr("kvferry.connectors.daemon_requests.ANSWER_SLACK_S", 0.1)
    tokens, half, name = 2 * PAGE, PAGE, new_name()
    prompt, theirs, ours = new_prompt(tokens), range(20, 20 + blocks_of(tokens)), range(blocks_of(tokens))
    pair.give("prefill", Begin("late", name, prompt), Save("late", half, tuple(theirs)[: blocks_of(half)]))
    time.sleep(1.2)
    pair.give("decode", Load("late", name, prompt, "p", 0, (), tuple(ours)))
    time.sleep(1.8)
    pair.give("prefill", Save("late", tokens, tuple(theirs)), Release("late", 7))
    assert received(pair.sides["decode"], "late") == set()
    sent(pair.sides["prefill"], "late")
    assert same(pair, theirs, ours, BLOCK)


@pytest.mark.parametrize("waits", [False, True])
def test_a_prompt_whose_end_is_not_told_is_given_up(
    pair: BlockPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    monkeypatch.setattr(RequestTools, "end_seconds", property(lambda _: 0.4))
    side, theirs = pair.sides["prefill"], tuple(range(PER_PAGE))
    until(lambda: side._requests._lasting.looking is None)  # type: ignore[attr-defined]  # another test's, with its time
    failed = side.moved.failed
    pair.give("prefill", Begin("unended", new_name(), new_prompt(PAGE), waits=waits))
    if waits:
        time.sleep(0.2)  # longer than between two looks: the engine has no blocks for it yet
    pair.give("prefill", Save("unended", PAGE, theirs))
    pair.give("prefill", Release("unended", 7))
    sent(side, "unended")
    news = side.reports.take_news()
    assert news is not None and "unended" in news.failed
    assert side.moved.failed == failed + 1 and pair.at_rest("prefill")
    assert "did not say Ended" in caplog.text  # the daemon's own deadline is later
    assert not side._works and not side._pushes


def test_an_error_of_ours_ends_a_push_too(pair: BlockPair, monkeypatch: pytest.MonkeyPatch) -> None:
    side, name = pair.sides["prefill"], new_name()
    pushed, failed = side.moved.pushed, side.moved.failed
    pair.give("prefill", Begin("ours", name, new_prompt(2 * PAGE)))
    until(lambda: pair.stats("prefill").requests.running)
    monkeypatch.setattr(DaemonClient, "progress", lambda *_: 1 / 0)
    pair.give("prefill", Save("ours", PAGE, tuple(range(PER_PAGE))))
    pair.give("prefill", Drop("ours"))
    sent(side, "ours")
    assert pair.at_rest("prefill"), "it was reported while the daemon had the blocks"
    assert (side.moved.pushed, side.moved.failed) == (pushed, failed + 1)


def test_an_error_of_ours_ends_a_load_too(pair: BlockPair, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, name = PAGE, new_name()
    prompt, theirs, ours = new_prompt(tokens), tuple(range(20, 20 + PER_PAGE)), tuple(range(PER_PAGE))
    side = pair.sides["decode"]
    failed = side.moved.failed
    monkeypatch.setattr(RequestTools, "loaded", lambda *_: [].pop())
    pair.give("decode", Load("our load", name, prompt, "p", 0, (), ours))
    pair.give("prefill", Begin("our load", name, prompt), Save("our load", tokens, theirs), Release("our load", 7))
    assert received(side, "our load") == set(ours)
    sent(pair.sides["prefill"], "our load")
    assert side.moved.failed == failed + 1 and pair.at_rest("decode") and not side._works


def test_an_end_that_comes_while_a_push_is_given_up_changes_nothing(pair: BlockPair) -> None:
    """The daemon says Ended to its abort, too."""
    side = pair.sides["prefill"]
    pushed, open_before = side.moved.pushed, side._sessions.client
    pair.give("prefill", Begin("twice", new_name(), new_prompt(PAGE)))
    until(lambda: pair.stats("prefill").requests.running)
    for _ in range(2):
        pair.give("prefill", Cancel("twice"))
    until(lambda: not side._works)
    assert side.moved.pushed == pushed and pair.at_rest("prefill")
    assert side._sessions.client is open_before and open_before is not None and not open_before.open_requests


def test_a_prompt_that_waits_for_page_ids_is_sent_when_it_is_asked_for(pair: BlockPair) -> None:
    """Prompts that share most of their blocks need more page ids than the daemon has for what nobody asks for. The
    engine waits for none of them: what it has computed and handed in goes on as soon as there are some."""
    pages = BLOCKS // PER_PAGE - 1
    tokens, count = pages * PAGE, pages * PER_PAGE
    most = SHARING * BLOCKS // PER_PAGE // 2 // pages
    before = pair.stats("prefill").requests
    for number in range(most):
        request = f"unasked {number}"
        pair.give(
            "prefill", Begin(request, new_name(), new_prompt(tokens)), Save(request, PAGE, tuple(range(PER_PAGE)))
        )
    until(lambda: pair.stats("prefill").requests.running == most)
    name, prompt, theirs, ours = new_name(), new_prompt(tokens), tuple(range(2, 2 + count)), tuple(range(count))
    pair.give("prefill", Begin("asked", name, prompt), Save("asked", PAGE, theirs[:PER_PAGE]))
    pair.give("prefill", Save("asked", tokens, theirs), Release("asked", 7))
    until(lambda: pair.stats("prefill").requests.waiting)
    pair.give("decode", Load("asked", name, prompt, "p", 0, (), ours))
    assert received(pair.sides["decode"], "asked") == set()
    assert same(pair, range(2, 2 + count), range(count), BLOCK)
    sent(pair.sides["prefill"], "asked")
    assert pair.stats("prefill").requests.failed == before.failed
    for number in range(most):
        pair.give("prefill", Drop(f"unasked {number}"))
        sent(pair.sides["prefill"], f"unasked {number}")
    assert pair.at_rest("prefill")


def test_what_the_engine_holds_is_never_written(pair: BlockPair) -> None:
    """It holds a page and a block of the next: the page is not sent, the block is left out of its page's bytes."""
    tokens, held = 3 * PAGE + 5, PAGE + BLOCK
    count = blocks_of(tokens)
    theirs, ours = range(20, 20 + count), range(count)
    before = pair.of("decode").memory.copy()
    received_before = pair.stats("decode").transfers.delta_pages
    assert exchange(pair, "held", new_name(), new_prompt(tokens), theirs, ours, held=PAGE, start=held) == set()
    own = held // BLOCK
    assert (pair.of("decode").memory[:, :own] == before[:, :own]).all()
    assert same(pair, range(20 + own, 20 + count), range(own, count), (tokens - 1) % BLOCK + 1)
    assert pair.stats("decode").transfers.delta_pages == received_before + 3


@pytest.mark.usefixtures("daemons")
def test_what_is_handed_in_comes_back(pair: BlockPair) -> None:
    tokens = 3 * PAGE
    count = blocks_of(tokens)
    prompt, engine = new_prompt(tokens), pair.of("decode")
    stored = engine.memory[:, 40 : 40 + count].copy()
    pair.give("decode", StorePages("store", new_name(), prompt, tuple(range(40, 40 + count))))
    sent(pair.sides["decode"], "store")
    engine.clear(*range(40, 40 + count))  # its blocks are the engine's again
    assert pair.stats("decode").host.cached >= 3
    longer = new_prompt(tokens + 1, shared=prompt)
    engine.clear(*range(count))
    pair.give("decode", Restore("restore", new_name(), longer, BLOCK, tuple(range(1, count))))
    assert received(pair.sides["decode"], "restore") == set()
    assert (engine.memory[:, 0] == CANARY).all() and (engine.memory[:, 1:count] == stored[:, 1:]).all()
    # What the tier holds is not asked for, but for the block of it that is the engine's own.
    pages = pair.stats("decode").transfers.delta_pages
    engine.clear(*range(count + 1))
    theirs = range(20, 20 + count + 1)
    pair.of("prefill").memory[:, 20 : 20 + count] = stored
    assert exchange(pair, "mixed", new_name(), longer, theirs, range(count + 1)) == set()
    assert (engine.memory[:, :count] == stored).all()
    assert pair.stats("decode").transfers.delta_pages == pages + 1


@pytest.mark.usefixtures("daemons")
def test_a_load_that_is_cancelled_is_reported_when_the_daemon_has_let_go(pair: BlockPair) -> None:
    name, prompt = new_name(), new_prompt(4 * PAGE)
    ours = tuple(range(blocks_of(4 * PAGE)))
    pair.give("decode", Load("cancelled", name, prompt, "p", 0, (), ours))
    until(lambda: pair.stats("decode").requests.running)
    pair.give("decode", Cancel("cancelled"))
    assert received(pair.sides["decode"], "cancelled") == set(ours)
    assert pair.at_rest("decode"), "it was reported while the daemon had the blocks"


def test_a_push_that_is_dropped_is_reported_when_the_daemon_has_let_go(pair: BlockPair) -> None:
    name, prompt = new_name(), new_prompt(4 * PAGE)
    theirs = tuple(range(blocks_of(4 * PAGE)))
    pair.give("prefill", Begin("dropped", name, prompt), Save("dropped", 2 * PAGE, theirs[: 2 * PER_PAGE]))
    until(lambda: pair.stats("prefill").requests.running)
    pair.give("prefill", Drop("dropped"))
    sent(pair.sides["prefill"], "dropped")
    assert pair.at_rest("prefill")


def test_a_preempted_prompt_is_read_no_more(pair: BlockPair) -> None:
    name, prompt = new_name(), new_prompt(4 * PAGE)
    theirs = tuple(range(blocks_of(4 * PAGE)))
    pair.give("prefill", Begin("preempted", name, prompt), Save("preempted", 2 * PAGE, theirs[: 2 * PER_PAGE]))
    until(lambda: pair.stats("prefill").requests.running)
    pair.give("prefill", preempted=("preempted",))
    assert pair.at_rest("prefill"), "the engine gives the blocks away, and the daemon may read them"
    news = pair.sides["prefill"].reports.take_news()
    assert news is not None and "preempted" in news.failed
    pair.give("prefill", Save("preempted", 4 * PAGE, theirs), Release("preempted"))
    sent(pair.sides["prefill"], "preempted")


def test_a_computed_prompt_that_is_preempted_is_reported_when_its_request_ends(
    pair: BlockPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said any more of a request that is over, also not its token."""
    said: list[RequestName] = []
    monkeypatch.setattr(DaemonClient, "aux", lambda _, name, blob: said.append(name))
    name, prompt, theirs = new_name(), new_prompt(PAGE), tuple(range(PER_PAGE))
    pair.give("prefill", Begin("computed", name, prompt), Save("computed", PAGE, theirs))
    until(lambda: pair.stats("prefill").requests.running)
    pair.give("prefill", preempted=("computed",))
    pair.give("prefill", Drop("computed", 7))
    sent(pair.sides["prefill"], "computed")
    assert pair.at_rest("prefill") and not said


def test_a_killed_daemon_is_proven_gone_before_its_blocks_are_reported(pair: BlockPair) -> None:
    """A daemon that stands still may still copy: nothing is reported. Killed, it is; then another one comes, and all is
    as before."""
    name, prompt = new_name(), new_prompt(4 * PAGE)
    side, daemon = pair.sides["decode"], pair.daemons["decode"]
    ours = tuple(range(blocks_of(4 * PAGE)))
    pair.give("decode", Load("killed", name, prompt, "p", 0, (), ours))
    until(lambda: pair.stats("decode").requests.running)
    daemon.popen.send_signal(signal.SIGSTOP)
    pair.give("decode", Cancel("killed"))
    time.sleep(1.5)
    assert side.reports.take() == (set(), set()), "blocks were given back that a daemon may write"
    pair.stack.kill(daemon)
    pair.stack.processes.remove(daemon)
    assert received(side, "killed") == set(ours)
    pair.start("decode")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        prompt = new_prompt(PAGE)
        if exchange(pair, "again", new_name(), prompt, range(20, 22), range(2)) == set():
            break
        time.sleep(0.3)
    assert same(pair, range(20, 22), range(2), BLOCK)
