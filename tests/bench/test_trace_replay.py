"""The replay of a small trace: what it counts is checked by hand or against a brute-force optimum; refusals."""

import importlib.util
import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.radix.tree import policy_names

BENCH = Path(__file__).resolve().parents[2] / "bench" / "trace_replay.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trace_replay", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["trace_replay"] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


replay = load()


def line(ids: list[int], at: int = 0, tokens: int | None = None) -> str:
    record = {"timestamp": at, "input_length": len(ids) * 512 if tokens is None else tokens, "output_length": 1}
    return json.dumps({**record, "hash_ids": ids}) + "\n"


def write(path: Path, *prompts: list[int]) -> Path:
    path.write_text("".join(line(ids, at) for at, ids in enumerate(prompts)))
    return path


def bench(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCH), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_table_has_every_policy_and_both_bounds(tmp_path: Path) -> None:
    a, b, c = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    trace = write(tmp_path / "trace.jsonl", a, b, c, a, b, c)
    ran = bench("--trace", trace, "--blocks", "8,12", "--score-from", "3")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("6 requests, 24 pages of 512 tokens, 12 different; no host tier\n")
    rows = [row.split() for row in ran.stdout.splitlines()[3:]]
    size = 2 + len(policy_names())
    by_size = {rows[i][0]: rows[i : i + size] for i in (0, size)}
    assert list(by_size) == ["8", "12"]
    for of_size in by_size.values():
        assert of_size[0][1:] == ["no", "end", "50.00", "50.00", "100.00"]
        assert [row[0] for row in of_size[2:]] == policy_names()
    assert by_size["8"][1] == ["optimum", "33.33", "33.33", "66.67"]  # b goes for c, then a, which has been hit, for b
    lru = by_size["8"][2 + policy_names().index("lru")]
    assert lru[1:7] == ["0.00", "0.00", "0.00", "0.00", "0", "%"]
    assert by_size["12"][2][1:5] == ["50.00", "50.00", "0.00", "100.00"]


def test_what_leaves_the_device_is_found_on_the_host(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", [1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4])
    requests = replay.read_trace(trace, 64)
    hits = replay.replay(requests, "lru", 4 * 8, 4 * 8)
    assert (hits.device.tolist(), hits.host.tolist()) == ([0, 0, 0], [0, 0, 32])


def test_a_prompt_larger_than_the_pool_keeps_its_head(tmp_path: Path) -> None:
    requests = replay.read_trace(write(tmp_path / "trace.jsonl", [1, 2, 3, 4], [1, 2, 3, 4]), 512)
    assert replay.replay(requests, "lru", 3, 0).device.tolist() == [0, 3]
    assert replay.replay(requests, "lru", 1, 8).host.tolist() == [0, 0]
    assert replay.optimum(requests, replay.next_uses(requests), 3).device.tolist() == [0, 3]


@pytest.mark.parametrize(("page_size", "pages"), [(512, 3), (64, 17), (16, 66)])
def test_pages_of_a_partial_block(tmp_path: Path, page_size: int, pages: int) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line([1, 2, 3], tokens=1050))
    assert [len(request) for request in replay.read_trace(path, page_size)] == [pages]


