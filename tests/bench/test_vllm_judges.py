"""Judges of bench/vllm: what they call met and missed; no server runs here."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvferry.proto import cache_pb2
from tests.bench.scripts import imported

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("chat", "cluster", "timed_steps", "compare", "hooks", "chaos", "greedy", "demo", "suite")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    with imported("vllm", SCRIPTS) as modules:
        yield modules


# -- compare -----------------------------------------------------------------------------------------------------------


def result(bench: SimpleNamespace, megabytes: float, *turns: list[int]) -> object:
    """`turns`: TTFTs in ms, conversation by conversation."""
    replies = [[bench.chat.Reply(ttft_s=ms / 1000) for ms in times] for times in turns]
    return bench.compare.Result("any", megabytes * 1e6, 1.0, replies)


@pytest.mark.parametrize(
    ("case", "megabytes", "first", "later", "missed"),
    [
        ("large", 100, 500, 300, []),
        ("large", 101, 500, 300, ["101.000 MB, not 0.999 x below 100.000"]),
        ("large", 100.05, 500, 300, []),
        ("large", 90, 501, 300, ["median TTFT of turn 1 501.0 ms, not below 500.0"]),
        ("large", 90, 400, 301, ["median TTFT from turn 2 on 301.0 ms, not below 300.0"]),
        ("evicting", 50, 900, 299, []),
        ("evicting", 51, 400, 299, ["51.000 MB, not 2 x below 100.000"]),
        ("evicting", 50, 400, 300, ["median TTFT from turn 2 on 300.0 ms, not below 300.0"]),
    ],
)
def test_the_aims_of_a_comparison(
    bench: SimpleNamespace, case: str, megabytes: float, first: int, later: int, missed: list[str]
) -> None:
    nixl = result(bench, 100, [500, 300], [100, 100], [900, 900])
    ours = result(bench, megabytes, [first, later], [first - 1, later - 1], [first + 1, later + 1])
    told = bench.compare.judge(case, nixl, ours)
    assert [line.split(": ", 1)[1] for line in told] == missed


def test_a_system_that_moves_nothing_meets_no_aim(bench: SimpleNamespace) -> None:
    ours, theirs = result(bench, 0, [400, 200]), result(bench, 100, [500, 300])
    assert bench.compare.judge("evicting", theirs, ours) == ["missed, evicting: any moved nothing"]
    assert bench.compare.judge("large", ours, ours)[0] == "missed, large: any moved nothing"


@pytest.mark.parametrize(("case", "host", "missed"), [("large", 0, 0), ("evicting", 7, 0), ("evicting", 0, 1)])
def test_a_case_in_which_the_daemon_did_nothing_is_missed(
    bench: SimpleNamespace, case: str, host: int, missed: int
) -> None:
    warm_up, behind = bench.compare.Done(4, 96, 0, 128), bench.compare.Done(5, 98, host, 400)
    assert [line.split(": ")[1] for line in bench.compare.unused(case, warm_up.less(warm_up))][:2] == [
        "pages received are 0",
        "tokens held are 0",
    ]
    assert len(bench.compare.unused(case, behind.less(warm_up))) == missed


def test_percentiles_are_between_what_was_measured(bench: SimpleNamespace) -> None:
    assert bench.compare.percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert bench.compare.percentile([1.0, 2.0, 3.0, 4.0, 5.0], 90) == pytest.approx(4.6)
    shown = bench.compare.table("large", 0, [result(bench, 1, [100, 10], [200, 30])])
    assert [next(iter(column.cells)) for column in shown.columns][-2:] == ["150 / 190", "20 / 28"]


# -- hooks -------------------------------------------------------------------------------------------------------------


def written(bench: SimpleNamespace, path: Path, steps: int, hooks_ms: float, always: bool) -> None:
    """Steps of 10 ms, one every 2 s: the engine waits for requests in between."""
    with path.open("w") as file:
        clock = bench.timed_steps.StepClock(file, always)
        for number in range(steps + 1):
            clock.begin(2.0 * number + 1, 7)
            clock.spent = hooks_ms / 1000 if clock.runs else 0.0
            clock.last_hook(2.0 * number + 1.010)
            clock.begin(2.0 * number + 2, 0)
            clock.last_hook(2.0 * number + 2.001)


@pytest.mark.parametrize(
    ("decode_ms", "prefill_ms", "prefill_steps", "share"),
    [(0.08, 0.04, 100, 0.016), (0.04, 0.11, 100, 0.022), (0.11, 0.04, 100, 0.022), (0.04, 0.04, 99, float("inf"))],
)
def test_both_engines_hooks_are_judged(
    bench: SimpleNamespace, tmp_path: Path, decode_ms: float, prefill_ms: float, prefill_steps: int, share: float
) -> None:
    for side in ("scheduler", "worker"):
        written(bench, tmp_path / f"kv_consumer-{side}", 400, decode_ms, False)
        written(bench, tmp_path / f"kv_producer-{side}", prefill_steps, prefill_ms, True)
    worst, lines = bench.hooks.judge_both(tmp_path, 400, 100)
    assert worst == pytest.approx(share, rel=1e-3)
    assert lines[0].startswith("decode engine: 400 steps in 4 + 4 blocks")
    assert lines[1].startswith("prefill engine: ")
    assert lines[-1].endswith("met" if share <= 0.02 else "MISSED")


def test_what_was_not_run_long_enough_is_missed(bench: SimpleNamespace, tmp_path: Path) -> None:
    worst, lines = bench.hooks.judge_both(tmp_path, 1, 1)
    assert worst == float("inf") and "0 steps of the scheduler and 0 of the worker, too few" in lines[0]


def test_a_step_ends_with_the_next_where_the_engine_does_not_wait(bench: SimpleNamespace) -> None:
    file = io.StringIO()
    clock = bench.timed_steps.StepClock(file, True)
    clock.begin(1.0, 3)
    clock.spent += 0.001
    clock.last_hook(1.02)
    clock.begin(1.03, 0)
    clock.begin(1.04, 5)
    clock.begin(9.0, 1)  # it had no last hook
    assert file.getvalue().splitlines() == ["0 0.040000 0.0010000 1 3", "1 7.960000 0.0000000 1 5"]


class Clock:
    """A look takes 1 s; `burn` what it is given, and returns it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now

    def burn(self, seconds: int) -> int:
        self.now += seconds
        return seconds


