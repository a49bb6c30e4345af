"""Multi-turn chats on GPUs, decode-side reuse off against on: prefill on one GPU, decode on the other.

    python bench/gpu/turns.py [--shape llama-8b] [--devices cuda:0,cuda:1] [--concurrency 1,4,32]

A whole system (daemons, reference workers of an untrained model, front end) for each of the two, `kvferry loadgen` with
token ids in a closed loop on it, decode steps in batches. Pools hold all conversations: nothing is evicted. Printed:

* time to first token by turn, and the bytes that were moved; these fall by the share of the prompts that the decode
  daemon held, hit tokens / queried tokens;
* pages: of each request both workers have written down sums over the bytes of its pages (`kvferry worker --record`):
  of every page moved the two are equal;
* logits: every prompt with its output goes through the plain model of transformers, in one pass; of each output token
  its logit there is held against the best one. What that would show: the same pass over a prompt of which 16 pages are
  wrong must choose tokens that are further off.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import SystemSpec, start_system
from kvferry.daemon.config.values import parse_size
from kvferry.loadgen.files import read_report
from kvferry.loadgen.report import Report
from kvferry.workers.models.random_weights import parse_shape, random_model
from kvferry.workers.record import Recorded, read_record

LIMIT = 0.05  # between the best logit and the chosen one's
SHARE_LIMIT = 0.01
WRONG_PAGES = 16  # of the control's prompts
CONVERSATIONS = {1: 4, 4: 8, 32: 32}  # by concurrency
KEY_TOKENS = 64  # with which a conversation begins, and no other
PREFILL, DECODE = "prefill", "decode"


@dataclass(slots=True)
class Pages:
    compared: int = 0
    different: int = 0


@dataclass(slots=True)
class Logits:
    tokens: int = 0
    others: int = 0  # not the reference's best
    beyond: int = 0  # the limit
    worst: float = 0.0

    def add(self, gaps: torch.Tensor) -> None:
        """gaps: of each token, between the best logit and its own."""
        self.tokens += len(gaps)
        self.others += int((gaps > 0).sum())
        self.beyond += int((gaps > LIMIT).sum())
        self.worst = max(self.worst, float(gaps.max()))

    def __str__(self) -> str:
        return (
            f"{self.tokens} logits, {self.others} not the reference's best, at most {self.worst:.4f} below it, "
            f"{self.beyond} more than {LIMIT}"
        )


@dataclass(slots=True)
class Run:
    """One load at one concurrency."""

    report: Report
    requests: list[Recorded]  # of the decode worker
    pages: Pages
    logits: Logits = field(default_factory=Logits)
    control: Logits = field(default_factory=Logits)  # of tokens chosen by prompts with wrong pages

    @property
    def moved(self) -> int:
        assert self.report.daemons is not None
        return self.report.daemons.moved_bytes

    @property
    def share(self) -> float:
        """Of the prompts' tokens that were held."""
        daemons = self.report.daemons
        assert daemons is not None
        return daemons.hit_tokens / daemons.queried_tokens


def runs(args: argparse.Namespace, reuse: str) -> dict[int, Run]:
    """By concurrency, in one system."""
    sending, receiving = args.devices.split(",") if "," in args.devices else (args.devices, args.devices)
    with tempfile.TemporaryDirectory(prefix="kvferry-turns-") as folder, Stack() as stack:
        records = {role: Path(folder) / f"{role}.jsonl" for role in (PREFILL, DECODE)}
        slots = ["--slots", str(args.slots), "--slot-bytes", args.slot_bytes] if args.slots else []
        spec = SystemSpec(
            random_weights=args.shape,
            prefill_device=sending,
            decode_device=receiving,
            page_size=args.page_size,
            decode_pool_bytes=parse_size(args.pool_bytes),
            prefill_pool_bytes=parse_size(args.pool_bytes),
            prefill_flags=slots,
            decode_flags=[*slots, "--reuse", reuse],
            worker_flags=["--dtype", "bfloat16", "--chunk-tokens", str(args.chunk_tokens)],
            prefill_worker_flags=["--record", str(records[PREFILL])],
            decode_worker_flags=["--record", str(records[DECODE]), "--max-batch", "64"],
        )
        began = time.monotonic()
        system = start_system(stack, spec)
        print(f"reuse {reuse}: up in {time.monotonic() - began:.1f} s", flush=True)
        found: dict[int, Run] = {}
        seen = 0
        for clients in args.concurrency:
            report = load(system.url, system.decodes[0].daemon_address, clients, args, Path(folder))
            requests = recorded(records[DECODE], seen + (report.requests + warm_ups(clients) * args.turns))[seen:]
            seen += len(requests)
            found[clients] = Run(report, requests, compare_pages(read_record(records[PREFILL]), requests))
            firsts = ", ".join(f"{turn.p50:.1f}" for turn in report.ttft_by_turn_ms)
            print(f"  {clients} at a time: {report.requests} requests in {report.duration_s:.1f} s", end="; ")
            print(f"time to first token by turn, p50: {firsts} ms", flush=True)
    return found


