"""The daemon of this machine, as commands without an address find it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.daemon import socket_file
from kvferry.daemon.cli import doctor_checks as doctor
from kvferry.daemon.cli.find_daemon import DEFAULT_ADDRESS, NoDaemon, default_address, default_socket
from kvferry.daemon.cli.findings import BAD, OK
from kvferry.daemon.config import values
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import ConfigError


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


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder in a temporary folder of the test's own; it is not there yet."""
    for name in ("KVFERRY_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"kvferry-{os.geteuid()}"


def test_without_a_runtime_folder_the_daemon_makes_one_for_its_user_alone(own: Path) -> None:
    config = DaemonConfig(role="decode")
    assert config.socket == f"{own}/kvferry-decode.sock"
    assert default_address() == DEFAULT_ADDRESS
    before = os.umask(0)
    try:
        socket_file.clear_socket(config.socket)
    finally:
        os.umask(before)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    (finding,) = doctor.daemon_socket(config)
    assert finding.level == OK
    Path(config.socket).touch()
    assert default_address() == f"unix:{config.socket}" and default_socket("decode") == config.socket


def open_to_others(own: Path) -> None:
    own.mkdir()
    own.chmod(0o750)


def a_link(own: Path) -> None:
    (own.parent / "elsewhere").mkdir(mode=0o700)
    own.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("make", "said"),
    [(open_to_others, "has mode 0750; it must be 0700: remove it"), (a_link, "is no folder: remove it")],
)
def test_a_folder_that_others_may_have_made_is_refused(own: Path, make: Callable[[Path], None], said: str) -> None:
    make(own)
    config = DaemonConfig(role="decode")
    Path(config.socket).touch()
    with pytest.raises(ConfigError, match=f"^{own} {said}.*, or name another place with --socket or XDG_RUNTIME_DIR"):
        socket_file.clear_socket(config.socket)
    with pytest.raises(NoDaemon, match=said):
        default_socket("decode")
    assert default_address() == DEFAULT_ADDRESS
    (finding,) = doctor.daemon_socket(config)
    assert finding.level == BAD and said in finding.remedy


def test_a_folder_of_another_user_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.mkdir(mode=0o700)
    stranger = os.stat_result([*own.stat()[:4], os.geteuid() + 1, *own.stat()[5:10]])
    monkeypatch.setattr(values.os, "lstat", lambda path: stranger)
    with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid() + 1}; it must belong to {os.geteuid()}, who"):
        socket_file.clear_socket(DaemonConfig(role="decode").socket)


def test_a_folder_that_somebody_named_is_taken_as_it_is(own: Path) -> None:
    other = own.parent / "named"
    other.mkdir(mode=0o755)
    socket_file.clear_socket(f"{other}/d.sock")
    assert stat.S_IMODE(other.stat().st_mode) == 0o755
