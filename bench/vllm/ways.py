"""kvferry in vLLM servers that are run in other ways, token for token against one vLLM without a connector.

python bench/vllm/ways.py [WAY...] [--ranks 2:2] [--output bench/results/vllm-ways.txt]

example     beside vLLM's ExampleConnector in MultiConnector, on both sides: prefill loads from that one what it has
reset       as "example", with a reset to weights of a name between the two runs, over which that connector keeps what
            it has: the engines leave the name
offload     the same beside its OffloadingConnector, whose blocks are copied in torch (programs/offloading_in_torch.py)
faulty      prefill beside a connector whose loads fail (faulty_loads.py): vLLM computes again what kvferry sends
servers     two API servers on each side (--api-server-count 2)
preempted   caches of 34 blocks on both sides, prompts in chunks and long answers: requests are preempted
back        the way back: prefill caches no prefixes, and before each turn but the first its daemon is replaced by one
            that holds nothing; of each prompt what decode holds comes back, or is computed
replicas    the same with two prefill engines that keep what fits in 34 blocks; the daemons stay, and a turn goes to
            whichever engine has less to do
elsewhere   as "back", with two decode engines, to which the turns of a chat go by turns: what came before is at the
            other's daemon, for which prefill's asks the decode daemons that it has a session with
back-blocks, replicas-blocks, elsewhere-blocks: on a GPU from block to block, the first token at once; what another
            decode daemon has is in its host tier
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import httpx
from chat import Load, Messages, Reply, compared, new_client, one_server, run_chats, texts, user_text
from cluster import DEVICES, PROGRAMS, SCHEDULER, SMALL, Cluster, Log, Spec, ranks_of
from demo import held
from resets import RESET

LEFT = "another connector loads behind a reset to 'other weights': that name is left"  # in ours
INJECTED, RECOVERED = "Inject KV cache", "Recovered from KV load failure"  # in vLLM's log
DEADLINE_SECONDS = 60.0
UP_SECONDS = 60.0
UNCACHED = (*SMALL, "--no-enable-prefix-caching")  # else the engine itself has what the other connector could load
SERVE = (str(PROGRAMS / "serve.py"), "serve")  # the module has one API server, whatever it is told
CHUNKED = (*SMALL, "--no-scheduler-reserve-full-isl", "--max-num-batched-tokens", "256")  # whose ends find no room
SHORT = Load(conversations=3, turns=2, user_words=60, max_tokens=16)
BACK = Load(conversations=3, turns=3, user_words=160, max_tokens=24)
LONG = Load(conversations=6, turns=2, user_words=160, max_tokens=120)
BACK_WAYS = ("back", "replicas", "elsewhere")
BLOCK_WAYS = tuple(f"{way}-blocks" for way in BACK_WAYS)  # on GPUs
FETCHING_WAYS = (*BACK_WAYS, *BLOCK_WAYS)
METRICS = ("vllm:num_preemptions_total", "vllm:kvferry_failed_total", "vllm:kvferry_pushed_total")


def example(folder: str) -> tuple[dict[str, object], ...]:
    return (
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    )


def offload() -> tuple[dict[str, object], ...]:
    copies = {"spec_name": "OffloadingInTorch", "spec_module_path": "programs.offloading_in_torch"}
    extra = {**copies, "cpu_bytes_to_use": 256 << 20}
    return ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra},)


def faulty() -> tuple[dict[str, object], ...]:
    return ({"kv_connector": "FaultyLoads", "kv_connector_module_path": "faulty_loads", "kv_role": "kv_both"},)


def spec_of(way: str, folder: Path) -> tuple[Spec, Load]:
    plain = Spec(extra={"deadline_seconds": DEADLINE_SECONDS})
    if way in ("example", "reset"):
        beside = {name: example(str(folder / f"{name}-kv")) for name in ("prefill", "decode")}
        own = {name: {"weights_file": str(folder / f"{name}-weights")} for name in beside} if way == "reset" else {}
        return replace(plain, flags=UNCACHED, beside=beside, extra_of=own), SHORT
    if way == "offload":
        return replace(plain, flags=UNCACHED, beside=dict.fromkeys(("prefill", "decode"), offload())), SHORT
    if way == "faulty":
        return replace(plain, beside={"prefill": faulty()}), SHORT
    if way in FETCHING_WAYS:
        spec = replace(plain, daemon_flags=("--way-back", "always"), extra={"deadline_seconds": 2 * DEADLINE_SECONDS})
        if way.startswith("replicas"):
            spec = replace(spec, prefills=2, prefill_blocks=130 if way in BLOCK_WAYS else 34)
        else:
            decodes = 2 if way.startswith("elsewhere") else 1
            spec = replace(spec, prefill_flags=("--no-enable-prefix-caching",), decodes=decodes)
        if way in BLOCK_WAYS:
            spec = replace(spec, pool="engine", first_token="prefill", decode_flags=SCHEDULER)
        return spec, BACK
    if way == "servers":
        return replace(plain, program=SERVE, flags=(*SMALL, "--api-server-count", "2")), SHORT
    return replace(plain, flags=CHUNKED, decode_blocks=34, prefill_blocks=34), LONG


def leaks_of(cluster: Cluster) -> list[str]:
    """What the daemons still hold behind the deadline: prompts that decode had from another connector wait for it."""
    end = time.monotonic() + DEADLINE_SECONDS + 10
    while True:
        leaks = [leak for name in (*cluster.prefills, *cluster.decodes) if (leak := held(cluster.stats(name)))]
        if not leaks or time.monotonic() > end:
            return leaks
        time.sleep(1.0)


def run_way(
    way: str, stored: Path, ranks: Mapping[str, int], references: dict[Load, list[list[Reply]]]
) -> tuple[str, bool]:
    spec, load = spec_of(way, stored)
    spec = replace(spec, ranks=ranks)
    if load not in references:
        with Cluster(Spec(ranks=ranks)) as cluster:
            references[load] = asyncio.run(run_chats(cluster.alone().url, load))
    reference = references[load]
    said = texts(reference)
    if way in FETCHING_WAYS:
        return run_back(way, spec, load, reference)
    with Cluster(spec) as cluster:
        cluster.kvferry()
        got = [asyncio.run(run_chats(cluster.front, load, said))]
        if way == "reset":
            reset(cluster, spec)
        got.append(asyncio.run(run_chats(cluster.front, load, said)))  # finds it all
        stats, leaks = cluster.stats("decode"), leaks_of(cluster)
        counts = {name: {metric: cluster.metric(name, metric) for metric in METRICS} for name in ("prefill", "decode")}
        logs = {name: engine.log.read_text(errors="replace") for name, engine in cluster.engines.items()}
    comparisons = [compared(reference, each) for each in got]
    wrong = [each for comparison in comparisons for each in comparison.wrong] + leaks
    told = (
        f"{way}: {sum(each.tokens for each in comparisons)} tokens compared, {len(wrong)} wrong, "
        f"{sum(len(each.ties) for each in comparisons)} at ties; received {stats.transfers.delta_pages} pages, the "
        f"daemon held {stats.requests.hit_tokens} tokens"
    )
    for name, of in counts.items():
        preempted, failed, pushed = (f"{of[metric]:.0f}" for metric in METRICS)
        injected, recovered = logs[name].count(INJECTED), logs[name].count(RECOVERED)
        told += (
            f"; {name}: {preempted} preemptions, {pushed} pushed, {failed} failed, the other connector loaded "
            f"{injected} times and failed {recovered}"
        )
    if way == "reset":
        wrong += [
            f"{name}: what another connector loaded has the new weights' name"
            for name in logs
            if LEFT not in logs[name]
        ]
    if way in ("example", "offload", "reset"):
        wrong += [f"{name}: nothing came from the other connector" for name in logs if INJECTED not in logs[name]]
    if way == "faulty" and RECOVERED not in logs["prefill"]:
        wrong.append("no load failed")
    return "\n".join([told, *wrong]), not wrong


def reset(cluster: Cluster, spec: Spec) -> None:
    """Says that both engines have other weights, once they hold no block."""
    for name, own in spec.extra_of.items():
        Path(str(own["weights_file"])).write_text("other weights")
        end = time.monotonic() + UP_SECONDS
        while not httpx.post(cluster.engines[name].url + RESET, timeout=UP_SECONDS).json()["success"]:
            assert time.monotonic() < end, f"{name} does not let go of its blocks"
            time.sleep(0.5)


async def one_turn(url: str, load: Load, said: list[list[str]], turn: int) -> list[Reply]:
    """All conversations' at once."""
    async with new_client() as client:
        ask = one_server(client, url)

        async def one(conversation: int) -> Reply:
            messages: Messages = []
            for number in range(turn + 1):
                messages.append({"role": "user", "content": user_text(conversation, number, load.user_words)})
                if number < turn:
                    messages.append({"role": "assistant", "content": said[conversation][number]})
            return await ask(messages, load.max_tokens)

        # Another comes first in each turn, so that of several engines each gets what others have computed.
        order = [(turn + place) % load.conversations for place in range(load.conversations)]
        replies = dict(zip(order, await asyncio.gather(*map(one, order)), strict=True))
        return [replies[number] for number in range(load.conversations)]


