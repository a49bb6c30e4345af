"""Systems whose pools are their engines' own memory, and engines that come again."""

from __future__ import annotations

import dataclasses
import threading
import time

import grpc

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, SystemSpec
from tests.support.engines import Engines, Turn
from tests.system.serving.ranks import PAGE, Case

ENGINE = ["--pool", "engine"]


def engine_words(pages: int, ranks: int, storage: str, device: str) -> list[str]:
    words = [*ENGINE, "--pool-pages", str(pages), "--page-size", str(PAGE), "--ranks", str(ranks)]
    return [*words, "--storage", storage, "--pool-device", device]


def on_engines(system: SystemSpec, pages: int, case: Case, devices: tuple[str, str] = ("cpu", "cpu")) -> SystemSpec:
    """Both sides' pools are their workers'."""
    prefill, decode = (
        engine_words(pages, ranks, storage, device)
        for ranks, storage, device in zip((case.prefill, case.decode), case.storages, devices, strict=True)
    )
    return dataclasses.replace(
        system,
        prefill_flags=[*system.prefill_flags, *ENGINE],
        decode_flags=[*system.decode_flags, *ENGINE],
        worker_flags=[*system.worker_flags, *prefill],
        decode_worker_flags=[*system.decode_worker_flags, *decode],  # the later words win
    )


def again(stack: Stack, replica: Replica, role: str, system: SystemSpec, words: list[str]) -> Replica:
    """Another worker for the same daemon; later words win."""
    common = ["worker", role, "--socket", replica.socket, "--listen", "127.0.0.1:0", "--synthetic"]
    flags = [*system.worker_flags, *(system.decode_worker_flags if role == "decode" else ())]
    worker = stack.start(f"{replica.name}-worker", [*common, *flags, *words])
    return dataclasses.replace(replica, worker=worker, worker_address=stack.ready(worker))


def met_again(engines: Engines, prompt: list[int], max_new: int) -> Turn:
    """Sessions are made anew with the memory: a request may come before them."""
    deadline = time.monotonic() + 20
    while True:
        turn = engines.turn(prompt, max_new)
        if turn.error is None or time.monotonic() > deadline:
            return turn
        assert turn.code is grpc.StatusCode.UNAVAILABLE, turn.details
        threading.Event().wait(0.1)
