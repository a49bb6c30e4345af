"""Replies of a front end with `--first-token prefill` or `decode`, against those of one vLLM: token for token, for each
way of sampling, half of them streamed.

python bench/vllm/first_tokens.py [--ways WAY ...] [--greedy] [--requests N] [--many N] [--first-token prefill]
    [--few-tokens [--reasoning-parser deepseek_r1]] [--aborts N] [--restarts N]
    [--output bench/results/vllm-first-tokens.txt]

Without a GPU the servers run Model Runner V2 with interpreted kernels (`v2_on_cpu.py`), or with `--runner 1` vLLM's own
for CPUs, whose decode engine samples the first token again. `begun`: replies that decode began behind a token of
prefill's; of others decode has sampled every token. Ways in which the one vLLM itself fails a request are named and not
judged. `--aborts`, `--restarts`: all is asked once more while clients leave and daemons die; then nothing is held. A
difference is allowed only where the reference's two best logits are within VLLM_TIE, which is asked for once more; it
is counted. The one vLLM is asked all twice (`--references`): what differs then is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
from chaos import LEAVE_SECONDS, Faults, Run, leaks, restart_loop
from chat import CHAT, TIE, new_client
from cluster import DEVICES, PROGRAMS, SCHEDULER, SMALL, Cluster, ClusterError, Log, Spec
from sampling import (
    THOUGHTS,
    WAYS,
    Replies,
    Said,
    ask_all,
    greedy_ways,
    keys_of,
    request_of,
    streamed,
    way_of,
)
from small_models import model_of_few_tokens

WHOLE_PROMPTS = ("--max-num-batched-tokens", "4096")  # vLLM's own runner for CPUs fails at a seed and a prompt's part
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


async def leave(url: str, ways: Sequence[str], aborts: int) -> None:
    """Clients that go while their replies come, or before."""
    async with new_client() as client:
        for number in range(aborts):
            chosen = random.Random(number)
            asked = request_of(chosen.choice(ways), 1000 + number)
            asking = asyncio.create_task(streamed(client, url, asked))
            await asyncio.wait({asking}, timeout=chosen.uniform(0.0, LEAVE_SECONDS))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def ask_all_in_a_storm(cluster: Cluster, args: argparse.Namespace) -> Replies:
    storm = Run(Faults(args.aborts, args.restarts))
    asking = ask_all(cluster.front, keys_of(args.ways, args.requests), args.many)
    leaving = leave(cluster.front, args.ways, args.aborts)
    got, *_ = await asyncio.gather(asking, leaving, restart_loop(storm, cluster))
    return got


COUNTS = ("kvferry_front_prefill_first_tokens_total", "kvferry_front_decode_alone_total")


def counts_of(front: str) -> list[str]:
    """What the front end counts of replies that prefill's answer began, and of prompts that decode computed."""
    told = httpx.get(front + "/metrics", trust_env=False).text.splitlines()
    return [line for line in told if line.startswith(COUNTS) and line[-4:] != " 0.0"]


def at_once(front: str) -> float:
    """How many replies prefill's answer began, or was."""
    return sum(float(line.rpartition(" ")[2]) for line in counts_of(front) if line.startswith(COUNTS[0]))


async def gap_at(url: str, way: str, number: int, place: int) -> float:
    """Between the two best log probabilities of this token, as one engine has them."""
    async with new_client() as client:
        asked = {**request_of(way, number), "logprobs": True, "top_logprobs": 2}
        answer = await client.post(url + CHAT, json=asked)
    listed = answer.json()["choices"][0]["logprobs"]["content"]
    best = sorted((each["logprob"] for each in listed[place]["top_logprobs"]), reverse=True)
    return float(best[0] - best[1])


HEAD = f"{'':22}{'judged':>9}{'equal':>7}{'ties':>6}{'cut':>5}{'wrong':>7}"
HEAD += f"{'streams':>9}{'chunks alike':>14}{'vLLM again':>12}"


