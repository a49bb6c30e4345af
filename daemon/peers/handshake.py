"""Hello of two daemons: what must be equal, and the words with which a difference is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import is_name, parse_address
from kvferry.daemon.core.errors import RequestError, precondition
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto.limits import (
    INCARNATION_BYTES,
    MAX_CAPABILITIES,
    MAX_CAPABILITY_CHARS,
    MAX_MESSAGE_BYTES,
    MAX_NAME_CHARS,
)
from kvferry.proto.versions import PROTOCOL, PROTOCOL_MIN
from kvferry.transfer.courier.link import CourierConfig
from kvferry.transfer.geometry.namespace import NamespaceFacts, differences
from kvferry.transfer.geometry.rank_lanes import Lane, lanes_of

if TYPE_CHECKING:
    from kvferry.daemon.sides.side import AnySide

log = logging.getLogger(__name__)

LANES = "lanes"
PART_SUMS = "part-sums"
WAY_BACK = "way-back"
LOOK_UP = "look-up"
HEADER_ROOM = 256  # of a slot, beside the pages: its header, and payloads that begin at multiples of 64 bytes
CAPABILITIES = ("ask-again", "aux", LANES)
REFUSAL = "kvferry-refusal"  # key in the trailing metadata of a refused stream, as proto/peer.proto says
NOT_READY = "not-ready"  # its value where a Hello cannot be answered yet

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
]

# Without SO_REUSEPORT a second daemon on the same port is refused instead of taking half of its calls.
SERVER_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)]


class NotReady(RequestError):
    """UNAVAILABLE: the side has no worker yet, or no pool, and no Hello of its own until then."""

    def __init__(self, message: str) -> None:
        super().__init__(common.ERROR_UNAVAILABLE, message)


def says_not_ready(trailing: Iterable[object]) -> bool:
    """Whether a peer that refused the stream answers and only waits for its worker. A daemon of a release without the
    key never says so: its refusal counts as one whose reason is not known."""
    return (REFUSAL, NOT_READY) in list(trailing)  # of pairs; Metadata itself would look for a key


def hello_of(side: AnySide) -> peer.PeerHello:
    """The side's own Hello. NotReady before its first worker, and while no engine's memory is the pool."""
    if side.tiers.facts is None:
        raise NotReady(f"daemon {side.config.name!r} has no {side.role} worker yet, so its model is not known")
    if not side.tiers.has_pool.is_set():
        raise NotReady(f"daemon {side.config.name!r} has no pool: its {side.role} engine is gone, and its memory")
    return peer.PeerHello(
        protocol=PROTOCOL,
        protocol_min=PROTOCOL_MIN,
        daemon=side.config.name,
        incarnation=side.incarnation,
        role=common.ROLE_DECODE if side.role == "decode" else common.ROLE_PREFILL,
        facts=side.tiers.facts.to_proto(),
        epoch=side.tiers.epoch,
        page_bytes=side.tiers.facts.geometry.page_bytes,
        capabilities=_capabilities(side),
        ranks=side.config.ranks,
        checksums=side.config.checksums == "on",
    )


def _capabilities(side: AnySide) -> tuple[str, ...]:
    sums = (PART_SUMS,) if side.tiers.memory.can_sum else ()
    back = (WAY_BACK,) if has_way_back(side.config) else ()
    look_up = (LOOK_UP,) if back and side.config.look_ups == "on" and side.lends else ()
    return (*CAPABILITIES, *sums, *back, *look_up)


def has_way_back(config: DaemonConfig) -> bool:
    """Whether a side with these settings can fetch (prefill) or send back (decode), and is to."""
    return config.way_back != "off" and not no_way_back(config)


def no_way_back(config: DaemonConfig) -> str:
    """Why a side with these settings can not; empty: it can."""
    return "nothing is kept (reuse is off)" if config.reuse == "off" else ""


def without_effect(config: DaemonConfig) -> str:
    """Why the setting of the way back has none, for the log; empty: it is off, or has."""
    why = no_way_back(config)
    return f"--way-back is {config.way_back} and has no effect: {why}" if why and config.way_back != "off" else ""


def back_lanes(own: peer.PeerHello, theirs: peer.PeerHello, lanes: Callable[[], Sequence[Lane]]) -> Sequence[Lane]:
    """The lanes of their session's way back; none where one of the two has none."""
    both = WAY_BACK in own.capabilities and WAY_BACK in theirs.capabilities
    return lanes() if both else ()


def looks_up(own: peer.PeerHello, theirs: peer.PeerHello) -> bool:
    """Whether the prefill daemon of their session may look up what the decode daemon has cached."""
    return all(each in hello.capabilities for hello in (own, theirs) for each in (WAY_BACK, LOOK_UP))


