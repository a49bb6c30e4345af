"""Judges of bench/sglang, and its relay of late parts; no server of SGLang's runs here."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench.scripts import imported

SCRIPTS = ("late_parts", "servers", "compare", "tokens", "check")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    with imported("sglang", SCRIPTS) as modules:
        yield modules


def rows(name: str, ttft: float, late: float, rps: float, chats: int = 32) -> list[dict[str, Any]]:
    """Four turns, of which the first does not count."""
    turn = {"label": name, "conv": chats, "ttft50": ttft, "ttft90": late, "rps": rps, "mb": 72.0, "itl50": 0.004}
    return [{**turn, "turn": 1, "ttft50": 9.0, "rps": 1.0}, *({**turn, "turn": number} for number in (2, 3, 4))]


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (rows("kvferry", 0.42, 0.5, 30.0), ["kvferry, 32 chats: holds: TTFT 1.05 x, requests/s 0.97 x"]),
        (rows("kvferry", 0.43, 0.5, 30.0), ["kvferry, 32 chats: DOES NOT HOLD: TTFT 1.07 x"]),
        (rows("kvferry", 0.30, 0.5, 29.0), ["DOES NOT HOLD: TTFT 0.75 x, requests/s 0.94 x"]),
        (rows("kvferry-2-ranks", 0.30, 0.5, 29.0), []),
        (rows("kvferry-half", 0.45, 0.65, 35.0), ["kvferry-half, 32 chats: holds: TTFT p50 450"]),
        (rows("kvferry-half", 0.451, 0.65, 35.0), ["DOES NOT HOLD"]),
        (rows("kvferry-half", 0.45, 0.651, 35.0), ["DOES NOT HOLD"]),
        (rows("kvferry-half", 0.45, 0.65, 34.9), ["DOES NOT HOLD"]),
    ],
)
def test_what_must_hold(bench: SimpleNamespace, ours: list[dict[str, Any]], said: list[str]) -> None:
    own = [*rows("nixl-off", 0.5, 0.6, 31.0), *rows("nixl-on", 0.4, 0.5, 28.0)]
    lines = bench.compare.verdicts(bench.compare.cells_of([*own, *ours]))
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert part in line


def test_ranks_are_compared_with_ranks(bench: SimpleNamespace) -> None:
    cells = bench.compare.cells_of([*rows("nixl-on-2-ranks", 0.2, 0.5, 40.0), *rows("kvferry-2-ranks", 0.3, 0.5, 40.0)])
    (line,) = bench.compare.verdicts(cells)
    assert line.startswith("kvferry-2-ranks, 32 chats: DOES NOT HOLD: TTFT 1.50 x")


def test_a_reply_is_wrong_where_it_differs_at_no_tie(
    bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = bench.tokens.Reply
    gaps = (1.0, 0.1, 2.0)
    reference = [[reply([1, 2, 3], gaps)] for _ in range(4)]
    found = [[reply([1, 2, 3])], [reply([1, 9, 9])], [reply([1, 2, 9])], []]
    assert bench.tokens.say("a pair", reference, found) == 2
    told = capsys.readouterr().out
    assert "2 of 4 chats differ, 1 not at a tie, the widest gap 2.000; 1 failed" in told
    assert bench.tokens.say("a pair", reference, reference) == 0


def test_ranks_have_gpus_of_their_own_where_there_are_as_many(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = {1: [0], 2: [0, 0], 4: [0] * 4}
    found = {}
    for count, memories in gpus.items():
        monkeypatch.setattr(bench.servers, "gpu_memories", lambda memories=memories: memories)
        found[count] = [bench.servers.gpus_of(name, min(2, count)) for name in ("p", "d", "a")]
    assert found == {1: [[0], [0], [0]], 2: [[0, 1], [0, 1], [0, 1]], 4: [[0, 1], [2, 3], [2, 3]]}
    monkeypatch.setattr(bench.servers, "gpu_memories", lambda: [0])
    with pytest.raises(bench.servers.DidNotStart, match="2 ranks need as many GPUs; there are 1"):
        bench.servers.gpus_of("d", 2)


SENDS = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as sent:
    sent.sendall(b"x" * 3_000_000)
    sent.shutdown(socket.SHUT_WR)
    print(len(sent.recv(100)))
"""


def server_below(port: int, shift: int) -> socket.socket:
    """A server whose port and the relay's, so far above it, are below this one. Both were free a moment ago."""
    for tried in range(port - shift, 20_000, -37):
        try:
            socket.create_server(("127.0.0.1", tried + shift)).close()
            return socket.create_server(("127.0.0.1", tried))
        except OSError:
            continue
    raise AssertionError("no port is free")


def test_what_a_process_sends_is_held_back(
    bench: SimpleNamespace, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no compiler")
    with server_below(32_000, bench.late_parts.SHIFT) as server:
        port = server.getsockname()[1]
        got: list[tuple[float, int]] = []

        def take() -> None:
            taken, _ = server.accept()
            with taken:
                size = 0
                while data := taken.recv(1 << 16):
                    size += len(data)
                got.append((time.monotonic(), size))
                taken.sendall(b"done")

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        with bench.late_parts.LateParts(port, port, tmp_path, [0.5]) as late:
            began = time.monotonic()
            environment = {**os.environ, **late.environment}
            words = [sys.executable, "-c", SENDS, str(port)]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, check=True)
        thread.join(10)
    assert done.stdout.strip() == "4" and got[0][1] == 3_000_000
    assert got[0][0] >= began + 0.5
    assert "1 connections, 2 MiB, at most 0.5 s late" in capfd.readouterr().out
