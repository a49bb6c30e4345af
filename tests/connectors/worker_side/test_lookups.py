"""What an engine's scheduler sees of the daemon beside it: prefixes that it holds, its life, its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from kvferry.connectors import lookups
from kvferry.connectors.lookups import HeldPrefixes
from kvferry.connectors.orders import PromptPages, Restore, StorePages
from kvferry.proto import common_pb2, worker_pb2, worker_pb2_grpc
from tests.connectors.worker_side.engine_pair import (
    FACTS,
    PAGE,
    POOL_PAGES,
    Pair,
    new_name,
    new_prompt,
    received,
    sent,
    until,
)


@contextmanager
def watching(pair: Pair) -> Iterator[HeldPrefixes]:
    view = HeldPrefixes(pair.socket("decode"), common_pb2.ROLE_DECODE, FACTS.id, timeout_s=2.0)
    try:
        until(lambda: view.up)
        yield view
    finally:
        view.close()


def test_who_hears_its_namespace_later_finds_it_then(pair: Pair) -> None:
    prompt = new_prompt(2 * PAGE)
    pair.give("decode", StorePages("a", new_name(), prompt, tuple(range(4))))
    sent(pair.sides["decode"], "a")
    view = HeldPrefixes(pair.socket("decode"), common_pb2.ROLE_DECODE, bytes(32), timeout_s=2.0)
    try:
        until(lambda: view.up)
        assert view.held_pages(prompt.digests) == 0
        view.set_namespace(FACTS.id)
        until(lambda: view.held_pages(prompt.digests) == 2)
        assert view.up
    finally:
        view.close()


def test_what_is_stored_is_found_and_comes_back(pair: Pair) -> None:
    engine, side = pair.engines["decode"], pair.sides["decode"]
    prompt = new_prompt(3 * PAGE)
    wanted = [engine.block(n) for n in range(6)]
    with watching(pair) as view:
        assert (view.daemon, view.most_pages) == ("d", POOL_PAGES)
        assert view.held_pages(prompt.digests) == 0
        pair.give("decode", StorePages("a", new_name(), prompt, tuple(range(6))))
        sent(side, "a")
        longer = new_prompt(4 * PAGE, prompt)
        until(lambda: view.held_pages(longer.digests) == 3)
        assert view.held_pages(longer.digests[: 2 * 32]) == 2
        restore = PromptPages(prompt.digests, 3 * PAGE + 1, bytes(32))
        pair.give("decode", Restore("b", new_name(), restore, PAGE, tuple(range(50, 54))))
        assert received(side, "b") == set()
        assert [engine.block(n) for n in range(50, 54)] == wanted[2:]
        assert view.held_pages(new_prompt(PAGE).digests) == 0
    until(lambda: pair.at_rest("decode"))


def test_a_daemon_that_stands_still_is_not_up_until_it_goes_on(pair: Pair) -> None:
    prompt = new_prompt(PAGE)
    with watching(pair) as view:
        pair.give("decode", StorePages("a", new_name(), prompt, (0, 1)))
        sent(pair.sides["decode"], "a")
        until(lambda: view.held_pages(prompt.digests) == 1)
        process = pair.daemons["decode"].popen.pid
        os.kill(process, signal.SIGSTOP)
        try:
            until(lambda: not view.up, 3 * lookups.BEAT_SECONDS)
            assert view.held_pages(prompt.digests) == 0, "nobody would load it"
            assert view.daemon == "d"
        finally:
            os.kill(process, signal.SIGCONT)
        until(lambda: view.up and view.held_pages(prompt.digests) == 1)


def test_another_daemon_is_found_without_being_asked_for_a_prompt(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    prompt = new_prompt(PAGE)
    with watching(pair) as view:
        pair.give("decode", StorePages("a", new_name(), prompt, (0, 1)))
        sent(pair.sides["decode"], "a")
        until(lambda: view.held_pages(prompt.digests) == 1)
        pair.stack.kill(pair.daemons["decode"])
        until(lambda: not view.up, 3 * lookups.BEAT_SECONDS)
        until(lambda: "the daemon does not answer" in caplog.text)
        pair.start("decode")
        until(lambda: view.up)
        assert view.held_pages(prompt.digests) == 0 and view.most_pages == POOL_PAGES
        assert caplog.text.count("the daemon does not answer") == 1


def test_its_thread_is_known_to_the_kernel(pair: Pair) -> None:
    def names() -> list[str]:
        found = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found.append(task.joinpath("comm").read_text().strip())
        return found

    assert "kvferry request" in names(), "of the worker's half"
    until(lambda: "kvferry index" not in names())  # the kernel knows a joined thread a moment longer
    with watching(pair):
        assert "kvferry index" in names()
    until(lambda: "kvferry index" not in names())


def test_a_daemon_that_ends_in_order_is_gone_at_once(pair: Pair) -> None:
    with watching(pair) as view:
        pair.daemons["decode"].popen.terminate()
        pair.daemons["decode"].popen.wait(20)
        began = time.monotonic()
        assert not view.up and time.monotonic() - began < lookups.BEAT_SECONDS
        pair.start("decode")
        until(lambda: view.up)


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        (
            worker_pb2.HeldRequest(role=common_pb2.ROLE_PREFILL, namespace_id=bytes(32)),
            grpc.StatusCode.FAILED_PRECONDITION,
            "role: the engine is prefill, this daemon decode",
        ),
        (
            worker_pb2.HeldRequest(role=common_pb2.ROLE_DECODE, namespace_id=bytes(5)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "namespace_id has 5 bytes; it must have 32",
        ),
    ],
)
def test_who_asks_wrongly_is_told_so(
    pair: Pair, request_: worker_pb2.HeldRequest, code: grpc.StatusCode, reason: str
) -> None:
    with grpc.insecure_channel(f"unix:{pair.socket('decode')}") as channel, pytest.raises(grpc.RpcError) as refused:
        worker_pb2_grpc.WorkerStub(channel).Held(request_, timeout=10)
    assert isinstance(refused.value, grpc.Call)
    assert (refused.value.code(), refused.value.details()) == (code, reason)


def test_a_file_that_is_not_what_the_daemon_said_is_not_mapped(tmp_path: Path) -> None:
    file = tmp_path / "index"
    file.write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="has 4096 bytes; the daemon said 8192"):
        lookups._map(str(file), 8192)
    with pytest.raises(ValueError, match="no index of held pages"):
        lookups._map(str(file), 4096)
