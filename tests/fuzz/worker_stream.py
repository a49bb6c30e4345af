"""Messages of a worker on its stream, to either role: the whole service, from hello to the end of the stream.

Frames: the first one's tag is the role, and whether the pool is to be the engine's memory, of which there is none to be
mapped; each is a WorkerMessage. In the end the worker is gone, and nothing is held.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

from kvferry.daemon.services.worker import WorkerService
from kvferry.daemon.sides.side import AnySide
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.mapping.segment import FileLock
from tests.fuzz.frames import Frame, bytes_changed, change, join, message_changed, parsed, split
from tests.fuzz.registrations import hello_with_pool
from tests.fuzz.stage import (
    FACTS,
    NAMES,
    OTHER_FACTS,
    PROMPTS,
    WORDS,
    Call,
    Decode,
    Honest,
    Prefill,
    Stage,
    engines_config,
    run,
)
from tests.simulation.prompts import PAGE_BYTES

DECODE, PREFILL, ENGINES = 0, 1, 2


def one_input(data: bytes) -> None:
    frames = split(data)
    messages = [parsed(wire.WorkerMessage, frame.body) for frame in frames]
    if None in messages:
        messages = messages[: messages.index(None)]
    if messages:
        run(lambda stage: _serve(stage, messages, frames[0].tag))


async def _serve(stage: Stage, messages: list[Any], tag: int) -> None:
    role = ("decode", "prefill")[tag % 2]
    config = engines_config(role) if tag & ENGINES else None
    side: Decode | Prefill = (Prefill if tag % 2 else Decode)(stage.clock, config)
    stage.sides.append(side)
    honest = Honest(side)
    honest.cache(NAMES[5], PROMPTS[0])
    call = Call(messages, stage.findings, stage.turn)
    locks: list[FileLock] = []

    def hold(event: wire.WorkerEvent) -> None:
        """The session file, as a worker that keeps to the rules does before it says Attached."""
        if event.WhichOneof("kind") == "welcome":
            locks.append(FileLock.open(event.welcome.session_file))
            locks[-1].try_acquire()

    call.on_answer = hold
    try:
        await WorkerService({side.role: cast(AnySide, side)}, "127.0.0.1:1").Session(None, cast(Any, call))
    finally:
        for lock in locks:
            lock.close()
        honest.gone()
        while side.tasks.running:
            await asyncio.sleep(0)
        await side.close()


def _change_body(frame: Frame, chance: Random) -> Frame:
    message = parsed(wire.WorkerMessage, frame.body)
    if message is None or chance.random() < 0.1:
        return Frame(frame.tag, bytes_changed(frame.body, chance))
    message_changed(message, chance, WORDS)
    return Frame(frame.tag, message.SerializeToString())


def mutate(data: bytes, most: int, seed: int) -> bytes:
    chance = Random(seed)
    return change(data, most, chance, SEEDS, _change_body)


def _talk(role: int, *messages: wire.WorkerMessage) -> bytes:
    return join([Frame(role, message.SerializeToString()) for message in messages])


def _registering(role: int) -> list[wire.WorkerMessage]:
    said = hello_with_pool(common.STORAGE_PAGE_MAJOR, 1, PAGE_BYTES, facts=FACTS)
    said.role = common.Role.Name(role)
    said.pool.ranks[0].memories[0].file.name = "not-there"
    return [wire.WorkerMessage(hello=said), wire.WorkerMessage(attached=wire.Attached())]


def _seeds() -> list[bytes]:
    def say(kind: str, number: int, **fields: Any) -> wire.WorkerMessage:
        message = wire.WorkerMessage()
        body = getattr(message, kind)
        body.name.CopyFrom(NAMES[number].to_proto())
        for field, value in fields.items():
            setattr(body, field, value)
        return message

    def hello(role: int, tenant: int = 0) -> list[wire.WorkerMessage]:
        facts = (FACTS, OTHER_FACTS)[tenant].to_proto()
        said = wire.WorkerHello(protocol=1, role=role, worker="w", facts=facts)
        return [wire.WorkerMessage(hello=said), wire.WorkerMessage(attached=wire.Attached())]

    def prompt(number: int) -> dict[str, Any]:
        chosen = PROMPTS[number]
        return {"digests": chosen.digests, "tokens": len(chosen.tokens), "tail_digest": chosen.tail}

    def output(number: int, new: int) -> bytes:
        full = (len(PROMPTS[number].tokens) + new) // 4 - PROMPTS[number].full
        return bytes(range(32)) * full

    quiesced = wire.WorkerMessage(quiesced=wire.Quiesced())
    decode, prefill = common.ROLE_DECODE, common.ROLE_PREFILL
    return [
        _talk(
            DECODE,
            *hello(decode),
            say("admit", 0, **prompt(1), max_new_tokens=8),
            say("admit", 1, **prompt(2), max_new_tokens=20, held_tokens=8),
            say("grow", 0, tokens=16),
            say("finish", 0, tokens=19, digests=output(1, 7)),
            say("finish", 1, tokens=13),
            quiesced,
        ),
        _talk(
            DECODE,
            *hello(decode, 1),
            say("admit", 0, **prompt(3), prefill="p", max_new_tokens=5, deadline_ms=50, priority=3),
            say("admit", 1, **prompt(1), prefill="p", max_new_tokens=5, held_tokens=4, warmup=True),
            say("progress", 1, tokens=4),
            say("abort", 0, reason="enough"),
            say("admit", 2, **prompt(3), max_new_tokens=50),
            say("admit", 3, **prompt(2), max_new_tokens=50),
        ),
        _talk(
            PREFILL,
            *hello(prefill),
            say("begin", 0, **prompt(1)),
            say("progress", 0, tokens=5),
            say("progress", 0, tokens=12),
            say("aux", 0, blob=b"first token"),
            say("begin", 1, **prompt(3), warmup=True, deadline_ms=20),
            say("progress", 1, tokens=8),
            say("abort", 1, reason="no more"),
            quiesced,
        ),
        _talk(DECODE | ENGINES, *_registering(decode)),
        _talk(PREFILL | ENGINES, *_registering(prefill)),
        _talk(PREFILL, *hello(prefill, 1), *(say("begin", number, **prompt(number % 4)) for number in range(6))),
    ]


SEEDS = _seeds()
