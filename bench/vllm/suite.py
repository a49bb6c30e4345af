"""All that is to hold of the vLLM connector, in one run with as few starts of servers as can be.

python bench/vllm/suite.py [--folder bench/results]

One vLLM alone gives the reference. Then the same chats go through vLLM's NixlConnector and through kvferry, each with a
decode cache that evicts and with a large one. Where kvferry's pair says another token than the reference, the other
pair's answer tells whether the hand-off of KV is why: what both say is counted apart. kvferry's first cluster also
serves aborts and restarts, the second the hooks' times. Writes vllm-greedy.txt, vllm-compare.txt, vllm-hooks.txt and
vllm-chaos.txt (greedy.py, compare.py, hooks.py and chaos.py do one of them each).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import chaos
import compare
import hooks
from chat import Comparison, Load, Messages, Reply, compared, run_chats, texts
from cluster import Cluster, Log, Spec
from rich.console import Console

CHAOS_TOKENS, CHAOS_CLIENTS = 16, 4  # of each answer; at a time
PATIENT: dict[str, object] = {"deadline_seconds": 45.0}


@dataclass(slots=True)
class Reference:
    """What one vLLM alone answers."""

    load: Load
    replies: list[list[Reply]]
    prompts: list[Messages]
    answers: list[Reply]  # to them

    @property
    def said(self) -> list[list[str]]:
        return texts(self.replies)


def refer(load: Load, chaos_tokens: int) -> Reference:
    asked = chaos.prompts(4, 3)
    with Cluster(Spec()) as cluster:
        url = cluster.alone().url

        async def run() -> Reference:
            replies = await run_chats(url, load)
            return Reference(load, replies, asked, await chaos.references(url, asked, chaos_tokens))

        return asyncio.run(run())


def tell_greedy(log: Log, case: str, done: compare.Done, comparison: Comparison) -> None:
    log.add(
        f"{case} decode cache: {comparison}; received {done.delta_pages} pages, the daemon held "
        f"{done.hit_tokens} of {done.queried_tokens} tokens, {done.host_hit_tokens} of them on the host",
        *comparison.told,
    )


class Cases:
    """One after another, each on clusters of its own; every one gives how much of it was bad."""

    def __init__(self, args: argparse.Namespace, load: Load, reference: Reference, logs: dict[str, Log]) -> None:
        self.args = args
        self.load = load
        self.reference = reference
        self.logs = logs
        self.results: dict[tuple[str, str], compare.Result] = {}  # by case and system
        self.opinions: list[list[Reply]] = []  # of the pair without kvferry, on the prompts of aborts and restarts

    def evicting(self) -> int:
        """The decode daemon's pool is too small for all chats as well: what it evicts comes back from its host tier."""
        args, reference = self.args, self.reference
        self.without("evicting", args.small_blocks)
        wanted = chaos.Wanted(reference.answers, self.opinions)
        spec = Spec(decode_blocks=args.small_blocks, pool=args.pool, pool_bytes=args.small_pool, extra=PATIENT)
        with Cluster(spec) as cluster:
            cluster.kvferry()
            bad = self.served("evicting", cluster)
            faults = chaos.Faults(args.aborts, args.restarts, args.stops)
            lines, failed = chaos.run_on(cluster, reference.prompts, wanted, faults, CHAOS_CLIENTS, CHAOS_TOKENS)
            self.logs["chaos"].add(*lines)
        return bad + failed + self.compared("evicting", args.small_blocks)

    def large(self) -> int:
        args = self.args
        self.without("large", 0)
        with tempfile.TemporaryDirectory() as times:
            os.environ["HOOK_TIMES"] = times
            with Cluster(replace(hooks.TIMED, pool=args.pool, extra=PATIENT)) as cluster:
                cluster.kvferry()
                bad = self.served("large", cluster)
                asyncio.run(hooks.load(cluster.front, Path(times), args.steps, args.prefill_steps, 4))
            share, told = hooks.judge_both(Path(times), args.steps, args.prefill_steps)
            self.logs["hooks"].add(*told)
        return bad + (share > hooks.LIMIT) + self.compared("large", 0)

    def served(self, case: str, cluster: Cluster) -> int:
        result = asyncio.run(compare.drive(cluster, "kvferry", self.load, self.reference.said))
        self.results[case, "kvferry"] = result
        comparison = compared(self.reference.replies, result.replies, self.results[case, "nixl"].replies)
        tell_greedy(self.logs["greedy"], case, result.done, comparison)
        missed = compare.unused(case, result.done)
        self.logs["greedy"].add(*missed)
        return len(comparison.wrong) + len(missed)

    def without(self, case: str, blocks: int) -> None:
        """The pair without kvferry."""
        with Cluster(Spec(decode_blocks=blocks)) as cluster:
            cluster.nixl()
            self.results[case, "nixl"] = asyncio.run(compare.drive(cluster, "nixl", self.load, self.reference.said))
            if not self.opinions:
                self.opinions = chaos.opinions(
                    cluster, self.reference.prompts, CHAOS_CLIENTS, CHAOS_TOKENS, self.args.listen
                )

    def compared(self, case: str, blocks: int) -> int:
        pair = [self.results[case, "nixl"], self.results[case, "kvferry"]]
        console = Console(record=True, width=118, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(compare.table(case, blocks, pair))
        missed = compare.judge(case, *pair)
        self.logs["compare"].add(console.export_text().rstrip(), *(missed or [f"{case}: every aim was met"]))
        return len(missed)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="bench/results")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--user-words", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--small-blocks", type=int, default=44)
    parser.add_argument("--pool", choices=("daemon", "engine"), default="daemon", help="whose it is, on GPUs")
    parser.add_argument("--small-pool", default="64MiB", help="of the daemons in the evicting case")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prefill-steps", type=int, default=hooks.PREFILL_STEPS)
    parser.add_argument("--aborts", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--stops", type=int, default=8)
    parser.add_argument("--listen", type=float, default=0.0, metavar="SECONDS", help="as for chaos.py")
    parser.add_argument(
        "--cases", default="evicting,large", help="one of them alone leaves out what the other measures"
    )
    args = parser.parse_args()
    cases = args.cases.split(",")
    if not cases or set(cases) - {"evicting", "large"}:
        parser.error(f"--cases is {args.cases!r}; it must be of evicting, large")
    args.cases = cases
    return args


def main() -> int:
    args = parse_args()
    kinds = (
        "greedy",
        "compare",
        *(("chaos",) if "evicting" in args.cases else ()),
        *(("hooks",) if "large" in args.cases else ()),
    )
    load = Load(args.conversations, args.turns, args.user_words, args.max_tokens, concurrency=2)
    logs = {name: Log(Path(args.folder) / f"vllm-{name}.txt") for name in kinds}
    cases = Cases(args, load, refer(load, CHAOS_TOKENS), logs)
    bad = 0
    if "evicting" in args.cases:
        bad += cases.evicting()
    if "large" in args.cases:
        bad += cases.large()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
