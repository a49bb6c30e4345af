"""Imports of commands that must begin quickly: probes run `kvferry health` every few seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvferry
from kvferry.proto.versions import PROTOCOL, PROTOCOL_MIN

CONFIG = {"numpy", "grpc", "torch", "cryptography"}
ASKS_A_DAEMON = {"numpy", "pydantic", "torch", "cryptography", "kvferry._core", "importlib.metadata"}


@pytest.mark.parametrize(
    ("words", "needless"),
    [
        (("--help",), ASKS_A_DAEMON | {"grpc", "rich"}),
        (("config", "show", "--role", "decode"), CONFIG),
        (("health", "unix:/nowhere", "--timeout", "0.05"), ASKS_A_DAEMON | {"rich"}),
        (("stats", "unix:/nowhere"), ASKS_A_DAEMON),
    ],
)
def test_what_a_command_does_not_import(words: tuple[str, ...], needless: set[str]) -> None:
    program = (
        "import atexit, sys; atexit.register(lambda: print('IMPORTED', *sys.modules)); "
        "from kvferry.daemon.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=False
    )
    imported = set(done.stdout.rpartition("IMPORTED ")[2].split())
    assert "kvferry.daemon.cli.main" in imported, done.stderr
    assert not imported & needless


def test_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"kvferry {kvferry.__version__}, protocol {PROTOCOL}, oldest peer {PROTOCOL_MIN}\n"
    assert kvferry.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="has no attribute 'version'"):
        _ = kvferry.version
