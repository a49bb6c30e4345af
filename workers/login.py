"""A worker's login: calls of the engine service carry a bearer token that the worker's file has. Health has none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from kvferry.secret_files import ApiKeys

_SERVICE = "/kvferry.v1.Engine/"
_REFUSED = "authorization: a token that this worker's --api-keys file has is required, as Bearer TOKEN"


class Login(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Ends calls that carry no known token with UNAUTHENTICATED, before anything of them is read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_SERVICE):
            return handler
        told = dict(handler_call_details.invocation_metadata).get("authorization", "")
        if isinstance(told, str) and self._keys.hold(told):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refuse_stream)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: bytes, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSED)


async def _refuse_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSED)
    yield b""  # never; it makes this a stream