def wait_until_up(cluster: Cluster) -> None:
    """The daemons' sessions are up, and prefill's engines are with their daemons."""
    end = time.monotonic() + UP_SECONDS
    up = ["up"] * len(cluster.prefills)
    while any([peer.state for peer in cluster.stats(name).peers] != up for name in cluster.decodes) or not all(
        cluster.stats(name).workers for name in cluster.prefills
    ):
        assert time.monotonic() < end, "the daemons do not find each other again"
        time.sleep(0.2)
    time.sleep(1.0)  # the engine's scheduler looks for its daemon four times a second


class Fetched(NamedTuple):
    """What prefill's daemons have fetched since they began."""

    tokens: int
    elsewhere: int  # of them, from decode daemons that had not asked for the prompt
    ends: Counter[str]  # what became of prompts that lacked some


def fetched_by(cluster: Cluster) -> Fetched:
    backs = [cluster.stats(name).way_back for name in cluster.prefills]
    ends = Counter[str]()
    for back in backs:
        ends.update({each.reason: each.count for each in (*back.choices, *back.transfers.aborts)})
    elsewhere = sum(back.elsewhere_tokens for back in backs)
    return Fetched(sum(back.fetched_tokens for back in backs), elsewhere, ends)


def run_back(way: str, spec: Spec, load: Load, reference: list[list[Reply]]) -> tuple[str, bool]:
    said, got = texts(reference), [list[Reply]() for _ in reference]
    lines, fetched, elsewhere = list[str](), 0, 0
    with Cluster(spec) as cluster:
        cluster.kvferry()
        fronts = list[str]()
        for name in cluster.decodes:
            cluster.start_front([name])
            fronts.append(cluster.front)
        for turn in range(load.turns):
            if turn and spec.prefills == 1:
                cluster.kill_daemon("prefill")
                cluster.start_daemon("prefill")
            wait_until_up(cluster)
            before = fetched_by(cluster)
            replies = asyncio.run(one_turn(fronts[turn % len(fronts)], load, said, turn))
            for turns, reply in zip(got, replies, strict=True):
                turns.append(reply)
            now = fetched_by(cluster)
            tokens = now.tokens - before.tokens
            fetched += tokens
            elsewhere += now.elsewhere - before.elsewhere
            ends = ", ".join(f"{reason} {count}" for reason, count in (now.ends - before.ends).items())
            prompts = ", ".join(str(reply.prompt_tokens) for reply in replies)
            lines.append(f"  turn {turn + 1}: prompts of {prompts} tokens, {tokens} fetched; {ends}")
        leaks = leaks_of(cluster)
        failed = sum(cluster.metric(name, "vllm:kvferry_failed_total") for name in cluster.prefills)
    comparison = compared(reference, got)
    wrong = [*comparison.wrong, *leaks]
    if fetched <= load.conversations * (load.turns - 1) * load.max_tokens:
        wrong.append("no more was fetched than decode alone had computed")
    if spec.decodes > 1 and not elsewhere:
        wrong.append("nothing was fetched from a decode daemon that had not asked")
    told = (
        f"{way}: {comparison.tokens} tokens compared, {len(wrong)} wrong, {len(comparison.ties)} at ties; {fetched} "
        f"tokens fetched, {elsewhere} of them elsewhere, {failed:.0f} failed"
    )
    return "\n".join([told, *lines, *wrong]), not wrong


def main() -> int:
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for resets
    ways = (
        "example",
        "reset",
        "offload",
        "faulty",
        "servers",
        "preempted",
        *BACK_WAYS,
        *(BLOCK_WAYS if DEVICES else ()),
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", nargs="*", choices=[*ways, []], default=[])
    parser.add_argument("--ranks", default="1:1", metavar="P:D", help="tensor-parallel, of prefill and of decode")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    ranks = ranks_of(args.ranks)
    log = Log(args.output)
    references: dict[Load, list[list[Reply]]] = {}
    all_well = True
    for way in args.way or ways:
        with tempfile.TemporaryDirectory(prefix="kvferry-vllm-") as stored:
            told, well = run_way(way, Path(stored), ranks, references)
        log.add(told)
        all_well = all_well and well
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
