"""Resets of engines over real daemons: old pages are not had again and are free, what is under way ends at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from kvferry.connectors.lookups import LOOK_SECONDS, HeldPrefixes
from kvferry.connectors.orders import Begin, Forget, Load, News, PromptPages, Release, Restore, Save, StorePages
from kvferry.connectors.prompt_chain import PromptChain
from kvferry.connectors.weights_epoch import WeightsEpoch
from kvferry.proto import admin_pb2, admin_pb2_grpc, common_pb2
from tests.connectors.scheduling import Request
from tests.connectors.worker_side.engine_pair import (
    FACTS,
    PAGE,
    Pair,
    exchange,
    heard,
    new_name,
    new_prompt,
    push,
    received,
    same,
    sent,
    until,
)
from tests.connectors.worker_side.test_copies import a_copy_waits
from tests.connectors.worker_side.test_lookups import watching


def prompt_of(epoch: WeightsEpoch, tokens: int) -> PromptPages:
    """The same tokens for everybody."""
    return PromptChain(Request("a", tokens), PAGE, None, epoch.root).prompt(tokens)


def of_step(name: str) -> WeightsEpoch:
    epoch = WeightsEpoch(lambda: name)
    epoch.advance(named=True)
    return epoch


def again(pair: Pair) -> None:
    """Ends decode's daemon in order and starts it anew, its host tier's file read and its engine's session up."""
    side = pair.sides["decode"]
    pair.daemons["decode"].popen.terminate()
    pair.daemons["decode"].popen.wait(20)
    side.reports.take_news()
    pair.start("decode")
    until(lambda: (news := side.reports.take_news()) is not None and news.sessions == {0: True})
    until(lambda: its_file_is_read(pair))


def its_file_is_read(pair: Pair) -> bool:
    """Before, every flush is refused."""
    nobodys = admin_pb2.FlushRequest(role=common_pb2.ROLE_DECODE, namespace_id=bytes(32))
    with grpc.insecure_channel(f"unix:{pair.socket('decode')}") as channel:
        try:
            admin_pb2_grpc.AdminStub(channel).Flush(nobodys, timeout=10)
        except grpc.RpcError as error:
            return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND
    return True


@contextmanager
def kept_in_a_file(pair: Pair, folder: Path) -> Iterator[None]:
    """The host tier of decode's daemon, where it starts anew meanwhile."""
    words = pair.words["decode"]
    pair.words["decode"] = [*words, "--host-dir", str(folder)]
    try:
        yield
    finally:
        pair.words["decode"] = words
        again(pair)


def test_a_prompt_comes_from_prefill_again_once_both_were_reset(pair: Pair) -> None:
    first, second = WeightsEpoch(str), of_step("2")
    assert exchange(pair, "a", new_name(), prompt_of(first, 3 * PAGE), range(6), range(6)) == set()
    # Prefill was reset before decode: what it sends is refused, at once and not at the deadline.
    name = new_name()
    push(pair, "b", name, prompt_of(second, 3 * PAGE), tuple(range(10, 16)))
    load = Load("b", name, prompt_of(first, 3 * PAGE), "p", 2 * PAGE, tuple(range(4)), (20, 21))
    pair.give("decode", load)
    assert received(pair.sides["decode"], "b", seconds=4.0) == {20, 21}
    sent(pair.sides["prefill"], "b")
    # Both: nothing of before is matched by either daemon, everything comes anew.
    bytes_before = pair.stats("decode").transfers.delta_bytes
    assert exchange(pair, "c", new_name(), prompt_of(second, 3 * PAGE), range(10, 16), range(30, 36)) == set()
    assert same(pair, range(10, 16), range(30, 36))
    assert pair.stats("decode").transfers.delta_bytes - bytes_before == 3 * FACTS.geometry.page_bytes
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_pages_of_before_are_not_found_by_an_engine_that_was_reset_and_become_free(pair: Pair) -> None:
    side, epoch = pair.sides["decode"], of_step("3")
    with watching(pair) as view:
        old = prompt_of(epoch, 4 * PAGE)
        pair.give("decode", StorePages("a", new_name(), old, tuple(range(8))))
        sent(side, "a")
        until(lambda: view.held_pages(old.digests) == 4)
        epoch.advance(named=True)
        new = prompt_of(epoch, 4 * PAGE)
        assert view.held_pages(new.digests) == 0
        restore = PromptPages(new.digests, 4 * PAGE + 1, bytes(32))
        pair.give("decode", Restore("b", new_name(), restore, 0, tuple(range(50, 58))))
        assert received(side, "b") == set(range(50, 58)), "without an index, too"
        view.flush()
        until(lambda: view.held_pages(old.digests) == 0)
        until(lambda: pair.stats("decode").pool.cached == 0)
    until(lambda: pair.at_rest("decode"))


