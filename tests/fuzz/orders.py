"""Requests of a front end to a worker's Engine service: of any content, against every bound.

A frame of tag 0 is a PrefillRequest, of tag 1 a DecodeRequest, of tag 2 the RequestName of an Abort. What is taken
keeps within the worker's bounds; what is not is INVALID_ARGUMENT, and one that names the field.
"""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.message import Message

from kvferry.client.requests import RequestFailed, RequestName
from kvferry.proto import common_pb2 as common
from kvferry.proto import engine_pb2 as wire
from kvferry.proto.limits import MAX_PRIORITY
from kvferry.radix.prompt_cache import PromptCache
from kvferry.workers.orders import (
    MAX_DAEMON_NAME_CHARS,
    MAX_DEADLINE_S,
    MAX_STOP_TOKENS,
    Bounds,
    DecodeOrder,
    PrefillOrder,
    decode_order,
    prefill_order,
)
from tests.fuzz.frames import Frame, bytes_changed, change, join, message_changed, parsed, split
from tests.fuzz.stage import NAMES, WORDS, Finding

BOUNDS = Bounds(max_tokens=64, vocabulary=1000, page_size=4)
KINDS: tuple[type[Message], ...] = (wire.PrefillRequest, wire.DecodeRequest, common.RequestName)


def one_input(data: bytes) -> None:
    prompts = PromptCache(page_size=BOUNDS.page_size)
    for frame in split(data):
        message: Any = parsed(KINDS[frame.tag % 3], frame.body)
        if message is not None:
            _ask(message, prompts)


def _ask(message: Any, prompts: PromptCache) -> None:
    if isinstance(message, common.RequestName):
        try:
            name = RequestName.from_proto(message)
        except ValueError:
            return
        if RequestName.from_proto(name.to_proto()) != name:
            raise Finding(f"{name} is another one when it is read again")
        return
    try:
        order: PrefillOrder | DecodeOrder
        if isinstance(message, wire.PrefillRequest):
            order = prefill_order(message, BOUNDS, prompts)
        else:
            order = decode_order(message, BOUNDS, prompts)
    except RequestFailed as refusal:
        if refusal.code != common.ERROR_INVALID_ARGUMENT or not refusal.message:
            raise Finding(f"refused with {refusal.code}: {refusal.message}") from refusal
        return
    tokens = order.prompt.tokens
    full, rest = divmod(len(tokens), BOUNDS.page_size)
    new = order.max_new_tokens if isinstance(order, DecodeOrder) else 1
    right = (
        list(tokens) == list(message.tokens)
        and 1 <= len(tokens) <= BOUNDS.max_tokens - new
        and max(tokens) < BOUNDS.vocabulary
        and len(order.prompt.digests) == 32 * full
        and len(order.prompt.tail_digest) == (32 if rest else 0)
        and 0 < order.deadline_s <= MAX_DEADLINE_S
        and abs(order.priority) <= MAX_PRIORITY
    )
    if isinstance(order, DecodeOrder):
        right &= new >= 1 and len(order.stop_tokens) <= MAX_STOP_TOKENS and len(order.prefill) <= MAX_DAEMON_NAME_CHARS
    if not right:
        raise Finding(f"{message} was taken as {order}")


def _change_body(frame: Frame, chance: Random) -> Frame:
    message = parsed(KINDS[frame.tag % 3], frame.body)
    if message is None or chance.random() < 0.1:
        return Frame(frame.tag, bytes_changed(frame.body, chance))
    message_changed(message, chance, WORDS)
    return Frame(frame.tag, message.SerializeToString())


def mutate(data: bytes, most: int, seed: int) -> bytes:
    return change(data, most, Random(seed), SEEDS, _change_body)


def _seeds() -> list[bytes]:
    name = NAMES[0].to_proto()
    sampling = wire.Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=7)
    prefill = wire.PrefillRequest(name=name, tokens=range(9), sampling=sampling, deadline_ms=50, priority=-3)
    decode = wire.DecodeRequest(
        name=name, tokens=range(8), sampling=sampling, max_new_tokens=5, stop_tokens=[2, 3], prefill="p", warmup=True
    )
    largest = wire.DecodeRequest(name=name, tokens=[999] * 60, max_new_tokens=4, deadline_ms=1 << 31, priority=1000)
    told = [Frame(tag, each.SerializeToString()) for tag, each in ((0, prefill), (1, decode), (2, name), (1, largest))]
    return [join(told), *(join([each]) for each in told)]


SEEDS = _seeds()
