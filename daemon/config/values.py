"""Words that settings and commands share: sizes, addresses, devices, names. Nothing here needs the model of all
settings, which takes long to import.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tempfile
from collections.abc import Iterable

from kvferry import addresses, flags
from kvferry.proto.limits import MAX_NAME_CHARS

_SIZE = re.compile(r"^\s*([0-9]{1,20})\s*([KMGT]i?B|B)?\s*$", re.IGNORECASE)
_HALF_SIZE = re.compile(r"^\s*([0-9]{1,20})\s*([KMGT])i?\s*$", re.IGNORECASE)  # as other programs take them
_DAEMONS_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_NAME_CHARS - 1}}}")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class ConfigError(ValueError):
    """A setting that cannot be, named."""


def parse_size(text: str) -> int:
    """Bytes of "4096", "64MiB", "8GiB", "2GB". Raises ConfigError."""
    found = _SIZE.match(text)
    if found is None:
        half = _HALF_SIZE.match(text)
        meant = f"; did you mean {half.group(1)}{half.group(2).upper()}iB?" if half is not None else ""
        raise ConfigError(f"size {text!r} is not a number of bytes, like 4096, 64MiB or 8GiB{meant}")
    return int(found.group(1)) * _UNITS[(found.group(2) or "").upper()]


def size(nbytes: float) -> str:
    """The size for people: 12.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def parse_device(text: str) -> tuple[int, ...]:
    """GPU ids by rank, as `flags.devices` reads them. ConfigError."""
    try:
        return flags.devices(text)
    except ValueError as error:
        raise ConfigError(f"device {error}") from error


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[v6]:port". Raises ConfigError."""
    try:
        return addresses.split(text)
    except ValueError as error:
        raise ConfigError(f"address {text!r} is not {error}") from error


def is_name(text: str) -> bool:
    """Whether a daemon may be called so."""
    return _DAEMONS_NAME.fullmatch(text) is not None


def runtime_dir() -> str:
    """The folder of sockets unless told otherwise: XDG_RUNTIME_DIR, else one of this user in the temporary folder."""
    return os.environ.get("XDG_RUNTIME_DIR") or own_folder()


def own_folder() -> str:
    return os.path.join(tempfile.gettempdir(), f"kvferry-{os.geteuid()}")


def check_own_folder(folder: str) -> None:
    """ConfigError where it is `own_folder` and not this user's alone, since anybody may make one of that name in the
    temporary folder; any other is as whoever named it wants it. One that is not there is no error.
    """
    if folder != own_folder():
        return
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        problem = "is no folder"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}; it must belong to {os.geteuid()}, who runs this"
    elif found.st_mode & 0o077:
        problem = f"has mode {stat.S_IMODE(found.st_mode):04o}; it must be 0700"
    else:
        return
    raise ConfigError(f"{folder} {problem}: remove it, or name another place with --socket or XDG_RUNTIME_DIR")


def nearest(name: str, valid: Iterable[str]) -> str:
    """Words that name the valid name closest to this one; empty if none is close."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