def test_the_same_id_behind_another_parent_is_another_page(tmp_path: Path) -> None:
    first, second = replay.read_trace(write(tmp_path / "trace.jsonl", [1, 9], [2, 9]), 512)
    assert first.pages.tolist() == [0, 1]
    assert second.pages.tolist() == [2, 3]
    assert first.digests[32:] != second.digests[32:]


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_evictions_beats_the_optimum(tmp_path: Path, seed: int) -> None:
    random.seed(seed)
    prompts = [
        random.choice([[1], [2]]) + [random.randint(1, 2) for _ in range(random.randint(0, 2))] for _ in range(9)
    ]
    capacity = 4
    requests = replay.read_trace(write(tmp_path / "trace.jsonl", *prompts), 512)
    paths = [tuple(request.pages.tolist()) for request in requests]
    parents = {page: path[k - 1] if k else None for path in paths for k, page in enumerate(path)}

    @cache
    def best(i: int, held: frozenset[int]) -> int:
        if i == len(paths):
            return 0
        hits = sum(page in held for page in paths[i])
        return hits + max(best(i + 1, after) for after in rooms(held | set(paths[i]), frozenset(paths[i])))

    def rooms(held: frozenset[int], locked: frozenset[int]) -> set[frozenset[int]]:
        if len(held) <= capacity:
            return {held}
        inner = {parents[page] for page in held}
        return {room for page in held - locked - inner for room in rooms(held - {page}, locked)}

    got = replay.optimum(requests, replay.next_uses(requests), capacity).device
    assert int(got.sum()) == best(0, frozenset())


def chats(strangers: float, seed: int = 7) -> list[list[int]]:
    """40 conversations at a time, of 8 turns in the mean, among prompts that never come again."""
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 30))
    live: list[list[int]] = []
    prompts = []
    while len(prompts) < 4000:
        if rng.random() < strangers:
            prompts.append([next(fresh) for _ in range(rng.randint(5, 40))])
            continue
        if len(live) < 40:
            live.append([next(fresh) for _ in range(rng.randint(2, 10))])
        i = rng.randrange(len(live))
        prompts.append(list(live[i]))
        live[i] += [next(fresh) for _ in range(rng.randint(1, 3))]
        if rng.random() < 1 / 8:
            del live[i]
    return prompts


def hit_rates(path: Path, prompts: list[list[int]], pages: int) -> dict[str, float]:
    requests = replay.read_trace(write(path, *prompts), 512)
    rates = {}
    for policy in ("lru", "learned"):
        hits = replay.replay(requests, policy, pages, 0).device
        rates[policy] = 100 * int(hits[2000:].sum()) / sum(map(len, prompts[2000:]))
    return rates


def test_learned_lets_strangers_go_and_is_no_worse_where_recency_is_all(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    scanned = hit_rates(path, chats(strangers=0.5), 500)
    assert scanned["learned"] > scanned["lru"] + 5
    worse = []
    for seed in range(4):  # a single run may be lucky or not: here nothing tells one conversation from another
        plain = hit_rates(path, chats(strangers=0.0, seed=seed), 500)
        worse.append(plain["lru"] - plain["learned"])
    assert sum(worse) / len(worse) < 0.5
    rounds = hit_rates(path, [list(range(doc * 20, doc * 20 + 20)) for doc in range(100)] * 40, 1000)
    assert rounds["lru"] == 0
    assert rounds["learned"] > 20


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("nothing", "not JSON"),
        ("[]", "list"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}', "hash_ids: missing"),
        ('{"timestamp": 0, "input_length": "3", "output_length": 1, "hash_ids": [1]}', "input_length: '3'"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [-1]}', "hash_ids: [-1]"),
        ('{"timestamp": -1, "input_length": 3, "output_length": 1, "hash_ids": [1]}', "timestamp: -1"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, bad: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line([1]) + bad + "\n")
    with pytest.raises(replay.TraceError) as caught:
        replay.read_trace(path, 512)
    assert f"{path}:2: " in str(caught.value)
    assert says in str(caught.value)


def test_an_absent_trace_and_wrong_words(tmp_path: Path) -> None:
    absent = bench("--trace", tmp_path / "none.jsonl")
    assert absent.returncode == 2
    assert "none.jsonl: No such file" in absent.stderr
    trace = write(tmp_path / "trace.jsonl", [1], [2])
    for words, says in ((("--page-size", 100), "must divide 512"), (("--policies", "best"), "must be of: lru")):
        refused = bench("--trace", trace, *words)
        assert refused.returncode == 2
        assert says in refused.stderr