def test_a_daemon_that_is_away_is_told_when_it_is_back(pair: Pair) -> None:
    with watching(pair) as view:
        pair.daemons["decode"].popen.terminate()
        pair.daemons["decode"].popen.wait(20)
        view.flush()
        time.sleep(3 * LOOK_SECONDS)
        assert not view._flushed
        pair.start("decode")
        until(lambda: view._flushed)
    engine = pair.sides["decode"].reports
    until(lambda: (news := engine.take_news()) is not None and news.sessions == {0: True})  # it is told, too


def test_a_flush_of_what_the_daemon_does_not_have_is_not_tried_again(pair: Pair) -> None:
    view = HeldPrefixes(pair.socket("decode"), common_pb2.ROLE_DECODE, bytes(32), timeout_s=2.0)
    try:
        view.flush()
        until(lambda: view._flushed and not view._ask.is_set())
    finally:
        view.close()


def test_a_flush_before_the_workers_have_said_their_namespace_frees_what_is_in_that(pair: Pair) -> None:
    prompt = new_prompt(2 * PAGE)
    pair.give("decode", StorePages("a", new_name(), prompt, tuple(range(4))))
    sent(pair.sides["decode"], "a")
    with watching(pair) as theirs:
        until(lambda: theirs.held_pages(prompt.digests) == 2)
        view = HeldPrefixes(pair.socket("decode"), common_pb2.ROLE_DECODE, bytes(32), timeout_s=2.0)
        try:
            view.flush()
            until(lambda: view._flushed)
            view.ask_again()
            until(lambda: not view._ask.is_set())  # behind the daemon's answer to the flush
            assert theirs.held_pages(prompt.digests) == 2
            view.set_namespace(FACTS.id)
            until(lambda: theirs.held_pages(prompt.digests) == 0)
            pair.give("decode", StorePages("b", new_name(), prompt, tuple(range(4))))
            sent(pair.sides["decode"], "b")
            until(lambda: theirs.held_pages(prompt.digests) == 2)
            view.set_namespace(FACTS.id)
            assert view._flushed, "it is made once"
        finally:
            view.close()


def test_a_flush_that_is_refused_for_now_is_tried_again(tmp_path: Path) -> None:
    """The daemon still reads its host tier's file."""
    asked: list[admin_pb2.FlushRequest] = []

    class Admin(admin_pb2_grpc.AdminServicer):
        def Flush(self, request: admin_pb2.FlushRequest, context: grpc.ServicerContext) -> admin_pb2.FlushReply:
            asked.append(request)
            if len(asked) < 3:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "still being read")
            return admin_pb2.FlushReply()

    server = grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(Admin(), server)
    server.add_insecure_port(f"unix:{tmp_path}/decode.sock")
    server.start()
    view = HeldPrefixes(f"{tmp_path}/decode.sock", common_pb2.ROLE_DECODE, bytes(32), timeout_s=2.0)
    try:
        view.flush()
        until(lambda: len(asked) == 3 and view._flushed)
    finally:
        view.close()
        server.stop(None).wait(10)


