"""The front end's servers: who they are (Describe), whether they are up, and the calls that it makes to them.

Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from kvferry.channels import open_aio_channel
from kvferry.front.chat import Tokenizer, load_tokenizer
from kvferry.front.errors import ApiError, from_grpc, unavailable
from kvferry.proto import common_pb2, engine_pb2
from kvferry.proto.limits import MAX_NAME_CHARS
from kvferry.secret_files import BearerToken
from kvferry.transfer.geometry.namespace import MAX_TEXT, NamespaceFacts, differences

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_ADDRESS_CHARS = 300  # a name of DNS has 253, its port 5
MAX_PATH_CHARS = 4096
DESCRIBE_DEADLINE_S = 2.0
ABORT_DEADLINE_S = 5.0
RECHECK_S = 10.0  # a server that is up is described again this often
MIN_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
ALONE_AFTER_S = 10.0  # from its start on a front end waits so long for a prefill server to answer at all

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
)

PrefillCall = grpc.aio.UnaryUnaryCall[engine_pb2.PrefillRequest, engine_pb2.PrefillReply]
Metadata = tuple[tuple[str, str], ...]
DecodeCall = grpc.aio.UnaryStreamCall[engine_pb2.DecodeRequest, engine_pb2.DecodeReply]

_log = logging.getLogger(__name__)


class Mismatch(Exception):
    """A server's description is not usable here."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """A server's facts by its own word, checked."""

    model: str
    daemon: str
    daemon_address: str
    namespace_id: bytes
    page_size: int
    root_digest: bytes
    max_tokens: int
    local_prefill_max_tokens: int
    tokenizer: str
    all: common_pb2.NamespaceFacts

    @classmethod
    def from_reply(cls, reply: engine_pb2.DescribeReply, role: common_pb2.Role) -> EngineFacts:
        """Raises Mismatch naming field, value and bound."""
        if reply.role != role:
            raise Mismatch(f"role is {_role(reply.role)}; it must be {_role(role)}")
        for field, value in (("namespace_id", reply.namespace_id), ("facts.root_digest", reply.facts.root_digest)):
            if len(value) != 32:
                raise Mismatch(f"{field} has {len(value)} bytes; it must have 32")
        for field, text, most in (
            ("model", reply.model, MAX_TEXT),
            ("facts.model", reply.facts.model, MAX_TEXT),
            ("facts.revision", reply.facts.revision, MAX_TEXT),
            ("facts.digest_algorithm", reply.facts.digest_algorithm, MAX_TEXT),
            ("facts.engine_layout", reply.facts.engine_layout, MAX_TEXT),
            ("facts.geometry.dtype", reply.facts.geometry.dtype, MAX_TEXT),
            ("facts.tenant_salt_digest", reply.facts.tenant_salt_digest, 32),
            ("daemon", reply.daemon, MAX_NAME_CHARS),
            ("daemon_address", reply.daemon_address, MAX_ADDRESS_CHARS),
            ("tokenizer", reply.tokenizer, MAX_PATH_CHARS),
        ):
            if len(text) > most:
                raise Mismatch(f"{field} has {len(text)} {_unit(text)}; the bound is {most}")
        if reply.facts.geometry.page_size < 1:
            raise Mismatch(f"facts.geometry.page_size is {reply.facts.geometry.page_size}; it must be at least 1")
        if reply.max_tokens < 2:
            raise Mismatch(f"max_tokens is {reply.max_tokens}; it must be at least 2")
        return cls(
            model=reply.model,
            daemon=reply.daemon,
            daemon_address=reply.daemon_address,
            namespace_id=reply.namespace_id,
            page_size=reply.facts.geometry.page_size,
            root_digest=reply.facts.root_digest,
            max_tokens=reply.max_tokens,
            local_prefill_max_tokens=reply.local_prefill_max_tokens,
            tokenizer=reply.tokenizer,
            all=reply.facts,
        )

    def difference(self, other: EngineFacts) -> str:
        """Why the two cannot work together: each field with both values, and the remedy."""
        try:
            found = differences(NamespaceFacts.from_proto(self.all), NamespaceFacts.from_proto(other.all))
        except ValueError:  # one of them does not say all; the ids say that there is a difference
            found = []
        if found:
            return "; ".join(map(str, found))
        return f"namespace_id is {self.namespace_id.hex()[:16]} here and {other.namespace_id.hex()[:16]} there"


def _unit(text: str | bytes) -> str:
    return "characters" if isinstance(text, str) else "bytes"


def _role(role: common_pb2.Role) -> str:
    names = {common_pb2.ROLE_PREFILL: "prefill", common_pb2.ROLE_DECODE: "decode"}
    return names.get(role, str(role))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The facts that all servers behind one front end share."""

    name: str
    tokenizer: Tokenizer
    namespace_id: bytes
    page_size: int
    root_digest: bytes


