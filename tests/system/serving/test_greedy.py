"""Real models through two daemons and two workers: every token equals that of plain transformers in one process."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, SystemSpec, start_replicas
from kvferry.front.chat import FolderTokenizer
from kvferry.proto import engine_pb2
from kvferry.workers.models.sampling import Sampling
from kvferry.workers.models.transformer import kv_shape
from kvferry.workers.smollm import converted_model
from tests.support import tiny_models
from tests.support.engines import Engines, Turn, settled
from tests.support.reference import Comparison, Conversation
from tests.support.stacks import running_stack

PAGE = 16
CHUNK = 48
NEW_TOKENS = 8
POOL_PAGES = 24  # hold two small conversations, not two large ones
SMALL, LARGE = (80, 30), (110, 50)  # tokens that a user's first and later turns add
WORDS = 250  # of the text that each conversation is about
LICENSE = Path(__file__).parents[3] / "LICENSE"

Script = list[list[int]]  # the tokens before each reply


@dataclass(frozen=True)
class Family:
    """A model, the system that serves it, and its plain form in this process."""

    stack: Stack
    prefill: Replica
    decode: Replica
    model: Any = field(repr=False)
    tokenizer: FolderTokenizer | None  # None: prompts are random tokens

    def scripts(self, conversations: range, turns: int, size: tuple[int, int]) -> list[Script]:
        """What the users say; each conversation's number gives another text."""
        counts = [size[0], *[size[1]] * (turns - 1)]
        if self.tokenizer is None:
            return [random_script(number, counts) for number in conversations]
        return [chat_script(self.tokenizer, number, counts) for number in conversations]


def chat_script(tokenizer: FolderTokenizer, number: int, counts: Sequence[int]) -> Script:
    words = LICENSE.read_text().split()[number * WORDS : (number + 1) * WORDS]
    text = iter(tokenizer.encode_piece(" ".join(words)))
    script = []
    for turn, count in enumerate(counts):
        head = tokenizer.encode_piece(("<|im_end|>\n" if turn else "") + "<|im_start|>user\nWhat is this? ")
        end = tokenizer.encode_piece("<|im_end|>\n<|im_start|>assistant\n")
        script.append([*head, *islice(text, count - len(head) - len(end)), *end])
        assert len(script[-1]) == count
    return script


def random_script(number: int, counts: Sequence[int]) -> Script:
    rng = random.Random(number)
    return [[rng.randrange(tiny_models.VOCABULARY) for _ in range(count)] for count in counts]


def smollm2_folder() -> Path:
    try:
        return converted_model()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def serve(
    stack: Stack,
    folder: Path,
    tokenizer: FolderTokenizer | None,
    *,
    pool_pages: int,
    host_pages: int = 0,
    decode_flags: Sequence[str] = (),
    ranks: tuple[int, int] = (1, 1),
) -> Family:
    """ranks: of prefill and of decode; each has all of a latent."""
    torch.set_num_threads(1)  # as the workers
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    shape = kv_shape(model)
    page_bytes = PAGE * shape.token_bytes
    host_flags = ["--host-bytes", str(host_pages * page_bytes), "--checksums", "on"]
    spec = SystemSpec(
        model=str(folder),
        page_size=PAGE,
        decode_pool_bytes=pool_pages * page_bytes * ranks[1],
        prefill_pool_bytes=pool_pages * page_bytes * ranks[0],
        decode_flags=[*host_flags, "--ranks", str(ranks[1]), *decode_flags],
        prefill_flags=[*host_flags, "--ranks", str(ranks[0])],
        worker_flags=["--revision", "1", "--chunk-tokens", str(CHUNK)],
    )
    prefills, decodes = start_replicas(stack, spec)
    return Family(stack, prefills[0], decodes[0], model, tokenizer)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    tokenizer = None
    if request.param == "smollm2":
        folder = smollm2_folder()
        tokenizer = FolderTokenizer(str(folder))
    else:
        folder = tmp_path_factory.mktemp(request.param)
        tiny_models.random_model(request.param).save_pretrained(folder)
    threads = torch.get_num_threads()
    with running_stack() as stack:
        yield serve(stack, folder, tokenizer, pool_pages=POOL_PAGES)
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Talk:
    """One conversation as it went: each turn's prompt and outcome."""

    prompts: list[list[int]]
    turns: list[Turn]

    def left(self, turn: int) -> int:
        """Tokens of the history whose KV the turn left at the decode server: its last token's is never computed."""
        return len(self.prompts[turn]) + len(self.turns[turn].output) - 1


