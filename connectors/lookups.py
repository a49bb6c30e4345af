"""Look-ups at the daemon beside the engine, over its Unix socket: what it holds of a prompt, pinned until released or
for a time. Nothing here waits for an answer."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import grpc

from kvferry.proto import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, common_pb2
from kvferry.proto.limits import MAX_MESSAGE_BYTES

PIN_SECONDS = 30  # the daemon lets go by itself
RETRY_SECONDS = 1.0  # after a daemon was found gone
FACTS_SECONDS = 10.0  # for which a daemon's name and bounds hold: it may come back as another, unnoticed
_log = logging.getLogger(__name__)
_HELD_NOTHING = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED)


class PinLookup:
    """One question; the answer comes on a thread of gRPC's."""

    def __init__(self, owner: PinLookups) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._tokens: int | None = None
        self._pin = 0
        self._released = False

    @property
    def tokens(self) -> int | None:
        return self._tokens

    def release(self) -> None:
        with self._lock:
            self._released = True
            pin, self._pin = self._pin, 0
        if pin:
            self._owner.unpin(pin)

    def answered(self, pin: int, tokens: int) -> None:
        with self._lock:
            self._tokens = tokens
            if not self._released:
                self._pin, pin = pin, 0
        if pin:
            self._owner.unpin(pin)


class PinLookups:
    """The look-ups of one engine; `close` ends them. The methods may be called from one thread."""

    def __init__(self, socket: str, role: common_pb2.Role, namespace_id: bytes, *, timeout_s: float) -> None:
        options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=options)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self._cache = cache_pb2_grpc.CacheStub(self._channel)
        self._role = role
        self._namespace_id = namespace_id
        self._timeout_s = timeout_s
        self._down_until = 0.0
        self._daemon = ""
        self._most_pages = 0
        self._facts_until = 0.0
        self._asking_facts = False
        self._facts_are_old = False  # the answer that is under way may be of another daemon
        self._closed = False
        self._ask_facts()

    @property
    def up(self) -> bool:
        return time.monotonic() >= self._down_until

    @property
    def daemon(self) -> str:
        if self.up:
            self._ask_facts()
        return self._daemon

    @property
    def most_pages(self) -> int:
        return self._most_pages

    def start(self, digests: bytes) -> PinLookup:
        self._ask_facts()
        lookup = PinLookup(self)
        request = admin_pb2.PinRequest(
            role=self._role, namespace_id=self._namespace_id, digests=digests, seconds=PIN_SECONDS
        )
        call = self._admin.Pin.future(request, timeout=self._timeout_s)
        call.add_done_callback(lambda done: self._pinned(lookup, done))
        return lookup

    def ask_again(self) -> None:
        self._facts_until = 0.0
        self._facts_are_old = self._asking_facts
        self._ask_facts()

    def unpin(self, pin: int) -> None:
        if not self._closed:
            self._admin.Unpin.future(
                admin_pb2.UnpinRequest(role=self._role, pin=pin), timeout=self._timeout_s
            ).add_done_callback(_ignore)

    def close(self) -> None:
        """Ends the look-ups; pins that are left end by their time."""
        self._closed = True
        self._channel.close()

    def _pinned(self, lookup: PinLookup, call: grpc.Future[Any]) -> None:
        try:
            reply = call.result()
        except grpc.RpcError as error:
            self._failed(error)
            lookup.answered(0, 0)
        except grpc.FutureCancelledError:
            lookup.answered(0, 0)
        else:
            self._down_until = 0.0
            lookup.answered(reply.pin, reply.pinned_tokens)

    def _failed(self, error: grpc.RpcError) -> None:
        code = error.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            if self.up:
                _log.warning("the daemon does not answer (%s); prompts are computed here meanwhile", code.name)
            self._down_until = time.monotonic() + RETRY_SECONDS
            self._facts_until = 0.0
        elif code not in _HELD_NOTHING:
            _log.warning("look-up: %s: %s", code.name, error.details())

    def _ask_facts(self) -> None:
        """Asks for the daemon's name and bounds if they are old. Those that are known hold until the answer."""
        if self._asking_facts or self._closed or time.monotonic() < self._facts_until:
            return
        self._asking_facts = True
        call = self._cache.Stats.future(cache_pb2.StatsRequest(), timeout=self._timeout_s)
        call.add_done_callback(self._told)

    def _told(self, call: grpc.Future[Any]) -> None:
        try:
            reply = call.result()
            self._most_pages = most_pages(reply, self._role, self._namespace_id)
            self._daemon = reply.daemon
            # Before its first worker has come a daemon has no pages.
            hold = FACTS_SECONDS if self._most_pages else RETRY_SECONDS
            self._facts_until = 0.0 if self._facts_are_old else time.monotonic() + hold
        except grpc.RpcError as error:
            self._failed(error)
        except grpc.FutureCancelledError:
            pass
        finally:
            self._asking_facts = self._facts_are_old = False


def most_pages(stats: cache_pb2.StatsReply, role: common_pb2.Role, namespace_id: bytes) -> int:
    """The most pages that one prompt may have; 0 where this side is not there."""
    for side in stats.sides:
        if side.role == role:
            quotas = [n.hard_quota for n in side.namespaces if n.namespace_id == namespace_id and n.hard_quota]
            return min(side.pool.pages, *quotas) if quotas else side.pool.pages
    return 0


def _ignore(call: grpc.Future[Any]) -> None:
    """A pin that cannot be let go ends by its time."""
    if not call.cancelled():
        call.exception()
