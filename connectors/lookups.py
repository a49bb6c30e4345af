"""What the daemon beside the engine holds of a prompt, read from memory that the daemon shares: no call, no lock, no
wait. What was found may be gone when it is loaded; then the load brings less, and the engine computes the rest.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from dataclasses import dataclass

import grpc

from kvferry import _core
from kvferry.proto import admin_pb2, admin_pb2_grpc, common_pb2, worker_pb2, worker_pb2_grpc
from kvferry.threads import name_thread
from kvferry.waiting import have_ended

# Answers to a flush that is to be asked for again; FAILED_PRECONDITION: the host tier's file is still being read.
NOT_FREED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.FAILED_PRECONDITION)
BEAT_SECONDS = 1.0  # without a beat after which the daemon is taken for gone; it beats 20 times a second
LOOK_SECONDS = 0.5  # between looks at its beat
STOP_SECONDS = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Daemon:
    name: str
    pages: int
    keeps: bool
    fetch_tokens: int
    index: _core.HeldIndexReader

    @property
    def lives(self) -> bool:
        return time.monotonic_ns() - self.index.last_beat < BEAT_SECONDS * 1e9


class HeldPrefixes:
    """The prefixes that the daemon holds, for one engine; `close` ends it. A thread of its own asks for the daemon's
    index whenever there is none, or its daemon is gone."""

    def __init__(self, socket: str, role: common_pb2.Role, namespace_id: bytes, *, timeout_s: float) -> None:
        self._socket = socket
        self._request = worker_pb2.HeldRequest(role=role, namespace_id=namespace_id)
        self._namespace_id = namespace_id
        self._timeout_s = timeout_s
        self._daemon: _Daemon | None = None
        self._told_gone = False
        self._ask = threading.Event()  # at once, whether the index is old or not
        self._flushed = True  # nothing is to be freed at the daemon
        self._flushes = False  # a flush was ever asked for
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name="kvferry index", daemon=True)
        self._thread.start()

    @property
    def up(self) -> bool:
        """The daemon lives, and its index is here."""
        return (found := self._daemon) is not None and found.lives

    @property
    def daemon(self) -> str:
        """The daemon's name; empty while it is not known."""
        return found.name if (found := self._daemon) is not None else ""

    @property
    def most_pages(self) -> int:
        """The most pages that a prompt may have there; 0 while it is not known."""
        return found.pages if (found := self._daemon) is not None else 0

    @property
    def keeps(self) -> bool:
        """Whether it keeps pages that are handed in; False while that is not known."""
        return (found := self._daemon) is not None and found.keeps

    @property
    def fetch_tokens(self) -> int:
        """Lacking tokens of a prompt from which on the daemon may fetch them; 0: it fetches nothing, as far as is
        known."""
        return found.fetch_tokens if (found := self._daemon) is not None else 0

    def held_pages(self, digests: bytes) -> int:
        """The first pages of a prompt that the daemon can read just now; 32 bytes a page."""
        found = self._daemon
        return found.index.held_pages(digests, self._namespace_id) if found is not None and found.lives else 0

    def set_namespace(self, namespace_id: bytes) -> None:
        """Takes the namespace that the engine's workers say in the place of the one that it was made with: prefixes are
        found there from now on, and a flush that was asked for before is made there, too. Does not wait."""
        if namespace_id == self._namespace_id:
            return
        self._request = worker_pb2.HeldRequest(role=self._request.role, namespace_id=namespace_id)
        self._namespace_id = namespace_id
        if self._flushes:  # of another namespace until now
            self._flushed = False
        self._ask.set()

    def ask_again(self) -> None:
        """Has the daemon's name, bounds and index asked for: it may be another daemon. Does not wait."""
        self._ask.set()

    def flush(self) -> None:
        """Has the daemon free the pages of this namespace that nothing holds, when it answers. Does not wait."""
        self._flushes, self._flushed = True, False
        self._ask.set()

    def close(self) -> None:
        self._closed = True
        self._ask.set()
        have_ended([self._thread], STOP_SECONDS)

    def _follow(self) -> None:
        name_thread("kvferry index")
        while not self._closed:
            if self._ask.is_set() or not self.up:
                self._ask.clear()
                self._find()
            if not self._flushed:
                self._free()
            self._ask.wait(LOOK_SECONDS)

    def _free(self) -> None:
        self._flushed = True  # before it is asked: a flush that is wanted meanwhile is another
        try:
            with _channel(self._socket) as channel:
                stub = admin_pb2_grpc.AdminStub(channel)
                stub.Flush(
                    admin_pb2.FlushRequest(role=self._request.role, namespace_id=self._namespace_id),
                    timeout=self._timeout_s,
                )
        except grpc.RpcError as error:
            # Any other answer is of a daemon that has nothing of this namespace (another one, or made anew), or has
            # freed what it could beside a file that it could not open.
            if error.code() in NOT_FREED:
                self._flushed = False

    def _find(self) -> None:
        """Asks the daemon. What is known of one that does not answer stays."""
        try:
            with _channel(self._socket) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                reply = stub.Held(self._request, timeout=self._timeout_s)
            if reply.file:  # else no worker has come yet
                index = _map(reply.file, reply.nbytes)
                self._daemon = _Daemon(reply.daemon, reply.pages, not reply.drops, reply.fetch_tokens, index)
            self._told_gone = False
        except (grpc.RpcError, OSError, ValueError) as error:
            if not self._told_gone and not self._closed:
                _log.warning("the daemon does not answer; prompts are computed here meanwhile: %s", _reason(error))
            self._told_gone = True


def _channel(socket: str) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    return grpc.insecure_channel(f"unix:{socket}", options=options)


def _map(path: str, nbytes: int) -> _core.HeldIndexReader:
    """OSError, or ValueError where the file is not what the daemon said."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if (size := os.fstat(fd).st_size) != nbytes:
            raise ValueError(f"{path} has {size} bytes; the daemon said {nbytes}")
        return _core.HeldIndexReader(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def _reason(error: Exception) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
