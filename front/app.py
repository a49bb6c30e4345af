"""The front end's HTTP: OpenAI's routes over a FrontService.

POST /v1/chat/completions, POST /v1/completions, GET /v1/models[/NAME], GET /health (503 until the servers are up),
GET /kvferry/stats. A client that leaves ends its request on the prefill and the decode server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from http import HTTPStatus

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvferry import tracing
from kvferry.front.bodies import Bodies, BodyRefused
from kvferry.front.edge.exchange import REQUEST_ID_BYTES, request_id_of
from kvferry.front.errors import ApiError, internal, invalid, model_not_found, overloaded
from kvferry.front.formats import ChatFormat, CompletionFormat, Format
from kvferry.front.openai_types import ELSEWHERE, ChatRequest, CompletionRequest, ModelCard, ModelList, parse_request
from kvferry.front.service import ClientCall, Finished, FrontService, Piece, ReplyBegun
from kvferry.front.stats import StatsReport
from kvferry.front.text import Delta
from kvferry.front.vllm import WHOLE_PATHS

ROUTES = ("/v1/chat/completions", "/v1/completions")
MAX_BODY_BYTES = 64 * 2**20  # 1 Mi token ids in JSON are at most 12 MB

_log = logging.getLogger(__name__)


def create_app(service: FrontService) -> FastAPI:
    app = FastAPI(title="kvferry front end", docs_url=None, redoc_url=None, openapi_url=None)
    created = int(time.time())
    bodies = Bodies(MAX_BODY_BYTES, service.config.max_requests)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: HttpRequest) -> Response:
        request = parse_request(ChatRequest, await _body(http, bodies, service.stats.running))
        caller = _caller(http)
        answers = ChatFormat(request, caller.request_id, int(time.time()))
        return _generation(service.run(request, caller), answers, streamed=request.stream)

    @app.post("/v1/completions")
    async def completions(http: HttpRequest) -> Response:
        request = parse_request(CompletionRequest, await _body(http, bodies, service.stats.running))
        caller = _caller(http)
        answers = CompletionFormat(request, caller.request_id, int(time.time()))
        return _generation(service.run(request, caller), answers, streamed=request.stream)

    async def only_before_vllm(http: HttpRequest) -> Response:
        message = f"{http.url.path}: is not served before reference workers; {ELSEWHERE}"
        raise invalid(None, message, code="unsupported_route")

    for path in WHOLE_PATHS:
        app.add_route(path, only_before_vllm, methods=["POST"])

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[_model_card(service, created)])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        card = _model_card(service, created)
        if name != card.id:
            raise model_not_found(name, card.id)
        return card

    @app.get("/health")
    async def health() -> Response:
        service.engines.served()
        return JSONResponse({"status": "ok"})

    @app.get("/kvferry/stats")
    async def stats() -> StatsReport:
        return service.report()

    @app.exception_handler(ApiError)
    async def api_error(_: HttpRequest, error: ApiError) -> Response:
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(http: HttpRequest, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}"
        return _error_response(ApiError(error.status_code, message, type="invalid_request_error"))

    return app


def _caller(http: HttpRequest) -> ClientCall:
    return ClientCall(
        request_id=secrets.token_bytes(REQUEST_ID_BYTES),
        client_id=request_id_of(http.scope),
        traceparent=http.headers.get(tracing.HEADER, ""),
    )


def _model_card(service: FrontService, created: int) -> ModelCard:
    served = service.engines.served()
    return ModelCard(
        id=served.name,
        created=created,
        max_model_len=service.engines.max_tokens(),
        vocab_size=served.tokenizer.vocab_size,
    )


async def _body(http: HttpRequest, bodies: Bodies, running: int) -> bytes:
    """Raises ApiError 413 for a body that is too long, as soon as it is; 429 where it would be one too many."""
    try:
        return await bodies.read(http, running)
    except BodyRefused as refused:
        if refused.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise overloaded(str(refused)) from None
        error = invalid(None, str(refused))
        error.status = refused.status
        raise error from None
    except ClientDisconnect:
        raise invalid(None, "the client left before its request was complete") from None


def _error_response(error: ApiError) -> Response:
    return Response(error.json(), status_code=error.status, media_type="application/json")


def _generation(pieces: AsyncGenerator[Piece, None], bodies: Format, *, streamed: bool) -> GenerationResponse:
    return (StreamedResponse if streamed else WholeResponse)(pieces, bodies)


class GenerationResponse(Response):
    """Sends a generation as it comes. Nothing is sent before the first token, so that a request that fails before it
    gets its own HTTP status; a client that leaves at any time closes the generation."""

    def __init__(self, pieces: AsyncGenerator[Piece, None], bodies: Format) -> None:
        super().__init__()
        self.pieces = pieces
        self.bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.pieces):
            try:
                first = await anext(self.pieces)
                assert isinstance(first, ReplyBegun), f"the first piece of a generation is {first!r}"
            except Exception as error:
                await _error_response(_as_api_error(error))(scope, receive, send)
                return
            await self.serve(first, scope, receive, send)

    async def serve(self, opened: ReplyBegun, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeResponse(GenerationResponse):
    async def serve(self, opened: ReplyBegun, scope: Scope, receive: Receive, send: Send) -> None:
        texts: list[str] = []
        tokens: list[int] = []
        response = None
        try:
            async for piece in self.pieces:
                if isinstance(piece, Delta):
                    texts.append(piece.text)
                    tokens += piece.tokens
                elif isinstance(piece, Finished):
                    texts.append(piece.rest)
                    body = self.bodies.whole(opened, "".join(texts), tokens, piece)
                    response = Response(body, media_type="application/json")
            assert response is not None, "a generation ended without Finished"
        except Exception as error:
            response = _error_response(_as_api_error(error))
        await response(scope, receive, send)


class StreamedResponse(GenerationResponse):
    """Server-sent events. A failure after the first token is an event of its own."""

    async def serve(self, opened: ReplyBegun, scope: Scope, receive: Receive, send: Send) -> None:
        head = Response(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )
        del head.headers["content-length"]
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": head.raw_headers})
        try:
            await _send_events(send, self.bodies.opened(opened))
            async for piece in self.pieces:
                if isinstance(piece, Delta):
                    await _send_events(send, self.bodies.delta(piece))
                elif isinstance(piece, Finished):
                    await _send_events(send, self.bodies.finished(piece))
        except Exception as error:
            await _send_events(send, [_as_api_error(error).json()])
        await _send_events(send, ["[DONE]"])
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_events(send: Send, events: list[str]) -> None:
    if events:
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    _log.error("a request failed unexpectedly", exc_info=error)
    return internal(f"{type(error).__name__}: {error}")


async def _while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work`, and cancels it when the client leaves."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait({working, leaving})
    if not working.cancelled():
        working.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