class EngineLink:
    """One server."""

    def __init__(self, address: str, role: common_pb2.Role, token: BearerToken | None = None) -> None:
        self.address = address
        self._token = token
        self.role = role
        self.facts: EngineFacts | None = None  # as last described; never forgotten
        self.answers = False  # whether it described itself when last asked
        self.up = False
        self.error = "not asked yet"
        self.outstanding = 0  # requests of this front end that are not over
        self.assigned = 0  # requests ever given to it
        self.recheck = asyncio.Event()
        self._letting_go: set[asyncio.Task[None]] = set()  # each has a deadline
        self._channel = open_aio_channel(address, None, CHANNEL_OPTIONS)
        # The generated stubs do the same, without types.
        self._describe = self._channel.unary_unary(
            "/kvferry.v1.Engine/Describe",
            request_serializer=engine_pb2.DescribeRequest.SerializeToString,
            response_deserializer=engine_pb2.DescribeReply.FromString,
        )
        self._prefill = self._channel.unary_unary(
            "/kvferry.v1.Engine/Prefill",
            request_serializer=engine_pb2.PrefillRequest.SerializeToString,
            response_deserializer=engine_pb2.PrefillReply.FromString,
        )
        self._decode = self._channel.unary_stream(
            "/kvferry.v1.Engine/Decode",
            request_serializer=engine_pb2.DecodeRequest.SerializeToString,
            response_deserializer=engine_pb2.DecodeReply.FromString,
        )

        self._abort = self._channel.unary_unary(
            "/kvferry.v1.Engine/Abort",
            request_serializer=engine_pb2.AbortRequest.SerializeToString,
            response_deserializer=engine_pb2.AbortReply.FromString,
        )

    @property
    def label(self) -> str:
        return f"{_role(self.role)} server {self.address}"

    async def describe(self) -> EngineFacts:
        """Raises Mismatch, grpc.aio.AioRpcError."""
        reply = await self._describe(engine_pb2.DescribeRequest(), timeout=DESCRIBE_DEADLINE_S, metadata=self._login())
        return EngineFacts.from_reply(reply, self.role)

    def prefill(self, request: engine_pb2.PrefillRequest, *, deadline_s: float, metadata: Metadata = ()) -> PrefillCall:
        return self._prefill(request, timeout=deadline_s, metadata=(*metadata, *self._login()))

    def decode(self, request: engine_pb2.DecodeRequest, *, metadata: Metadata = ()) -> DecodeCall:
        return self._decode(request, metadata=(*metadata, *self._login()))

    def _login(self) -> Metadata:
        return () if self._token is None else (("authorization", self._token.header),)

    def let_go(self, name: common_pb2.RequestName) -> None:
        """A prompt that it has handed over is wanted no more. Where it cannot be told, its daemon keeps the prompt
        until its deadline.
        """
        task = asyncio.create_task(self._let_go(name))
        self._letting_go.add(task)
        task.add_done_callback(self._letting_go.discard)

    async def _let_go(self, name: common_pb2.RequestName) -> None:
        try:
            await self._abort(engine_pb2.AbortRequest(name=name), timeout=ABORT_DEADLINE_S, metadata=self._login())
        except grpc.aio.AioRpcError as error:
            _log.info("%s: an abort was not acknowledged: %s", self.label, error.details())

    def failed(self, error: grpc.aio.AioRpcError) -> ApiError:
        """A call ended with this error: what the client is told. An unavailable server is described again."""
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            self.recheck.set()
        return from_grpc(self.label, error)

    async def close(self) -> None:
        await asyncio.gather(*self._letting_go)
        await self._channel.close(None)


