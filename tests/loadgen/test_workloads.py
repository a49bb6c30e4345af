"""Workloads and distributions: the same seed gives the same, sizes are as asked, bad files are named."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from kvferry.loadgen import conversation_spec, trace
from kvferry.loadgen.arguments import add_arguments, make_loop, make_workload, starts
from kvferry.loadgen.chats import Chats, read_chats
from kvferry.loadgen.conversation_spec import read_spec
from kvferry.loadgen.distributions import Constant, Lognormal, Uniform, generator, parse
from kvferry.loadgen.runner import Closed, Open
from kvferry.loadgen.scripts import TokenTurn, Workload, WorkloadError
from kvferry.loadgen.shared_prefix import PRESETS, SharedPrefix, Sizes
from kvferry.loadgen.trace import Trace, read_trace
from kvferry.loadgen.workload import MultiTurn


def ids(turn: TokenTurn) -> list[int]:
    return [int(i) for run in turn.runs if run.count for i in run.json.split(b",")]


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--url", "http://x", *words])


def workload(*words: str, vocabulary: int | None = 300) -> Workload:
    return make_workload(flags(*words), vocabulary)


def mean(text: str, count: int = 4000) -> float:
    source = generator(1, text)
    return float(np.mean([parse(text).sample(source) for _ in range(count)]))


def test_distributions() -> None:
    assert parse("40") == parse("constant:40") == Constant(40)
    assert parse("uniform:10,20") == parse("uniform:min=10,max=20") == Uniform(10, 20)
    assert mean("uniform:10,20") == pytest.approx(15, rel=0.02)
    assert mean("uniform:0.5,0.6") == pytest.approx(0.55, rel=0.02)
    assert mean("lognormal:mean=3,sigma=0.5") == pytest.approx(np.exp(3 + 0.125), rel=0.05)
    assert mean("lognormal:average=300") == pytest.approx(300, rel=0.05)
    assert mean("poisson:8") == pytest.approx(8, rel=0.03)
    source = generator(2, "zipf")
    zipf = [parse("zipf:1.5,max=9").sample(source) for _ in range(500)]
    assert (min(zipf), max(zipf)) == (1, 9)
    average = parse("lognormal:average=1000,ratio=0.8,max=1500")
    assert isinstance(average, Lognormal)
    assert np.exp(average.mean) == pytest.approx(800)
    assert Constant(0.2).count(source, 1) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("normal:3,4", "distribution must be one of constant, uniform, lognormal, zipf, poisson, got 'normal'"),
        ("uniform:3", "uniform: max is missing"),
        ("uniform:5,4", "max must be >= 5, got 4"),
        ("uniform:1,2,3", "uniform has no parameter 'parameter 3'"),
        ("zipf:1", "alpha must be > 1, got 1"),
        ("lognormal:average=9,sigma=1", "lognormal has no parameter 'sigma'"),
        ("lognormal:average=9,ratio=1", "ratio must be above 0 and below 1, got 1"),
        ("poisson:x", "alpha must be a number, got 'x'"),
        ("-3", "value must be >= 0, got -3"),
        ("nan", "value must be a number of at most"),
    ],
)
def test_bad_distributions(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_a_conversation_depends_on_the_seed_and_its_number_alone() -> None:
    sizes = ("--turns", "uniform:2,5", "--user-words", "poisson:9", "--system-words", "7", "--seed", "4")
    few, many = workload("--conversations", "2", *sizes), workload("--conversations", "200", *sizes)
    assert few.text(1) == many.text(1) != many.text(0)
    assert few.tokens(1) == many.tokens(1)
    assert few.text(0).system == few.text(1).system
    assert len(few.text(0).system.split()) == 7
    assert {many.turns(i) for i in range(50)} == {2, 3, 4, 5}
    assert len(many.text(3).turns) == len(many.tokens(3).turns) == many.turns(3)
    assert workload("--conversations", "2", *sizes[:-1], "5").text(1) != few.text(1)
    first = [ids(many.tokens(i).turns[0]) for i in range(2)]
    assert first[0][:7] == first[1][:7]
    assert all(32 <= token < 300 for token in first[0])


def test_sizes_of_turns() -> None:
    words = ("--turns", "3", "--user-words", "5", "--own-words", "4", "--max-tokens", "6", "--think-seconds", "2")
    script = workload(*words).text(0)
    assert [len(turn.text.split()) for turn in script.turns] == [9, 5, 5]
    assert [(turn.max_tokens, turn.think_s) for turn in script.turns] == [(6, 0), (6, 2), (6, 2)]


def test_sizes_that_are_constant_change_nothing_else() -> None:
    """No generator is made for them; the words come from one of their own."""
    constant = workload("--turns", "3", "--user-words", "5", "--own-words", "4", "--system-words", "6")
    drawn = workload("--turns", "uniform:3,3", "--user-words", "uniform:5,5", "--own-words", "4", "--system-words", "6")
    for number in range(3):
        assert constant.text(number) == drawn.text(number)
        assert constant.tokens(number) == drawn.tokens(number)


def test_shared_prefixes() -> None:
    published = PRESETS["published"]
    assert published == Sizes(20, 50_000, 4_500, 350, 1_000, 128)
    shared = workload("--workload", "shared-prefix", "--prefixes", "3", "--requests", "40", "--seed", "2")
    assert isinstance(shared, SharedPrefix)
    prompts = [ids(shared.tokens(i).turns[0]) for i in range(40)]
    assert {len(prompt) for prompt in prompts} == {256 + 32}
    heads: dict[int, set[tuple[int, ...]]] = {}
    for i, prompt in enumerate(prompts):
        heads.setdefault(shared.prefix_of(i), set()).add(tuple(prompt[:256]))
    assert sorted(heads) == [0, 1, 2]
    assert all(len(found) == 1 for found in heads.values())
    assert len({tuple(prompt[256:]) for prompt in prompts}) == 40
    text = shared.text(7)
    assert len(text.system.split()) == 256
    assert len(text.turns[0].text.split()) == 32


def write_trace(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def record(at: float, tokens: int, *blocks: int, output: int = 5) -> dict[str, object]:
    return {"timestamp": at, "input_length": tokens, "output_length": output, "hash_ids": list(blocks)}


def test_a_trace(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", record(0, 1024, 4, 9), record(3000, 700, 4, 8), record(4000, 512, 9))
    trace = Trace(read_trace(path), seed=1, vocabulary=32_000, speed=2)
    assert [trace.start_s(i) for i in range(3)] == [0, 1.5, 2]
    prompts = [ids(trace.tokens(i).turns[0]) for i in range(3)]
    assert [len(prompt) for prompt in prompts] == [1024, 700, 512]
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:] == prompts[2]
    assert trace.tokens(1).turns[0].max_tokens == 5
    args = ("--workload", "trace", "--file", str(path), "--max-tokens", "1")
    assert workload(*args).tokens(1).turns[0].max_tokens == 1
    assert list(starts(flags(*args, "--speed", "4"), workload(*args, "--speed", "4"))) == [0, 0.75, 1]
    assert workload(*args).start_s(1) is None
    with pytest.raises(WorkloadError, match="a trace has no text"):
        trace.text(0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no requests"),
        ([[1]], "t.jsonl:1: must be an object, got list"),
        ([record(0, 512, 1), record(-1, 512, 1)], "t.jsonl:2: timestamp must be a number >= 0, got -1"),
        ([record(0, 513, 1)], "t.jsonl:1: input_length is 513; 1 hash_ids are as many blocks of 512"),
        ([{**record(0, 512), "hash_ids": ["a"]}], "hash_ids must be a list of whole numbers"),
    ],
)
def test_bad_traces(given: list[object], message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=message):
        read_trace(write_trace(tmp_path / "t.jsonl", *given))


def test_chats(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    messages = [("system", "be brief"), ("user", "one"), ("assistant", "a b c"), ("user", "two"), ("assistant", "d")]
    path.write_text(
        json.dumps(
            [
                {"id": "x", "messages": [{"role": role, "content": content} for role, content in messages]},
                {"id": "y", "conversations": [{"from": "gpt", "value": "hm"}, {"from": "human", "value": "three"}]},
                {"id": "z", "messages": [{"role": "assistant", "content": "nobody asked"}]},
            ]
        )
    )
    chats = Chats(read_chats(path), seed=0, think_s=Constant(1), output_tokens=None, label="x")
    assert (chats.conversations, chats.turns(0), chats.turns(1)) == (2, 2, 1)
    script = chats.text(0)
    assert (script.system, [turn.text for turn in script.turns]) == ("be brief", ["one", "two"])
    assert [(turn.max_tokens, turn.think_s) for turn in script.turns] == [(4, 0), (2, 1)]
    assert chats.text(1).turns[0].text == "three"
    assert len(read_chats(path, limit=1)) == 1


def test_chats_of_other_assistants_and_messages_that_are_not_understood(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [("human", "one"), ("tool", "x"), ("bing", "a b c"), ("user", None), ("human", "two"), ("chatgpt", "d")]
    messages = [{"from": role, "value": value} for role, value in words]
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": messages}]))
    (chat,) = read_chats(tmp_path / "chats.json")
    assert ([tuple(exchange) for exchange in chat.exchanges], chat.skipped) == ([("one", "a b c"), ("two", "d")], 2)
    assert "2 messages left out" in caplog.text


def test_lines_and_files_have_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_LINE", 10)
    (tmp_path / "t.jsonl").write_text("x" * 1000)
    with pytest.raises(WorkloadError, match="more than 10 characters; a line may have 10"):
        read_trace(tmp_path / "t.jsonl")
    monkeypatch.setattr(conversation_spec, "MAX_SPEC_BYTES", 10)
    with pytest.raises(WorkloadError, match="has 1000 bytes; it may have 10"):
        read_spec(tmp_path / "t.jsonl", seed=0, vocabulary=100, think_s=Constant(0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "must be a list of chats, got dict"),
        ("[]", "no chat has a user's message"),
        ("[{}]", "chat 0: messages: Field required"),
        ('[{"messages": [{"role": "robot", "content": ""}]}]', "user's message; 1 messages have no text or a role"),
        ('[{"messages": [{"role": "user", "content": 3}]}]', "messages.0.content: .* got 3"),
        ("nonsense", "Expecting value"),
    ],
)
def test_bad_chats(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "chats.json").write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_chats(tmp_path / "chats.json")


SPEC = {
    "filetype": "generate_conversations",
    "num_conversations": 6,
    "text_files": ["words.txt"],
    "print_stats": False,
    "prompt_input": {
        "num_turns": {"distribution": "uniform", "min": 3, "max": 5},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 8},
        "prefix_num_tokens": {"distribution": "lognormal", "average": 20, "max": 50},
        "num_tokens": {"distribution": "uniform", "min": 12, "max": 16},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 4, "max": 6}},
}


def spec_of(path: Path, **changes: object) -> MultiTurn:
    (path / "words.txt").write_text("alpha beta gamma delta")
    (path / "spec.json").write_text(json.dumps({**SPEC, **changes}))
    return read_spec(path / "spec.json", seed=3, vocabulary=300, think_s=Constant(0))


def test_generate_conversations(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert spec.conversations == 6
    assert {spec.turns(i) for i in range(6)} <= {2, 3}  # 3 to 5 messages: 4 or 6
    script = spec.text(0)
    assert len(script.system.split()) == 8
    assert 12 + 1 <= len(script.turns[0].text.split()) <= 16 + 50
    assert all(12 <= len(turn.text.split()) <= 16 and 4 <= turn.max_tokens <= 6 for turn in script.turns[1:])
    words = {word.strip(".").lower() for turn in script.turns for word in turn.text.split()}
    assert words == {"alpha", "beta", "gamma", "delta"}
    flags_of = ("--workload", "generate-conversations", "--file", str(tmp_path / "spec.json"), "--conversations", "2")
    assert workload(*flags_of).conversations == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filetype": "x"}, "filetype must be 'generate_conversations', got 'x'"),
        ({"num_conversations": 0}, "num_conversations must be a whole number >= 1, got 0"),
        ({"text_files": ["absent.txt"]}, "text_files: .*absent.txt: No such file"),
        ({"prompt_output": {}}, "prompt_output.num_tokens.distribution must be the name of one, got None"),
        (
            {"prompt_output": {"num_tokens": {"distribution": "zipf", "alpha": 0.5}}},
            "prompt_output.num_tokens: alpha must be > 1, got 0.5",
        ),
    ],
)
def test_bad_specifications(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=message):
        spec_of(tmp_path, **changes)


def test_arrivals() -> None:
    words = ("--conversations", "2000", "--rate", "20")
    times = list(starts(flags(*words), workload(*words)))
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.15)
    assert times == list(starts(flags(*words), workload(*words)))
    steady = list(starts(flags(*words, "--arrivals", "constant"), workload(*words)))
    assert np.diff(steady) == pytest.approx(1 / 20)


def test_loops() -> None:
    assert make_loop(flags()) == Closed(4, 4)
    assert make_loop(flags("--concurrency", "3", "--active", "9")) == Closed(3, 9)
    assert make_loop(flags("--workload", "shared-prefix", "--preset", "published")) == Closed(128, 128)
    assert make_loop(flags("--rate", "3", "--concurrency", "7")) == Open(7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload", "trace"), "--file is needed by --workload trace"),
        (("--file", "x"), "--file is of no use to --workload multi-turn"),
        (("--vocabulary", "32"), "vocabulary must be > 32, got 32"),
        (("--workload", "trace", "--file", "/nowhere"), "No such file"),
    ],
)
def test_workloads_that_cannot_be(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        workload(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--speed", "2"), "--speed is for the times of a trace"),
        (("--rate", "2", "--active", "3"), "--active is for a closed loop"),
        (("--concurrency", "4", "--active", "3"), r"--active must be >= clients \(4\), got 3"),
    ],
)
def test_loops_that_cannot_be(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        make_loop(flags(*words))