def recorded(path: Path, count: int) -> list[Recorded]:
    """Once there are so many: a worker writes a request down behind its last token."""
    end = time.monotonic() + 20
    while path.read_bytes().count(b"\n") < count:
        if time.monotonic() > end:
            raise SystemExit(f"{path.name} has fewer than {count} requests")
        time.sleep(0.1)
    return read_record(path)


def warm_ups(clients: int) -> int:
    """Conversations before those that are measured."""
    return 1 + clients // 16


def load(url: str, stats: str, clients: int, args: argparse.Namespace, folder: Path) -> Report:
    path = folder / f"report-{clients}.json"
    conversations, warm_up = args.conversations or CONVERSATIONS.get(clients, 2 * clients), warm_ups(clients)
    words = ["loadgen", "--url", url, "--stats", stats, "--json", str(path), "--seed", str(clients), "--ignore-eos"]
    words += ["--api", "completions-tokens", "--concurrency", str(clients), "--active", str(clients)]
    words += ["--conversations", str(conversations + warm_up), "--warm-up", str(warm_up), "--turns", str(args.turns)]
    words += ["--own-words", str(args.first_tokens), "--user-words", str(args.user_tokens)]
    words += ["--max-tokens", str(args.output_tokens), "--vocabulary", str(parse_shape(args.shape).vocabulary)]
    command = [sys.executable, "-m", "kvferry", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=False)
    if not path.exists():
        raise SystemExit(f"the load ended with {done.returncode}: {done.stdout[-2000:]}")
    report = read_report(path)
    if not report.ok:
        raise SystemExit(f"{report.failed} of {report.requests} requests failed: {report.errors}")
    return report


def compare_pages(prefill: Sequence[Recorded], decode: Sequence[Recorded]) -> Pages:
    computed = {each.request: each.sums for each in prefill}
    pages = Pages()
    for each in decode:
        sums = computed[each.request][each.first_page :]
        assert len(sums) == len(each.sums), f"{len(each.sums)} pages of {each.request} moved; it has {len(sums)}"
        pages.compared += len(sums)
        pages.different += sum(a != b for a, b in zip(sums, each.sums, strict=True))
    return pages


def compare_logits(of: Sequence[Run], args: argparse.Namespace) -> None:
    """Every conversation's longest request contains its others."""
    devices = sorted(set(args.devices.split(",")))
    networks = [random_model(parse_shape(args.shape), dtype="bfloat16", threads=1, device=each) for each in devices]
    work: list[tuple[Run, list[Recorded]]] = []
    for run in of:
        chats: dict[tuple[int, ...], list[Recorded]] = {}
        for each in run.requests:
            chats.setdefault(tuple(each.prompt[:KEY_TOKENS]), []).append(each)
        work += [(run, chat) for chat in chats.values()]

    def check(number: int) -> None:
        for run, chat in work[number :: len(networks)]:
            add_logits(run, networks[number].network, chat, args.page_size)

    with ThreadPoolExecutor(len(networks)) as pool:
        list(pool.map(check, range(len(networks))))


_adding = threading.Lock()


