"""Times of gRPC calls, by method and code. Unary calls only: a stream lasts as long as its session. Shell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc

from kvferry.daemon.core.counters import Histogram

if TYPE_CHECKING:
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor

MAX_SERIES = 256  # pairs of method and code; only methods that are served are counted


class RpcTimes(Interceptor):
    def __init__(self, now: Callable[[], float]) -> None:
        self.histograms: dict[tuple[str, str], Histogram] = {}  # by ("Cache/Stats", "OK")
        self._now = now

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler
        method = "/".join(part.rpartition(".")[2] for part in details.method.strip("/").split("/"))
        return grpc.unary_unary_rpc_method_handler(
            self._timed(method, handler.unary_unary),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _timed(self, method: str, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def timed(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> object:
            begin = self._now()
            failed = grpc.StatusCode.UNKNOWN
            try:
                reply = await cast("Awaitable[object]", step(request, context))
                failed = grpc.StatusCode.OK
                return reply
            except asyncio.CancelledError:
                failed = grpc.StatusCode.CANCELLED
                raise
            finally:
                self._add(method, _code(context, failed), self._now() - begin)

        return timed

    def _add(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        key = (method, code.name)
        if key in self.histograms or len(self.histograms) < MAX_SERIES:
            self.histograms.setdefault(key, Histogram()).add(seconds)


def _code(context: grpc.aio.ServicerContext[Any, Any], otherwise: grpc.StatusCode) -> grpc.StatusCode:
    """The code that the handler set or aborted with; it answers with a number where nothing was set."""
    code = context.code()
    return code if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK else otherwise
