"""The address on which the daemon of this machine listens for its operator."""

from __future__ import annotations

import os

from kvferry.daemon.config.values import ConfigError, check_own_folder, runtime_dir

DEFAULT_ADDRESS = "127.0.0.1:7070"  # of a decode daemon without --listen
ADDRESS_HELP = f"$KVFERRY_SOCKET, or the one socket where daemons make it without --socket, or {DEFAULT_ADDRESS}"


class NoDaemon(Exception):
    """No daemon is found, or several are."""


def default_socket(role: str | None) -> str:
    """The socket KVFERRY_SOCKET, else that of `kvferry serve` without --socket."""
    named = os.environ.get("KVFERRY_SOCKET")
    if named:
        return named
    try:
        check_own_folder(runtime_dir())
    except ConfigError as error:
        raise NoDaemon(str(error)) from error
    roles = ("decode", "prefill", "both") if role is None else (role, "both")
    paths = [os.path.join(runtime_dir(), f"kvferry-{name}.sock") for name in roles]
    found = [path for path in paths if os.path.exists(path)]
    if len(found) != 1:
        problem = f"{', '.join(found)} are all there" if found else f"there is no {' or '.join(paths)}"
        raise NoDaemon(f"{problem}; name one with --socket")
    return found[0]


def default_address() -> str:
    """The address for questions that any of a daemon's addresses answers: its socket where there is one, else
    DEFAULT_ADDRESS."""
    try:
        return f"unix:{default_socket(None)}"
    except NoDaemon:
        return DEFAULT_ADDRESS
