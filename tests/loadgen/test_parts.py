"""Dialogues, streams and reports alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvferry.loadgen import client as client_module
from kvferry.loadgen.client import Client, ModelInfo, Outcome, ServerError
from kvferry.loadgen.daemon_stats import DaemonCounts, Reading, StatsError, counted
from kvferry.loadgen.dialogue import ChatDialogue, Generation, Reply, ReplyError, TokenDialogue
from kvferry.loadgen.distributions import Constant
from kvferry.loadgen.files import FileError, read_report, write_csv, write_json, write_requests
from kvferry.loadgen.plots import hit_rates, write_comparison, write_plots
from kvferry.loadgen.report import Target, distribution, make_report
from kvferry.loadgen.runner import RunRecord, TurnRecord
from kvferry.loadgen.workload import MultiTurn

GENERATION = Generation("m", temperature=0.0, seed=1, ignore_eos=True, extra={"priority": 3})


def chat(conversations: int = 1, **sizes: int) -> MultiTurn:
    names = {"turns": "turns_each", "user": "user_words", "system": "system_words", "output": "output_tokens"}
    given = {names[name]: Constant(value) for name, value in {"output": 4, **sizes}.items()}
    return MultiTurn(conversations, **given, vocabulary=100)


def test_a_dialogue_carries_its_history() -> None:
    workload = chat(turns=2, user=2, system=2)
    script = workload.text(0)
    dialogue = ChatDialogue(script, GENERATION)
    dialogue.request(0)
    dialogue.append(Reply("yes", []))
    body = json.loads(dialogue.request(1))
    assert body["messages"] == [
        {"role": "system", "content": script.system},
        {"role": "user", "content": script.turns[0].text},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": script.turns[1].text},
    ]
    assert (body["ignore_eos"], body["max_tokens"], body["priority"]) == (True, 4, 3)
    ids = workload.tokens(0)
    tokens = TokenDialogue(ids, GENERATION)
    first = json.loads(tokens.request(0))
    assert first["return_token_ids"] is True
    with pytest.raises(ReplyError, match="gave no token ids"):
        tokens.append(Reply("yes", []))
    tokens.append(Reply("yes", [7, 8]))
    last = json.loads(tokens.request(1))
    assert "return_token_ids" not in last  # no turn follows: nobody needs them
    own = [[int(i) for run in turn.runs if run.count for i in run.json.split(b",")] for turn in ids.turns]
    assert [len(tokens) for tokens in own] == [4, 2]
    assert first["prompt"] == own[0]
    assert last["prompt"] == [*own[0], 7, 8, *own[1]]


def test_distribution() -> None:
    values = distribution(i / 1000 for i in range(1, 101))
    assert (values.count, values.mean, values.p50) == (100, pytest.approx(50.5), pytest.approx(50.5))
    assert (values.min, values.max, values.std) == (
        pytest.approx(1),
        pytest.approx(100),
        pytest.approx(29.01, abs=0.01),
    )
    assert (values.p25, values.p75) == (pytest.approx(25.75), pytest.approx(75.25))
    assert (values.p90, values.p99) == (pytest.approx(90.1), pytest.approx(99.01))
    assert distribution([]).count == 0


def turn(number: int = 0, at: int = 0, first: float | None = 0.1, error: str | None = None) -> TurnRecord:
    gaps = (0.2, 0.2) if error is None else ()
    return TurnRecord(number, at, 1.0, 0.01, 0.5, first, gaps, 10, 4, 3, error)


def test_report_counts_only_what_did_not_fail() -> None:
    good, bad = turn(), turn(1, first=None, error="broken")
    before, after = DaemonCounts(moved_bytes=5, saved_bytes=1), DaemonCounts(moved_bytes=25, saved_bytes=2)
    report = make_report(RunRecord((good, bad), 2, 2.0), after.since(before), target=Target(ttft_ms=150))
    assert (report.requests, report.failed, report.skipped, report.ok) == (2, 1, 2, False)
    assert (report.requests_per_s, report.output_tokens_per_s, report.tokens_per_s) == (0.5, 1.5, 6.5)
    assert report.latency_ms.p99 == pytest.approx(500)
    assert report.token_ms.mean == pytest.approx(200)  # 0.4 s for two tokens behind the first
    assert report.errors[0].message == "broken"
    assert report.goodput is not None
    assert (report.goodput.requests, report.goodput.requests_per_s) == (1, 0.5)
    assert json.loads(report.json())["daemons"]["moved_bytes"] == 20
    assert not make_report(RunRecord((), 0, 1.0), None).ok


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target(ttft_ms=99), False),
        (Target(inter_token_ms=199), False),
        (Target(latency_ms=499), False),
        (Target(ttft_ms=101, inter_token_ms=201, latency_ms=501), True),
    ],
)
def test_a_target(target: Target, met: bool) -> None:
    assert target.met(turn()) is met


def test_files(tmp_path: Path) -> None:
    record = RunRecord((turn(), turn(0, 1), turn(1, first=None, error="broken")), 0, 2.0)
    report = make_report(record, DaemonCounts(moved_bytes=7), target=Target(ttft_ms=1))
    write_json(report, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report
    write_csv(report, tmp_path / "report.csv")
    rows = {row[0]: row for row in (line.split(",") for line in (tmp_path / "report.csv").read_text().splitlines())}
    assert rows["what"][1:3] == ["count", "mean"]
    assert rows["ttft_ms"][1:3] == ["2", "100.0"]
    assert rows["daemons_moved_bytes"] == ["daemons_moved_bytes", "", "7"]
    write_requests(record.turns, tmp_path / "requests.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines] == [None, None, "broken"]
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(FileError, match="not a report: setup: Field required"):
        read_report(tmp_path / "none.json")
    with pytest.raises(FileError, match="No such file"):
        read_report(tmp_path / "absent.json")


def test_what_daemons_counted_between_two_readings() -> None:
    def reading(at_s: float, uptime_s: float, moved: int) -> Reading:
        return Reading("d:1", at_s, uptime_s, DaemonCounts(moved_bytes=moved))

    first = reading(1000.0, 50.0, 7)
    assert counted((first, first), (reading(1600.0, 651.0, 9), reading(1600.0, 0.0, 10))).moved_bytes == 5
    assert counted((), ()) == DaemonCounts()
    with pytest.raises(StatsError, match=r"daemon d:1: moved_bytes is 6, and was 7 before: it was started anew"):
        counted((first,), (reading(1600.0, 650.0, 6),))
    # Started anew, it counted beyond what it had counted before.
    with pytest.raises(StatsError, match=r"daemon d:1 runs for 300\.0 s, and would for 650\.0 s: it was started anew"):
        counted((first,), (reading(1600.0, 300.0, 90),))


def test_hit_rate_over_time() -> None:
    ends = [TurnRecord(0, 0, at - 0.5, 0.0, 0.5, 0.1, (), 10, hit, 1, None) for at, hit in ((1, 0), (2, 5), (4, 10))]
    edges, rates = hit_rates(ends, 4)
    assert edges.tolist() == [1, 2, 3, 4]
    assert rates[[0, 1, 3]].tolist() == [0, 50, 100]
    assert np.isnan(rates[2])


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    record = RunRecord(tuple(turn(i, i % 3) for i in range(9)), 0, 2.0)
    paths = write_plots(make_report(record, None), record.turns, tmp_path / "plots")
    assert [path.name for path in paths] == ["ttft_by_turn.png", "latency.png", "hit_rate.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize("scale", [1, 40])
def test_two_runs_in_one_picture_whose_ticks_are_whole(
    scale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_module = pytest.importorskip("matplotlib.figure", reason="plots need matplotlib")
    drawn = []
    save = figure_module.Figure.savefig

    def kept(figure: object, *args: object, **options: object) -> None:
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(figure_module.Figure, "savefig", kept)
    turns = tuple(turn(i, i % 2, first=scale * (0.0001 + i / 1e6)) for i in range(9))
    reports = [make_report(RunRecord(turns[:n], 0, 2.0), DaemonCounts(moved_bytes=n * scale * 10**6)) for n in (4, 9)]
    assert write_comparison(("off.json", "on.json"), reports, tmp_path).name == "compared.png"
    write_plots(reports[1], turns, tmp_path)
    (both, *_) = drawn
    assert [text.get_text() for text in both.legends[0].get_texts()] == ["A: off.json", "B: on.json"]
    assert [bar.get_height() for bar in both.axes[4].patches] == [4 * scale, 9 * scale]
    for axis in (axis for figure in drawn for axis in figure.axes):
        ticks = [label.get_text() for label in (*axis.get_xticklabels(), *axis.get_yticklabels())]
        assert [tick for tick in ticks if tick] and not [tick for tick in ticks if "." in tick], ticks
        assert len(set(axis.get_yticks())) == len(axis.get_yticks())


@asynccontextmanager
async def scripted(head: str, *parts: str) -> AsyncIterator[str]:
    """A server that answers every request with this; gives its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length: " in asked:
            await reader.readexactly(int(asked.split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.write(f"HTTP/1.1 {head}\r\nconnection: close\r\n\r\n".encode())
        for part in parts:
            writer.write(part.encode())
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def sent(head: str, *parts: str) -> Outcome:
    async with scripted(head, *parts) as url, Client(url, connections=1, timeout_s=5) as client:
        return await client.send("/v1/completions", b"{}")


@pytest.mark.parametrize(
    ("parts", "text", "error"),
    [
        (
            ('data: {"choices": [{"text": "a"}]}\n\nda', 'ta: {"choices": [{"text": "b"}]}\n\ndata: [DONE]\n\n'),
            "ab",
            None,
        ),
        (('data: {"choices": [{"delta": {"content": "a"}}]}\n\n',), "a", "ended without [DONE]"),
        (("data: [DONE]\n\n",), "", "the reply has no content"),
        (('data: {"choices": [{"text": ""}]}\n\ndata: [DONE]\n\n',), "", "the reply has no content"),
        ((": a comment\n\ndata: nonsense\n\n",), "", "not a chunk: nonsense"),
        (('data: {"error": {"message": "full"}}\n\n',), "", "full"),
        (('data: {"choices": [], "usage": {"prompt_tokens": "x"}}\n\n',), "", "not a chunk"),
    ],
)
def test_streams(parts: tuple[str, ...], text: str, error: str | None) -> None:
    outcome = asyncio.run(sent("200 OK\r\ncontent-type: text/event-stream", *parts))
    assert outcome.reply().text == text
    if error is None:
        assert outcome.error is None
        assert len(outcome.timing.gaps_s) == len(text) - 1
    else:
        assert outcome.error is not None
        assert error in outcome.error


def test_tokens_that_read_as_no_text() -> None:
    parts = ('data: {"choices": [{"text": ""}]}', 'data: {"choices": [], "usage": {"completion_tokens": 2}}')
    outcome = asyncio.run(sent("200 OK", *(f"{part}\n\n" for part in (*parts, "data: [DONE]"))))
    assert (outcome.error, outcome.output_tokens) == (None, 2)
    assert outcome.timing.first_s is not None
    assert outcome.timing.first_s < outcome.timing.latency_s


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_timed_and_of_no_next_turn(name: str) -> None:
    deltas = ({"role": "assistant", "content": ""}, *({name: word} for word in ("so", "it", "is")))
    thoughts = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
    alone = asyncio.run(sent("200 OK", *thoughts, "data: [DONE]\n\n"))
    assert (alone.error, alone.reply().text, alone.output_tokens) == (None, "", 3)
    timing = alone.timing
    assert timing.opened_s is not None and timing.first_s is not None
    assert timing.opened_s < timing.first_s < timing.last_s
    assert sum(timing.gaps_s) == pytest.approx(timing.last_s - timing.first_s)
    said = 'data: {"choices": [{"delta": {"content": "yes"}}]}\n\n'
    both = asyncio.run(sent("200 OK", *thoughts, said, "data: [DONE]\n\n"))
    assert (both.reply().text, len(both.timing.gaps_s), both.output_tokens) == ("yes", 3, 4)


def test_an_event_as_large_as_a_prompt() -> None:
    ids = ",".join(["31999"] * 200_000)
    first = f'data: {{"choices": [{{"text": "a", "token_ids": [5]}}], "prompt_token_ids": [{ids}]}}\n\n'
    outcome = asyncio.run(sent("200 OK", first, "data: [DONE]\n\n"))
    assert (outcome.error, outcome.tokens) == (None, [5])


def test_an_answer_that_is_an_error() -> None:
    assert asyncio.run(sent("503 Busy", '{"error": {"message": "later"}}')).error == "HTTP 503: later"
    assert asyncio.run(sent("500 Oh", "<html>")).error == "HTTP 500: <html>"
    assert asyncio.run(sent("429 Full", '{"error": {"mess', 'age": "lat', 'er"}}')).error == "HTTP 429: later"


async def model_of(head: str, *parts: str) -> ModelInfo:
    async with scripted(head, *parts) as url, Client(url, connections=1, timeout_s=5) as client:
        return await client.model()


def test_a_list_of_models_that_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ('{"data": [{"id": "m", "vo', 'cab_size": 300}]', "}")
    assert asyncio.run(model_of("200 OK", *parts)) == ModelInfo("m", 300)
    with pytest.raises(ServerError, match=re.escape('/v1/models: HTTP 503: {"data"')):
        asyncio.run(model_of("503 Busy", *parts))
    monkeypatch.setattr(client_module, "MAX_BODY_BYTES", 41)
    for status in ("200 OK", "503 Busy"):
        with pytest.raises(ServerError, match=f"/v1/models: HTTP {status[:3]}: the answer has more than 41 bytes"):
            asyncio.run(model_of(status, *parts))


def test_a_server_that_lists_no_models() -> None:
    with pytest.raises(ServerError, match="not a list of models"):
        asyncio.run(model_of("200 OK", '{"data": []}'))
