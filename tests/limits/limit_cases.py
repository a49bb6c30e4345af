"""Bounds of requests and sessions, each with a value at it and one past it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.tls_names import MAX_TLS_NAME_CHARS, MAX_TLS_PEERS, parse_tls_peers
from kvferry.daemon.core.cache import MAX_NAMESPACES, Cache
from kvferry.daemon.core.counters import TransferCounters
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import FailAsk, ToWorker
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import MAX_ASKS_PER_REQUEST, Name, check_priority, check_prompt, name_of
from kvferry.daemon.core.pins import MAX_PINS
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.peers.handshake import check_hello
from kvferry.daemon.peers.session import Session, SessionSetup, SessionTimes
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import (
    MAX_ATTEMPT,
    MAX_AUX_BYTES,
    MAX_METADATA_BYTES,
    MAX_NAME_CHARS,
    MAX_PRIORITY,
    REQUEST_ID_BYTES,
)
from kvferry.transfer.courier.config import CourierConfig
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.receiver import Receiver
from kvferry.transfer.protocol.slots import NOTICE_BYTES, CreditPurse, PartNotice

PAGE = 4
GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=1, dtype="float16", page_size=PAGE)
MAX_TOKENS = 40
NAMESPACE = bytes(32)
NAME = Name(bytes(16), 1)


@dataclass(frozen=True)
class Limit:
    """`give` takes a value: it raises, or returns what says that the value was refused, or nothing."""

    give: Callable[[int], object]
    within: int
    past: int
    refusal: str  # what the refusal says


def named(request_id: int = REQUEST_ID_BYTES, attempt: int = 1) -> None:
    name_of(common.RequestName(request_id=bytes(request_id), attempt=attempt))


def prompt(tokens: int, digests: int | None = None, tail: int | None = None) -> None:
    full, partial = divmod(tokens, PAGE)
    check_prompt(
        tokens=tokens,
        digests=bytes(32 * full if digests is None else digests),
        tail_digest=bytes((32 if partial else 0) if tail is None else tail),
        page_size=PAGE,
        max_tokens=MAX_TOKENS,
    )


def digests(pages: int) -> bytes:
    return b"".join(hashlib.sha256(bytes([i])).digest() for i in range(pages))


class Decoding:
    """A decode core with a ready request of 2 pages that may have 8 new tokens."""

    def __init__(self, queue: int = 8, events: bool = False) -> None:
        cache = Cache(16, PAGE)
        if events:
            cache.log_events()
        self.core = DecodeCore(cache, DecodeLimits(MAX_TOKENS, 64, 30.0, queue))
        self.admit(NAME, 8, 8)
        self.core.aux("p", NAME, b"", 0.0)
        self.core.pages_arrived(1, [0, 1], 0.0)
        self.core.take_effects()

    def admit(self, name: Name, tokens: int, new: int, held: int = 0) -> None:
        request = wire.Admit(
            name=name.to_proto(),
            digests=digests(tokens // PAGE),
            tokens=tokens,
            tail_digest=bytes(32 if tokens % PAGE else 0),
            prefill="p",
            max_new_tokens=new,
            held_tokens=held,
        )
        self.core.admit(1, NAMESPACE, name, request, 60.0, 0.0)

    def failure(self) -> str | None:
        for effect in self.core.take_effects():
            if isinstance(effect, ToWorker) and effect.event.WhichOneof("kind") == "failed":
                return effect.event.failed.error.message
        return None


def new_tokens(count: int) -> None:
    Decoding().admit(Name(bytes(16), 2), 8, count)


def grow(tokens: int) -> str | None:
    decoding = Decoding()
    decoding.core.grow(1, NAME, tokens, 0.0)
    return decoding.failure()


def finish(tokens: int) -> str | None:
    decoding = Decoding()
    decoding.core.grow(1, NAME, 15, 0.0)
    decoding.core.finish(1, NAME, tokens, bytes(32 * (tokens // PAGE - 2)), 0.0)
    return decoding.failure()


def decode_aux(nbytes: int) -> str | None:
    decoding = Decoding()
    decoding.admit(Name(bytes(16), 2), 8, 8)
    decoding.core.aux("p", Name(bytes(16), 2), bytes(nbytes), 0.0)
    return decoding.failure()


def waiting(count: int) -> None:
    """Requests for which there is no page."""
    decoding = Decoding(queue=8)
    decoding.core.cache.pool.allocate(decoding.core.cache.pool.free)
    for number in range(count):
        decoding.admit(Name(bytes(16), 3 + number), 39, 1)


class Prefilling:
    def __init__(self, table: int = 8) -> None:
        self.core = PrefillCore(Cache(16, PAGE), PrefillLimits(table=table))

    def begin(self, name: Name = NAME) -> None:
        begin = wire.Begin(name=name.to_proto(), digests=digests(2), tokens=8)
        self.core.begin(1, NAMESPACE, name, begin, 60.0, 0.0)

    def ask(self, transfer: int = 1, name: Name = NAME, **fields: Any) -> None:
        fields = {"namespace_id": NAMESPACE, "tokens": 8, "last_full_digest": digests(2)[32:], **fields}
        self.core.ask(1, name, peer.Ask(transfer=transfer, name=name.to_proto(), **fields), 60.0, 0.0)

    def failure(self) -> str | None:
        for effect in self.core.take_effects():
            if isinstance(effect, FailAsk):
                return effect.error.message
            if isinstance(effect, ToWorker) and effect.event.WhichOneof("kind") == "failed":
                return effect.event.failed.error.message
        return None


def progress(tokens: int) -> str | None:
    prefilling = Prefilling()
    prefilling.begin()
    prefilling.core.progress(1, NAME, tokens, 0.0)
    return prefilling.failure()


def prefill_aux(nbytes: int) -> str | None:
    prefilling = Prefilling()
    prefilling.begin()
    prefilling.core.progress(1, NAME, 8, 0.0)
    prefilling.core.aux(1, NAME, bytes(nbytes), 0.0)
    return prefilling.failure()


def table(count: int) -> None:
    prefilling = Prefilling()
    for number in range(count):
        prefilling.begin(Name(bytes(16), 1 + number))


def asks(count: int) -> str | None:
    prefilling = Prefilling()
    for transfer in range(1, count + 1):
        prefilling.ask(transfer)
    return prefilling.failure()


def asked(**fields: Any) -> str | None:
    prefilling = Prefilling()
    prefilling.begin()
    prefilling.ask(**fields)
    return prefilling.failure()


def namespaces(count: int) -> None:
    cache = Cache(4, PAGE)
    for number in range(count):
        cache.namespace(number.to_bytes(32, "big"))


def pins(count: int) -> None:
    decoding = Decoding()
    namespace = decoding.core.cache.namespace(NAMESPACE)
    for _ in range(count):
        decoding.core.pins.pin(namespace, digests(2), 60.0)


def session_setup(remote: str) -> SessionSetup:
    """A session that has a slot in each direction, and whose memory nobody touches."""
    return SessionSetup(
        remote=remote,
        courier=CourierConfig(slot_bytes=4096, receive_slots=1, send_slots=1),
        memory=cast(Any, None),
        lanes=lanes_of(GEOMETRY, 1, 1),
        remote_ranks=1,
        checksums=False,
        times=SessionTimes(0.5, 3.0),
    )


def courier_up(**fields: Any) -> None:
    async def hear() -> None:
        session = Session(session_setup("p"))
        up = {"metadata": b"m", "slot_bytes": 4096, "receive_slots": 1, **fields}
        session._dispatch(peer.PeerMessage(courier_up=peer.CourierUp(**up)))

    asyncio.run(hear())


def hello(**fields: Any) -> None:
    """Up to the protocol, which no release speaks."""

    class Side:
        role = "decode"
        config = DaemonConfig(role="decode", name="d")

    said = {"daemon": "x", "protocol": 99, "protocol_min": 99, "incarnation": bytes(16), **fields}
    try:
        check_hello(cast(Any, Side()), peer.PeerHello(**said), "here")
    except RequestError as error:
        if not error.message.startswith("protocol"):
            raise


def credit(slot: int, generation: int = 1) -> None:
    CreditPurse(4).add([cast(Any, CreditOf(slot, generation))])


@dataclass(frozen=True)
class CreditOf:
    slot: int
    generation: int


def notified(slot: int = 0, nbytes: int = NOTICE_BYTES) -> None:
    receiver = Receiver(epoch=1, lanes=lanes_of(GEOMETRY, 1, 1), slot_bytes=128, slots=4, counts=TransferCounters())
    payload = PartNotice(2, 1, slot, 1).pack() if nbytes == NOTICE_BYTES else bytes(nbytes)
    receiver.notification(payload, lambda slot: bytes(64))


def tls_peers(count: int) -> None:
    parse_tls_peers([f"d{number}" for number in range(count)])


def tls_name(characters: int) -> None:
    parse_tls_peers("spiffe://".ljust(characters, "x"))


LIMITS: dict[str, Limit] = {
    "REQUEST_ID_BYTES": Limit(named, 16, 17, "request_id has 17 bytes; it must have 16"),
    "request id, short": Limit(named, 16, 15, "request_id has 15 bytes"),
    "MAX_ATTEMPT": Limit(lambda n: named(attempt=n), MAX_ATTEMPT, MAX_ATTEMPT + 1, "attempt is 65537"),
    "attempt, least": Limit(lambda n: named(attempt=n), 1, 0, "attempt is 0"),
    "MAX_PRIORITY": Limit(check_priority, MAX_PRIORITY, MAX_PRIORITY + 1, "priority is 1001"),
    "priority, least": Limit(check_priority, -MAX_PRIORITY, -MAX_PRIORITY - 1, "priority is -1001"),
    "tokens": Limit(prompt, MAX_TOKENS, MAX_TOKENS + 1, "tokens is 41; it must be 1 to 40"),
    "tokens, least": Limit(prompt, 1, 0, "tokens is 0"),
    "digests": Limit(lambda n: prompt(8, digests=n), 64, 65, "digests has 65 bytes"),
    "tail digest": Limit(lambda n: prompt(9, tail=n), 32, 33, "tail_digest has 33 bytes"),
    "max_new_tokens": Limit(new_tokens, MAX_TOKENS - 8, MAX_TOKENS - 7, "max_new_tokens is 33"),
    "max_new_tokens, least": Limit(new_tokens, 1, 0, "max_new_tokens is 0"),
    "grow": Limit(grow, 16, 17, "tokens 17 needs 5 pages; the promise is 4"),
    "finish": Limit(finish, 15, 16, "tokens is 16; it must be 8 to 15"),
    "MAX_AUX_BYTES": Limit(decode_aux, MAX_AUX_BYTES, MAX_AUX_BYTES + 1, "aux has 65537 bytes"),
    "aux of a worker": Limit(prefill_aux, MAX_AUX_BYTES, MAX_AUX_BYTES + 1, "blob has 65537 bytes"),
    "waiting requests": Limit(waiting, 8, 9, "8 requests wait for admission; the bound is 8"),
    "rendezvous table": Limit(table, 8, 9, "8 requests are in the rendezvous table"),
    "progress": Limit(progress, 8, 9, "tokens is 9; it must be 0 to 8"),
    "asks": Limit(asks, MAX_ASKS_PER_REQUEST, MAX_ASKS_PER_REQUEST + 1, "16 transfers of name"),
    "range of an ask": Limit(lambda n: asked(pages=n), 2, 3, "first_page 0 + pages 3 is past the prompt's 2"),
    "namespace id": Limit(lambda n: asked(namespace_id=bytes(n)), 32, 33, "namespace_id has 33 bytes"),
    "ask's tail digest": Limit(lambda n: asked(tail_digest=bytes(n)), 0, 33, "tail_digest has 33 bytes"),
    "namespaces": Limit(namespaces, MAX_NAMESPACES, MAX_NAMESPACES + 1, "would be one more than 64"),
    "pins": Limit(pins, MAX_PINS, MAX_PINS + 1, "1024 pins are held"),
    "MAX_METADATA_BYTES": Limit(
        lambda n: courier_up(metadata=bytes(n)), MAX_METADATA_BYTES, MAX_METADATA_BYTES + 1, "length is 65537"
    ),
    "courier's slots": Limit(lambda n: courier_up(receive_slots=n), 1024, 1025, "receive_slots is 1025"),
    "courier's slot bytes": Limit(lambda n: courier_up(slot_bytes=n), 1 << 30, (1 << 30) + 1, "slot_bytes is 10737"),
    "courier's slot bytes, least": Limit(lambda n: courier_up(slot_bytes=n), 4096, 4095, "slot_bytes is 4095"),
    "MAX_NAME_CHARS": Limit(
        lambda n: hello(daemon="x" * n), MAX_NAME_CHARS, MAX_NAME_CHARS + 1, "daemon has 129 characters"
    ),
    "credit's slot": Limit(credit, 3, 4, "credit.slot is 4"),
    "credit's generation": Limit(lambda n: credit(0, n), (1 << 64) - 1, 1 << 64, "credit.generation is 18446"),
    "notification's slot": Limit(notified, 3, 4, "notification.slot is 4"),
    "names of peers": Limit(tls_peers, MAX_TLS_PEERS, MAX_TLS_PEERS + 1, "257 names are given; the bound is 256"),
    "a peer's name": Limit(tls_name, MAX_TLS_NAME_CHARS, MAX_TLS_NAME_CHARS + 1, "2049 characters; the bound is 2048"),
    "notification's length": Limit(lambda n: notified(nbytes=n), 32, 33, "notification.length is 33 bytes"),
}