def test_hooks_of_a_step_without_tokens_count_where_one_had_something_to_do(bench: SimpleNamespace) -> None:
    file, seconds = io.StringIO(), Clock()
    clock = bench.timed_steps.StepClock(file, True, clock=seconds)
    works = clock.timed(seconds.burn, lambda result: result > 30)
    waits = clock.timed(lambda: works(10), lambda result: False)
    clock.begin(1.0, 3)
    works(20)
    clock.begin(1.1, 0)
    works(10)
    clock.begin(1.2, 0)
    waits(), works(40)  # the clock's looks at the hook within `waits` are in its time
    clock.begin(1.3, 0)
    clock.begin(1.4, 1)
    (line,) = file.getvalue().splitlines()
    assert float(line.split()[2]) == 20 + (10 + 4) + 40


def test_what_the_engine_does_within_a_hook_is_not_counted_but_hooks_within_that_are(bench: SimpleNamespace) -> None:
    file, seconds = io.StringIO(), Clock()
    clock = bench.timed_steps.StepClock(file, True, clock=seconds)
    inner = clock.timed(seconds.burn)
    own = clock.left_out(lambda: (seconds.burn(100), inner(5)))
    outer = clock.timed(lambda: (seconds.burn(20), own()))
    clock.begin(1.0, 3)
    outer()
    clock.begin(1.1, 1)
    (line,) = file.getvalue().splitlines()
    looks = 1 + 4  # the one that ends what was left out, those at the inner hook
    assert 25 <= float(line.split()[2]) <= 25 + looks


def methods_of(path: str, name: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef) if not node.name.startswith("__")}


def test_every_hook_of_a_step_is_timed() -> None:
    """What the connector has, but for what runs when an engine starts or ends, within a timed one, or does nothing."""
    source = ast.parse((ROOT / "bench/vllm/timed_connector.py").read_text())
    listed = {
        name
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("OF_REQUESTS", "OF_STEPS")
        for name in ast.literal_eval(node.value)
    }
    timed = listed | methods_of("bench/vllm/timed_connector.py", "TimedConnector")
    left = {name for name in methods_of("connectors/vllm/connector.py", "KVFerryConnector") - timed if name[0] != "_"}
    assert left == {
        *("set_xfer_handshake_metadata", "bind_gpu_block_pool", "begin_with_first_tokens", "decodes", "has_news"),
        *("register_kv_caches", "get_handshake_metadata", "shutdown", "build_prom_metrics"),
        *("wait_for_layer_load", "save_kv_layer", "build_kv_connector_stats"),
    }


# -- chaos -------------------------------------------------------------------------------------------------------------


def at_rest() -> cache_pb2.SideStats:
    side = cache_pb2.SideStats()
    side.peers.add(name="prefill", state="up", free_credits=16, slots=16)
    return side


def test_a_daemon_at_rest_holds_nothing(bench: SimpleNamespace) -> None:
    assert bench.chaos.held("decode", at_rest()) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"busy_slots": 1}, "session with prefill: busy_slots is 1, withheld_slots 0"),
        ({"withheld_slots": 2}, "busy_slots is 0, withheld_slots 2"),
        ({"free_credits": 15}, "15 of 16 credits are free"),
        ({"free_credits": 0, "slots": 0}, "0 of 0 credits are free"),
        ({"state": "down"}, "session with prefill: it is down"),
    ],
)
def test_slots_and_credits_that_are_missing_are_leaks(
    bench: SimpleNamespace, change: dict[str, object], told: str
) -> None:
    side = at_rest()
    for name, value in change.items():
        setattr(side.peers[0], name, value)
    (line,) = bench.chaos.held("decode", side)
    assert told in line


