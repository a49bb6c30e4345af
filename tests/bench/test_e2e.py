"""The simulation of the published workload, its committed fit, and one short run of the whole system."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

E2E = Path(__file__).parent.parent.parent / "bench" / "e2e"
sys.path.insert(0, str(E2E))
fit_published = pytest.importorskip("fit_published", reason="bench/e2e is not here")
import rig  # noqa: E402
from claims import Chats  # noqa: E402
from simulation import simulate  # noqa: E402

from kvferry.client.client import DaemonClient  # noqa: E402
from kvferry.client.requests import RequestFailed, RequestName  # noqa: E402
from kvferry.loadgen.report import make_report  # noqa: E402
from kvferry.loadgen.runner import RunRecord, TurnRecord  # noqa: E402
from kvferry.logs import LOG_FORMAT  # noqa: E402
from kvferry.proto import cache_pb2  # noqa: E402
from kvferry.workers.ending import aborted_on_error  # noqa: E402
from kvferry.workers.models.engine_model import read_engine_model  # noqa: E402
from kvferry.workers.models.interface import WrongPage  # noqa: E402


def test_the_committed_engine_gives_the_published_baseline_row() -> None:
    model = read_engine_model(fit_published.FILE)
    outcome = simulate(model, fit_published.SIZES, fit_published.BASELINE, fit_published.prefixes())
    got = (outcome.requests_per_s, outcome.ttft_p50_s, outcome.inter_token_ms)
    assert got == pytest.approx(fit_published.ROW, rel=0.01)


def test_the_simulation_keeps_what_queues_keep() -> None:
    """Little's law over the whole run; nothing faster than its own parts; a cap of one is one after the other."""
    model = read_engine_model(fit_published.FILE)
    sizes = replace(fit_published.SIZES, requests=200, output=50)
    prefix_of = fit_published.prefixes()
    system = replace(fit_published.BASELINE, reuse="on")
    on = simulate(model, sizes, system, prefix_of)
    latency = on.ttft_mean_s + 49 * on.inter_token_ms / 1000
    assert 0.5 * sizes.concurrency < on.requests_per_s * latency <= sizes.concurrency
    alone = simulate(model, replace(sizes, requests=3), replace(system, max_running=1), prefix_of)
    assert alone.mean_batch == 1
    assert alone.inter_token_ms == pytest.approx(1000 * model.step_s(1, 54_500 + 25), rel=0.01)


def test_a_report_in_the_models_time() -> None:
    turn = TurnRecord(0, 0, 0.0, 0.0, 0.5, 0.25, (0.25,), 10, 4, 2, None)
    report = rig.in_model_time(make_report(RunRecord((turn,), 0, 2.0), None), 4.0)
    assert (report.duration_s, report.requests_per_s, report.ttft_ms.p50) == (8.0, 0.125, 1000.0)
    assert (report.token_ms.mean, report.ttft_by_turn_ms[0].max) == (1000.0, 1000.0)
    assert report.input_tokens.mean == 10


class Aborted:
    """A daemon's client that hears of the request's end."""

    async def abort(self, name: RequestName, reason: str) -> None:
        assert reason.startswith("page ")


def test_what_a_worker_says_of_a_wrong_page_is_found_in_its_log(tmp_path: Path) -> None:
    """Whoever then answered the request."""

    async def ends(error: Exception) -> None:
        async with aborted_on_error(cast(DaemonClient, Aborted()), RequestName(bytes(16), 1)):
            raise error

    logs = [tmp_path / "prefill.log", tmp_path / "decode.log"]
    logs[1].write_text("2026-11-21 12:00:00,000 INFO kvferry.workers.models.pacing: device: 3 waits\n")
    handler = logging.FileHandler(logs[0])
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        for error in (WrongPage("page 7 holds others' bytes"), RuntimeError("page 8 is of no interest")):
            with pytest.raises((RequestFailed, RuntimeError)):
                asyncio.run(ends(error))
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    (said,) = rig.wrong_pages(logs)
    assert said.endswith("page 7 holds others' bytes")


@pytest.mark.parametrize(
    ("wrong", "tried_again", "pages", "message"),
    [
        (
            ["request x: page 7 holds others' bytes", "request y: page 9"],
            0,
            5,
            "2 wrong pages, the first: request x: page 7",
        ),
        ([], 1, 5, "tried 1 prefills again"),
        ([], 0, 6, "do not sum to its 6 pages"),
    ],
)
def test_a_run_that_hides_harm_is_not_used(wrong: list[str], tried_again: int, pages: int, message: str) -> None:
    whole = cache_pb2.PoolStats(pages=5, free=3, cached=2)
    rig.judge(whole, [], 0)
    with pytest.raises(rig.RigError, match=message):
        rig.judge(cache_pb2.PoolStats(pages=pages, free=3, cached=2), wrong, tried_again)


def test_what_an_endless_prefill_cache_computes() -> None:
    """Against each prompt, token by token, in full pages of 64."""
    bench = importlib.import_module("return")
    chats = Chats(conversations=2, turns=3, system=130, user=50, output=20)
    # Shared 128. Prompts of 180, 250, 320 tokens; 192 and 256 are held before the second and the third.
    assert bench.endless(chats) == 128 + 2 * ((180 - 128) + (250 - 192) + (320 - 256))


def test_prompt_tokens_that_were_computed_are_those_neither_held_nor_fetched() -> None:
    sides = []
    for queried, hit, fetched in ((1000, 100, 300), (500, 0, 64)):
        side = cache_pb2.SideStats()
        side.requests.queried_tokens, side.requests.hit_tokens = queried, hit
        side.way_back.fetched_tokens = fetched
        sides.append(side)
    setup = rig.Setup(decode_pages=1, prefill_pages=1, engine=None)
    report = make_report(RunRecord((), 0, 1.0), None)
    measured = rig.Run(setup, report, cache_pb2.SideStats(), tuple(sides), ())
    assert (measured.computed_tokens, measured.fetched_tokens) == (1036, 364)


@pytest.mark.nightly
def test_a_short_run_through_the_system() -> None:
    setup = rig.Setup(
        decode_pages=400, prefill_pages=4000, engine=E2E / "engine_8b.json", host_pages=800, max_running=3
    )
    load = ["--conversations", "6", "--turns", "3", "--user-words", "300", "--max-tokens", "40", "--concurrency", "6"]
    for reuse in ("off", "on"):
        measured = rig.run(replace(setup, reuse=reuse), [*load, "--api", "completions-tokens"], limit_s=120)
        assert (measured.report.requests, measured.report.failed) == (18, 0)
        assert (measured.decode.requests.hit_tokens > 0) is (reuse == "on")
        steps = next(line for line in measured.engine_log if "steps, mean" in line)
        assert float(steps.split()[-1]) <= 3
