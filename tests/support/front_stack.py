"""A front end before scripted servers: real gRPC and HTTP on loopback, in an event loop of their own thread.

The servers keep no pages. A decode server remembers the token sequences it served, so that matched tokens are what a
daemon would report; the prefill and decode halves of a request meet by its id.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvferry.front.edge.settings import EdgeSettings
from kvferry.front.server import FrontConfig, serve
from kvferry.front.service import ServiceConfig
from kvferry.proto import cache_pb2, cache_pb2_grpc, common_pb2, engine_pb2, engine_pb2_grpc
from kvferry.proto.limits import ERROR_METADATA
from kvferry.radix.digests import chain_digests, root_digest

PAGE_SIZE = 16
PAGE_BYTES = 4096
MAX_TOKENS = 4096
MODEL = "toy"
NAMESPACE = b"n" * 32

_T = TypeVar("_T")


def echo_reply(prompt: Sequence[int]) -> list[int]:
    """Eight letters that follow from the prompt."""
    digest = hashlib.sha256(bytes(t % 256 for t in prompt)).digest()
    return [97 + byte % 26 for byte in digest[:8]]


@dataclass
class Meeting:
    """Where the two halves of a request meet: the decode half waits for the prefill half's word."""

    done: dict[bytes, asyncio.Future[None]] = field(default_factory=dict)

    def of(self, request_id: bytes) -> asyncio.Future[None]:
        return self.done.setdefault(request_id, asyncio.get_running_loop().create_future())


@dataclass
class Fault(Exception):
    code: grpc.StatusCode
    message: str
    of_prefill: bool = False

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        typed = common_pb2.Error(of_prefill=self.of_prefill)
        return ((ERROR_METADATA, typed.SerializeToString()),) if self.of_prefill else ()


