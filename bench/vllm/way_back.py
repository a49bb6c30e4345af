"""The way back with vLLM: a prefill server that has nothing of a conversation fetches it from the decode daemon, token
for token against one vLLM without a connector.

python bench/vllm/way_back.py [--setting always] [--output FILE]

The prefill engine caches no prefixes, and before each turn but the first its daemon is replaced by one that holds
nothing: of each prompt all that decode holds must come back, or be computed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from chat import Load, Messages, Reply, compared, new_client, one_server, run_chats, texts, user_text
from cluster import Cluster, Log, Spec
from demo import held

LOAD = Load(conversations=3, turns=3, user_words=160, max_tokens=24)
LEAK_SECONDS = 40.0
UP_SECONDS = 60.0


async def one_turn(cluster: Cluster, load: Load, said: list[list[str]], turn: int) -> list[Reply]:
    """All conversations' at once."""
    async with new_client() as client:
        ask = one_server(client, cluster.front)

        async def one(conversation: int) -> Reply:
            messages: Messages = []
            for number in range(turn + 1):
                messages.append({"role": "user", "content": user_text(conversation, number, load.user_words)})
                if number < turn:
                    messages.append({"role": "assistant", "content": said[conversation][number]})
            return await ask(messages, load.max_tokens)

        return list(await asyncio.gather(*(one(number) for number in range(load.conversations))))


def wait_until_up(cluster: Cluster) -> None:
    """The daemons' session is up, and prefill's engine is with its daemon."""
    end = time.monotonic() + UP_SECONDS
    while [peer.state for peer in cluster.stats("decode").peers] != ["up"] or not cluster.stats("prefill").workers:
        assert time.monotonic() < end, "the daemons do not find each other again"
        time.sleep(0.2)
    time.sleep(1.0)  # the engine's scheduler looks for its daemon four times a second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=("off", "auto", "always"), default="always")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    log = Log(args.output)
    with Cluster(Spec()) as cluster:
        reference = asyncio.run(run_chats(cluster.alone().url, LOAD))
    said = texts(reference)
    spec = Spec(
        prefill_flags=("--no-enable-prefix-caching",),
        daemon_flags=("--way-back", args.setting),
        extra={"deadline_seconds": 120.0},  # of a machine with few cores
    )
    got: list[list[Reply]] = [[] for _ in range(LOAD.conversations)]
    fetched = 0
    with Cluster(spec) as cluster:
        cluster.kvferry()
        for turn in range(LOAD.turns):
            if turn:
                cluster.kill_daemon("prefill")
                cluster.start_daemon("prefill")
            wait_until_up(cluster)
            for replies, reply in zip(got, asyncio.run(one_turn(cluster, LOAD, said, turn)), strict=True):
                replies.append(reply)
            back = cluster.stats("prefill").way_back
            fetched += back.fetched_tokens
            choices = ", ".join(f"{choice.reason} {choice.count}" for choice in back.choices) or "none"
            prompts = ", ".join(str(replies[turn].prompt_tokens) for replies in got)
            log.add(f"turn {turn + 1}: prompts of {prompts} tokens, {back.fetched_tokens} fetched; choices: {choices}")
        end = time.monotonic() + LEAK_SECONDS
        while (leaks := [leak for name in ("prefill", "decode") if (leak := held(cluster.stats(name)))]) and (
            time.monotonic() < end
        ):
            time.sleep(0.5)
        failed = cluster.metric("prefill", "vllm:kvferry_failed_total")
    comparison = compared(reference, got)
    wrong = [*comparison.wrong, *leaks]
    if args.setting == "always" and not fetched:
        wrong.append("nothing was fetched")
    log.add(
        f"way back {args.setting}: {comparison.tokens} tokens compared, {len(wrong)} wrong, {len(comparison.ties)} at "
        f"ties; {fetched} tokens fetched, {failed:.0f} prompts failed at prefill",
        *wrong,
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