def test_rows_of_an_earlier_runs_file_are_not_matched_behind_a_reset(pair: Pair, tmp_path: Path) -> None:
    side, engine, epoch = pair.sides["decode"], pair.engines["decode"], WeightsEpoch(lambda: "4")
    old, wanted = prompt_of(epoch, 4 * PAGE), [engine.block(n) for n in range(8)]

    def restored(request: str, prompt: PromptPages) -> set[int]:
        longer = PromptPages(prompt.digests, 4 * PAGE + 1, bytes(32))
        pair.give("decode", Restore(request, new_name(), longer, 0, tuple(range(50, 58))))
        return received(side, request)

    with watching(pair) as view, kept_in_a_file(pair, tmp_path):
        again(pair)
        pair.give("decode", StorePages("a", new_name(), old, tuple(range(8))))
        sent(side, "a")
        again(pair)
        until(lambda: view.held_pages(old.digests) == 4)
        assert (pair.stats("decode").host.cached, pair.stats("decode").pool.cached) == (4, 0), "in the file alone"
        epoch.advance(named=True)
        new = prompt_of(epoch, 4 * PAGE)
        assert view.held_pages(new.digests) == 0
        assert restored("b", new) == set(range(50, 58)), "without an index, too"
        assert restored("c", old) == set() and [engine.block(n) for n in range(50, 58)] == wanted, "they were there"
        view.flush()
        until(lambda: view.held_pages(old.digests) == 0)
        again(pair)
        assert restored("d", old) == set(range(50, 58)), "nor are they in the file any more"
    until(lambda: pair.at_rest("decode"))


def test_everything_ordered_before_is_reported_once_and_has_no_effect(pair: Pair) -> None:
    decode, prefill = pair.sides["decode"], pair.sides["prefill"]
    prompt, kept = new_prompt(2 * PAGE), new_prompt(2 * PAGE)
    pair.give("decode", Load("a", new_name(), prompt, "p", 0, (), (0, 1, 2, 3)))  # its prefill never comes
    until(lambda: pair.stats("decode").requests.running)
    resets = decode.moved.resets
    with watching(pair) as view:
        pair.give(
            "decode",
            StorePages("b", new_name(), prompt, (4, 5, 6, 7)),
            Forget(),
            StorePages("c", new_name(), kept, (8, 9, 10, 11)),
        )
        told: list[str] = []
        until(lambda: [told.extend(names) for names in decode.reports.take()] and len(told) == 3)
        assert set(told) == {"a", "b", "c"} and decode.reports.take_bad() == {0, 1, 2, 3}
        until(lambda: view.held_pages(kept.digests) == 2)
        assert view.held_pages(prompt.digests) == 0
    assert decode.moved.resets == resets + 1

    prefill.reports.take_news()
    name = new_name()
    pair.give("prefill", Begin("d", name, prompt), Save("d", PAGE, (0, 1, 2, 3)))
    until(lambda: pair.stats("prefill").requests.running)
    pair.give("prefill", Forget())
    until(lambda: prefill.reports.news is not None)
    assert prefill.reports.take_news() == News(frozenset({"d"}))
    pair.give("prefill", Save("d", 2 * PAGE, (0, 1, 2, 3)), Release("d"))
    sent(prefill, "d")
    pair.give("decode", Load("d", name, prompt, "p", 0, (), (0, 1, 2, 3)))
    assert received(decode, "d") == {0, 1, 2, 3}
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))
    assert decode.reports.take() == prefill.reports.take() == (set(), set())


def test_when_it_has_given_up_nothing_is_copied(pair: Pair) -> None:
    side, prompt = pair.sides["prefill"], new_prompt(2 * PAGE)
    with a_copy_waits(side) as there_is_one:
        pair.give("prefill", Begin("a", new_name(), prompt), Save("a", 2 * PAGE, (0, 1, 2, 3)))
        there_is_one()
        heard(side)
        copied = side.moved.saved_bytes
    side.give_up()
    assert not side._works and side.moved.saved_bytes in (copied, copied + 4 * FACTS.geometry.page_bytes // 2)
    pair.give("prefill", Release("a"))
    sent(side, "a")
    until(lambda: pair.at_rest("prefill"))
