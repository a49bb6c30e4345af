"""The HTTP side of the front end before vLLM servers.

POST /v1/chat/completions, /v1/completions: split    POST /v1/embeddings, /v1/responses, /tokenize, /detokenize: passed
to a decode server    GET /v1/models, /health, /stats
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import asdict
from http import HTTPStatus

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive

from kvferry import tracing
from kvferry.front.bodies import Bodies, BodyRefused
from kvferry.front.edge.exchange import LEFT, request_id_of
from kvferry.front.edge.metrics import Role
from kvferry.front.upstream.legs import Server
from kvferry.front.vllm import SPLIT_PATHS, WHOLE_PATHS, Caller, VllmFront
from kvferry.front.vllm_body import MAX_BODY_BYTES, Refusal, parse_body
from kvferry.front.vllm_reply import StreamedReply

ROUTES = SPLIT_PATHS + WHOLE_PATHS


def create_app(front: VllmFront) -> Starlette:
    bodies = Bodies(MAX_BODY_BYTES, front.config.max_requests)

    async def completions(request: Request) -> Response:
        try:
            body = parse_body(await bodies.read(request, front.running))
        except BodyRefused as refused:
            front.counts.refused += refused.status == HTTPStatus.TOO_MANY_REQUESTS
            return _error(Refusal(refused.status, str(refused)))
        except Refusal as error:
            return _error(error)
        except ClientDisconnect:
            return _nobody_hears()
        if front.running >= front.config.max_requests:
            front.counts.refused += 1
            return _error(Refusal(429, f"{front.running} requests run; the bound is {front.config.max_requests}"))
        front.running += 1

        def left() -> None:
            front.running -= 1

        try:
            return await _unless_left(request, front.answer(request.scope["path"], body, left, _caller(request)))
        except Refusal as error:
            return _error(error)

    async def models(request: Request) -> Response:
        try:
            reply = await _models(front, request)
        except Refusal as error:
            return _error(error)
        return Response(reply.content, reply.status_code, media_type="application/json")

    async def model(request: Request) -> Response:
        """One of the list, since vLLM has the list only."""
        name = request.path_params["name"]
        try:
            reply = await _models(front, request)
            if reply.status_code != HTTPStatus.OK:
                return Response(reply.content, reply.status_code, media_type="application/json")
            cards = [card for card in reply.json()["data"] if card["id"] == name]
        except Refusal as error:
            return _error(error)
        return JSONResponse(cards[0]) if cards else _error(Refusal(404, f"model: {name!r} is not served here"))

    async def health(request: Request) -> Response:
        """200 where a decode server answers so: it can do all by itself."""
        replies = await asyncio.gather(*map(front.healthy, {server.url for server in front.decode}))
        if any(replies):
            return Response(status_code=200)
        return _error(Refusal(503, "no decode server is well"))

    async def stats(request: Request) -> Response:
        servers = [
            *(_told("prefill", each) for each in front.prefill),
            *(_told("decode", each) for each in front.decode),
        ]
        return JSONResponse({**asdict(front.counts), "running": front.running, "servers": servers})

    return Starlette(
        routes=[
            *(Route(path, completions, methods=["POST"]) for path in ROUTES),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/stats", stats),
        ],
        exception_handlers={HTTPException: _no_such_route},
    )


def _told(role: Role, server: Server) -> dict[str, str | int | None]:
    """What the counts say of a server."""
    told = {"role": role, "url": server.url, "dp_rank": server.place.dp_rank, "running": server.running}
    return {**told, "unready": server.unready}


async def _models(front: VllmFront, request: Request) -> httpx.Response:
    """A decode server's list. Refusal where there is none."""
    authorization = front.authorization(_caller(request).authorization)
    headers = {"authorization": authorization} if authorization else {}
    try:
        return await front.client.get(front.choose_decode(b"").url + "/v1/models", headers=headers)
    except httpx.TransportError as error:
        raise Refusal(503, f"no decode server can be reached: {error}") from error


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _unless_left(request: Request, work: Coroutine[None, None, StreamedReply]) -> Response:
    """The response that `work` gives; `work` is cancelled when the client leaves before."""
    working = asyncio.create_task(work, name="answer")
    leaving = asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        working.cancel()
        await asyncio.wait({working})
        if not working.cancelled() and working.exception() is None:
            await working.result().let_go()
        raise
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait({working, leaving})
    return _nobody_hears() if working.cancelled() else working.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _caller(request: Request) -> Caller:
    headers = request.headers
    return Caller(headers.get(tracing.HEADER, ""), headers.get("authorization", ""), request_id_of(request.scope))


def _nobody_hears() -> Response:
    return Response(status_code=LEFT)


def _error(refusal: Refusal) -> Response:
    kind = "invalid_request_error" if refusal.status < 429 else "service_unavailable_error"
    return JSONResponse({"error": {"message": str(refusal), "type": kind, "code": refusal.status}}, refusal.status)
