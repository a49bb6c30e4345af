"""A command whose extra is not installed says which, and never how Python failed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORKER = ("worker", "decode", "--socket", "/nowhere", "--listen", "127.0.0.1:0", "--model", "/nowhere")
SERVE = ("serve", "--role", "decode", "--listen", "127.0.0.1:0")


def run(missing: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command where a package is missing."""
    begin = f"import sys; sys.modules[{missing!r}] = None; "
    program = begin + "from kvferry.daemon.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("missing", "words", "message"),
    [
        ("torch", WORKER, "kvferry worker: needs the package torch: pip install 'kvferry[workers]'"),
        ("httpx", ("front", "--help"), "kvferry front: needs the package httpx: pip install 'kvferry[front]'"),
        ("fastapi", ("front", "--vllm-decode", "http://127.0.0.1:1"), "package fastapi: pip install 'kvferry[front]'"),
        ("aiohttp", ("loadgen", "--help"), "kvferry loadgen: needs the package aiohttp: pip install 'kvferry[front]'"),
        ("zmq", (*SERVE, "--events", "tcp://127.0.0.1:0"), "pip install 'kvferry[events]'"),
        ("opentelemetry", (*SERVE, "--otel", "http://127.0.0.1:1"), "pip install 'kvferry[otel]'"),
    ],
)
def test_a_missing_extra_is_named(missing: str, words: tuple[str, ...], message: str) -> None:
    done = run(missing, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_needs_no_extra_runs_without_them() -> None:
    for words in (("--help",), ("config", "show", "--role", "decode"), ("completion", "bash")):
        done = run("httpx", *words)
        assert done.returncode == 0, done.stderr
    assert "--vllm-decode" not in run("httpx", "completion", "bash").stdout


def test_a_package_of_the_daemons_own_is_no_extra() -> None:
    assert "ModuleNotFoundError" in run("rich", "stats").stderr
