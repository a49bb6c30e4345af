"""A modelled engine: what it says a prompt, a step, a transfer take, and who waits for whom."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import pytest

from kvferry.client.requests import RequestFailed
from kvferry.workers.models.engine_model import EngineModel, read_engine_model
from kvferry.workers.models.interface import SequenceCompute
from kvferry.workers.models.pacing import GRACE_S, OPENING_S, Batch, ModelPace, NoPace, Timeline
from kvferry.workers.places import Places

MODEL = EngineModel(
    name="m",
    prefill_tokens_per_s=1000,
    prefill_context_ns=500_000,
    decode_step_ms=10,
    decode_sequence_us=1000,
    decode_context_ns=2000,
    kv_bytes_per_token=1000,
    transfer_gb_per_s=0.001,
    transfer_latency_ms=5,
    restore_gb_per_s=0.01,
)
QUICK = replace(MODEL, decode_step_ms=2, decode_sequence_us=0, decode_context_ns=0)


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_a_model_says_how_long_things_take() -> None:
    assert MODEL.prompt_s(0, 100) == pytest.approx(100 * (0.001 + 0.05 * 0.0005))
    assert MODEL.prompt_s(2000, 2100) == pytest.approx(100 * (0.001 + 2.05 * 0.0005))
    halves = MODEL.prompt_s(0, 300) + MODEL.prompt_s(300, 1000)
    assert halves == pytest.approx(MODEL.prompt_s(0, 1000))  # whatever the chunks
    assert MODEL.step_s(4, 1000) == pytest.approx(0.010 + 0.004 + 0.002)
    assert MODEL.transfer_s(20) == pytest.approx(0.005 + 0.02)
    assert MODEL.transfer_s(0) == 0
    assert MODEL.restore_s(20) == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transfer_gb_per_s": 0}, "transfer_gb_per_s must be > 0, got 0"),
        ({"decode_step_ms": -1}, "decode_step_ms must be >= 0, got -1"),
        ({"prefill_tokens_per_s": "fast"}, "prefill_tokens_per_s must be a number, got 'fast'"),
        ({"more": 1}, "more is no field of an engine model"),
        ({"name": None}, None),
    ],
)
def test_a_model_in_a_file(changes: dict[str, object], message: str | None, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({**asdict(MODEL), "note": "why", **changes}))
    if message is None:
        assert read_engine_model(path).step_s(1, 1) == MODEL.step_s(1, 1)
        return
    with pytest.raises(ValueError, match=message):
        read_engine_model(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_engine_model(tmp_path / "absent.json")
    (tmp_path / "engine.json").write_text('{"name": "m"}')
    with pytest.raises(ValueError, match="decode_context_ns is missing"):
        read_engine_model(tmp_path / "engine.json")


def test_who_waited_when_the_one_before_ended_starts_at_that_end() -> None:
    async def scenario() -> None:
        line = Timeline(clock=2.0)
        begin = time.monotonic()
        await line.serve(0.04, begin)
        assert line.free_at == pytest.approx(begin + 0.02 + line.behind_s, abs=1e-6)
        await asyncio.sleep(0.01)  # what this machine spends in between is inside the next wait
        await line.serve(0.04, begin)
        assert line.free_at == pytest.approx(begin + 0.04 + line.behind_s, abs=1e-6)  # whatever the machine lost
        assert time.monotonic() >= begin + 0.04
        assert (line.served, line.busy_s) == (2, pytest.approx(0.08))
        await asyncio.sleep(0.05)
        await line.serve(0.04, begin)  # 0.03 s too late to be over in time
        assert line.behind_s >= 0.03
        assert line.free_at <= time.monotonic()

    run(scenario())


def test_a_batch_steps_together() -> None:
    async def scenario() -> None:
        device = Timeline(clock=1.0)
        batch = Batch(QUICK, device)
        together: list[int] = []
        running = 0

        async def sequence(steps: int) -> None:
            nonlocal running
            batch.join()
            running += 1
            for _ in range(steps):
                await batch.step(10)
                together.append(batch.steps)
            running -= 1
            batch.leave()

        await asyncio.gather(*(sequence(steps) for steps in (3, 5, 5)))
        assert sorted(together) == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 2 + [5] * 2
        assert (batch.steps, batch.mean, running) == (5, 13 / 5, 0)
        await sequence(1)  # one that comes when all have left
        assert (batch.steps, device.served) == (6, 6)

    run(scenario())


def test_a_batch_goes_on_without_one_that_does_not_come() -> None:
    async def scenario() -> None:
        batch = Batch(QUICK, Timeline(clock=1.0))
        batch.join()  # never steps
        batch.join()
        begin = time.monotonic()
        await batch.step(1)
        assert time.monotonic() - begin >= GRACE_S * 0.9
        waiting = asyncio.create_task(batch.step(1))
        await asyncio.sleep(0)
        waiting.cancel()
        batch.leave()
        batch.leave()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(GRACE_S)
        assert batch.steps == 1

    run(scenario())


def test_the_end_of_an_engine_ends_its_waits() -> None:
    async def scenario() -> None:
        pace = ModelPace(replace(QUICK, decode_step_ms=60_000), clock=1.0, token_bytes=1)
        async with pace.decoding() as engine:
            waiting = [asyncio.create_task(engine.step(1)), asyncio.create_task(engine.step(1))]
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in waiting)
            pace.close()
            results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
            assert [type(result) for result in results] == [asyncio.CancelledError] * 2

    run(scenario())


def test_prompts_take_turns_and_one_that_waits_for_pages_lets_others_compute() -> None:
    async def scenario() -> None:
        pace = ModelPace(MODEL, clock=100.0, token_bytes=1)
        pages = asyncio.Event()
        order: list[str] = []

        async def begin(name: str, ready: asyncio.Event | None) -> str:
            if ready is not None:
                await ready.wait()
            return name

        async def prompt(name: str, ready: asyncio.Event | None = None) -> None:
            async with pace.turn() as turn:
                assert await turn.opening(begin(name, ready)) == name
                order.append(f"{name} begins")
                await pace.prompt(0, 100, turn.since)
                order.append(f"{name} ends")

        stuck = asyncio.create_task(prompt("a", pages))
        await asyncio.sleep(0)
        others = [asyncio.create_task(prompt(name)) for name in "bc"]
        await asyncio.gather(*others)
        assert order == ["b begins", "b ends", "c begins", "c ends"]
        pages.set()
        await stuck
        assert order[-2:] == ["a begins", "a ends"]
        cancelled = asyncio.create_task(prompt("d", asyncio.Event()))
        await asyncio.sleep(1.5 * OPENING_S)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await prompt("e")
        assert order[-1] == "e ends"

    run(scenario())


def test_transfers_and_restores_are_served_by_what_they_use() -> None:
    async def scenario() -> None:
        pace = ModelPace(MODEL, clock=1.0, token_bytes=4)
        begin = time.monotonic()
        await asyncio.gather(*(pace.arrived(40, 0) for _ in range(3)))  # 10 tokens each: 15 ms, one after the other
        assert time.monotonic() - begin >= 0.045
        begin = time.monotonic()
        await pace.arrived(0, 200)
        assert time.monotonic() - begin >= 0.02
        begin = time.monotonic()
        await asyncio.gather(pace.fetched(10), pace.fetched(0), pace.arrived(40, 0))
        assert time.monotonic() - begin >= 0.03

    run(scenario())


def test_places() -> None:
    async def scenario() -> None:
        places = Places(1)
        async with places.take(1.0) as left:
            assert left > 0.9
            with pytest.raises(RequestFailed, match=r"1 requests run \(max_running\); no place in 0.02 s"):
                async with places.take(0.02):
                    pass

            async def second() -> float:
                async with places.take(5.0) as left:
                    return left

            waiting, leaving = asyncio.create_task(second()), asyncio.create_task(second())
            await asyncio.sleep(0.05)
            leaving.cancel()
            assert not waiting.done()
        assert 4 < await waiting < 4.99
        async with places.take(0.1), Places(0).take(3.0) as left:
            assert left == 3.0
        with pytest.raises(ValueError, match="max_running is -1; it must be at least 0"):
            Places(-1)

    run(scenario())


class Adds:
    def step(self, token: int, position: int) -> int:
        return token + position


def test_an_engine_that_takes_its_own_time_waits_for_nothing() -> None:
    async def scenario() -> None:
        from kvferry.workers.models.compute_thread import ComputeThread

        thread = ComputeThread()
        pace = NoPace(thread)
        async with pace.turn() as turn, pace.decoding() as engine:
            assert await turn.opening(asyncio.sleep(0, "begun")) == "begun"
            await pace.prompt(0, 10**9, turn.since)
            await pace.arrived(10**12, 10**9)
            await pace.fetched(10**9)
            await engine.step(10**9)
            assert await engine.compute(cast(SequenceCompute, Adds()), 3, 4) == 7
        thread.close()

    run(scenario())
