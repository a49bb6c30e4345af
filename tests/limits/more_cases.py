"""Further bounds, each with a value at it and one past it: lists and texts of messages, settings, HTTP bodies."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kvferry import tracing
from kvferry.daemon.config import sources as config_sources
from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.decode import MAX_GROWTHS
from kvferry.daemon.core.decode_leases import MAX_RETRACTED
from kvferry.daemon.core.effects import FailAsk, ToWorker
from kvferry.daemon.core.errors import MAX_MESSAGE_CHARS, RequestError
from kvferry.daemon.core.limits import BlockShape, Name
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.core.way_back.choice import ALWAYS, WayBackLimits
from kvferry.daemon.peers import discovery, session
from kvferry.daemon.peers.session import Session
from kvferry.daemon.sides.gathering import check_rank
from kvferry.front.engines import MAX_ADDRESS_CHARS, MAX_PATH_CHARS, EngineFacts
from kvferry.front.openai_types import (
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    ChatRequest,
    CompletionRequest,
    parse_request,
)
from kvferry.front.vllm_body import MAX_DEPTH, parse_body
from kvferry.proto import common_pb2 as common
from kvferry.proto import engine_pb2 as engine
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import (
    INCARNATION_BYTES,
    MAX_CAPABILITIES,
    MAX_CAPABILITY_CHARS,
    MAX_LOOKED_UP_PAGES,
    MAX_NAME_CHARS,
)
from kvferry.radix.prompt_cache import PromptCache
from kvferry.transfer.geometry.kv_geometry import MAX_CACHES, KVGeometry, Layout
from kvferry.transfer.geometry.namespace import MAX_TEXT, NamespaceFacts
from kvferry.transfer.geometry.registration import Registration
from kvferry.transfer.protocol.slots import CreditPurse
from kvferry.workers.orders import MAX_STOP_TOKENS, Bounds, decode_order, prefill_order
from tests.limits.limit_cases import (
    GEOMETRY,
    NAME,
    PAGE,
    CreditOf,
    Decoding,
    Limit,
    asked,
    courier_up,
    digests,
    hello,
    session_setup,
)


def held(tokens: int) -> None:
    Decoding().admit(Name(bytes(16), 2), 8, 8, held=tokens)


SHAPE = BlockShape(blocks=8, block_tokens=2, page_size=PAGE)


def admit_blocks(count: int) -> None:
    SHAPE.of_admit(wire.Admit(tokens=8, prefill="p", blocks=range(count)))


def held_blocks(count: int) -> None:
    SHAPE.held_of_admit(wire.Admit(tokens=8, prefill="p", held_tokens=4, held_blocks=range(count)))


def begin_blocks(count: int) -> None:
    SHAPE.of_begin(wire.Begin(tokens=8, blocks=range(count)))


def progress_blocks(count: int) -> str | None:
    """With those that Begin named."""
    core = PrefillCore(Cache(16, PAGE, limits=CacheLimits(in_blocks=True)), PrefillLimits(table=8))
    begin = wire.Begin(name=NAME.to_proto(), digests=digests(2), tokens=8, blocks=[0])
    core.begin(1, bytes(32), NAME, begin, 60.0, 0.0, SHAPE.of_begin(begin))
    core.progress(1, NAME, 2, 0.0, range(1, count))
    told = [effect.event for effect in core.take_effects() if isinstance(effect, ToWorker)]
    return next((event.failed.error.message for event in told if event.WhichOneof("kind") == "failed"), None)


def fetch_blocks(count: int) -> str | None:
    limits = PrefillLimits(table=8, way_back=WayBackLimits(ALWAYS, 64))
    core = PrefillCore(Cache(16, PAGE, limits=CacheLimits(in_blocks=True)), limits)
    core.fetches.session_up(1)
    begin = wire.Begin(name=NAME.to_proto(), digests=digests(2), tokens=8, patience=wire.PATIENCE_FETCH)
    core.begin(1, bytes(32), NAME, begin, 60.0, 0.0, SHAPE.of_begin(begin))
    ask = peer.Ask(name=NAME.to_proto(), namespace_id=bytes(32), tokens=8, held_tokens=4)
    ask.last_full_digest = digests(2)[-32:]
    core.ask(1, NAME, ask, 60.0, 0.0)
    core.fetch(1, NAME, wire.Fetch(name=NAME.to_proto(), blocks=range(count)), 0.0)
    told = [effect.event for effect in core.take_effects() if isinstance(effect, ToWorker)]
    return next((event.failed.error.message for event in told if event.WhichOneof("kind") == "failed"), None)


def looked_up_pages(count: int) -> str | None:
    """Of an Ask; that none of them is held is another refusal."""
    core = Decoding().core
    core.returns.lend(1, peer.Ask(transfer=1, pages=count, digests=bytes(32 * count)), 60.0, 0.0)
    (failed,) = (effect for effect in core.take_effects() if isinstance(effect, FailAsk))
    return failed.error.message if failed.error.code == common.ERROR_INVALID_ARGUMENT else None


def block_number(most: int) -> None:
    SHAPE.of_admit(wire.Admit(tokens=2, prefill="p", blocks=[most]))


def block_tokens(tokens: int) -> None:
    geometry = KVGeometry(1, 1, 1, "float16", PAGE, Layout.ENGINE)
    pool = wire.EnginePool(pages=1, block_tokens=tokens)
    rank = pool.ranks.add()
    rank.memories.add(nbytes=geometry.page_bytes).file.name = "mine"
    rank.tensors.add(page_stride=geometry.page_bytes, page_bytes=geometry.page_bytes)
    Registration.from_proto(pool, geometry, 1)


def page_tokens(count: int) -> str | None:
    decoding = Decoding(events=True)
    decoding.core.page_tokens(1, NAME, 0, [1] * count, 0.0)
    return decoding.failure()


def page_tokens_of_finish(count: int) -> str | None:
    decoding = Decoding(events=True)
    decoding.core.finish(1, NAME, 8, b"", 0.0, page_tokens=wire.PageTokens(tokens=[1] * count))
    return decoding.failure()


def digests_of_finish(nbytes: int) -> str | None:
    decoding = Decoding()
    decoding.core.grow(1, NAME, 15, 0.0)
    decoding.core.finish(1, NAME, 15, bytes(nbytes), 0.0)
    return decoding.failure()


def growths(count: int) -> str | None:
    """Grow messages that wait for pages, which a younger request is asked to give back."""
    decoding, younger = Decoding(), Name(bytes(16), 2)
    decoding.admit(younger, 8, 8)
    decoding.core.aux("p", younger, b"", 0.0)
    decoding.core.cache.pool.allocate(decoding.core.cache.pool.free)
    for _ in range(count):
        decoding.core.grow(1, NAME, 15, 0.0)
    return decoding.failure()


def retracted(count: int) -> str | None:
    core = Decoding().core
    for number in range(count):
        core._keeper.remember_retracted(
            cast(Any, SimpleNamespace(name=Name(bytes(16), number), worker=1, order=number))
        )
    return None if core.comes_back(1, Name(bytes(16), 0)) else "the oldest is forgotten"


def full_digest(nbytes: int) -> str | None:
    return asked(last_full_digest=digests(2)[32:].ljust(nbytes, b"x"))


def traceparent(characters: int) -> str | None:
    text = f"00-{'a' * 32}-{'b' * 16}-01".ljust(characters, "x")
    return None if tracing.checked(text) else "it is none"


def error_text(characters: int) -> str | None:
    error = RequestError.from_proto(common.Error(message="x" * characters))
    return None if len(error.message) == characters else f"cut to {len(error.message)}"


def credits(count: int) -> None:
    CreditPurse(4).add([cast(Any, CreditOf(slot % 4, 1 + slot // 4)) for slot in range(count)])


def waiting_for_peer(messages: int, message: peer.PeerMessage) -> str | None:
    async def told() -> str | None:
        waiting = Session(session_setup("p"))
        for _ in range(messages):
            waiting.send(message)
        return waiting._broken.result() if waiting._broken.done() else None

    return asyncio.run(told())


BLOB = peer.PeerMessage(aux=peer.PeerAux(blob=bytes(65_528)))  # 64 KiB with its frame: 512 of them are 32 MiB


def registered(
    *, ranks: int = 1, memories: int = 1, tensors: int = 1, name: str = "", handle: int = 0, uuid: int = 16
) -> None:
    pool = wire.EnginePool(pages=1)
    for _ in range(ranks):
        rank = pool.ranks.add()
        for _ in range(memories):
            memory = rank.memories.add(nbytes=GEOMETRY.page_bytes)
            if handle:
                memory.gpu.ipc_handle, memory.gpu.device_uuid = bytes(handle), bytes(uuid)
            else:
                memory.file.name = name or "mine"
        for _ in range(tensors):
            rank.tensors.add(page_stride=GEOMETRY.page_bytes, page_bytes=GEOMETRY.page_bytes)
    Registration.from_proto(pool, GEOMETRY, 1)


FACTS: dict[str, Any] = {"model": "m", "digest_algorithm": "sha256_cbor", "root_digest": bytes(32)}


def facts(**fields: Any) -> None:
    NamespaceFacts.from_proto(common.NamespaceFacts(geometry=GEOMETRY.to_proto(), **{**FACTS, **fields}))


def dtype(characters: int) -> None:
    geometry = GEOMETRY.to_proto()
    geometry.dtype = geometry.dtype.ljust(characters, "x")
    NamespaceFacts.from_proto(common.NamespaceFacts(geometry=geometry, **FACTS))


def caches(count: int, characters: int = 0) -> None:
    """A page of so many caches behind the first, the last with a dtype of so many characters."""
    geometry = GEOMETRY.to_proto()
    for _ in range(count):
        geometry.further.add(layers=1, kv_heads=1, head_dim=1, dtype="uint8", tensors=1)
    geometry.further[-1].dtype = geometry.further[-1].dtype.ljust(characters, "x")
    NamespaceFacts.from_proto(common.NamespaceFacts(geometry=geometry, **FACTS))


def described(of_facts: dict[str, Any] | None = None, dtype: str = "float16", **fields: Any) -> None:
    geometry = GEOMETRY.to_proto()
    geometry.dtype = dtype
    told = common.NamespaceFacts(geometry=geometry, **{**FACTS, **(of_facts or {})})
    role = common.ROLE_DECODE
    reply = {"role": role, "namespace_id": bytes(32), "max_tokens": 8, **fields}
    EngineFacts.from_reply(engine.DescribeReply(facts=told, **reply), role)


BOUNDS, PROMPTS = Bounds(max_tokens=40, vocabulary=100, page_size=PAGE), PromptCache(page_size=PAGE)


def decode_ordered(tokens: int = 1, **fields: Any) -> None:
    request = engine.DecodeRequest(name=NAME.to_proto(), tokens=[1] * tokens, max_new_tokens=1, **fields)
    decode_order(request, BOUNDS, PROMPTS)


def prefill_ordered(tokens: int) -> None:
    prefill_order(engine.PrefillRequest(name=NAME.to_proto(), tokens=[1] * tokens), BOUNDS, PROMPTS)


def chat(messages: int) -> None:
    fields = {"messages": [{"role": "user", "content": ""}] * messages}
    parse_request(ChatRequest, json.dumps(fields).encode())


def stops(*stop: str) -> None:
    parse_request(CompletionRequest, json.dumps({"prompt": "x", "stop": stop}).encode())


def depth(levels: int) -> None:
    parse_body(b'{"a": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}")


def config_file(characters: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kvferry.yaml"
        file.write_text("slots: 8\n".ljust(characters, "#"))
        config_sources._from_file(str(file))


def addresses(count: int) -> str | None:
    """Of an answer of DNS."""
    asked: list[str] = []

    async def resolve(service: str) -> list[str]:
        return [f"10.0.{number >> 8}.{number & 255}:7071" for number in range(count)]

    async def ask_name(address: str) -> str:
        asked.append(address)
        return ""

    found = discovery.Discovery("prefill:7071", cast(Any, None), lambda task: None, resolve=resolve, ask_name=ask_name)
    asyncio.run(found.look())
    return None if len(asked) == count else f"{len(asked)} were asked"


def past(give: Any, most: int, refusal: str) -> Limit:
    return Limit(give, most, most + 1, refusal)


MORE: dict[str, Limit] = {
    "held tokens": Limit(held, 8, 12, "held_tokens is 12; it must be a multiple of 4, at most the prompt's 8"),
    "blocks of an Admit": past(admit_blocks, 4, "blocks has 5 entries from token 0 on; it must have 1 to 4"),
    "held blocks of an Admit": past(held_blocks, 2, "held_blocks has 3 entries; with held_tokens 4 it must have 2"),
    "blocks of a Begin": past(begin_blocks, 4, "blocks has 5 entries behind 0; the prompt has 4"),
    "blocks of a Progress": past(progress_blocks, 4, "blocks has 4 entries behind 1; the prompt has 4"),
    "blocks of a Fetch": past(fetch_blocks, 4, "blocks has 5 entries behind 0; the prompt has 4"),
    "a block's number": past(block_number, 7, "blocks has 8; the engine has blocks 0 to 7"),
    "tokens of a block": past(block_tokens, PAGE, "pool.block_tokens is 5; a page of 4 tokens is no whole number"),
    "page tokens": past(page_tokens, 8, "page_tokens has 9 tokens from first_token 0 on"),
    "page tokens of Finish": past(page_tokens_of_finish, 8, "page_tokens has 9 tokens from first_token 0 on"),
    "digests of Finish": past(digests_of_finish, 32, "digests has 33 bytes"),
    "Grow messages": past(growths, MAX_GROWTHS, "4 Grow messages wait already; the bound is 4"),
    "retracted requests": past(retracted, MAX_RETRACTED, "the oldest is forgotten"),
    "INCARNATION_BYTES": past(lambda n: hello(incarnation=bytes(n)), INCARNATION_BYTES, "incarnation has 17 bytes"),
    "MAX_LOOKED_UP_PAGES": past(looked_up_pages, MAX_LOOKED_UP_PAGES, "at most 16384 x 32"),
    "MAX_CAPABILITIES": past(lambda n: hello(capabilities=["x"] * n), MAX_CAPABILITIES, "capabilities has 65 entries"),
    "MAX_CAPABILITY_CHARS": past(
        lambda n: hello(capabilities=["x" * n]), MAX_CAPABILITY_CHARS, "a capability has 65 characters"
    ),
    "courier's ranks": past(lambda n: courier_up(ranks=[peer.CourierRank()] * n), 1, "ranks has 2 entries"),
    "credits": past(credits, 4, "credit.slot is 0"),
    "ask's last full digest": past(full_digest, 32, "last_full_digest has 33 bytes"),
    "traceparent": past(traceparent, 55, "it is none"),
    "text of an error": past(error_text, MAX_MESSAGE_CHARS, "cut to 1024"),
    "messages that wait for a peer": past(
        lambda n: waiting_for_peer(n, peer.PeerMessage(heartbeat=peer.Heartbeat())), session.OUTGOING, "8192 messages"
    ),
    "bytes that wait for a peer": past(
        lambda n: waiting_for_peer(n, BLOB), session.OUTGOING_BYTES >> 16, "512 messages of 33554432 bytes wait"
    ),
    "engine of a rank": past(
        lambda n: check_rank(wire.OneRank(ranks=1, engine="x" * n), 1), MAX_NAME_CHARS, "rank.engine has 129 characters"
    ),
    "ranks of a pool": past(lambda n: registered(ranks=n), 1, "pool.ranks has 2 entries"),
    "memories of a rank": past(lambda n: registered(memories=n), 1, "memories has 2 entries"),
    "tensors of a rank": past(lambda n: registered(tensors=n), 1, "tensors has 2 entries"),
    "name of a shared file": past(lambda n: registered(name="x" * n), 128, "it must be 1 to 128 letters"),
    "IPC handle": past(lambda n: registered(handle=n), 64, "ipc_handle has 65 bytes"),
    "UUID of a GPU": past(lambda n: registered(handle=64, uuid=n), 16, "device_uuid has 17 bytes"),
    "model": past(lambda n: facts(model="x" * n), MAX_TEXT, "facts.model has 513 characters"),
    "revision": past(lambda n: facts(revision="x" * n), MAX_TEXT, "facts.revision has 513 characters"),
    "digest algorithm": past(
        lambda n: facts(digest_algorithm="x" * n), MAX_TEXT, "facts.digest_algorithm has 513 characters"
    ),
    "engine layout": past(lambda n: facts(engine_layout="x" * n), MAX_TEXT, "facts.engine_layout has 513 characters"),
    "kv scales": past(lambda n: facts(kv_scales="x" * n), MAX_TEXT, "facts.kv_scales has 513 characters"),
    "speculative": past(lambda n: facts(speculative="x" * n), MAX_TEXT, "facts.speculative has 513 characters"),
    "root digest": past(lambda n: facts(root_digest=bytes(n)), 32, "facts.root_digest has 33 bytes"),
    "tenant's salt": past(lambda n: facts(tenant_salt_digest=bytes(n)), 32, "facts.tenant_salt_digest has 33 bytes"),
    "dtype": past(dtype, len("float16"), "geometry.dtype is 'float16x'; it must be one of"),
    "further caches": past(caches, MAX_CACHES - 1, "geometry.further, the number of entries, is 8; it must be 0 to 7"),
    "dtype of a further cache": past(
        lambda n: caches(1, n), len("uint8"), "geometry.further[0].dtype is 'uint8x'; it must be one of"
    ),
    "a server's model": past(lambda n: described(model="x" * n), MAX_TEXT, "model has 513 characters"),
    "a server's daemon": past(lambda n: described(daemon="x" * n), MAX_NAME_CHARS, "daemon has 129 characters"),
    "a server's daemon's address": past(
        lambda n: described(daemon_address="x" * n), MAX_ADDRESS_CHARS, "daemon_address has 301 characters"
    ),
    "a server's tokenizer": past(
        lambda n: described(tokenizer="x" * n), MAX_PATH_CHARS, "tokenizer has 4097 characters"
    ),
    "a server's namespace": past(lambda n: described(namespace_id=bytes(n)), 32, "namespace_id has 33 bytes"),
    "a server's dtype": past(lambda n: described(dtype="x" * n), MAX_TEXT, "facts.geometry.dtype has 513 characters"),
    **{
        f"a server's facts, {field}": past(
            lambda n, field=field: described({field: "x" * n}), MAX_TEXT, f"facts.{field} has 513 characters"
        )
        for field in ("model", "revision", "digest_algorithm", "engine_layout")
    },
    **{
        f"a server's facts, {field}": past(
            lambda n, field=field: described({field: bytes(n)}), 32, f"facts.{field} has 33 bytes"
        )
        for field in ("root_digest", "tenant_salt_digest")
    },
    "tokens of a prefill": past(prefill_ordered, 39, "tokens has 40 tokens and 1 may be added"),
    "tokens of a decode": past(lambda n: decode_ordered(tokens=n), 39, "tokens has 40 tokens and 1 may be added"),
    "stop tokens": past(lambda n: decode_ordered(stop_tokens=range(n)), MAX_STOP_TOKENS, "stop_tokens has 1025 tokens"),
    "prefill of a decode": past(
        lambda n: decode_ordered(prefill="x" * n), MAX_NAME_CHARS, "prefill has 129 characters; it may have 128"
    ),
    "messages of a chat": past(chat, MAX_MESSAGES, "at most 100000 items"),
    "stops": past(lambda n: stops(*"x" * n), MAX_STOPS, "at most 4 items"),
    "characters of a stop": past(lambda n: stops("x" * n), MAX_STOP_CHARS, "1 to 256 characters, got 257"),
    "depth of a body": past(depth, MAX_DEPTH, "more than 100 deep"),
    "settings' file": past(config_file, config_sources.MAX_FILE_BYTES, "has more than 1048576 characters"),
    "addresses of a name of DNS": past(addresses, discovery.MAX_ADDRESSES, "1024 were asked"),
}
