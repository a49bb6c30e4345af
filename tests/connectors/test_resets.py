"""Resets: what was computed before is named by nobody any more, and nothing of it is loaded, stored or sent."""

from __future__ import annotations

import pytest

from kvferry.connectors.orders import Begin, Forget, Load, Release, Restore, Save, StorePages
from kvferry.connectors.scheduler_side import SchedulerSide
from kvferry.connectors.weights_epoch import WeightsEpoch
from kvferry.radix.digests import DIGEST_BYTES, chain_digests, root_digest
from tests.connectors.scheduling import (
    BLOCK,
    TO_DECODE,
    TO_PREFILL,
    Daemon,
    Request,
    blocks,
    decode,
    orders,
    prefill,
)


def epoch(*names: str) -> WeightsEpoch:
    """One whose file has these names, one a reset."""
    left = list(names)
    return WeightsEpoch(lambda: left.pop(0))


def test_an_epoch_without_a_name_is_nobody_elses() -> None:
    ours, theirs = epoch("", ""), epoch("")
    assert ours.root is None, "pages are found that an engine of the same weights' files has left"
    ours.advance(named=True)
    theirs.advance(named=True)
    first = ours.root
    ours.advance(named=True)
    assert len({first, ours.root, theirs.root, root_digest(), None}) == 5


def test_engines_that_were_reset_to_weights_of_one_name_agree() -> None:
    ours, theirs = epoch("step 1", "step 2"), epoch("step 2")
    ours.advance(named=True)
    theirs.advance(named=True)
    assert ours.root != theirs.root, "one is behind the other"
    ours.advance(named=True)
    assert ours.root == theirs.root and ours.name == "step 2"


def test_a_name_that_an_epoch_had_is_none_of_another() -> None:
    ours, theirs = epoch("step 1", "step 1", "step 2", "step 1"), epoch("step 1")
    theirs.advance(named=True)
    roots = {theirs.root}
    for known in ("step 1", "", "step 2", ""):
        ours.advance(named=True)
        assert ours.name == known
        roots.add(ours.root)
    assert len(roots) == 4 and ours.root != theirs.root


def test_a_reset_that_is_not_whole_takes_no_name() -> None:
    ours, theirs = epoch("step 1"), epoch("step 1")
    ours.advance(named=False)
    theirs.advance(named=True)
    assert ours.name == "" and ours.root != theirs.root
    ours.advance(named=True)
    assert ours.root == theirs.root, "it is there for the next try"


def test_a_name_that_cannot_be_taken_again_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ours = epoch("step 1", "step 1")
    ours.advance(named=True)
    assert "was named" not in caplog.text
    ours.advance(named=True)
    assert "an epoch was named 'step 1' before" in caplog.text


def names(side: SchedulerSide, daemon: Daemon, request: Request) -> bytes:
    """The digests by which it is looked up."""
    daemon.asked.clear()
    side.new_request(request)
    side.matched(request, 0)
    return daemon.asked[0]


@pytest.mark.parametrize("make", [decode, prefill])
def test_nothing_is_found_by_its_name_of_before(make: type[SchedulerSide]) -> None:
    daemon = Daemon()
    side = make(daemon)  # type: ignore[arg-type, call-arg]
    params = TO_PREFILL if make is prefill else None  # type: ignore[comparison-overlap]
    before = names(side, daemon, Request("a", 61, params))
    assert before == chain_digests(list(range(60)), page_size=BLOCK).tobytes()
    assert side.reset(emptied=True) and daemon.flushed == 1 and side.counts.resets == 1
    after = names(side, daemon, Request("b", 61, params))
    same = [after[i : i + 32] == before[i : i + 32] for i in range(0, len(after), DIGEST_BYTES)]
    assert len(after) == len(before) and not any(same)
    assert orders(side) == [Forget()]


