"""Secrets in files, read again when a file changes. No message, log or error names a secret: only its line."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable
from typing import Generic, TypeVar

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1000
MIN_SECRET_CHARS, MAX_SECRET_CHARS = 8, 512
LOOK_SECONDS = 1.0  # a file is looked at again this often, while somebody asks
BEARER = "bearer "

_SECRET = re.compile(r"[!-~]+")  # printable ASCII without spaces: what a header can carry
_Stamp = tuple[int, int, int]
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class SecretFileError(ValueError):
    """A file of secrets that cannot be used; the message names file, line and bound."""


class _Watched(Generic[_T]):
    """A file's contents, as they were when it was last whole: a change that cannot be read is logged, once."""

    def __init__(self, path: str, parse: Callable[[str, list[str]], _T], clock: Callable[[], float]) -> None:
        self._path, self._parse, self._clock = path, parse, clock
        self._stamp = _stamp(path)
        self._value = parse(path, _lines(path))
        self._look_at = clock() + LOOK_SECONDS

    def current(self) -> _T:
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look()
        return self._value

    def _look(self) -> None:
        try:
            stamp = _stamp(self._path)
        except SecretFileError:
            stamp = (0, 0, 0)  # gone
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._value = self._parse(self._path, _lines(self._path))
            _log.info("%s has changed and was read again", self._path)
        except SecretFileError as error:
            _log.error("%s; what it had before stays in use", error)


class ApiKeys:
    """The keys of a file, one a line; empty lines and those that begin with # are none. SecretFileError at first."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = _Watched(path, _key_digests, clock)

    def hold(self, authorization: str) -> bool:
        """Whether an `authorization` header has one of the keys. Takes as long whichever it is, or none."""
        key = authorization[len(BEARER) :] if authorization[: len(BEARER)].lower() == BEARER else ""
        given = _digest(key)
        found = False
        for digest in self._file.current():
            found |= hmac.compare_digest(digest, given)
        return found


class BearerToken:
    """The token in a file, as the header that carries it. SecretFileError at first."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = _Watched(path, _one, clock)

    @property
    def header(self) -> str:
        return f"Bearer {self._file.current()}"


def _stamp(path: str) -> _Stamp:
    try:
        told = os.stat(path)
    except OSError as error:
        raise SecretFileError(f"{path}: {error.strerror or error}") from error
    return told.st_mtime_ns, told.st_ino, told.st_size


def _lines(path: str) -> list[str]:
    """All lines, each empty or a secret."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SecretFileError(f"{path}: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise SecretFileError(f"{path}: has more than {MAX_FILE_BYTES} bytes")
    lines = [line.strip() for line in data.decode("utf-8", "replace").split("\n")]
    lines = ["" if line.startswith("#") else line for line in lines]
    for number, line in enumerate(lines, 1):
        if line and not MIN_SECRET_CHARS <= len(line) <= MAX_SECRET_CHARS:
            bounds = f"{MIN_SECRET_CHARS} to {MAX_SECRET_CHARS}"
            raise SecretFileError(f"{path}: line {number} has {len(line)} characters; it must have {bounds}")
        if line and not _SECRET.fullmatch(line):
            raise SecretFileError(f"{path}: line {number} must be printable ASCII without spaces")
    return lines


def _key_digests(path: str, lines: list[str]) -> tuple[bytes, ...]:
    keys = [line for line in lines if line]
    if not 1 <= len(keys) <= MAX_KEYS:
        raise SecretFileError(f"{path}: has {len(keys)} keys; it must have 1 to {MAX_KEYS}")
    return tuple(map(_digest, keys))


def _one(path: str, lines: list[str]) -> str:
    tokens = [line for line in lines if line]
    if len(tokens) != 1:
        raise SecretFileError(f"{path}: has {len(tokens)} tokens; it must have 1")
    return tokens[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
