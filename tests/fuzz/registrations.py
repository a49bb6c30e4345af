"""Registrations of workers with `--pool engine`: a WorkerHello with memory of its own, from its check to its mapping.

Each frame is a hello; its tag says whether the daemon has a GPU. What is taken says the same when it is written and
read again; and what is mapped of a file is the pages, all of them and nothing else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from random import Random
from typing import Any

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.memory.making import registration_of
from kvferry.daemon.memory.shared import SharedPoolMemory
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.geometry.registration import Registration
from tests.fuzz.frames import Frame, bytes_changed, change, join, message_changed, parsed, split
from tests.fuzz.stage import FACTS, FOLDER, WORDS, Finding, engines_config

FILE, FILE_BYTES = "engine-pool", 1 << 14
PATH = os.path.join(FOLDER, FILE)
OTHER = b"\xee"
CONFIGS = (engines_config("decode"), engines_config("decode", "cuda:0"))
GEOMETRY = KVGeometry(layers=2, kv_heads=1, head_dim=2, dtype="float16", page_size=CONFIGS[0].page_size)
MOST_PAGES = 256  # that are looked at; pages are as small as 16 bytes


def one_input(data: bytes) -> None:
    for frame in split(data):
        hello: Any = parsed(wire.WorkerHello, frame.body)
        if hello is not None:
            _register(hello, frame.tag % 2)


async def _clear(memory: SharedPoolMemory, pages: int) -> None:
    for page in range(pages):
        memory.zero_tail(page, 0, lambda problem: None)


def _register(hello: Any, which: int) -> None:
    config = CONFIGS[which]
    try:
        registration = registration_of(config, hello)
    except RequestError:
        return
    assert registration is not None
    geometry = KVGeometry.from_proto(hello.facts.geometry)
    if Registration.from_proto(registration.to_proto(), geometry, config.ranks) != registration:
        raise Finding(f"{registration} is another one when it is read again")
    if registration.on_gpus or registration.pages > MOST_PAGES:
        return
    with open(PATH, "wb") as file:
        file.write(OTHER * FILE_BYTES)
    try:
        memory = SharedPoolMemory.map(registration, geometry, FOLDER, 1)
    except (OSError, ValueError):
        return
    try:
        asyncio.run(_clear(memory, registration.pages))
    finally:
        memory.close()
    with open(PATH, "rb") as file:
        found = file.read()
    zeroed = found.count(0)
    if len(found) != FILE_BYTES or zeroed + found.count(OTHER) != FILE_BYTES:
        raise Finding(f"{registration}: the file has other bytes than those that were written")
    if zeroed != registration.pages * geometry.page_bytes:
        raise Finding(f"{registration}: {zeroed} bytes are of pages of {geometry.page_bytes}")


_WORDS = (*WORDS, FILE, "../" + FILE, f"{FILE}-2", "kvferry-pool", "bfloat16", bytes(64), bytes(16), bytes([1]) * 64)


def _change_body(frame: Frame, chance: Random) -> Frame:
    hello: Any = parsed(wire.WorkerHello, frame.body)
    if hello is None or chance.random() < 0.05:
        return Frame(frame.tag, bytes_changed(frame.body, chance))
    chosen = chance.random()
    message_changed(hello.pool if chosen < 0.7 else hello.facts.geometry if chosen < 0.9 else hello, chance, _WORDS)
    return Frame(frame.tag ^ (chance.random() < 0.05), hello.SerializeToString())


def mutate(data: bytes, most: int, seed: int) -> bytes:
    return change(data, most, Random(seed), SEEDS, _change_body)


def hello_with_pool(
    storage: int,
    tensors: int,
    page_bytes: int,
    *,
    interleaved: bool = False,
    gpu: bool = False,
    facts: NamespaceFacts | None = None,
) -> wire.WorkerHello:
    """Of 8 pages, whose tensors lie behind each other, or in turn within each page's stride."""
    model = (facts or dataclasses.replace(FACTS, geometry=GEOMETRY)).to_proto()
    hello = wire.WorkerHello(protocol=1, role=common.ROLE_DECODE, worker="w", facts=model)
    hello.pool.pages = 8
    hello.pool.storage = common.Storage.Name(storage)
    rank = hello.pool.ranks.add()
    memory = rank.memories.add(nbytes=FILE_BYTES)
    if gpu:
        memory.gpu.ipc_handle, memory.gpu.device_uuid = bytes(64), bytes(16)
    else:
        memory.file.name = FILE
    stride = page_bytes * tensors + 32 if interleaved else page_bytes
    for number in range(tensors):
        offset = number * page_bytes if interleaved else number * 8 * page_bytes
        rank.tensors.add(memory=0, offset=offset, page_stride=stride, page_bytes=page_bytes)
    return hello


def _seeds() -> list[bytes]:
    page_bytes, layers = GEOMETRY.page_bytes, GEOMETRY.layers
    planes = layers * GEOMETRY.tensors

    def told(*hellos: wire.WorkerHello, tag: int = 0) -> bytes:
        return join([Frame(tag, hello.SerializeToString()) for hello in hellos])

    whole = hello_with_pool(common.STORAGE_PAGE_MAJOR, 1, page_bytes)
    major = hello_with_pool(common.STORAGE_LAYER_MAJOR, planes, page_bytes // planes)
    return [
        told(whole, hello_with_pool(common.STORAGE_PAGE_MAJOR, 1, page_bytes, interleaved=True)),
        told(major, hello_with_pool(common.STORAGE_LAYER_MAJOR, planes, page_bytes // planes, interleaved=True)),
        told(hello_with_pool(common.STORAGE_LAYER_BLOCKS, layers, page_bytes // layers)),
        told(hello_with_pool(common.STORAGE_PAGE_MAJOR, 1, page_bytes, gpu=True), whole, tag=1),
    ]


SEEDS = _seeds()