def test_one_difference_of_many_replies_is_told_once(bench: SimpleNamespace) -> None:
    told = ["  WRONG: request 3, prompt 5, token 1: a", "  allowed: request 4, prompt 5, token 2: b"]
    told += ["  allowed: request 9, prompt 5, token 2: b", "  allowed: afterwards, prompt 5, token 2: b"]
    assert bench.chaos.alike(told) == [
        "  WRONG: prompt 5, token 1: a (1 times)",
        "  allowed: prompt 5, token 2: b (3 times)",
    ]


def test_what_is_held_of_pool_and_requests_is_a_leak(bench: SimpleNamespace) -> None:
    side = at_rest()
    side.pool.locks, side.requests.waiting, side.quarantine.lost_workers = 1, 2, 3
    assert bench.chaos.held("d", side) == [
        "d daemon: pool.locks is 1",
        "d daemon: requests.waiting is 2",
        "d daemon: quarantine.lost_workers is 3",
    ]
    del side.peers[:]
    assert "there is no session" in bench.chaos.held("d", side)[-1]


def test_what_fails_as_a_rank_is_killed_is_asked_again_and_counted_apart(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails of itself is a failure; nothing is asked while an engine is away."""
    chaos, run = bench.chaos, bench.chaos.Run(bench.chaos.Faults(0, 0, rank_kills=2))
    prompts, asked, killed = chaos.prompts(4, 3), list[int](), list[str]()
    kills: list[asyncio.Task[None]] = []

    def kill(name: str) -> None:
        time.sleep(0.2)
        killed.append(name)

    async def streamed(client: object, url: str, body: dict[str, object], began: float) -> object:
        assert len(killed) == run.engines_ended, "it is not back"
        asked.append(prompts.index(body["messages"]))
        if len(asked) == 2:
            raise RuntimeError("it fails of itself")
        if len(asked) in (3, 5):
            kills.append(asyncio.create_task(chaos.kill_rank(run, SimpleNamespace(kill_rank=kill), None)))
            await asyncio.sleep(0)
            raise RuntimeError("EngineDeadError")
        return bench.chat.Reply()

    monkeypatch.setattr(chaos, "streamed", streamed)
    wanted = SimpleNamespace(compare=lambda *reply: None)
    asyncio.run(asyncio.wait_for(chaos.client_loop(run, None, "", prompts, wanted, 1, 16), 20))
    first, second, third, fourth = asked[0], asked[1], asked[2], asked[4]
    assert asked == [first, second, third, third, fourth, fourth] and killed == ["decode", "prefill"]
    assert (run.done, run.again, run.over) == (3, 2, True)
    assert run.refused == [f"prompt {second}: RuntimeError it fails of itself"]
    assert "2 ranks killed and their engines started, 2 requests asked again" in str(run)


def test_a_reply_that_its_server_aborts_is_none(bench: SimpleNamespace) -> None:
    """vLLM says so of what it was at, when the engine of another data-parallel rank is killed."""

    async def reply_that_ends(reason: str | None) -> Any:
        event = {"choices": [{"delta": {"content": ""}, "finish_reason": reason}]}
        content = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
        answers = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
        async with httpx.AsyncClient(transport=answers) as client:
            return await bench.chat.streamed(client, "http://d", {}, time.monotonic())

    assert asyncio.run(reply_that_ends("stop")).tokens == []
    for reason in ("abort", None):
        with pytest.raises(RuntimeError, match="http://d ended it behind 0 tokens by itself"):
            asyncio.run(reply_that_ends(reason))


def test_tokens_that_differ_are_wrong_but_at_ties(bench: SimpleNamespace) -> None:
    def reply(*tokens: tuple[str, float]) -> object:
        return bench.chat.Reply(tokens=[bench.chat.Token(text, -1.0, -1.0 - gap) for text, gap in tokens])

    comparison = bench.chat.Comparison()
    reference = reply(("a", 1.0), ("b", 5e-4), ("c", 1.0))
    comparison.add("same", reference, reference)
    comparison.add("tie", reference, reply(("a", 1.0), ("x", 1.0), ("y", 1.0)))
    assert (comparison.tokens, len(comparison.ties), comparison.wrong) == (5, 1, [])
    opinion = reply(("a", 1.0), ("b", 1.0), ("x", 1.0))
    comparison.add("as another", reference, reply(("a", 1.0), ("b", 1.0), ("x", 1.0)), [opinion])
    assert (len(comparison.ties), len(comparison.shared), comparison.wrong) == (1, 1, [])
    others = [opinion, reply(("a", 1.0), ("z", 1.0), ("y", 1.0))]
    comparison.add("not as another", reference, reply(("a", 1.0), ("b", 1.0), ("y", 1.0)), others)
    assert len(comparison.wrong) == 1
    comparison.wrong.clear()
    comparison.add("other", reference, reply(("z", 1.0)))
    comparison.add("short", reference, reply(("a", 1.0)))
    comparison.add("nothing", reply(), reply())
    assert [line.split(",")[0].split(":")[0] for line in comparison.wrong] == ["other", "short", "nothing"]


@pytest.mark.parametrize("name", ["suite", "compare", "hooks", "chaos", "greedy", "demo"])
def test_the_scripts_take_their_arguments(
    bench: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        getattr(bench, name).main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")
