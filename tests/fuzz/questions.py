"""Questions that anybody may ask a daemon, and orders of operators: Lookup, Flush, Pin, Unpin, Dump.

A frame's tag is the call; its bytes are the request. Afterwards the pins are taken away, and nothing is held.
"""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any, cast

from google.protobuf.message import Message

from kvferry.daemon.observe.stats import Snapshots
from kvferry.daemon.services.admin import AdminService
from kvferry.daemon.services.cache import CacheService
from kvferry.daemon.sides.side import AnySide
from kvferry.proto import admin_pb2 as admin
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common
from tests.fuzz.frames import Frame, bytes_changed, change, join, message_changed, parsed, split
from tests.fuzz.stage import FACTS, NAMES, PROMPTS, WORDS, Call, Decode, Finding, Honest, Prefill, Refused, Stage, run

REQUESTS: tuple[tuple[str, type[Message]], ...] = (
    ("Lookup", cache.LookupRequest),
    ("Flush", admin.FlushRequest),
    ("Pin", admin.PinRequest),
    ("Unpin", admin.UnpinRequest),
    ("Dump", admin.DumpRequest),
    ("Stats", cache.StatsRequest),
)

_SIDES: dict[str, AnySide] = {}


def _now() -> float:
    return Stage.current.clock.now if hasattr(Stage, "current") else 0.0


_SNAPSHOTS = Snapshots("d", _SIDES, _now)  # once: it asks what is installed


def one_input(data: bytes) -> None:
    frames = split(data)
    if frames:
        run(lambda stage: _serve(stage, frames))


async def _serve(stage: Stage, frames: list[Frame]) -> None:
    sides: dict[str, AnySide] = {"decode": cast(AnySide, Decode(stage.clock)), "prefill": Prefill(stage.clock)}
    stage.sides += cast(Any, sides.values())
    workers = [Honest(cast(Any, side)) for side in sides.values()]
    for worker in workers:
        worker.cache(NAMES[5], PROMPTS[1])
        worker.cache(NAMES[4], PROMPTS[3])
    workers[0].admit(NAMES[0], PROMPTS[1], prefill="")
    _SIDES.clear()
    _SIDES.update(sides)
    services = (CacheService(sides, _SNAPSHOTS), AdminService(sides))
    for frame in frames:
        name, kind = REQUESTS[frame.tag % len(REQUESTS)]
        request = parsed(kind, frame.body)
        if request is None:
            continue
        call = Call([], stage.findings, stage.turn)
        service = next(each for each in services if name in vars(type(each)))
        with contextlib.suppress(Refused):
            reply = await getattr(service, name)(request, call)
            if not isinstance(reply, Message):
                raise Finding(f"{name} answers {reply!r}")
        stage.turn()
        for side in sides.values():
            side.tick()
    for worker, side in zip(workers, sides.values(), strict=True):
        side.ready_core.pins.unpin(0)
        worker.gone()


def _change_body(frame: Frame, chance: Random) -> Frame:
    request = parsed(REQUESTS[frame.tag % len(REQUESTS)][1], frame.body)
    if request is None or chance.random() < 0.1:
        return Frame(chance.randrange(6), bytes_changed(frame.body, chance))
    message_changed(request, chance, WORDS)
    return Frame(frame.tag, request.SerializeToString())


def mutate(data: bytes, most: int, seed: int) -> bytes:
    return change(data, most, Random(seed), SEEDS, _change_body)


def _seeds() -> list[bytes]:
    decode, prefill, digests = common.ROLE_DECODE, common.ROLE_PREFILL, PROMPTS[1].digests
    asked: tuple[tuple[int, Message], ...] = (
        (0, cache.LookupRequest(namespace_id=FACTS.id, digests=digests)),
        (2, admin.PinRequest(role=decode, namespace_id=FACTS.id, digests=digests, seconds=60)),
        (2, admin.PinRequest(role=prefill, namespace_id=FACTS.id, digests=PROMPTS[3].digests, seconds=1)),
        (4, admin.DumpRequest(role=decode, namespace_id=FACTS.id, limit=2)),
        (4, admin.DumpRequest(role=prefill)),
        (1, admin.FlushRequest(role=decode, strict=True)),
        (1, admin.FlushRequest(role=prefill, namespace_id=FACTS.id)),
        (3, admin.UnpinRequest(role=decode, pin=1)),
        (3, admin.UnpinRequest(role=prefill)),
        (5, cache.StatsRequest()),
    )
    frames = [Frame(tag, request.SerializeToString()) for tag, request in asked]
    return [join(frames), join(frames[::-1]), join(frames[1:6])]


SEEDS = _seeds()