def judge(log: Log, url: str, wants: Sequence[Replies], got: Replies) -> int:
    """How many are wrong, or failed: each is to be as in one of `wants`, the first of which says where it is not. What
    the one vLLM itself fails is not judged; where that is all of a way, it is wrong. `cut`: the same tokens, in other
    chunks, out of which vLLM's parser made another text. The last column: how many of its replies were as before when
    it was asked again."""
    wrong = 0
    for way in dict.fromkeys(way for way, _ in got):
        ours = [key for key in got if key[0] == way and all(want[key].tokens for want in wants)]
        if failed := [want[key].reason for want in wants for key in want if key[0] == way and not want[key].tokens]:
            log.add(f"{way:22} the one vLLM fails {len(failed)}: {failed[0]}")
        unlike = [key for key in ours if all(want[key] != got[key] for want in wants)]
        other = [key for key in unlike if not any(is_cut(want[key], got[key]) for want in wants)]
        ties = sum(is_tie(log, url, key, wants[0][key], got[key]) for key in other)
        wrong += len(other) - ties if ours else 1
        streams = [key for key in ours if got[key].chunks]
        alike = sum(any(want[key].chunks == got[key].chunks for want in wants) for key in streams)
        same = sum(wants[0][key] == wants[-1][key] for key in ours)
        told = f"{len(ours):9}{len(ours) - len(unlike):7}{ties:6}{len(unlike) - len(other):5}{len(other) - ties:7}"
        log.add(f"{way:22}{told}{len(streams):9}{alike:14}{same if len(wants) > 1 else '-':>12}")
    return wrong


def is_cut(want: Said, got: Said) -> bool:
    """Whether a stream is the same, token for token, but for its chunks and what a parser made of them: vLLM joins the
    tokens of steps that its API server is late for, and its parsers of thoughts and calls look at a chunk at a time."""
    alike = replace(want, text=got.text, thought=got.thought, calls=got.calls) == got
    return alike and bool(got.chunks) and ids_of(want) != ids_of(got)


def ids_of(said: Said) -> list[object]:
    """The tokens of each chunk."""
    return [choice.get("token_ids") for chunk in said.chunks for choice in chunk["choices"]]


def is_tie(log: Log, url: str, key: tuple[str, int], want: Said, got: Said) -> bool:
    """Whether the two differ first where the two best logits are as good as one. Logs what is not."""
    told = way_of(*key).get("return_token_ids", True) and "prompt" not in request_of(*key)
    pairs = zip(want.tokens, got.tokens, strict=False) if told else ()
    place = next((i for i, (left, right) in enumerate(pairs) if left != right), -1)
    try:
        gap = asyncio.run(gap_at(url, *key, place)) if place >= 0 else math.inf
    except httpx.HTTPError as error:
        raise ClusterError(f"the one vLLM is gone: {error!r}") from error
    if gap >= TIE:
        told = f"{replace(want, chunks=[])}\n  got {replace(got, chunks=[])}"
        log.add(f"  {key}, {gap:.3f} between the two best of token {place}: {told}")
    return gap < TIE


