"""Operators' commands at real daemons: health, doctor, top."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import pytest

from kvferry.daemon.cli import find_daemon
from kvferry.daemon.cli import main as cli
from kvferry.daemon.cli.stack import Process, Stack, lasting_port
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import start_replicas
from tests.support.engines import Engines, settled, stats
from tests.support.stacks import SmallSystem


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def kvferry(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, in this process: each start of Python would cost most of a second."""
    monkeypatch.setenv("COLUMNS", "240")

    def run(*words: str) -> Done:
        capsys.readouterr()
        code = cli.main(words)
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.mark.timeout(120)
def test_health_doctor_and_top_of_a_pair(kvferry: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stack() as stack:
        prefills, decodes = start_replicas(stack, SmallSystem(page_size=16))
        decode, prefill = decodes[0], prefills[0]
        with Engines(prefill, decode) as engines:
            first = engines.turn(list(range(100)), 10)
            assert engines.turn(list(range(100)) + first.output, 10).error is None
        settled(decode)

        for address in (decode.daemon_address, f"unix:{decode.socket}"):
            done = kvferry("health", address)
            assert (done.returncode, done.stdout) == (0, "SERVING\n"), done.stderr
        monkeypatch.setenv("KVFERRY_SOCKET", decode.socket)
        assert kvferry("health").returncode == 0
        assert "decode-0 (decode)" in kvferry("stats").stdout
        monkeypatch.delenv("KVFERRY_SOCKET")

        flags = ["--peer", f"prefill-0={prefill.daemon_address}", "--peer", "gone=127.0.0.1:1"]
        flags += ["--peer", f"wrong={decode.daemon_address}", "--pool-bytes", "1TiB", "--page-size", "16"]
        done = kvferry("doctor", *flags, "--ucx-ports", "24000-24010", "--format", "json")
        assert done.returncode == 1, done.stderr
        found = {finding["what"]: finding for finding in json.loads(done.stdout)}
        assert found["shared memory /dev/shm"]["level"] == "bad"
        assert "pools take 1.0 TiB" in found["shared memory /dev/shm"]["found"]
        assert "--pool-bytes" in found["shared memory /dev/shm"]["remedy"]
        assert "tcp" in found["UCX transports"]["found"].split()
        assert found["courier"]["level"] == "ok"
        peer = found[f"peer prefill-0 {prefill.daemon_address}"]
        assert peer["level"] == "ok" and "protocol 1, pages of 16 tokens (" in peer["found"]
        assert ", pools take 1.0 TiB" in found["memory"]["found"]
        assert "cannot be reached: Connection refused" in found["peer gone 127.0.0.1:1"]["found"]
        assert found[f"peer wrong {decode.daemon_address}"]["found"] == "is no prefill daemon"
        assert all(finding["remedy"] for finding in found.values() if finding["level"] == "bad")

        done = kvferry("top", prefill.daemon_address, decode.daemon_address, "127.0.0.1:1", "--frames", "1")
        assert done.returncode == 0, done.stderr
        row = next(line for line in done.stdout.splitlines() if "decode-0 (decode)" in line)
        assert "45.7%" in row and "0/0" in row and "prefill-0 up 16/16" in row
        assert "UNAVAILABLE" in done.stdout
        done = kvferry("top", decode.daemon_address, "--frames", "2", "--interval", "0.2")
        assert done.returncode == 0
        row = next(line for line in done.stdout.splitlines() if "decode-0 (decode)" in line)
        assert re.search(r"│ +- │ +0/0 ", row), row  # nothing was looked up between the two frames

        assert kvferry("health", decode.daemon_address, "--engine").returncode == 0
        decode.worker.popen.kill()
        deadline = time.monotonic() + 20
        while kvferry("health", decode.daemon_address, "--engine").returncode != 1:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert kvferry("health", decode.daemon_address).returncode == 0


@pytest.mark.nightly
def test_a_daemon_that_drains_is_alive_but_not_ready(kvferry: Command) -> None:
    with Stack() as stack:
        prefills, decodes = start_replicas(
            stack, SmallSystem(page_size=16, worker_flags=["--synthetic-decode-us", "300000"])
        )
        decode = decodes[0]
        with Engines(prefills[0], decode) as engines:
            running = engines._pool.submit(engines.turn, list(range(40)), 12)
            deadline = time.monotonic() + 20
            while stats(decode).requests.running == 0:
                assert time.monotonic() < deadline
            decode.daemon.popen.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            ready, live = kvferry("health", decode.daemon_address), kvferry("health", decode.daemon_address, "--live")
            assert (ready.returncode, ready.stdout) == (1, "NOT_SERVING: it drains\n")
            assert live.returncode == 0
            assert running.result(30).error is None  # what was accepted is finished


def test_nobody_and_wrong_flags(kvferry: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kvferry("health", "127.0.0.1:1").returncode == 2
    assert kvferry("health", "127.0.0.1:1", "--timeout", "0").returncode == 2
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    for command in ("health", "stats"):  # without an address, and where no socket lies: the default port
        monkeypatch.setattr(find_daemon, "DEFAULT_ADDRESS", "127.0.0.1:1")
        done = kvferry(command)
        assert done.returncode == 2 and done.stderr.startswith(f"kvferry {command}: 127.0.0.1:1: UNAVAILABLE"), done
    assert kvferry("top", "127.0.0.1:1", "--frames", "1").returncode == 2
    done = kvferry("top", "127.0.0.1")
    assert done.returncode == 2 and "HOST:PORT" in done.stderr
    done = kvferry("doctor", "--slots", "0")
    assert done.returncode == 2 and "--slots is 0" in done.stderr


@pytest.mark.nightly
def test_prefill_daemons_are_found_by_dns_and_found_again_under_another_name() -> None:
    """`localhost` stands for a headless service: its address has first one prefill daemon, then another."""
    port = lasting_port()
    with Stack() as stack:

        def serve(role: str, name: str, *flags: str) -> Process:
            path = os.path.join(stack.folder, f"{name}.sock")
            words = ["serve", "--role", role, "--name", name, "--socket", path, "--page-size", "16", *flags]
            process = stack.start(name, words)
            stack.ready(process)
            worker = ["worker", role, "--synthetic", "--socket", path, "--listen", "127.0.0.1:0"]
            stack.ready(stack.start(f"{name}-worker", worker))
            return process

        first = serve("prefill", "first", "--listen", f"127.0.0.1:{port}", "--metrics", "off")
        serve("decode", "d", "--listen", "127.0.0.1:0", "--peer-service", f"localhost:{port}")
        with grpc.insecure_channel(f"unix:{stack.folder}/d.sock") as channel:

            def peers() -> dict[str, str]:
                return {peer.name: peer.state for peer in fetch(channel).sides[0].peers}

            def until(wanted: dict[str, str]) -> None:
                deadline = time.monotonic() + 60
                while peers() != wanted:
                    assert time.monotonic() < deadline, f"{peers()}, not {wanted}"
                    time.sleep(0.2)

            until({"first": "up"})
            stack.kill(first)
            serve("prefill", "second", "--listen", f"127.0.0.1:{port}", "--metrics", "off")
            until({"second": "up"})  # the address answers under another name: `first` is forgotten