def converse(engines: Engines, scripts: Sequence[Script], new_tokens: int, *, at_a_time: int) -> list[Talk]:
    """Turn by turn; of each turn so many conversations at a time."""
    talks = [Talk([], []) for _ in scripts]
    for number in range(len(scripts[0])):
        for talk, script in zip(talks, scripts, strict=True):
            history = talk.prompts[-1] + talk.turns[-1].output if talk.turns else []
            talk.prompts.append(history + script[number])
        for start in range(0, len(talks), at_a_time):
            batch = talks[start : start + at_a_time]
            turns = engines.turns([talk.prompts[-1] for talk in batch], new_tokens, deadline_s=120.0)
            for talk, turn in zip(batch, turns, strict=True):
                assert turn.error is None, turn.details
                assert len(turn.output) == new_tokens
                assert turn.delta_pages == -(-len(talk.prompts[-1]) // PAGE) - turn.matched // PAGE
                talk.turns.append(turn)
    return talks


def compare(model: Any, talks: Sequence[Talk]) -> Comparison:
    """Asserts that every token is the reference's, or differs at a near tie; those are printed."""
    comparison = Comparison()
    for talk in talks:
        conversation = Conversation(model)
        for prompt, turn in zip(talk.prompts, talk.turns, strict=True):
            conversation.compare(prompt, turn, comparison)
    print(comparison)
    if comparison.differences:  # in pytest's summary, though the test passes
        warnings.warn(f"{comparison}: {comparison.differences}", stacklevel=2)
    assert comparison.mistakes == []
    assert comparison.tokens == sum(len(turn.output) for talk in talks for turn in talk.turns)
    return comparison


def aligned(tokens: int) -> int:
    return tokens // PAGE * PAGE


def check_that_all_was_kept(talks: Sequence[Talk]) -> None:
    """Nothing was evicted: each turn matches what its conversation's last one left, at both servers."""
    for talk in talks:
        for number, turn in enumerate(talk.turns):
            assert turn.matched == (aligned(talk.left(number - 1)) if number else 0)
            assert turn.prefill_matched == (aligned(len(talk.prompts[number - 1])) if number else 0)


def test_the_comparison_sees_a_wrong_token() -> None:
    model = tiny_models.random_model("qwen2")
    prompt = list(range(60))
    output = tiny_models.plain_tokens(model, prompt, 6, CHUNK)
    for position in (None, 0, 5):
        turn = Turn(output=list(output), chunk_ends=[CHUNK, len(prompt)])
        if position is not None:
            turn.output[position] = (output[position] + 1) % tiny_models.VOCABULARY
        comparison = Comparison()
        Conversation(model).compare(prompt, turn, comparison)
        assert bool(comparison.mistakes) == (position is not None)


@pytest.mark.parametrize("family", [pytest.param("smollm2", marks=pytest.mark.nightly), "qwen2"], indirect=True)
def test_a_pool_that_holds_all(family: Family) -> None:
    with Engines(family.prefill, family.decode) as engines:
        evicted = settled(family.decode).pool.evicted
        talks = converse(engines, family.scripts(range(2), 3, SMALL), NEW_TOKENS, at_a_time=2)
    check_that_all_was_kept(talks)
    compare(family.model, talks)
    assert settled(family.decode).pool.evicted == evicted
    settled(family.prefill)


@pytest.mark.parametrize("family", [pytest.param("smollm2", marks=pytest.mark.nightly), "qwen2"], indirect=True)
def test_a_pool_that_evicts_between_turns(family: Family) -> None:
    """Larger conversations through the same pools: some of a turn's history is gone at one server, or at both."""
    with Engines(family.prefill, family.decode) as engines:
        evicted = settled(family.decode).pool.evicted
        scripts = family.scripts(range(2, 4), 3, LARGE)
        talks = converse(engines, scripts, NEW_TOKENS, at_a_time=1)
    later = [(talk.left(number - 1), talk.turns[number].matched) for talk in talks for number in (1, 2)]
    assert all(matched % PAGE == 0 and matched <= left for left, matched in later)
    assert 0 < sum(matched for _, matched in later) < sum(aligned(left) for left, _ in later)
    compare(family.model, talks)
    assert settled(family.decode).pool.evicted > evicted
    settled(family.prefill)


@pytest.mark.parametrize(
    ("source", "pool_pages"),
    [pytest.param("smollm2", 14, marks=pytest.mark.nightly), pytest.param("qwen2", 14, marks=pytest.mark.nightly)],
)
def test_a_host_tier_under_a_small_pool_keeps_all(stack: Stack, tmp_path: Path, source: str, pool_pages: int) -> None:
    """Pools that hold one conversation: every turn's history is spilled and comes back, at both servers."""
    tokenizer = None
    folder = tmp_path
    if source == "smollm2":
        folder = smollm2_folder()
        tokenizer = FolderTokenizer(str(folder))
    else:
        tiny_models.random_model(source).save_pretrained(folder)
    threads = torch.get_num_threads()
    family = serve(stack, folder, tokenizer, pool_pages=pool_pages, host_pages=300)
    with Engines(family.prefill, family.decode) as engines:
        talks = converse(engines, family.scripts(range(3), 3, SMALL), NEW_TOKENS, at_a_time=1)
    check_that_all_was_kept(talks)
    compare(family.model, talks)
    torch.set_num_threads(threads)
    for side in (settled(family.decode), settled(family.prefill)):
        assert side.tiers.restored_pages > 0
        assert side.requests.host_hit_tokens > 0
        assert side.tiers.dropped_pages == side.tiers.mismatched_pages == 0


@pytest.mark.nightly
def test_retracted_requests_lose_no_token(stack: Stack, tmp_path: Path) -> None:
    """More is promised than there is: requests are taken back in the middle of their replies, and go on."""
    tiny_models.random_model("qwen2").save_pretrained(tmp_path)
    threads = torch.get_num_threads()
    family = serve(stack, tmp_path, None, pool_pages=20, host_pages=60, decode_flags=["--overcommit", "10"])
    prompts = [script[0] for script in family.scripts(range(10, 18), 1, (40, 0))]
    with Engines(family.prefill, family.decode) as engines:
        turns = engines.turns(prompts, 60, deadline_s=120.0)
    assert [turn.details for turn in turns if turn.error] == []
    comparison = Comparison()
    for prompt, turn in zip(prompts, turns, strict=True):
        assert len(turn.output) == 60
        Conversation(family.model).compare(prompt, turn, comparison)
    torch.set_num_threads(threads)
    assert comparison.mistakes == []
    assert settled(family.decode).requests.retracted > 0


@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_sampled_tokens(family: Family) -> None:
    """The same seed gives the tokens of one process, whichever server computes which, and whatever is matched."""
    wanted = engine_pb2.Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=1234)
    ((prompt,),) = family.scripts(range(4, 5), 1, SMALL)
    comparison = Comparison()
    conversation = Conversation(family.model)
    with Engines(family.prefill, family.decode) as engines:
        turns = [engines.turn(prompt, NEW_TOKENS, sampling=wanted) for _ in range(2)]
    for turn in turns:
        assert turn.error is None, turn.details
        conversation.compare(prompt, turn, comparison, Sampling.from_proto(wanted))
    assert [turn.matched for turn in turns] == [0, aligned(len(prompt))]
    assert comparison.mistakes == []
    assert turns[0].output == turns[1].output
    settled(family.decode)
    settled(family.prefill)


@pytest.mark.nightly
@pytest.mark.parametrize(("pool_pages", "at_a_time"), [(200, 4), (40, 2)])
def test_longer_conversations(
    stack: Stack, capsys: pytest.CaptureFixture[str], pool_pages: int, at_a_time: int
) -> None:
    """4 conversations x 4 turns of SmolLM2, in pools that hold them all and in pools that do not."""
    folder = smollm2_folder()
    threads = torch.get_num_threads()
    family = serve(stack, folder, FolderTokenizer(str(folder)), pool_pages=pool_pages)
    with Engines(family.prefill, family.decode) as engines:
        talks = converse(engines, family.scripts(range(4), 4, (120, 60)), 32, at_a_time=at_a_time)
    comparison = compare(family.model, talks)
    torch.set_num_threads(threads)
    evicted = settled(family.decode).pool.evicted
    with capsys.disabled():
        print(f"\nSmolLM2, 4 conversations x 4 turns, pools of {pool_pages} pages: {comparison}; {evicted} evicted")
    if at_a_time == 4:
        check_that_all_was_kept(talks)
    assert (evicted > 0) == (at_a_time == 2)
    settled(family.prefill)
