"""The load generator against a real front end before scripted servers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvferry.loadgen.files import read_report
from kvferry.loadgen.main import add_arguments, run
from tests.support.front_stack import PAGE_BYTES, PAGE_SIZE, Fault, Stack


@pytest.fixture
def stack() -> Iterator[Stack]:
    with Stack(prefill=1, decode=2) as stack:
        yield stack


def loadgen(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def report_of(stack: Stack, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    stats = [word for server in stack.decode for word in ("--stats", server.address)]
    assert loadgen("--url", stack.url, *stats, "--format", "json", *arguments) == code
    captured = capsys.readouterr()
    assert captured.err == ""  # no progress bar: nobody looks
    report: dict[str, Any] = json.loads(captured.out)
    return report


SMALL = ("--conversations", "3", "--turns", "3", "--user-words", "6", "--max-tokens", "8", "--concurrency", "2")


def test_chat(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(stack, capsys, *SMALL)
    assert (report["requests"], report["failed"], report["skipped"], report["errors"]) == (9, 0, 0, [])
    assert report["output_tokens"] == 9 * 8
    assert report["ttft_ms"]["count"] == report["latency_ms"]["count"] == 9
    assert report["inter_token_ms"]["count"] == 9 * 7
    assert [turn["count"] for turn in report["ttft_by_turn_ms"]] == [3, 3, 3]
    assert 0 < report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"] <= report["latency_ms"]["p99"]
    assert report["cached_tokens"] == report["daemons"]["saved_pages"] * PAGE_SIZE > 0
    assert report["daemons"]["saved_bytes"] == report["daemons"]["saved_pages"] * PAGE_BYTES
    moved = sum(server.moved_pages for server in stack.decode)
    assert report["daemons"]["moved_bytes"] == moved * PAGE_BYTES
    replies = httpx.get(f"{stack.url}/kvferry/stats").json()["replies"]
    assert replies["spliced_replies"] == 3 * (1 + 2)
    again = report_of(stack, capsys, *SMALL, "--seed", "1")
    assert again["daemons"]["moved_pages"] == sum(server.moved_pages for server in stack.decode) - moved


def test_the_same_seed_sends_the_same_requests(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    def prompts() -> list[list[int]]:
        found = sorted(list(request.tokens) for server in stack.decode for request in server.decodes)
        for server in stack.decode:
            server.decodes.clear()
        return found

    runs = []
    for seed in ("5", "5", "6"):
        report_of(stack, capsys, *SMALL, "--system-words", "4", "--seed", seed)
        runs.append(prompts())
    assert runs[0] == runs[1] != runs[2]
    heads = {bytes(prompt[:20]) for prompt in runs[0]}
    assert len(heads) == 1  # the common system prompt
    assert heads.pop().startswith(b"[system]\n")


def test_token_ids(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Turn k matches all pages that turn k - 1 left, and the ids of its reply come back exactly."""
    for server in stack.decode:
        server.reply = lambda prompt: [5000 + i for i in range(20)]
    report = report_of(
        stack,
        capsys,
        *("--api", "completions-tokens", "--user-words", "21", "--max-tokens", "20", "--system-words", "30"),
        *("--conversations", "2", "--turns", "4", "--concurrency", "1"),
    )
    left = [30 + 21 + k * 41 + 20 - 1 for k in range(3)]  # of a turn: prompt + output - 1
    one = sum(tokens // PAGE_SIZE * PAGE_SIZE for tokens in left)
    system = report["cached_tokens"] - 2 * one
    assert system in (0, 30 // PAGE_SIZE * PAGE_SIZE)  # whether the second conversation went to the first one's server
    assert report["output_tokens"] == 2 * 4 * 20
    assert report["prompt_tokens"] == 2 * sum(30 + 21 + k * 41 for k in range(4))


def test_failures_are_counted_and_end_their_conversation(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    for server in stack.decode:
        server.fault = Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "the pool is small")
    report = report_of(stack, capsys, *SMALL, code=1)
    assert (report["requests"], report["failed"], report["skipped"]) == (3, 3, 6)
    assert sum(error["count"] for error in report["errors"]) == 3
    assert "HTTP 429: decode server" in report["errors"][0]["message"]
    assert "the pool is small" in report["errors"][0]["message"]
    assert report["ttft_ms"]["count"] == 0


def test_a_failure_inside_a_stream(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    for server in stack.decode:
        server.reply = lambda prompt: [97, 1 << 40]
    report = report_of(stack, capsys, *SMALL, code=1)
    assert report["failed"] == 3
    assert "decode server" in report["errors"][0]["message"]


def test_table(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert loadgen("--url", stack.url, "--stats", stack.decode[0].address, *SMALL) == 0
    out = capsys.readouterr().out
    for words in (
        "time to first token",
        "inter-token latency",
        "request latency",
        "bytes moved",
        "bytes saved",
        "p90",
        "hit, host",
    ):
        assert words in out


def test_warm_up_is_in_none_of_the_numbers(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(stack, capsys, *SMALL, "--warm-up", "1")
    assert (report["requests"], report["setup"]["warm_up_requests"]) == (6, 3)
    finished = sum(len(server.decodes) for server in stack.decode)
    assert finished == 9
    assert report["cached_tokens"] == report["daemons"]["saved_pages"] * PAGE_SIZE


def test_an_open_loop_counts_from_the_intended_start(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """One request at a time, all meant to start within a millisecond: the last one has waited for the others."""
    words = ("--conversations", "6", "--turns", "1", "--rate", "5000", "--concurrency", "1", "--user-words", "4")
    report = report_of(stack, capsys, *words, "--goodput", "latency:100000", "--arrivals", "constant")
    assert report["requests"] == report["goodput"]["requests"] == 6
    # it began when the fifth was over, whose latency, from the same instant, is above the median
    assert report["late_ms"]["max"] > report["latency_ms"]["p50"] - 5 * 1000 / 5000
    assert report["latency_ms"]["max"] == pytest.approx(1000 * report["duration_s"], rel=0.2)
    assert report["ttft_ms"]["max"] > report["late_ms"]["max"]


def test_clients_and_active_conversations(stack: Stack, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With one client and three conversations open, the turns of the three are mixed."""
    path = tmp_path / "requests.jsonl"
    report_of(stack, capsys, *SMALL, "--concurrency", "1", "--active", "3", "--jsonl", str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["turn"] for line in lines] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    starts, ends = [line["start_s"] for line in lines], [line["start_s"] + line["latency_s"] for line in lines]
    assert all(start >= end for start, end in zip(starts[1:], ends, strict=False))


def test_files_and_comparison(stack: Stack, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        report_of(stack, capsys, *SMALL, "--json", str(tmp_path / f"{name}.json"), "--csv", str(tmp_path / "x.csv"))
    report_of(stack, capsys, *SMALL, "--json", str(tmp_path / "a.json"), "--goodput", "ttft:60000")
    both = ("--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert loadgen(*both, "--plots", str(tmp_path / "both")) == 0
    assert [path.name for path in (tmp_path / "both").iterdir()] == ["compared.png"]
    out = capsys.readouterr().out
    for words in ("goodput, requests/s", "matched tokens", "bytes moved"):  # rows behind one that B has not
        assert words in out
    for words in ("requests/s", "B / A", "time to first token, p99", "1.00x"):
        assert words in out
    assert loadgen("--compare", str(tmp_path / "a.json"), str(tmp_path / "x.csv")) == 1
    assert "x.csv: not a report" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(stack: Stack, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The run is not lost with it."""
    absent, written = tmp_path / "absent" / "report.json", tmp_path / "report.csv"
    assert loadgen("--url", stack.url, *SMALL, "--json", str(absent), "--csv", str(written)) == 1
    captured = capsys.readouterr()
    assert captured.err == f"kvferry loadgen: {absent}: No such file or directory\n"
    assert "request latency" in captured.out
    assert "latency_ms" in written.read_text()


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert loadgen("--url", "http://127.0.0.1:9", "--conversations", "1") == 1
    assert "kvferry loadgen: /v1/models: ClientConnectorError" in capsys.readouterr().err


def test_no_daemon(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert loadgen("--url", stack.url, "--stats", "127.0.0.1:9", "--conversations", "1") == 1
    assert "kvferry loadgen: daemon 127.0.0.1:9: UNAVAILABLE" in capsys.readouterr().err


def test_a_daemon_that_is_gone_by_the_end(stack: Stack, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All else that was measured is reported, and the reason."""
    server = stack.decode[1]

    async def gone() -> None:
        server.stats_fault = Fault(grpc.StatusCode.UNAVAILABLE, "gone")

    for each in stack.decode:
        each.between = gone
    path = tmp_path / "report.json"
    report = report_of(stack, capsys, *SMALL, "--json", str(path), code=1)
    assert (report["requests"], report["failed"], report["daemons"]) == (9, 0, None)
    assert report["daemons_missing"] == f"daemon {server.address}: UNAVAILABLE: gone"
    assert read_report(path).json() == json.dumps(report, indent=2)
    server.stats_fault = None
    assert loadgen("--url", stack.url, "--stats", server.address, *SMALL) == 1
    out = capsys.readouterr().out
    assert "request latency" in out
    assert f"no statistics of the daemons: daemon {server.address}: UNAVAILABLE: gone" in out
    assert loadgen("--compare", str(path), str(path)) == 0
    assert "no statistics of the daemons" in capsys.readouterr().out


def test_a_daemon_that_counts_anew(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """The other daemon's growing counts do not hide it."""
    first, second = stack.decode
    first.saved_pages = second.moved_pages = 1000

    async def anew() -> None:
        first.saved_pages += 5000
        second.moved_pages = 0

    for each in stack.decode:
        each.before = anew
    report = report_of(stack, capsys, *SMALL, code=1)
    assert (report["requests"], report["failed"], report["daemons"]) == (9, 0, None)
    assert f"daemon {second.address}: moved_bytes is" in report["daemons_missing"]
    assert f"and was {1000 * PAGE_BYTES} before: it was started anew" in report["daemons_missing"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--conversations", "0"), "must be a whole number >= 1, got '0'"),
        (("--system-words", "-1"), "value must be >= 0, got -1 (in '-1')"),
        (("--goodput", "p99:3"), "must name ttft, itl, latency, got 'p99:3'"),
        (("--header", "x"), "must be NAME:VALUE, got 'x'"),
        (("--extra", "[1]"), "must be a JSON object, got '[1]'"),
        (("--timeout", "0"), "must be > 0, got '0'"),
        (("--temperature", "nan"), "must be a number >= 0, got 'nan'"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        loadgen("--url", "http://x", *arguments)
    assert message in capsys.readouterr().err