def kinds_of(replies: Replies) -> str:
    """What the ways of sampling have come to, so that a way that says nothing is seen."""
    counts = {
        "ended": sum(said.reason == "stop" for said in replies.values()),
        "of one token": sum(said.reply_tokens == 1 for said in replies.values()),
        "called a tool": sum(bool(said.calls) for said in replies.values()),
        "thought": sum(bool(said.thought) for said in replies.values()),
        "thought and spoke": sum(bool(said.thought and said.text) for said in replies.values()),
        "listed by log probabilities": sum(bool(said.listed) for said in replies.values()),
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"of {len(replies)} replies {told or 'none ended before its bound'}"


def spec_of(args: argparse.Namespace) -> Spec:
    flags = (*SMALL, *TOOLS)
    if args.reasoning_parser:
        flags += ("--reasoning-parser", args.reasoning_parser)
    spec = Spec(flags=flags, pool=args.pool, first_token=args.first_token, extra={"deadline_seconds": 240.0})
    if args.runner == 1:
        return replace(spec, flags=(*flags, *WHOLE_PROMPTS))
    spec = replace(spec, decode_flags=SCHEDULER)
    return spec if DEVICES else replace(spec, program=(str(PROGRAMS / "v2_on_cpu.py"),))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=6, help="of each way of sampling")
    parser.add_argument("--many", type=int, default=4, help="requests at a time")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *THOUGHTS], help="of sampling; default: all")
    parser.add_argument("--greedy", action="store_true", help="seeded ways at temperature 0, and without their seeds")
    parser.add_argument("--few-tokens", action="store_true", help="a small model of random weights and 1,024 tokens")
    parser.add_argument("--reasoning-parser", default="", help="of all servers; then only ways of thinking by default")
    parser.add_argument("--runner", type=int, choices=(1, 2), default=2, help="version of vLLM's model runner")
    parser.add_argument("--references", type=int, choices=(1, 2), default=2, help="how often the one vLLM is asked")
    parser.add_argument("--aborts", type=int, default=0)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--pool", choices=("daemon", "engine"), default="daemon")
    parser.add_argument("--first-token", choices=("prefill", "decode"), default="decode", help="of the front end")
    parser.add_argument("--output", metavar="FILE")
    args = parser.parse_args()
    args.ways = args.ways or list(THOUGHTS if args.reasoning_parser else WAYS)
    if args.greedy:
        args.ways = greedy_ways(args.ways)
    elif args.runner == 1 and not DEVICES and "top p" in args.ways:
        args.ways.remove("top p")  # by a kernel that is not for CPUs
    return args


def main() -> int:
    args = parsed()
    if args.few_tokens:
        os.environ["VLLM_MODEL"] = str(model_of_few_tokens())
    log = Log(Path(args.output) if args.output else None)
    spec = spec_of(args)
    os.environ.setdefault("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")  # a grammar of its own has a model call tools
    with Cluster(spec) as one, Cluster(spec) as cluster:
        alone = one.alone().url
        version = httpx.get(alone + "/version", trust_env=False).json()["version"]
        log.add(f"vLLM {version}, runner {args.runner}, pool {args.pool}, first token from {args.first_token}")
        cluster.kvferry()
        log.add(HEAD)
        wants: list[Replies] = [{} for _ in range(args.references)]
        wrong = 0
        for way in args.ways:  # one after another: with vLLM's own runner for CPUs a seed counts beside seeds alone
            keys = keys_of([way], args.requests)
            for want in wants:
                want |= asyncio.run(ask_all(alone, keys, args.many))
            before = at_once(cluster.front)
            got = asyncio.run(ask_all(cluster.front, keys, args.many))
            wrong += judge(log, alone, [{key: want[key] for key in keys} for want in wants], got)
            log.add(f"  {at_once(cluster.front) - before:.0f} by prefill's answer; {kinds_of(got)}")
        begun = cluster.metric("decode", "vllm:kvferry_first_tokens_total")
        log.add(f"begun behind prefill's token: {begun:.0f} of {len(wants[0])}", *counts_of(cluster.front))
        if args.aborts or args.restarts:
            log.add(f"beside {args.aborts} clients that leave and {args.restarts} daemons that die:", HEAD)
            got = asyncio.run(ask_all_in_a_storm(cluster, args))
            wrong += judge(log, alone, wants, got)
            begun = cluster.metric("decode", "vllm:kvferry_first_tokens_total") - begun
            held = leaks(cluster)
            log.add(f"begun behind prefill's token: {begun:.0f} of {len(got) + args.aborts}; {len(held)} leaks", *held)
            wrong += len(held)
    log.add("0 wrong" if not wrong else f"{wrong} WRONG")
    return 1 if wrong or not (begun or args.runner == 1) else 0


if __name__ == "__main__":
    sys.exit(main())
