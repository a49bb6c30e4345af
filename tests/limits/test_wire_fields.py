"""Every text, every bytes and every list that a message may bring: what bounds it, and the test that goes past it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvferry.proto import admin_pb2, cache_pb2, common_pb2, engine_pb2, peer_pb2, worker_pb2
from tests.limits.limit_cases import LIMITS
from tests.limits.more_cases import MORE

TESTS = Path(__file__).parents[1]


class Case(NamedTuple):
    """Of LIMITS or MORE."""

    name: str


class ByTest(NamedTuple):
    file: str
    name: str


class Words(NamedTuple):
    """Why it needs no bound of its own."""

    why: str


LOOK_UPS = ByTest("system/serving/test_wire.py", "test_look_ups_are_bounded")
HELD = ByTest("connectors/worker_side/test_lookups.py", "test_who_asks_wrongly_is_told_so")
PINS = ByTest("system/operating/test_admin.py", "test_what_the_daemon_refuses_to_pin")
FLUSH_AND_DUMP = ByTest("system/operating/test_admin.py", "test_bounds_of_flush_and_dump")
NAMES = ByTest("daemon/peers/test_discovery.py", "test_what_cannot_be_a_name_is_left_out")
WORKERS = ByTest("limits/test_servers.py", "test_a_workers_name_has_a_length")
REASONS = ByTest("limits/test_servers.py", "test_a_reason_of_any_length_ends_the_request_and_is_not_kept")
PAGE_IDS = ByTest("client/test_client.py", "test_wrong_page_ids_break_the_session")
SHOWN = Words("of an answer to a command, which shows it and ends; bounded by the gRPC message")
DAEMONS = Words("of the worker's own daemon, which maps the same memory and is believed; bounded by the gRPC message")
SERVERS = Words("of a server that the front end was told of, for one request; bounded by the gRPC message")
LENT = ByTest("daemon/core/way_back/test_loans.py", "test_the_pages_of_an_ask_are_bounded")
LOOKED_UP = ByTest("daemon/peers/test_look_up_session.py", "test_a_look_up_that_cannot_be_ends_the_session")
UNREAD = Words("nobody reads it; it goes with its message")

FIELDS: dict[str, Case | ByTest | Words] = {
    # common.proto
    "RequestName.request_id": Case("REQUEST_ID_BYTES"),
    "Error.message": Case("text of an error"),
    "Geometry.dtype": Case("dtype"),
    "Geometry.further": Case("further caches"),
    "CacheShape.dtype": Case("dtype of a further cache"),
    "NamespaceFacts.model": Case("model"),
    "NamespaceFacts.revision": Case("revision"),
    "NamespaceFacts.digest_algorithm": Case("digest algorithm"),
    "NamespaceFacts.root_digest": Case("root digest"),
    "NamespaceFacts.tenant_salt_digest": Case("tenant's salt"),
    "NamespaceFacts.engine_layout": Case("engine layout"),
    "NamespaceFacts.kv_scales": Case("kv scales"),
    "NamespaceFacts.speculative": Case("speculative"),
    # peer.proto
    "PeerHello.daemon": Case("MAX_NAME_CHARS"),
    "PeerHello.incarnation": Case("INCARNATION_BYTES"),
    "PeerHello.capabilities": Case("MAX_CAPABILITIES"),
    "CourierUp.metadata": Case("MAX_METADATA_BYTES"),
    "CourierUp.ranks": Case("courier's ranks"),
    "Credits.credits": Case("credits"),
    "Ask.namespace_id": Case("namespace id"),
    "Ask.last_full_digest": Case("ask's last full digest"),
    "Ask.tail_digest": Case("ask's tail digest"),
    "Ask.traceparent": Case("traceparent"),
    "Ask.digests": LENT,
    "AskEnd.reason": UNREAD,
    "Lookup.namespace_id": LOOKED_UP,
    "Lookup.digests": LOOKED_UP,
    "PeerAux.blob": Case("MAX_AUX_BYTES"),
    # worker.proto, to the daemon
    "WorkerHello.worker": WORKERS,
    "OneRank.engine": Case("engine of a rank"),
    "EnginePool.ranks": Case("ranks of a pool"),
    "EngineRank.memories": Case("memories of a rank"),
    "EngineRank.tensors": Case("tensors of a rank"),
    "SharedFile.name": Case("name of a shared file"),
    "GpuAllocation.ipc_handle": Case("IPC handle"),
    "GpuAllocation.device_uuid": Case("UUID of a GPU"),
    "Admit.digests": Case("digests"),
    "Admit.tail_digest": Case("tail digest"),
    "Admit.prefill": Words("it is one of the daemon's own peers' names, or refused (test_wire: prefill is 'nobody')"),
    "Admit.traceparent": Case("traceparent"),
    "Admit.blocks": Case("blocks of an Admit"),
    "Admit.held_blocks": Case("held blocks of an Admit"),
    "Begin.digests": Case("digests"),
    "Begin.tail_digest": Case("tail digest"),
    "Begin.traceparent": Case("traceparent"),
    "Begin.blocks": Case("blocks of a Begin"),
    "Progress.blocks": Case("blocks of a Progress"),
    "Fetch.blocks": Case("blocks of a Fetch"),
    "Aux.blob": Case("aux of a worker"),
    "Finish.digests": Case("digests of Finish"),
    "PageTokens.tokens": Case("page tokens"),
    "Abort.reason": REASONS,
    "HeldRequest.namespace_id": HELD,
    # worker.proto, to the worker
    "SessionEnd.details": DAEMONS,
    "Welcome.daemon": DAEMONS,
    "Welcome.incarnation": DAEMONS,
    "Welcome.namespace_id": DAEMONS,
    "HeldReply.daemon": DAEMONS,
    "HeldReply.file": DAEMONS,
    "Welcome.segment": DAEMONS,
    "Welcome.session_file": DAEMONS,
    "Welcome.peer_address": DAEMONS,
    "Welcome.rank_pools": DAEMONS,
    "RankPool.segment": DAEMONS,
    "RankPool.ipc_handle": DAEMONS,
    "RankPool.device_uuid": DAEMONS,
    "Admitted.pages": PAGE_IDS,
    "Begun.pages": PAGE_IDS,
    "Grown.pages": PAGE_IDS,
    "Ready.aux": DAEMONS,
    # engine.proto
    "PrefillRequest.tokens": Case("tokens of a prefill"),
    "DecodeRequest.tokens": Case("tokens of a decode"),
    "DecodeRequest.stop_tokens": Case("stop tokens"),
    "DecodeRequest.prefill": Case("prefill of a decode"),
    "DescribeReply.model": Case("a server's model"),
    "DescribeReply.daemon": Case("a server's daemon"),
    "DescribeReply.daemon_address": Case("a server's daemon's address"),
    "DescribeReply.namespace_id": Case("a server's namespace"),
    "DescribeReply.tokenizer": Case("a server's tokenizer"),
    "PrefillReply.chunk_ends": SERVERS,
    "Generated.tokens": SERVERS,
    "Ending.reason": SERVERS,
    # cache.proto and admin.proto, to the daemon
    "LookupRequest.namespace_id": LOOK_UPS,
    "LookupRequest.digests": LOOK_UPS,
    "FlushRequest.namespace_id": FLUSH_AND_DUMP,
    "DumpRequest.namespace_id": FLUSH_AND_DUMP,
    "PinRequest.namespace_id": PINS,
    "PinRequest.digests": PINS,
    # cache.proto and admin.proto, to commands; of StatsReply a daemon that looks for others reads the name and roles
    "StatsReply.daemon": NAMES,
    **dict.fromkeys(
        (
            "StatsReply.sides",
            "StatsReply.rpcs",
            "StatsReply.metrics",
            "StatsReply.stalled",
            "StatsReply.lacks",
            "SideStats.peers",
            "SideStats.namespaces",
            "SideStats.policy",
            "WayBackStats.setting",
            "WayBackStats.off_because",
            "WayBackStats.choices",
            "RequestStats.failures",
            "ReasonCount.reason",
            "TierStats.unstored",
            "TierStats.host_stays",
            "TransferStats.failures",
            "TransferStats.aborts",
            "LatencyStats.stages",
            "StageStats.stage",
            "CopyStats.forced",
            "CopyStats.strategies",
            "CopyStats.fallbacks",
            "StrategyStats.strategy",
            "Histogram.bounds",
            "Histogram.counts",
            "PeerStats.name",
            "PeerStats.address",
            "PeerStats.state",
            "PeerStats.error",
            "NamespaceStats.namespace_id",
            "KvEventStats.endpoint",
            "KvEventStats.replay",
            "KvEventStats.blocks",
            "KvEventStats.cut_off_replays",
            "KvEventCount.event",
            "KvEventCount.medium",
            "DigestFacts.algorithm",
            "DigestFacts.root_digest",
            "BuildInfo.version",
            "BuildInfo.nixl",
            "BuildInfo.python",
            "RpcStats.method",
            "RpcStats.code",
            "TlsStats.broken",
            "DumpReply.nodes",
            "DumpReply.pins",
            "NodeView.namespace_id",
            "NodeView.first_digest",
            "NodeView.last_digest",
            "PinView.namespace_id",
        ),
        SHOWN,
    ),
}


def messages() -> Iterator[Descriptor]:
    """What a method of any service takes or answers with, and what is in it."""
    seen: set[str] = set()
    waiting: list[Descriptor] = []
    for module in (admin_pb2, cache_pb2, common_pb2, engine_pb2, peer_pb2, worker_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                waiting += [method.input_type, method.output_type]
    while waiting:
        message = waiting.pop()
        if message.full_name not in seen:
            seen.add(message.full_name)
            waiting += [field.message_type for field in message.fields if field.message_type is not None]
            yield message


def unbounded() -> set[str]:
    """Fields whose length or count the wire itself does not bound."""
    lengths = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return {
        f"{message.name}.{field.name}"
        for message in messages()
        for field in message.fields
        if field.type in lengths or field.is_repeated
    }


def test_every_field_that_may_be_long_is_in_the_table() -> None:
    assert unbounded() - FIELDS.keys() == set(), "say in FIELDS what bounds them"
    assert FIELDS.keys() - unbounded() == set(), "no message has them"


@pytest.mark.parametrize("field", [name for name, bound in FIELDS.items() if not isinstance(bound, Words)])
def test_what_the_table_names_is_there(field: str) -> None:
    bound = FIELDS[field]
    if isinstance(bound, ByTest):
        assert f"\ndef {bound.name}(" in (TESTS / bound.file).read_text()
    else:
        assert isinstance(bound, Case) and bound.name in LIMITS.keys() | MORE.keys()