def test_halves_of_a_pair_name_a_prompt_alike_once_both_were_reset() -> None:
    daemon = Daemon()
    ahead, behind = prefill(daemon, weights="step 7"), decode(daemon, weights="step 7")

    def prompts() -> tuple[bytes, bytes, bytes, bytes]:
        for side, params in ((ahead, TO_PREFILL), (behind, TO_DECODE)):
            request = Request("a", 61, params)
            side.new_request(request)
            side.matched(request, 0)
            side.allocated(request, blocks(61), 61 if side is behind else 0)
        (begin,) = [each for each in orders(ahead) if isinstance(each, Begin)]
        (load,) = [each for each in orders(behind) if isinstance(each, Load)]
        for side in (ahead, behind):
            side.received(["a"])
            side.finished(Request("a", 61), ())
            side.sent(["a"])
        return begin.prompt.digests, load.prompt.digests, begin.prompt.tail_digest, load.prompt.tail_digest

    theirs, ours, their_tail, our_tail = prompts()
    assert (theirs, their_tail) == (ours, our_tail)
    assert ahead.reset(emptied=True)
    theirs, ours, their_tail, our_tail = prompts()
    assert theirs[-32:] != ours[-32:] and their_tail != our_tail, "either would be refused"
    assert behind.reset(emptied=True)
    theirs, ours, their_tail, our_tail = prompts()
    assert (theirs, their_tail) == (ours, our_tail)


def test_what_a_prompt_shorter_than_a_page_is_named_changes_too() -> None:
    side = decode(Daemon())
    tails = []
    for name in ("a", "b"):
        request = Request(name, 5, TO_DECODE)
        side.new_request(request)
        side.matched(request, 0)
        side.allocated(request, blocks(5), 5)
        (load,) = [each for each in orders(side) if isinstance(each, Load)]
        tails.append(load.prompt.tail_digest)
        side.received([name])
        request.num_computed_tokens = 0
        side.reset(emptied=True)
    assert tails[0] != tails[1]


def test_a_load_under_way_is_forgotten_and_its_request_kept_by_nobody() -> None:
    side, request = decode(Daemon()), Request("a", 64, TO_DECODE)
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, blocks(64), 64)
    orders(side)
    request.num_computed_tokens = 64  # so vLLM counts while it loads
    assert not side.reset(emptied=False), "its blocks are in use"
    assert orders(side) == [Forget()]
    side.received(["a"])
    request.num_computed_tokens = 0  # the load failed
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, blocks(64), 0)
    request.num_computed_tokens, request.output = 80, 17
    assert side.finished(request, blocks(80)) == (False, None) and orders(side) == []


def test_what_runs_without_a_pause_is_kept_by_nobody_even_if_it_is_preempted_later() -> None:
    daemon = Daemon(pages=8)
    side, request = decode(daemon), Request("a", 64)
    side.new_request(request)
    side.allocated(request, blocks(64), 0)
    request.num_computed_tokens = 64
    assert not side.reset(emptied=False)
    side.step({}, ["a"], lambda _: ())
    request.num_computed_tokens = 0
    assert side.matched(request, 0) == (0, False)
    request.num_computed_tokens, request.output = 80, 17
    assert side.finished(request, blocks(80)) == (False, None) and orders(side) == []


def test_what_was_preempted_for_the_reset_is_named_anew() -> None:
    daemon = Daemon(pages=3)
    side, request = decode(daemon), Request("a", 64, TO_DECODE)
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, blocks(64), 64)
    orders(side)
    side.received(["a"])
    request.output, request.num_computed_tokens = 3, 0
    assert side.reset(emptied=True)
    daemon.asked.clear()
    assert side.matched(request, 0) == (24, True), "prefill has forgotten it; what is held by now may be had"
    assert daemon.asked[0][:32] != request.digests(64, BLOCK)[:32]
    side.allocated(request, blocks(64), 24)
    assert [type(each) for each in orders(side)] == [Forget, Restore]
    side.received(["a"])
    request.num_computed_tokens = 66
    assert side.finished(request, blocks(66))[0]
    (store,) = orders(side)
    assert isinstance(store, StorePages) and store.prompt.digests[:32] == daemon.asked[0][:32]


