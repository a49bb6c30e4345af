"""Addresses that fronts and workers listen on unasked, and what they say of others. Daemons': tests/daemon."""

from __future__ import annotations

import argparse

import pytest

from kvferry.daemon.cli.main import main
from kvferry.listening import Listen, is_loopback, listen

FRONT = ("front", "--prefill", "x:1", "--decode", "x:2")
VLLM = ("front", "--vllm-decode", "http://x:1")
WORKER = ("worker", "decode", "--synthetic", "--socket", "/nowhere/d.sock", "--connect-timeout", "0.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "fe80::1", "::ffff:127.0.0.1", "d0", "127.0.0.1.x"])
def test_what_is_not_loopback_or_only_a_name_of_it(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:8000", "d0:65535"])
def test_an_address_is_said_as_it_was_given(text: str) -> None:
    assert str(listen(text)) == text
    assert listen("[::1]:8000") == Listen("::1", 8000)


@pytest.mark.parametrize("text", ["8000", ":8000", "unix:/run/d.sock", "d0:65536", "d0:-1", "d0:²"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be HOST:PORT with a port of 0 to 65535, got "):
        listen(text)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:8000", "10.0.0.1:8000", "d0:8000"])
@pytest.mark.parametrize("words", [FRONT, VLLM, WORKER], ids=["front", "front of vLLM", "worker"])
def test_others_than_loopback_are_refused(
    words: tuple[str, ...], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--listen", address]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvferry {words[0]}: --listen is {address}: ")
    assert said.endswith("; an address that is not loopback needs --insecure\n")
