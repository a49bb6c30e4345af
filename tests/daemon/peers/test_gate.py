"""The gate of the Peer service: a certificate with no name on the list reaches no method of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import grpc
import pytest

from kvferry.daemon.peers.gate import PREFIX, PeerGate


class Context:
    def __init__(self, *names: bytes) -> None:
        self._names = names

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {"peer_dns": self._names, "x509_common_name": (b"d0",)}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise PermissionError(f"{code.name}: {details}")


def called(method: str, *names: bytes) -> list[object]:
    """The requests that a method has seen of one call by a certificate of these names."""
    seen: list[object] = []

    async def step(request: object, context: object) -> None:
        seen.append(request)

    async def continuation(details: object) -> Any:
        return grpc.stream_stream_rpc_method_handler(cast(Any, step))

    async def story() -> None:
        details = cast(grpc.HandlerCallDetails, SimpleNamespace(method=method))
        handler = await PeerGate("p", ["d0", "d1"]).intercept_service(continuation, details)
        await cast(Any, handler.stream_stream)("hello", Context(*names))

    asyncio.run(story())
    return seen


@pytest.mark.parametrize("names", [(b"d1",), (b"x", b"d0"), (b"D0",)])
def test_one_name_on_the_list_is_enough(names: tuple[bytes, ...]) -> None:
    assert called(f"{PREFIX}Session", *names) == ["hello"]


@pytest.mark.parametrize("names", [(), (b"d",), (b"x", b"d0.example.org")])
def test_without_one_nothing_of_the_call_is_seen(names: tuple[bytes, ...]) -> None:
    with pytest.raises(PermissionError, match=r"PERMISSION_DENIED: .* none is among the --tls-peer"):
        called(f"{PREFIX}Session", *names)


def test_other_services_have_no_list() -> None:
    assert called("/kvferry.v1.Cache/Stats", b"x") == ["hello"]
