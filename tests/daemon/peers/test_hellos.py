"""Hellos of two daemons: what cannot work together is refused, by field; and who gets no session whatever it says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, NoReturn, cast

import grpc
import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.peers.handshake import CAPABILITIES, LANES, NotReady, check_hello, hello_of
from kvferry.daemon.services import peer as peer_service
from kvferry.daemon.services.peer import PeerService
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.geometry.kv_geometry import CacheShape
from tests.daemon.peers.hellos import hello_from
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, TENANTS, SimPrefill
from tests.simulation.faults import Faults

FACTS, OTHER_TENANT = TENANTS
INDEXED = replace(FACTS, geometry=replace(FACTS.geometry, further=(CacheShape(2, 1, 132, "uint8", 1),)))
DRAFTS = replace(FACTS, speculative="eagle h1", geometry=replace(FACTS.geometry, layers=FACTS.geometry.layers + 1))
WITHOUT_LANES = [capability for capability in CAPABILITIES if capability != LANES]


def prefill(**settings: Any) -> SimPrefill:
    config = DaemonConfig(role="prefill", name="p", page_size=4, **settings)
    side = SimPrefill(Clock(1), config, PLAIN, Faults())
    side.tiers.has_pool.set()
    return side


def hello(**fields: Any) -> peer.PeerHello:
    """A decode daemon's."""
    return hello_from("d", common.ROLE_DECODE, fields)


def test_what_goes_together_is_taken() -> None:
    """Tenants share a session."""
    for said in (hello(), hello(protocol=9), hello(facts=OTHER_TENANT.to_proto()), hello(capabilities=WITHOUT_LANES)):
        check_hello(prefill(), said, "there")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"protocol": 0}, "protocol: prefill daemon 'p' speaks 1 to 1, 'd' at there 1 to 0"),
        ({"protocol": 3, "protocol_min": 2}, "protocol: prefill daemon 'p' speaks 1 to 1, 'd' at there 2 to 3"),
        ({"role": common.ROLE_PREFILL}, "role: prefill daemon 'p' needs ROLE_DECODE"),
        ({"facts": replace(FACTS, model="other").to_proto()}, "model: prefill daemon 'p' has model, 'd' at there"),
        ({"facts": replace(FACTS, root_digest=bytes(32)).to_proto()}, "root_digest: "),
        (
            {"facts": INDEXED.to_proto()},
            "geometry.further: prefill daemon 'p' has none, 'd' at there has 2 layers of 1 x",
        ),
        (
            {"facts": replace(FACTS, kv_scales="5c1e").to_proto()},
            "kv_scales: prefill daemon 'p' has none, 'd' at there has 5c1e; serve a checkpoint with the same scales",
        ),
        (
            {"facts": DRAFTS.to_proto()},
            "speculative: prefill daemon 'p' has none, 'd' at there has eagle h1; .* the same --speculative-config",
        ),
        ({"page_bytes": FACTS.geometry.page_bytes + 1}, "page_bytes: "),
        ({"ranks": 1 << 20}, "ranks: prefill daemon 'p' has 1, 'd' at there 1048576, by which: "),
        ({"ranks": 2, "capabilities": WITHOUT_LANES}, "lacks the capability 'lanes'"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        check_hello(prefill(), hello(**fields), "there")
    assert refused.value.code == common.ERROR_FAILED_PRECONDITION


def test_a_side_without_a_pool_says_no_hello() -> None:
    side = prefill()
    assert hello_of(side).epoch == side.tiers.epoch
    side.tiers.has_pool.clear()
    with pytest.raises(NotReady, match="has no pool"):
        hello_of(side)


class Call:
    """A decode daemon's call."""

    def __init__(self, said: peer.PeerHello | None) -> None:
        self._said = said

    async def read(self) -> peer.PeerMessage:
        if self._said is None:
            await asyncio.Event().wait()
        return peer.PeerMessage(hello=self._said)

    def peer(self) -> str:
        return "there"

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object = ()) -> NoReturn:
        raise PermissionError(f"{code.name}: {details}")


def session_is_refused(side: SimPrefill, said: peer.PeerHello | None, why: str) -> None:
    before = dict(side.sessions)
    with pytest.raises(PermissionError, match=why):
        asyncio.run(asyncio.wait_for(PeerService(side).Session(None, cast(Any, Call(said))), 20))
    assert side.sessions == before


def test_no_session_where_the_hello_is_refused() -> None:
    session_is_refused(prefill(), hello(role=common.ROLE_PREFILL), "FAILED_PRECONDITION: role: ")


def test_no_session_while_the_daemon_drains() -> None:
    side = prefill()
    side.draining = True
    session_is_refused(side, hello(), "UNAVAILABLE: the daemon is shutting down")


def test_no_session_beyond_max_peers() -> None:
    side = prefill(max_peers=2)
    side.sessions = {number: cast(Any, None) for number in (1, 2)}
    session_is_refused(side, hello(), "RESOURCE_EXHAUSTED: 2 peers are connected; --max-peers is 2")


def test_who_says_no_hello_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_service, "HELLO_SECONDS", 0.05)
    session_is_refused(prefill(), None, r"DEADLINE_EXCEEDED: no hello within 0\.05 s")
