"""CPU time of the connector's hooks, and of what KVFerryScheduler adds, against the steps' time, in a prefill and a
decode engine under load.

python bench/vllm/hooks.py [--steps 2000] [--output bench/results/vllm-hooks.txt]
VLLM_DEVICES=cuda:0,cuda:1 VLLM_FLAGS='--load-format dummy ...' python bench/vllm/hooks.py --pool engine --revision none

In the decode engine blocks of steps with and without the hooks alternate in one run; medians over the blocks. Limit:
2 % of the steps' time, in both engines; time in which an engine waits for requests is no step's.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from chat import new_client, one_server, user_text
from cluster import SCHEDULER, Cluster, Spec, machine
from timed_steps import TIMED_CONNECTOR, Step, blocks_of, read_steps

LIMIT = 0.02
TIMED = Spec(connector_class=TIMED_CONNECTOR, decode_flags=SCHEDULER)
PREFILL_STEPS = 100  # a prompt has one or few, a reply one a token
USER_WORDS = 60  # of a prompt
STEP_SECONDS = 1.0  # no step takes as long; what has not come by then is judged as missing


async def load(
    url: str, folder: Path, steps: int, prefill_steps: int, at_a_time: int, user_words: int = USER_WORDS
) -> None:
    """New chats again and again until the engines have done their steps, or a deadline for them is over."""
    async with new_client() as client:
        ask = one_server(client, url)
        done = False

        async def one(number: int) -> None:
            count = 0
            while not done:
                text = user_text(number, count, user_words)
                await ask([{"role": "user", "content": text}], 60 + 12 * number)
                count += 1

        tasks = [asyncio.create_task(one(number)) for number in range(at_a_time)]
        wanted = {"kv_consumer": steps, "kv_producer": prefill_steps}

        def lacking() -> bool:
            sides = ((role, side) for role in wanted for side in ("scheduler", "worker"))
            return any(len(read_steps(folder / f"{role}-{side}")) < wanted[role] for role, side in sides)

        end = time.monotonic() + 60 + steps * STEP_SECONDS
        while lacking() and time.monotonic() < end:
            await asyncio.sleep(2.0)
            if finished := [task for task in tasks if task.done()]:
                finished[0].result()
        done = True
        await asyncio.gather(*tasks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prefill-steps", type=int, default=PREFILL_STEPS)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--user-words", type=int, default=USER_WORDS)
    parser.add_argument("--pool", choices=("daemon", "engine"), default="daemon", help="whose it is, on GPUs")
    parser.add_argument("--revision", help="of weights without a file, as --load-format dummy makes them")
    parser.add_argument("--output", metavar="FILE")
    args = parser.parse_args()
    spec = replace(TIMED, pool=args.pool, extra={"revision": args.revision} if args.revision else {})
    lines = [f"{machine()}; {' '.join(sys.argv)}; {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"]
    with tempfile.TemporaryDirectory() as name:
        os.environ["HOOK_TIMES"] = name
        folder = Path(name)
        with Cluster(spec) as cluster:
            cluster.kvferry()
            asyncio.run(load(cluster.front, folder, args.steps, args.prefill_steps, args.at_a_time, args.user_words))
        worst, told = judge_both(folder, args.steps, args.prefill_steps)
    lines += told
    print("\n".join(lines))
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")
    return 0 if worst <= LIMIT else 1


def judge_both(folder: Path, steps: int, prefill_steps: int) -> tuple[float, list[str]]:
    """The greater share of the two engines, and what to tell of both."""
    shares, lines = [], []
    for role, title, least in (
        ("kv_consumer", "decode engine", steps),
        ("kv_producer", "prefill engine", prefill_steps),
    ):
        deciding, working = (read_steps(folder / f"{role}-{side}") for side in ("scheduler", "worker"))
        share, told = judge(deciding, working, least)
        shares.append(share)
        lines.append(f"{title}: {told}")
    worst = max(shares)
    lines.append(f"limit {LIMIT:.1%} of either engine's steps: {'met' if worst <= LIMIT else 'MISSED'}")
    return worst, lines


def judge(deciding: list[Step], working: list[Step], least: int) -> tuple[float, str]:
    """The hooks' share of the steps' time; infinite where either side has fewer than `least` steps, or no block of them
    with hooks."""
    with_hooks, without = (blocks_of(deciding, runs) for runs in (True, False))
    workers = blocks_of(working, True)
    if min(len(deciding), len(working)) < least or not (with_hooks and workers):
        return math.inf, f"{len(deciding)} steps of the scheduler and {len(working)} of the worker, too few"
    shares = [sum(s.hooks for s in block) / sum(s.wall for s in block) for block in with_hooks]
    in_worker = [sum(s.hooks for s in block) / sum(s.wall for s in block) for block in workers]
    deciding_share = statistics.median(shares)
    total = deciding_share + statistics.median(in_worker)
    told = (
        f"{len(deciding)} steps in {len(with_hooks)} + {len(without)} blocks; hooks take {total:.3%} CPU of the steps' "
        f"time (scheduler {deciding_share:.3%}, worker {total - deciding_share:.3%}; worst block "
        f"{max(shares) + max(in_worker):.3%})"
    )
    if without:
        steps = [statistics.median(s.wall for block in side for s in block) * 1000 for side in (with_hooks, without)]
        told += f"; median step {steps[0]:.2f} ms with, {steps[1]:.2f} ms without"
    return total, told


if __name__ == "__main__":
    sys.exit(main())