class Server(engine_pb2_grpc.EngineServicer, cache_pb2_grpc.CacheServicer):
    """One scripted engine, and its daemon's look-up and statistics."""

    def __init__(self, role: common_pb2.Role, name: str, meeting: Meeting) -> None:
        self.role = role
        self.name = name
        self.meeting = meeting
        self.model = MODEL
        self.tokenizer = "synthetic"
        self.namespace_id = NAMESPACE
        self.page_size = PAGE_SIZE
        self.max_tokens = MAX_TOKENS
        self.local_prefill_max_tokens = 0
        self.reply: Callable[[Sequence[int]], list[int]] = echo_reply
        self.before: Callable[[], Awaitable[None]] | None = None  # runs before a request's work
        self.at_describe: Callable[[], Awaitable[None]] | None = None
        self.at_handover: Callable[[], Awaitable[None]] | None = None  # of prefill: runs when decode goes on
        self.at_start: Callable[[], Awaitable[None]] | None = None  # of decode: runs behind Started
        self.between: Callable[[], Awaitable[None]] | None = None  # runs after each output token
        self.says_started = True
        self.paused_s = 0.0  # after the first output token, if not 0
        self.fault: Fault | None = None
        self.lookup_fault: Fault | None = None
        self.stats_fault: Fault | None = None
        self.absent = False  # nobody listens at its address
        self.lookup_load = 0
        self.free_pages = 1_000_000
        self.prefills: list[engine_pb2.PrefillRequest] = []
        self.decodes: list[engine_pb2.DecodeRequest] = []
        self.heard: list[dict[str, str]] = []  # metadata of each prefill and decode call
        self.aborts: list[common_pb2.RequestName] = []
        self.lookups = 0
        self.cancelled = 0
        self.running = 0
        self.served: list[list[int]] = []
        self.moved_pages = 0
        self.saved_pages = 0
        self.server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self, address: str = "127.0.0.1:0") -> None:
        if self.absent:
            self.address = "127.0.0.1:9"
            return
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        engine_pb2_grpc.add_EngineServicer_to_server(self, self.server)
        cache_pb2_grpc.add_CacheServicer_to_server(self, self.server)
        port = self.server.add_insecure_port(address)
        await self.server.start()
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
            self.server = None

    async def Describe(self, request: Any, context: Any) -> engine_pb2.DescribeReply:
        await self._call(self.at_describe)
        geometry = common_pb2.Geometry(layers=1, kv_heads=1, head_dim=8, dtype="float32", page_size=self.page_size)
        return engine_pb2.DescribeReply(
            role=self.role,
            model=self.model,
            daemon=self.name,
            daemon_address=self.address,
            facts=common_pb2.NamespaceFacts(
                model=self.model, geometry=geometry, digest_algorithm="sha256_cbor", root_digest=root_digest()
            ),
            namespace_id=self.namespace_id,
            max_tokens=self.max_tokens,
            local_prefill_max_tokens=self.local_prefill_max_tokens,
            tokenizer=self.tokenizer,
        )

    async def Prefill(self, request: engine_pb2.PrefillRequest, context: Any) -> engine_pb2.PrefillReply:
        self.prefills.append(request)
        self.heard.append(dict(context.invocation_metadata()))
        await self._work(context)
        met = self.meeting.of(request.name.request_id)
        if not met.done():
            met.set_result(None)
        await self._call(self.at_handover)
        return engine_pb2.PrefillReply(chunk_ends=[len(request.tokens)])

    async def Abort(self, request: engine_pb2.AbortRequest, context: Any) -> engine_pb2.AbortReply:
        self.aborts.append(request.name)
        return engine_pb2.AbortReply()

    async def Decode(self, request: engine_pb2.DecodeRequest, context: Any) -> None:
        self.decodes.append(request)
        self.heard.append(dict(context.invocation_metadata()))
        self.running += 1
        try:
            await self._decode(request, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _decode(self, request: engine_pb2.DecodeRequest, context: Any) -> None:
        await self._work(context)
        prompt = list(request.tokens)
        matched = self.matched_pages(chain_digests(prompt, page_size=PAGE_SIZE, parent=root_digest()).tobytes())
        delta = -(-len(prompt) // PAGE_SIZE) - matched
        if request.prefill:
            await asyncio.shield(self.meeting.of(request.name.request_id))
        self.moved_pages += delta
        self.saved_pages += matched
        started = engine_pb2.Started(
            matched_tokens=matched * PAGE_SIZE,
            delta_pages=delta,
            delta_bytes=delta * PAGE_BYTES,
            admit_to_ready_us=7,
            host_tokens=3,
        )
        if self.says_started:
            await context.write(engine_pb2.DecodeReply(started=started))
        await self._call(self.at_start)
        output: list[int] = []
        for token in self.reply(prompt)[: request.max_new_tokens]:
            output.append(token)
            await context.write(engine_pb2.DecodeReply(generated=engine_pb2.Generated(tokens=[token])))
            if token in request.stop_tokens:
                break
            if self.paused_s and len(output) == 1:
                await context.write(engine_pb2.DecodeReply(paused=engine_pb2.Paused()))
                await asyncio.sleep(self.paused_s)
            if self.between is not None:
                await self.between()
        self.served.append(prompt + output[:-1])
        reason = "stop" if len(output) < request.max_new_tokens else "length"
        ending = engine_pb2.Ending(reason=reason, output_tokens=len(output))
        await context.write(engine_pb2.DecodeReply(ending=ending))

    async def _work(self, context: Any) -> None:
        await self._call(self.before)
        if self.fault is not None:
            await context.abort(self.fault.code, self.fault.message, self.fault.metadata)

    async def _call(self, hook: Callable[[], Awaitable[None]] | None) -> None:
        try:
            if hook is not None:
                await hook()
        except asyncio.CancelledError:
            self.cancelled += self.role == common_pb2.ROLE_PREFILL  # Decode counts its own
            raise

    def matched_pages(self, digests: bytes) -> int:
        best = 0
        for tokens in self.served:
            held = chain_digests(tokens, page_size=PAGE_SIZE, parent=root_digest()).tobytes()
            pages = 0
            while pages < len(digests) // 32 and held.startswith(digests[: 32 * (pages + 1)]):
                pages += 1
            best = max(best, pages)
        return best

    async def Lookup(self, request: cache_pb2.LookupRequest, context: Any) -> cache_pb2.LookupReply:
        self.lookups += 1
        assert request.namespace_id == NAMESPACE
        if self.lookup_fault is not None:
            await context.abort(self.lookup_fault.code, self.lookup_fault.message)
        return cache_pb2.LookupReply(
            matched_tokens=self.matched_pages(request.digests) * PAGE_SIZE,
            running=self.running + self.lookup_load,
            free_pages=self.free_pages,
            pages=self.free_pages,
        )

    async def Stats(self, request: Any, context: Any) -> cache_pb2.StatsReply:
        if self.stats_fault is not None:
            await context.abort(self.stats_fault.code, self.stats_fault.message)
        transfers = cache_pb2.TransferStats(
            delta_pages=self.moved_pages,
            delta_bytes=self.moved_pages * PAGE_BYTES,
            saved_pages=self.saved_pages,
            saved_bytes=self.saved_pages * PAGE_BYTES,
        )
        other = common_pb2.ROLE_PREFILL if self.role == common_pb2.ROLE_DECODE else common_pb2.ROLE_DECODE
        sides = [cache_pb2.SideStats(role=self.role, transfers=transfers), cache_pb2.SideStats(role=other)]
        return cache_pb2.StatsReply(daemon=self.name, sides=sides)


class Stack:
    """Use as a context manager; `url` is the front end's."""

    def __init__(
        self, *, prefill: int = 1, decode: int = 1, configure: Callable[[Stack], None] = lambda _: None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.meeting = Meeting()
        self.prefill = [Server(common_pb2.ROLE_PREFILL, f"p{i}", self.meeting) for i in range(prefill)]
        self.decode = [Server(common_pb2.ROLE_DECODE, f"d{i}", self.meeting) for i in range(decode)]
        self.service: dict[str, Any] = {}  # of ServiceConfig
        self.edge = EdgeSettings()
        self.wait_s = 20.0
        self.url = ""
        configure(self)

    def __enter__(self) -> Stack:
        self._thread.start()
        self.call(self._start_servers())
        ready: Future[str] = Future()
        self._stop = asyncio.Event()
        self._front = asyncio.run_coroutine_threadsafe(self._run_front(ready), self._loop)
        self.url = f"http://{ready.result(30)}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._front.result(20)
        for server in (*self.prefill, *self.decode):
            self.call(server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs in the stack's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start_servers(self) -> None:
        for server in (*self.prefill, *self.decode):
            await server.start()

    async def _run_front(self, ready: Future[str]) -> None:
        service = ServiceConfig(
            prefill=tuple(server.address for server in self.prefill),
            decode=tuple(server.address for server in self.decode),
            **self.service,
        )
        config = FrontConfig("127.0.0.1", 0, service, wait_s=self.wait_s, grace_s=3.0, edge=self.edge)
        try:
            await serve(config, stop=self._stop, ready=ready.set_result)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise
