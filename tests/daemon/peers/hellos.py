"""The first word of a session, as a daemon of the other role says it."""

from __future__ import annotations

from typing import Any

from kvferry.daemon.peers.handshake import CAPABILITIES
from kvferry.proto import peer_pb2 as peer
from tests.simulation.daemons import TENANTS


def hello_from(daemon: str, role: int, fields: dict[str, Any]) -> peer.PeerHello:
    """The Hello of a daemon that goes with the simulation's first tenant, but for `fields`."""
    facts = TENANTS[0]
    said = {
        "protocol": 1,
        "protocol_min": 1,
        "daemon": daemon,
        "incarnation": bytes(16),
        "role": role,
        "facts": facts.to_proto(),
        "epoch": 7,
        "page_bytes": facts.geometry.page_bytes,
        "capabilities": CAPABILITIES,
    }
    return peer.PeerHello(**{**said, **fields})
