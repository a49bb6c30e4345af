"""Where commands without an address look for the daemon of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.daemon.find_daemon import DEFAULT_ADDRESS, default_address


def test_the_one_socket_else_the_default_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_address() == DEFAULT_ADDRESS == "127.0.0.1:7070"
    (tmp_path / "kvferry-prefill.sock").touch()
    assert default_address() == f"unix:{tmp_path}/kvferry-prefill.sock"
    (tmp_path / "kvferry-decode.sock").touch()  # of a pair the decode daemon has the default port
    assert default_address() == DEFAULT_ADDRESS
    monkeypatch.setenv("KVFERRY_SOCKET", "/run/d.sock")
    assert default_address() == "unix:/run/d.sock"
