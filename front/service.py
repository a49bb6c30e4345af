"""One request through the front end: prompt, route, the two legs, text."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import NamedTuple, ParamSpec, TypeVar

from kvferry import tracing
from kvferry.channels import ClientTls
from kvferry.front.chat import ChatMessage, ChatTemplateError, Tokenizer
from kvferry.front.edge.metrics import AloneReason, FrontMetrics
from kvferry.front.engines import EngineLink, Engines, ServedModel
from kvferry.front.errors import ApiError, invalid, model_not_found, overloaded, unavailable
from kvferry.front.legs import Generated, LegEvent, LegPaused, LegsRequest, LegStarted, run_legs
from kvferry.front.lookup import Lookups
from kvferry.front.openai_types import ChatRequest, CompletionRequest
from kvferry.front.reply_memory import ChatPrompt, ChatPrompts, ReplyMemory, SpliceCounts
from kvferry.front.routing import (
    DecodeCandidate,
    Lookup,
    PrefillCandidate,
    RoutingRule,
    choose_decode,
    choose_prefill,
    pages_needed,
)
from kvferry.front.stats import FrontStats, LookupsReport, RepliesReport, ServerReport, StatsReport
from kvferry.front.text import Delta, ReplyText
from kvferry.proto import engine_pb2
from kvferry.proto.limits import REQUEST_ID_BYTES
from kvferry.secret_files import BearerToken

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
COMES_SECONDS = 5.0  # that a request waits for a decode server where none is up: one may have come since it was asked
DECODE_SERVERS = 3  # that a request is given to at most: it may be the request that ends them

_log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

Request = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    prefill: tuple[str, ...]  # addresses
    decode: tuple[str, ...]
    model_name: str | None = None  # None: as the first server says
    tokenizer: str | None = None
    first_token_s: float = 60.0
    next_token_s: float = 30.0
    lookup_s: float = 0.5
    max_requests: int = 1024
    chat_max_tokens: int = 1024  # where a chat request gives none
    reply_entries: int = 16_384
    reply_tokens: int = 8 * 2**20
    rule: RoutingRule = field(default_factory=RoutingRule)
    daemon_tls: ClientTls | None = None  # of look-ups
    engine_token: BearerToken | None = None  # sent to the servers


class ClientCall(NamedTuple):
    """A client's request, by its names."""

    request_id: bytes  # daemons' and servers', 16 bytes
    client_id: str = ""  # x-request-id, carried to both servers
    traceparent: str = ""  # of the client's span, if it has one


class ReplyBegun(NamedTuple):
    """The first token is there."""

    model: str
    prompt_tokens: list[int]


class Finished(NamedTuple):
    reason: str  # "stop" or "length"
    rest: str  # the last of the text
    prompt_tokens: int
    output_tokens: int
    started: LegStarted
    decode: str
    prefill: str | None
    replies: SpliceCounts


Piece = ReplyBegun | Delta | Finished


class Route(NamedTuple):
    decode: EngineLink
    prefill: EngineLink | None  # None: the decode server computes what it lacks
    alone: AloneReason | None = None  # why so


@dataclass(slots=True)
class _Placed:
    """The servers that have a request now. It is counted once as one without prefill, wherever it goes."""

    service: FrontService
    route: Route
    counted: bool = False

    def elsewhere(self, failed: EngineLink) -> EngineLink | None:
        """Another prefill server, for a request that failed at this one; None: decode is to compute it."""
        others = [link for link in self.service.engines.prefill if link.up and link is not failed]
        if not others:
            return None
        self.service.stats.tried_again += 1
        return others[choose_prefill([PrefillCandidate(link.outstanding, link.assigned) for link in others])]

    def alone(self) -> None:
        """Told that the request's prefill servers are away."""
        self.count("prefill_failed")

    def count(self, reason: AloneReason | None) -> None:
        if reason is None or self.counted:
            return
        self.counted = True
        stats = self.service.stats
        stats.local_prefill += reason != "prefill_failed"
        stats.decode_alone += reason != "short"
        self.service.metrics.alone(reason)