@torch.inference_mode()
def add_logits(run: Run, network: Any, chat: Sequence[Recorded], page_size: int) -> None:
    longest = max(chat, key=lambda each: len(each.prompt))
    tokens = longest.prompt + longest.output
    middle, length = len(longest.prompt) // 2, WRONG_PAGES * page_size
    wrong = tokens[:middle] + tokens[middle : middle + length][::-1] + tokens[middle + length :]
    logits, of_wrong = logits_of(network, tokens), logits_of(network, wrong)
    for each in chat:
        end = len(each.prompt) + len(each.output)
        assert tokens[:end] == each.prompt + each.output, "a conversation that forgot what was said"
        rows = slice(len(each.prompt) - 1, end - 1)
        chosen = torch.tensor(each.output, device=logits.device)
        with _adding:
            run.logits.add(below_best(logits[rows], chosen))
            if len(each.prompt) > middle + length:
                run.control.add(below_best(logits[rows], of_wrong[rows].argmax(1)))


def logits_of(network: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens) - 1, vocabulary], float32: what follows each token but the last."""
    ids = torch.tensor([tokens[:-1]], device=network.lm_head.weight.device)
    hidden = network.model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return torch.nn.functional.linear(hidden.float(), network.lm_head.weight.float())  # not rounded once more


def below_best(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return rows.max(dim=1).values - rows.gather(1, chosen[:, None])[:, 0]


def show(clients: int, off: Run, on: Run) -> bool:
    turns = len(off.report.ttft_by_turn_ms)
    print(f"\n{clients} at a time, {off.report.requests // turns} conversations x {turns} turns")
    print(f"{'time to first token, ms':<30}{'off p50':>10}{'on p50':>10}{'off / on':>10}{'off p90':>11}{'on p90':>10}")
    rows = [(f"  turn {k + 1}", off.report.ttft_by_turn_ms[k], on.report.ttft_by_turn_ms[k]) for k in range(turns)]
    for name, a, b in [*rows, ("  all", off.report.ttft_ms, on.report.ttft_ms)]:
        print(f"{name:<30}{a.p50:>10.1f}{b.p50:>10.1f}{a.p50 / b.p50:>10.2f}{a.p90:>11.1f}{b.p90:>10.1f}")
    for name, a, b in (("inter-token, ms", off.report.inter_token_ms, on.report.inter_token_ms),):
        print(f"{name:<30}{a.p50:>10.1f}{b.p50:>10.1f}{a.p50 / b.p50:>10.2f}{a.p90:>11.1f}{b.p90:>10.1f}")
    print(f"{'requests/s':<30}{off.report.requests_per_s:>10.2f}{on.report.requests_per_s:>10.2f}")
    fall = 1 - on.moved / off.moved
    good = abs(fall - on.share) <= SHARE_LIMIT
    print(f"{'moved, GiB':<30}{off.moved / 2**30:>10.2f}{on.moved / 2**30:>10.2f}{off.moved / on.moved:>10.2f}")
    verdict = "ok" if good else "NOT within 1 %"
    print(f"{'bytes fell by, share held':<30}{fall:>10.2%}{on.share:>10.2%}  {verdict}")
    for name, run in (("off", off), ("on", on)):
        pages, logits = run.pages, run.logits
        good &= pages.compared > 0 and not pages.different and logits.tokens > 0 and not logits.beyond
        good &= run.control.beyond > 0
        print(f"reuse {name}: {pages.compared} moved pages compared, {pages.different} differ; {logits}")
        print(f"  with {WRONG_PAGES} pages of a prompt wrong it would be: {run.control}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", help="of `kvferry worker --random-weights`")
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="prefill's and decode's; cpu: for a rehearsal")
    parser.add_argument("--concurrency", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4, 32])
    parser.add_argument("--conversations", type=int, default=0, help="default: 4, 8 and 32")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--first-tokens", type=int, default=4096, help="before a conversation's first turn")
    parser.add_argument("--user-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--pool-bytes", default="72GiB", help="of each side")
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--slot-bytes", default="32MiB")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends what was started
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["no GPU"]
    print(f"{', '.join(names)}; {os.cpu_count()} processors; torch {torch.__version__}")
    print(
        f"{args.shape}, bfloat16, untrained; prefill on {args.devices.split(',')[0]}, decode on "
        f"{args.devices.split(',')[-1]}; {args.first_tokens} + {args.user_tokens} a turn tokens of prompt, "
        f"{args.output_tokens} of output; pages of {args.page_size} tokens"
    )
    off, on = runs(args, "off"), runs(args, "on")
    began = time.monotonic()
    compare_logits([*off.values(), *on.values()], args)
    print(f"reference: {time.monotonic() - began:.1f} s")
    good = [show(clients, off[clients], on[clients]) for clients in args.concurrency]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
