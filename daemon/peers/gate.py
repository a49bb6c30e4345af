"""The gate of the Peer service over TLS: certificates with a name on the list of --tls-peer may call it. Shell."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import grpc

from kvferry.daemon.config.tls_names import kind_of, normal_name
from kvferry.proto import peer_pb2

if TYPE_CHECKING:
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor

log = logging.getLogger(__name__)

PREFIX = f"/{peer_pb2.DESCRIPTOR.services_by_name['Peer'].full_name}/"
NAMES = {"peer_dns": "dns", "peer_uri": "uri", "peer_ip": "ip"}  # alternative names; no kind stands for another
SHOWN = 8
SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

Step = Callable[[Any, Any], Any]


class PeerGate(Interceptor):
    """Refuses with PERMISSION_DENIED before a method of the service sees anything of the call."""

    def __init__(self, daemon: str, allowed: Iterable[str]) -> None:
        self._daemon = daemon
        self._allowed = frozenset(allowed)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(PREFIX):
            return handler
        shape = next(shape for shape in SHAPES if getattr(handler, shape) is not None)
        make = getattr(grpc, f"{shape}_rpc_method_handler")
        return cast(
            "grpc.RpcMethodHandler[Any, Any]",
            make(
                self._guarded(getattr(handler, shape)),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            ),
        )

    def _guarded(self, step: Step) -> Step:
        assert not inspect.isasyncgenfunction(step), "methods of Peer read and write through their context"

        async def guarded(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> object:
            names = names_in(context.auth_context())
            if not self._allowed.intersection(names):
                message = refusal(self._daemon, names)
                log.warning("%s: %s", context.peer(), message)
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)
            return await cast("Awaitable[object]", step(request, context))

        return guarded


def names_in(auth: Mapping[str, Iterable[bytes]]) -> list[str]:
    """The names of the certificate that gRPC has verified, in the form in which they are compared. A name of one kind
    in the form of another, like a name of DNS `spiffe://...`, is left out: on the list the form tells the kind.
    """
    found = []
    for kind, raw in ((kind, raw) for held, kind in NAMES.items() for raw in auth.get(held, ())):
        try:
            name = normal_name(raw.decode())
        except ValueError:  # a name that could not be on the list
            continue
        if kind_of(name) == kind:
            found.append(name)
    return found


def refusal(daemon: str, names: list[str]) -> str:
    held = ", ".join(names[:SHOWN])[:512] or "none"
    return f"the certificate's alternative names are {held}; none is among the --tls-peer (tls_peers) of {daemon!r}"