class FrontService:
    def __init__(self, config: ServiceConfig, *, clock: Callable[[], float]) -> None:
        self.config = config
        self.metrics = FrontMetrics()
        self.engines = Engines(
            prefill=config.prefill,
            decode=config.decode,
            model_name=config.model_name,
            tokenizer=config.tokenizer,
            token=config.engine_token,
        )
        self.lookups = Lookups(deadline_s=config.lookup_s, clock=clock, tls=config.daemon_tls)
        self.stats = FrontStats()
        self._memory = ReplyMemory(entries=config.reply_entries, tokens=config.reply_tokens)
        # Owns the memory: prompts are built and replies remembered here, in the order in which they were handed over.
        self._prompts = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    async def close(self) -> None:
        await self.engines.close()
        await self.lookups.close()
        self._prompts.shutdown()

    async def run(self, request: Request, caller: ClientCall) -> AsyncGenerator[Piece, None]:
        """Runs a request: ReplyBegun, Delta..., Finished. Raises ApiError; closing the iterator before its end aborts
        the request."""
        stats = self.stats
        if stats.running >= self.config.max_requests:
            raise overloaded(f"{stats.running} requests are running, the bound is {self.config.max_requests}")
        stats.requests += 1
        stats.running += 1
        finished = False
        try:
            parent = tracing.checked(caller.traceparent)
            with tracing.span("request", parent, "server", request_id=caller.request_id.hex()) as span:
                async with aclosing(self._run(request, caller, span)) as pieces:
                    async for piece in pieces:
                        finished = isinstance(piece, Finished)
                        stats.finished += finished
                        yield piece
        except (asyncio.CancelledError, GeneratorExit):
            stats.cancelled += not finished
            raise
        except BaseException:
            stats.failed += 1
            raise
        finally:
            stats.running -= 1

    async def _run(self, request: Request, caller: ClientCall, span: tracing.Span) -> AsyncGenerator[Piece, None]:
        await self.engines.one_comes(min(COMES_SECONDS, self.config.first_token_s))
        served = self.engines.served()
        if request.model is not None and request.model != served.name:
            raise model_not_found(request.model, served.name)
        prompt = await self._prompt(request, served.tokenizer)
        max_new_tokens = self._max_new_tokens(request, len(prompt.tokens))
        stop_tokens = () if request.ignore_eos else served.tokenizer.stop_tokens
        with tracing.span("route", span.traceparent):
            route = await self._route(served, prompt.tokens, max_new_tokens, warmup=request.kvferry_warmup)
        span.set(prompt_tokens=len(prompt.tokens))
        legs = LegsRequest(
            request_id=caller.request_id,
            tokens=prompt.tokens,
            sampling=_sampling(request),
            max_new_tokens=max_new_tokens,
            stop_tokens=stop_tokens,
            first_token_s=self.config.first_token_s,
            next_token_s=self.config.next_token_s,
            priority=request.priority,
            warmup=request.kvferry_warmup,
            traceparent=span.traceparent,
            client_id=caller.client_id,
            metrics=self.metrics,
        )
        self.stats.add_replies(prompt.counts)
        self.stats.prompt_tokens += len(prompt.tokens)
        reply = ReplyText(served.tokenizer, stop_tokens=stop_tokens, stops=request.stop)
        started = LegStarted(0, 0, 0, 0)
        reason = "stop"
        placed = _Placed(self, route)
        async with aclosing(self._anywhere(served, legs, placed)) as events:
            async for event in events:
                if isinstance(event, LegStarted):
                    started = event
                    self._count_started(started)
                elif isinstance(event, Generated):
                    if not reply.tokens:
                        yield ReplyBegun(served.name, prompt.tokens)
                    delta = reply.feed(event.tokens)
                    self.stats.output_tokens += len(delta.tokens)
                    yield delta
                    if reply.stopped:
                        break
                elif isinstance(event, LegPaused):
                    self.stats.paused += 1
                else:
                    reason = event.reason
        if not reply.tokens:  # a server may end a reply before its first token
            yield ReplyBegun(served.name, prompt.tokens)
        rest = reply.finish()
        if isinstance(request, ChatRequest) and not request.kvferry_warmup:
            exact = reply.exact()
            await self._in_prompts(self._memory.remember, prompt.tokens, exact.text, exact.tokens)
        yield Finished(
            reason="stop" if reply.stopped else reason,
            rest=rest,
            prompt_tokens=len(prompt.tokens),
            output_tokens=len(reply.tokens),
            started=started,
            decode=placed.route.decode.address,
            prefill=None if placed.route.prefill is None else placed.route.prefill.address,
            replies=prompt.counts,
        )

    async def _anywhere(
        self, served: ServedModel, legs: LegsRequest, placed: _Placed
    ) -> AsyncGenerator[LegEvent, None]:
        """The request's events. A decode server that is away before it has said anything is left for another one."""
        clock = asyncio.get_running_loop().time
        first_token_at = clock() + legs.first_token_s
        left: list[EngineLink] = []
        while True:
            decode, prefill, alone = placed.route
            placed.count(alone)
            elsewhere = len(left) + 1 < DECODE_SERVERS and any(
                link.up and link is not decode and link not in left for link in self.engines.decode
            )
            begun = False
            try:
                async with aclosing(run_legs(legs, decode, prefill, placed, other_decode=elsewhere)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except ApiError as error:
                away = error.status == HTTPStatus.SERVICE_UNAVAILABLE and not error.of_prefill
                left.append(decode)
                if begun or not away or len(left) >= DECODE_SERVERS or clock() >= first_token_at:
                    raise
                if not await self.engines.one_comes(min(COMES_SECONDS, first_token_at - clock()), left):
                    raise
                try:
                    placed.route = await self._route(
                        served, legs.tokens, legs.max_new_tokens, warmup=legs.warmup, without=left
                    )
                except ApiError:  # the others have gone meanwhile
                    raise error from None
                self.stats.moved += 1
                # Another name: a daemon may still have the first one, and end it now.
                again = replace(
                    legs,
                    request_id=secrets.token_bytes(REQUEST_ID_BYTES),
                    first_token_s=max(0.001, first_token_at - clock()),
                )
                _log.info("request %s goes on as %s: %s", legs.request_id.hex(), again.request_id.hex(), error)
                legs = again

    async def _prompt(self, request: Request, tokenizer: Tokenizer) -> ChatPrompt:
        if isinstance(request, ChatRequest):
            messages = [ChatMessage(message.role, message.content) for message in request.messages]
            try:
                prompt = await self._in_prompts(ChatPrompts(tokenizer, self._memory).build, messages)
            except ChatTemplateError as error:
                raise invalid("messages", str(error)) from error
        elif isinstance(request.prompt, str):
            prompt = ChatPrompt(await self._in_prompts(tokenizer.encode_prompt, request.prompt), SpliceCounts())
        else:
            _check_tokens(request.prompt, tokenizer.vocab_size)
            prompt = ChatPrompt(request.prompt, SpliceCounts())
        if not prompt.tokens:
            raise invalid(_prompt_field(request), f"{_prompt_field(request)}: must have at least 1 token, got 0")
        return prompt

    def _max_new_tokens(self, request: Request, prompt_tokens: int) -> int:
        bound = self.engines.max_tokens()
        room = bound - prompt_tokens
        asked = request.output_bound
        if room < 1:
            name = _prompt_field(request)
            message = f"{name}: {prompt_tokens} tokens; prompt and output together may have {bound}"
            raise invalid(name, message, code="context_length_exceeded")
        if asked is None:
            default = self.config.chat_max_tokens if isinstance(request, ChatRequest) else COMPLETION_MAX_TOKENS
            return min(default, room)
        if asked > room:
            message = (
                f"max_tokens: must be <= {room} behind a prompt of {prompt_tokens} tokens "
                f"(prompt and output together may have {bound}), got {asked}"
            )
            raise invalid("max_tokens", message, code="context_length_exceeded")
        return asked

    async def _route(
        self,
        served: ServedModel,
        tokens: list[int],
        max_new_tokens: int,
        *,
        warmup: bool,
        without: Sequence[EngineLink] = (),
    ) -> Route:
        links = [link for link in self.engines.decode if link.up and link not in without]
        local = min((_local_prefill_max_tokens(link) for link in links), default=0)
        lookups: list[Lookup | None] = [None] * len(links)
        # Nothing of a warm-up is matched, whatever its servers hold.
        if not warmup and (len(links) > 1 or (len(links) == 1 and 0 < local < len(tokens))):
            lookups = await self.lookups.ask(links, served, tokens)
        # No await from here to the counting of the request at its servers: the next one must see it.
        candidates = [
            DecodeCandidate(link.outstanding, link.assigned, lookup)
            for link, lookup in zip(links, lookups, strict=True)
        ]
        prefills = [link for link in self.engines.prefill if link.up]
        if not candidates:
            raise unavailable(f"the servers are not up: {self.engines.complaints()}")
        pages = pages_needed(len(tokens), max_new_tokens, served.page_size)
        chosen = choose_decode(candidates, pages=pages, page_size=served.page_size, rule=self.config.rule)
        unmatched = len(tokens) - candidates[chosen].matched_tokens
        if unmatched <= _local_prefill_max_tokens(links[chosen]):
            return Route(links[chosen], None, "short")
        if not prefills:
            return Route(links[chosen], None, "no_prefill")
        prefill = choose_prefill([PrefillCandidate(link.outstanding, link.assigned) for link in prefills])
        return Route(links[chosen], prefills[prefill])

    def _count_started(self, started: LegStarted) -> None:
        self.stats.matched_tokens += started.matched_tokens
        self.stats.delta_pages += started.delta_pages
        self.stats.delta_bytes += started.delta_bytes

    async def _in_prompts(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await asyncio.wrap_future(self._prompts.submit(function, *args, **kwargs))

    def report(self) -> StatsReport:
        stats, replies, lookups = self.stats, self.stats.replies, self.lookups.counts
        ready = self.engines.ready
        return StatsReport(
            ready=ready,
            model=self.engines.served().name if ready else None,
            requests=stats.requests,
            running=stats.running,
            finished=stats.finished,
            failed=stats.failed,
            cancelled=stats.cancelled,
            local_prefill=stats.local_prefill,
            paused=stats.paused,
            tried_again=stats.tried_again,
            moved=stats.moved,
            decode_alone=stats.decode_alone,
            prompt_tokens=stats.prompt_tokens,
            matched_tokens=stats.matched_tokens,
            output_tokens=stats.output_tokens,
            delta_pages=stats.delta_pages,
            delta_bytes=stats.delta_bytes,
            replies=RepliesReport(
                spliced_replies=replies.spliced_replies,
                spliced_tokens=replies.spliced_tokens,
                lost_replies=replies.lost_replies,
                lost_tokens=replies.lost_tokens,
                unknown_replies=replies.unknown_replies,
                unknown_tokens=replies.unknown_tokens,
                remembered_replies=self._memory.entries,
                remembered_tokens=self._memory.tokens,
            ),
            lookups=LookupsReport(asked=lookups.asked, failed=lookups.failed, skipped=lookups.skipped),
            prefill=[_server_report(link) for link in self.engines.prefill],
            decode=[_server_report(link) for link in self.engines.decode],
        )


def _sampling(request: Request) -> engine_pb2.Sampling:
    seed = secrets.randbits(64) if request.seed is None and request.temperature > 0 else request.seed or 0
    return engine_pb2.Sampling(
        temperature=request.temperature, top_p=request.top_p, top_k=max(0, request.top_k), seed=seed % 2**64
    )


def _prompt_field(request: Request) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _check_tokens(tokens: list[int], vocab_size: int) -> None:
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        i, token = next((i, token) for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise invalid("prompt", f"prompt: entry {i} must be >= 0 and < {vocab_size}, got {token}")


def _local_prefill_max_tokens(link: EngineLink) -> int:
    assert link.facts is not None, f"{link.label} is used before it was described"
    return link.facts.local_prefill_max_tokens


def _server_report(link: EngineLink) -> ServerReport:
    return ServerReport(
        address=link.address,
        state="up" if link.up else "down",
        daemon="" if link.facts is None else link.facts.daemon,
        error=link.error,
        outstanding=link.outstanding,
        assigned=link.assigned,
    )
