"""Where the daemon of this machine listens for its operator."""

from __future__ import annotations

import os

from kvferry.daemon.values import runtime_dir


class NoDaemon(Exception):
    """There is none, or there are several."""


def default_socket(role: str | None) -> str:
    """KVFERRY_SOCKET, else that of `kvferry serve` without --socket."""
    named = os.environ.get("KVFERRY_SOCKET")
    if named:
        return named
    roles = ("decode", "prefill", "both") if role is None else (role, "both")
    paths = [os.path.join(runtime_dir(), f"kvferry-{name}.sock") for name in roles]
    found = [path for path in paths if os.path.exists(path)]
    if len(found) != 1:
        problem = f"{', '.join(found)} are all there" if found else f"there is no {' or '.join(paths)}"
        raise NoDaemon(f"{problem}; name one with --socket")
    return found[0]
