"""The name of a daemon's Unix socket: what a dead daemon left goes, and at the end the own one, never another's."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from kvferry.daemon.config.values import ConfigError, check_own_folder
from kvferry.frames import SUFFIX

MAX_PATH_BYTES = 107 - len(SUFFIX)  # Unix sockets take 107


class SocketFile:
    """The file of a socket that was just bound. It is held open: while it is, no other file gets its number."""

    def __init__(self, path: str) -> None:
        """OSError where it is not there."""
        self.path = path
        self._fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)

    def remove(self) -> None:
        """Removes the file, unless another has the name by now, as a successor that bound it. Idempotent."""
        if self._fd < 0:
            return
        try:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._fd), os.lstat(self.path)):
                    os.unlink(self.path)
        finally:
            os.close(self._fd)
            self._fd = -1


def clear_socket(path: str) -> None:
    """Makes the folder, removes what a dead daemon left, the workers' frame socket too; refuses one that answers, and
    anything that is no socket."""
    if len(path.encode()) > MAX_PATH_BYTES:
        raise ConfigError(f"--socket {path!r} has {len(path.encode())} bytes; it may have {MAX_PATH_BYTES}")
    for each in (path, path + SUFFIX):
        _clear(each)


def _clear(path: str) -> None:
    folder = os.path.dirname(path) or "."
    check_own_folder(folder)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        check_own_folder(folder)  # it may have been made by somebody else just now
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--socket {path!r} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        code = probe.connect_ex(path)
    if code == 0:
        raise ConfigError(f"--socket {path!r}: another daemon answers there")
    if code not in (errno.ECONNREFUSED, errno.ENOENT):
        raise ConfigError(f"--socket {path!r}: {os.strerror(code)}")
    os.unlink(path)
