"""Daemons of two releases, of which each may be the newer; and a system that is rolled over under load."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest

from kvferry.daemon.cli.stack import Process, lasting_port
from kvferry.daemon.cli.system import Replica, start_replicas
from kvferry.proto.versions import PROTOCOL
from tests.support.engines import Engines, settled, wait_until
from tests.support.releases import MixedStack, Other, installed, last_release, speaking, version_of
from tests.support.stacks import SmallSystem

SPEC = SmallSystem(page_size=16)
NAMES = ("prefill-0", "decode-0")


def chats(others: dict[str, Other]) -> tuple[Replica, Replica]:
    """Three turns of a pair, of which the later ones move their own pages alone."""
    with MixedStack(others) as stack:
        (prefill,), (decode,) = start_replicas(stack, SPEC)
        with Engines(prefill, decode) as engines:
            tokens, held = list(range(100)), 0
            for _ in range(3):
                answer = engines.turn(tokens, 12)
                assert answer.error is None, answer.details
                assert len(answer.output) == 12 and answer.matched == held
                held = (len(tokens) + 12 - 1) // 16 * 16  # the KV of the last token is never computed
                tokens = [*tokens, *answer.output, *range(50)]
        settled(decode)
    return prefill, decode


@pytest.mark.parametrize("newer", ["prefill-0", pytest.param("decode-0", marks=pytest.mark.nightly)])
@pytest.mark.timeout(120)
def test_a_release_of_the_next_protocol_works_with_this_one(newer: str) -> None:
    chats({newer: speaking(PROTOCOL + 1, PROTOCOL)})


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_releases_two_protocols_apart_refuse_each_other() -> None:
    with MixedStack({"prefill-0": speaking(PROTOCOL + 2, PROTOCOL + 1)}) as stack:
        (prefill,), (decode,) = start_replicas(stack, SPEC)
        with Engines(prefill, decode) as engines:
            answer = engines.turn(list(range(100)), 4, deadline_s=5)
        assert answer.error is not None
        said = decode.daemon.tail(200)
        assert f"speaks {PROTOCOL + 1} to {PROTOCOL + 2}" in said and "at most one protocol apart" in said, said


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = last_release(tmp_path_factory.mktemp("last"))
    assert version_of(python).startswith("kvferry ")
    return python


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("older", NAMES)
def test_the_last_release_works_with_this_one(older: str, last: Path) -> None:
    chats({older: installed(last)})


REPLACED = ("prefill-0", "decode-0", "prefill-1", "decode-1")
CHAT = "/v1/chat/completions"


class Load:
    """Chats of several turns, one behind the other on each thread, until it is left."""

    def __init__(self, url: str, threads: int) -> None:
        self._url, self._over = url, threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._chat, args=(i,)) for i in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)

    def _chat(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            chat = 0
            while not self._over.is_set():
                chat += 1
                messages: list[dict[str, str]] = []
                for turn in range(4):
                    messages.append({"role": "user", "content": f"{number} {chat} {turn} " + "word " * 20})
                    reply = client.post(CHAT, json={"messages": messages, "max_tokens": 8, "stream": turn % 2 == 1})
                    whole = reply.status_code == 200 and ("[DONE]" in reply.text or turn % 2 == 0)
                    with self._lock:
                        self.answered += whole
                        if not whole:
                            self.failed.append(f"{reply.status_code}: {reply.text[-300:]}")
                    messages.append({"role": "assistant", "content": "yes"})
                    time.sleep(0.05)


def roll(older: Other | None, newer: Other | None) -> None:
    """One replica after the other, daemon and worker, ends in order and begins again at its own addresses, as the newer
    release; None is this one. No request fails."""
    with MixedStack(dict.fromkeys(REPLACED, older) if older else {}) as stack:
        rolled = Rolled(stack)
        with Load(rolled.url, threads=4) as load:
            for name in REPLACED:
                before = load.answered
                stack.others.pop(name, None)
                if newer is not None:
                    stack.others[name] = newer
                rolled.replace(name)
                wait_until(lambda before=before: load.answered >= before + 20, 60.0, f"answers with the new {name}")
    assert load.failed == [] and load.answered >= 80


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_system_is_rolled_over_to_the_next_protocol_under_load_without_a_failed_request() -> None:
    roll(None, speaking(PROTOCOL + 1, PROTOCOL))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_system_is_rolled_over_from_the_last_release_under_load_without_a_failed_request(last: Path) -> None:
    roll(installed(last), None)


class Rolled:
    """Two replicas of each role behind a front end, at addresses that last."""

    def __init__(self, stack: MixedStack) -> None:
        self._stack = stack
        self._ports = {name: (lasting_port(), lasting_port()) for name in REPLACED}
        self._running: dict[str, tuple[Process, Process]] = {}
        for name in sorted(REPLACED, reverse=True):  # prefill first
            self._start(name)
        workers = [(name.partition("-")[0], f"127.0.0.1:{self._ports[name][1]}") for name in REPLACED]
        words = ["front", "--listen", "127.0.0.1:0", *(word for role, at in workers for word in (f"--{role}", at))]
        self.url = f"http://{stack.ready(stack.start('front', words))}"

    def _start(self, name: str) -> None:
        role = name.partition("-")[0]
        daemon_port, worker_port = self._ports[name]
        socket = f"{self._stack.folder}/{name}.sock"
        own = [
            "--name",
            name,
            "--socket",
            socket,
            "--page-size",
            "16",
            "--pool-bytes",
            str(64 << 20),
            "--metrics",
            "off",
        ]
        prefills = [each for each in REPLACED if each.startswith("prefill")]
        peers = [word for each in prefills for word in ("--peer", f"{each}=127.0.0.1:{self._ports[each][0]}")]
        words = ["serve", "--role", role, "--listen", f"127.0.0.1:{daemon_port}", *own]
        daemon = self._stack.start(name, words + (peers if role == "decode" else []))
        self._stack.ready(daemon)
        words = ["worker", role, "--synthetic", "--socket", socket, "--listen", f"127.0.0.1:{worker_port}"]
        worker = self._stack.start(f"{name}-worker", [*words, "--synthetic-decode-us", "5000"])
        self._stack.ready(worker)
        self._running[name] = (daemon, worker)

    def replace(self, name: str) -> None:
        """Worker first: it finishes what runs, and its daemon is still there for that."""
        daemon, worker = self._running[name]
        assert self._stack.stop(worker) == 0, worker.tail()
        assert self._stack.stop(daemon) == 0, daemon.tail()
        self._start(name)
