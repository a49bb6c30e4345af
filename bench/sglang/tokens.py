"""Greedy tokens of SGLang's pair against those of one SGLang alone, asked twice: a small model with random weights,
whose best logits are seldom near each other, chats of several turns, large and small pools of decode, and requests that
are aborted at random times beside them.

bash bench/gpu/sglang.sh OUT tokens [--systems kvferry nixl] [--chats 24] [--aborts 200] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from servers import ALONE, KVFERRY, NIXL, OUT, RADIX, ROOT, DidNotStart, Machine, Model, System, decode_gpu

# The attention's shape is Llama-3.1-8B's: no kernel is compiled that the pack has not.
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 512, 4, 32, 8, 128, 8192
SPREAD = 0.08
TURNS, FIRST, MORE, OUTPUT = 4, 700, 90, 24
LARGE, SMALL = 60_000, 12_000
SYSTEMS = {
    KVFERRY: System(KVFERRY, KVFERRY, RADIX, "2GiB", slots=4),
    NIXL: System(NIXL, NIXL, RADIX),
}
POOLS = {"large": LARGE, "small": SMALL}
Chats = list[list[list[int]]]  # of each chat the output of each turn


@dataclass(frozen=True)
class Urls:
    prefill: str  # empty: `decode` is alone
    decode: str
    bootstrap_port: int


def urls_of(machine: Machine) -> Urls:
    alone = "a" in machine.servers
    return Urls("" if alone else machine.url("p"), machine.url("a" if alone else "d"), machine.bootstrap_port)


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
    folder = folder or ROOT / "small"
    if not (folder / "config.json").exists():
        make_model(folder)
    return Model(("--model-path", str(folder), "--load-format", "auto"), LARGE, decode_tokens)


async def ask(session: aiohttp.ClientSession, urls: Urls, prompt: list[int], room: int) -> list[int]:
    body: dict[str, Any] = {"input_ids": prompt}
    body["sampling_params"] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": OUTPUT}
    if not urls.prefill:
        return await _post(session, urls.decode, body)
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": urls.bootstrap_port, "bootstrap_room": room}
    _, output = await asyncio.gather(_post(session, urls.prefill, body), _post(session, urls.decode, body))
    return output


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[int]:
    async with session.post(url + "/generate", json=body) as answer:
        told = await answer.json()
        if answer.status != 200:
            raise RuntimeError(str(told)[:300])
        return list(told["output_ids"])


def prompts_of(chats: int, seed: int) -> list[list[list[int]]]:
    """Of each chat what its user says in each turn."""
    rng = random.Random(seed)
    sizes = [FIRST] + [MORE] * (TURNS - 1)
    return [
        [[rng.randrange(2, VOCAB) for _ in range(size + rng.randrange(64))] for size in sizes] for _ in range(chats)
    ]


async def chat(
    session: aiohttp.ClientSession, urls: Urls, said: list[list[int]], rng: random.Random
) -> list[list[int]]:
    history: list[int] = []
    outputs = []
    for words in said:
        history += words
        output = await ask(session, urls, history, rng.randrange(1, 1 << 62))
        outputs.append(output)
        history += output
    return outputs


async def run_chats(urls: Urls, chats: int, seed: int, at_once: int) -> Chats:
    """A chat that fails has no more turns from there on."""
    gate, rng = asyncio.Semaphore(at_once), random.Random()
    timeout = aiohttp.ClientTimeout(total=40)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(said: list[list[int]]) -> list[list[int]]:
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
            prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(200, 8000))]
            seconds = rng.expovariate(1 / 0.03)
            async with gate:
                asked = asyncio.ensure_future(ask(session, urls, prompt, rng.randrange(1, 1 << 62)))
                done, _ = await asyncio.wait([asked], timeout=seconds)
                ended += not done
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

        await asyncio.gather(*(one() for _ in range(aborts)))
    return ended


def wrong(reference: Chats, found: Chats) -> tuple[int, int, int]:
    """(chats that differ, of them those that failed, tokens that differ in turns before which all was equal)."""
    chats = failed = tokens = 0
    for a, b in zip(reference, found, strict=True):
        failed += not b
        chats += a != b
        for mine, theirs in zip(a, b, strict=False):
            if mine != theirs:
                tokens += sum(x != y for x, y in zip(mine, theirs, strict=False))
                break
    return chats, failed, tokens


def say(what: str, reference: Chats, found: Chats) -> int:
    """Prints how many chats differ, and returns it."""
    chats, failed, tokens = wrong(reference, found)
    print(f"{what:44s} {chats:3d} of {len(reference)} chats differ ({failed} failed), {tokens} tokens", flush=True)
    return chats


async def with_aborts(urls: Urls, chats: int, aborts: int) -> tuple[Chats, int]:
    found, ended = await asyncio.gather(run_chats(urls, chats, 1, 4), run_aborts(urls, aborts, 3))
    return found, ended


def run_alone(machine: Machine, chats: int) -> Chats:
    """The outputs of the server `a`, asked three times."""
    urls = urls_of(machine)
    reference = asyncio.run(run_chats(urls, chats, 1, 1))
    (OUT / "tokens.json").write_text(json.dumps(reference))
    say("SGLang alone, again, one at a time", reference, asyncio.run(run_chats(urls, chats, 1, 1)))
    say("SGLang alone, again, 12 at once", reference, asyncio.run(run_chats(urls, chats, 1, 12)))
    return reference


def run_pair(machine: Machine, pool: str, reference: Chats, aborts: int) -> int:
    """How many chats of a pair differ."""
    urls, chats, name = urls_of(machine), len(reference), f"{machine.system.name}, {pool} pool"
    bad = say(f"{name}, one at a time", reference, asyncio.run(run_chats(urls, chats, 1, 1)))
    bad += say(f"{name}, 12 at once, again", reference, asyncio.run(run_chats(urls, chats, 1, 12)))
    found, ended = asyncio.run(with_aborts(urls, chats, aborts))
    bad += say(f"{name}, {ended} aborted beside", reference, found)
    bad += say(f"{name}, behind the aborts", reference, asyncio.run(run_chats(urls, chats, 1, 12)))
    machine.say_errors()
    return bad


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--pools", nargs="+", default=list(POOLS))
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--aborts", type=int, default=200)
    parser.add_argument("--model", type=Path, help="a folder with weights, in the place of the one that is made")
    args = parser.parse_args(words)
    with Machine(System("alone", ALONE)) as machine:
        machine.start("a", model_of(args.model, LARGE), gpu=decode_gpu())
        machine.wait()
        reference = run_alone(machine, args.chats)
    bad = 0
    for name in args.systems:
        for pool in args.pools:
            with Machine(SYSTEMS[name]) as machine:
                try:
                    machine.start_pair(model_of(args.model, POOLS[pool]))
                    machine.wait()
                    found = run_pair(machine, pool, reference, args.aborts)
                except DidNotStart as error:
                    print(f"== {name}, {pool} pool: {error}", flush=True)
                    found = 1
            bad += found if name == KVFERRY else 0
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