async def _done_within(work: Coroutine[Any, Any, object], seconds: float) -> bool:
    """Whether it has ended by then; else it is cancelled. Not wait_for: before Python 3.12 that swallows a cancellation
    that comes together with the end."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        return task.done()
    finally:
        task.cancel()


async def _described(link: EngineLink) -> EngineFacts:
    """One that is up may be late once, for instance while it compiles kernels. Raises as `EngineLink.describe`."""
    try:
        return await link.describe()
    except grpc.aio.AioRpcError as error:
        if not link.up or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    return await link.describe()


class Engines:
    """All servers of a front end. They are found, and found again, in the background.

    The model that is served is the one of which a prefill and a decode server were found first, or a decode server
    alone where no prefill server answers; it stays until the front end ends. Servers of another model, or of the same
    in another geometry, are not used.
    """

    def __init__(
        self,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        model_name: str | None,
        tokenizer: str | None,
        token: BearerToken | None = None,
    ) -> None:
        self.prefill = [EngineLink(address, common_pb2.ROLE_PREFILL, token) for address in prefill]
        self.decode = [EngineLink(address, common_pb2.ROLE_DECODE, token) for address in decode]
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._served: ServedModel | None = None
        self._alone_at = 0.0  # when decode servers alone will do
        self._settling = asyncio.Lock()  # loading a tokenizer takes seconds: only one may
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def links(self) -> list[EngineLink]:
        return [*self.prefill, *self.decode]

    def start(self) -> None:
        self._alone_at = asyncio.get_running_loop().time() + ALONE_AFTER_S
        self._tasks = [asyncio.create_task(self._keep_described(link)) for link in self.links]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self.links:
            await link.close()

    @property
    def ready(self) -> bool:
        """Whether requests are served: a decode server alone computes their prompts itself."""
        return any(link.up for link in self.decode)

    async def wait_ready(self, deadline_s: float) -> bool:
        """Whether a decode server was up before the deadline."""
        await self._until(lambda: self.ready, deadline_s)
        return self.ready

    async def one_comes(self, deadline_s: float, without: Sequence[EngineLink] = ()) -> bool:
        """Whether a decode server other than these is up before the deadline. Those that did not answer when they were
        last asked may have come since then: they are asked at once, and awaited while one does not answer."""
        others = [link for link in self.decode if link not in without]

        def is_up() -> bool:
            return any(link.up for link in others)

        if self._served is not None and not is_up():
            for link in others:
                link.recheck.set()
            await self._until(lambda: is_up() or all(link.answers for link in others), deadline_s)
        return is_up()

    async def _until(self, condition: Callable[[], bool], deadline_s: float) -> None:
        """Waits until a change of the servers after which the condition holds, no longer than the deadline."""

        async def changed() -> None:
            while not condition():
                self._changed.clear()
                await self._changed.wait()

        await _done_within(changed(), deadline_s)

    def served(self) -> ServedModel:
        """Raises ApiError 503 until the servers are up."""
        if self._served is None or not self.ready:
            raise unavailable(f"the servers are not up: {self.complaints()}")
        return self._served

    def complaints(self) -> str:
        """Why each server that is down is down."""
        return "; ".join(f"{link.label}: {link.error}" for link in self.links if not link.up)

    def max_tokens(self) -> int:
        """The most tokens of a request, prompt + output, that every server that is up takes."""
        return min(link.facts.max_tokens for link in self.links if link.up and link.facts is not None)

    async def _keep_described(self, link: EngineLink) -> None:
        backoff = MIN_BACKOFF_S
        while True:
            link.recheck.clear()
            was_up = link.up
            try:
                link.facts = await _described(link)
                link.answers = True
                await self._settle()
            except grpc.aio.AioRpcError as error:
                link.answers = False
                self._set(link, f"{error.code().name}: {error.details() or 'no details'}")
            except Mismatch as error:
                link.answers = False
                self._refuse(link, str(error))
            if was_up or not link.up:
                await asyncio.sleep(MIN_BACKOFF_S)  # requests that fail often do not make this a busy loop
            asked = await _done_within(link.recheck.wait(), RECHECK_S if link.up else backoff - MIN_BACKOFF_S)
            backoff = MIN_BACKOFF_S if link.up or asked else min(2 * backoff, MAX_BACKOFF_S)

    def _set(self, link: EngineLink, error: str) -> None:
        """A server without an error is up."""
        up = not error
        if up != link.up:
            _log.info("%s: %s", link.label, error or "up")
        link.up, link.error = up, error
        self._changed.set()

    def _refuse(self, link: EngineLink, why: str) -> None:
        """One that answers, and is not used."""
        if why != link.error:
            _log.warning("%s is not used: %s", link.label, why)
        link.up = False
        self._set(link, why)

    async def _settle(self) -> None:
        """Decides which of the servers that were described are up."""
        async with self._settling:
            error = ""
            if self._served is None:
                try:
                    await self._choose_model()
                except ValueError as failure:
                    error = str(failure)
            for link in self.links:
                if not link.answers or link.facts is None:
                    continue
                if self._served is None and not error and self._other(link) is None:
                    missing = common_pb2.ROLE_PREFILL if link.role == common_pb2.ROLE_DECODE else common_pb2.ROLE_DECODE
                    self._set(link, f"it is up, but no {_role(missing)} server is")
                elif why := error or self._misfit(link, link.facts):
                    self._refuse(link, why)
                else:
                    self._set(link, "")

    async def _choose_model(self) -> None:
        """Raises ValueError where the tokenizer cannot be loaded."""
        prefilled = {link.facts.namespace_id for link in self.prefill if link.facts is not None and link.answers}
        decoding = [link.facts for link in self.decode if link.facts is not None and link.answers]
        fitting = [facts for facts in decoding if facts.namespace_id in prefilled]
        if not prefilled and asyncio.get_running_loop().time() >= self._alone_at:
            fitting = decoding
        if fitting:
            facts = fitting[0]
            self._served = ServedModel(
                name=self._model_name or facts.model,
                tokenizer=await asyncio.to_thread(load_tokenizer, self._tokenizer or facts.tokenizer),
                namespace_id=facts.namespace_id,
                page_size=facts.page_size,
                root_digest=facts.root_digest,
            )

    def _other(self, link: EngineLink) -> EngineLink | None:
        """A server of the other role that answers."""
        others = self.prefill if link.role == common_pb2.ROLE_DECODE else self.decode
        return next((other for other in others if other.answers and other.facts is not None), None)

    def _misfit(self, link: EngineLink, facts: EngineFacts) -> str:
        """Why a server with these facts cannot be used; "" when it can."""
        served = self._served
        if served is None:
            other = self._other(link)
            assert other is not None and other.facts is not None, "there is nothing that it does not fit"
            return f"it does not fit {other.label}: {facts.difference(other.facts)}"
        for field, ours, theirs in (
            ("facts.geometry.page_size", served.page_size, facts.page_size),
            ("facts.root_digest", served.root_digest.hex(), facts.root_digest.hex()),
            ("namespace_id", served.namespace_id.hex(), facts.namespace_id.hex()),
        ):
            if ours != theirs:
                return (
                    f"{field} is {theirs}; the model that this front end serves has {ours}: start the server with that "
                    "model and geometry, or another front end for it"
                )
        return ""