def check_hello(side: AnySide, hello: peer.PeerHello, where: str) -> None:
    """Checks a peer's Hello: FAILED_PRECONDITION with field, both values and remedy, where the two cannot work
    together."""
    if len(hello.daemon) > MAX_NAME_CHARS:
        raise precondition(f"daemon has {len(hello.daemon)} characters; the bound is {MAX_NAME_CHARS}")
    if not is_name(hello.daemon):
        raise precondition(
            f"daemon is {hello.daemon!r}; it must be letters, digits, '_', '.' or '-', the first a letter or digit"
        )
    _check_lengths(hello)
    us, them = f"{side.role} daemon {side.config.name!r}", f"{hello.daemon!r} at {where}"
    if hello.protocol < PROTOCOL_MIN or hello.protocol_min > PROTOCOL:
        raise precondition(
            f"protocol: {us} speaks {PROTOCOL_MIN} to {PROTOCOL}, {them} {hello.protocol_min} to {hello.protocol}; "
            "install releases of kvferry at most one protocol apart"
        )
    wanted = common.ROLE_PREFILL if side.role == "decode" else common.ROLE_DECODE
    if hello.role != wanted:
        raise precondition(
            f"role: {us} needs {common.Role.Name(wanted)}, {them} is of role {hello.role}; check --peer and --role"
        )
    try:
        theirs = NamespaceFacts.from_proto(hello.facts)
    except ValueError as error:
        raise precondition(f"{them} sent unusable facts: {error}") from error
    assert side.tiers.facts is not None
    for difference in differences(side.tiers.facts, theirs):
        if difference.field != "tenant_salt_digest":  # tenants share a session; their pages never match
            raise precondition(
                f"{difference.field}: {us} has {difference.ours}, {them} has {difference.theirs}; {difference.remedy}"
            )
    page_bytes = side.tiers.facts.geometry.page_bytes
    if hello.page_bytes != page_bytes:
        raise precondition(
            f"page_bytes: {us} has {page_bytes}, {them} {hello.page_bytes}; serve the same model on both"
        )
    _check_ranks(side, hello, us, them)


def _check_lengths(hello: peer.PeerHello) -> None:
    if len(hello.incarnation) != INCARNATION_BYTES:
        raise precondition(f"incarnation has {len(hello.incarnation)} bytes; it must have {INCARNATION_BYTES}")
    if len(hello.capabilities) > MAX_CAPABILITIES:
        raise precondition(f"capabilities has {len(hello.capabilities)} entries; the bound is {MAX_CAPABILITIES}")
    longest = max(map(len, hello.capabilities), default=0)
    if longest > MAX_CAPABILITY_CHARS:
        raise precondition(f"a capability has {longest} characters; the bound is {MAX_CAPABILITY_CHARS}")


def ranks_of(hello: peer.PeerHello) -> int:
    """The speaker's tensor-parallel ranks."""
    return hello.ranks or 1


def part_checksums(own: peer.PeerHello, theirs: peer.PeerHello) -> bool:
    """Whether the parts of their session carry checksums: one of the two wants it and both can. Where one cannot (an
    older release, a GPU whose driver takes no kernels) the session does without, since else it could not be upgraded.
    """
    if not (own.checksums or theirs.checksums):
        return False
    unable = [hello.daemon for hello in (own, theirs) if PART_SUMS not in hello.capabilities]
    if unable:
        log.warning(
            "parts between %s and %s have no checksums, though --checksums is on: %s cannot make them",
            *(own.daemon, theirs.daemon, " and ".join(unable)),
        )
    return not unable


def _check_ranks(side: AnySide, hello: peer.PeerHello, us: str, them: str) -> None:
    assert side.tiers.facts is not None
    ranks = ranks_of(hello)
    senders, receivers = (ranks, side.config.ranks) if side.role == "decode" else (side.config.ranks, ranks)
    try:
        lanes_of(side.tiers.facts.geometry, senders, receivers)
    except ValueError as error:
        raise precondition(f"ranks: {us} has {side.config.ranks}, {them} {ranks}, by which: {error}") from error
    if max(ranks, side.config.ranks) > 1 and LANES not in hello.capabilities:
        raise precondition(
            f"ranks: {us} has {side.config.ranks}, {them} {ranks} and lacks the capability {LANES!r}; "
            "install the same kvferry on both"
        )


def courier_config(config: DaemonConfig, *, receive_slots: int, send_slots: int) -> CourierConfig:
    """receive_slots, send_slots: of each rank. The courier's sockets follow the address that the daemon listens on."""
    host, _ = parse_address(config.listen)
    return CourierConfig(
        slot_bytes=config.slot_bytes + HEADER_ROOM,
        receive_slots=receive_slots * config.ranks,
        send_slots=send_slots * config.ranks,
        bind_host=host,
        port_range=config.ucx_ports,
        tls=config.ucx_tls or None,
        rdma=config.rdma,
        devices=config.devices,
    )