def test_what_waits_still_comes_from_prefill() -> None:
    side, request = decode(Daemon(), weights="step 1"), Request("a", 64, TO_DECODE)
    side.new_request(request)
    assert side.reset(emptied=True)
    assert side.matched(request, 0) == (64, True)
    side.allocated(request, blocks(64), 64)
    forget, load = orders(side)
    root = root_digest("kvferry weights named step 1")
    assert isinstance(load, Load) and load.prompt.digests == request.digests(64, BLOCK, root)
    assert forget == Forget(), "what comes behind it is not forgotten"


def test_a_reset_that_leaves_blocks_to_be_found_names_no_epoch() -> None:
    side, request = decode(Daemon(), weights="step 1"), Request("a", 64, TO_DECODE)
    side.new_request(request)
    assert not side.reset(emptied=False)
    named = request.digests(64, BLOCK, root_digest("kvferry weights named step 1"))
    side.matched(request, 0)
    side.allocated(request, blocks(64), 64)
    (_, load) = orders(side)
    assert isinstance(load, Load) and load.prompt.digests != named
    side.received(["a"])
    assert side.reset(emptied=True), "tried again"
    other = Request("b", 64, TO_DECODE)
    side.new_request(other)
    side.matched(other, 0)
    side.allocated(other, blocks(64), 64)
    (_, load) = orders(side)
    assert isinstance(load, Load) and load.prompt.digests == named


def test_what_is_not_stored_yet_is_not_stored() -> None:
    side, request = decode(Daemon()), Request("a", 64)
    side.new_request(request)
    side.allocated(request, blocks(64), 0)
    request.num_computed_tokens = 64
    assert side.finished(request, blocks(64))[0]
    assert not side.reset(emptied=False)
    store, forget = orders(side)
    assert isinstance(store, StorePages) and forget == Forget(), "the worker reports it, and does nothing"
    side.sent(["a"])
    assert side.tracked == 0 and side.reset(emptied=True)


def test_a_push_under_way_is_not_told_to_anyone() -> None:
    side, request = prefill(Daemon()), Request("a", 64, TO_PREFILL)
    side.new_request(request)
    side.allocated(request, blocks(64), 0)
    orders(side, a=32)
    request.num_computed_tokens = 0  # preempted for the reset
    side.reset(emptied=True)
    assert orders(side) == [Forget()]
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, blocks(64), 0)
    (save,) = orders(side, a=64)  # the worker knows that its push is over
    assert isinstance(save, Save)
    request.num_computed_tokens = 64
    assert side.finished(request, blocks(64)) == (True, None), "routers ask decode alone"
    assert orders(side) == [Release("a")]
    side.sent(["a"])
    assert side.tracked == 0


def test_a_push_that_has_not_begun_is_named_anew() -> None:
    side, request = prefill(Daemon(), weights="step 1"), Request("a", 64, TO_PREFILL)
    side.new_request(request)
    assert side.reset(emptied=True)
    side.allocated(request, blocks(64), 0)
    forget, begin = orders(side)
    root = root_digest("kvferry weights named step 1")
    assert forget == Forget()
    assert isinstance(begin, Begin) and begin.prompt.digests == request.digests(64, BLOCK, root)


def test_a_request_that_cannot_be_named_stays_alone() -> None:
    side, request = decode(Daemon(pages=8)), Request("a", 64, adapter="?")
    side.new_request(request)
    assert side.reset(emptied=True)
    assert side.matched(request, 0) == (0, False)


def test_what_another_connector_loads_behind_a_reset_is_found_by_no_other_engine() -> None:
    """It may have kept over the reset what is of other weights; the engine's own cache has it, too, from then on."""
    daemon = Daemon()
    side = decode(daemon, weights="step 7")
    side.hear_of_other_load()
    assert side.counts.resets == 0, "there was no reset that it could have missed"
    assert side.reset(emptied=True)
    named = names(side, daemon, Request("a", 61))
    loaded = Request("b", 61)
    loaded.num_computed_tokens = 48
    side.new_request(loaded)
    side.hear_of_other_load()
    side.hear_of_other_load()
    assert side.counts.resets == 2 and daemon.flushed == 1, "what is there is right"
    assert side.finished(loaded, blocks(61)) == (False, None), "it is stored"
    own = names(side, daemon, Request("c", 61))
    assert own[:DIGEST_BYTES] != named[:DIGEST_BYTES], "under the name that others have"
