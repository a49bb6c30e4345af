"""The whole check in some minutes, on one GPU or two: greedy tokens of kvferry's pair beside SGLang alone, with aborts,
then multi-turn chats with kvferry and with SGLang's own NIXL backend, decode's radix cache on. All servers of a step
start at once, and those of the second while the first runs, where the GPU has room for both.

bash bench/gpu/sglang.sh OUT check [--steps tokens table] [--chats 12] [--aborts 100] [--at-once 1 4] [--shape 8b]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import grpc
from compare import Rows, keep, measured, show
from servers import ALONE, KVFERRY, NIXL, RADIX, ROOT, DidNotStart, Machine, Model, System, gpu_memories
from tokens import LARGE, SYSTEMS, model_of, run_alone, run_pair

from kvferry.daemon.cli.stack import StackError

# Beside the 8B shape of the pack, one that fits four times on a GPU of 80 GB.
SMALLER = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_hidden_layers": 28}
ROOMY_MIB = 130_000  # of one GPU that has both pairs of the 8B shape, and the servers of the first step beside them
CHAT_TOKENS = 8192 + 4 * (512 + 16)

_began = time.monotonic()


def said(what: str) -> None:
    print(f"== {time.monotonic() - _began:.0f} s: {what}", flush=True)


def shape_of(name: str, chats: int) -> Model:
    """The 8B shape's folder, or a smaller one's beside it; pools for so many chats, and half as much."""
    tokens = 3 * chats * CHAT_TOKENS // 2 // 64 * 64
    if name == "8b":
        return Model((), tokens, tokens)
    folder = ROOT / "model-3b"
    folder.mkdir(exist_ok=True)
    config = json.loads((ROOT / "model" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SMALLER))
    return Model(("--model-path", str(folder)), tokens, tokens)


def tokens_pair() -> Machine:
    return Machine(SYSTEMS[KVFERRY], place=1)


class Table:
    """Pairs of several systems side by side, measured one after the other."""

    def __init__(self, stack: ExitStack, model: Model) -> None:
        systems = (System("nixl-on", NIXL, RADIX), System("kvferry", KVFERRY, RADIX, slots=8))
        self.model = model
        self.machines = [stack.enter_context(Machine(system, 2 + i)) for i, system in enumerate(systems)]

    def start(self) -> None:
        for machine in self.machines:
            machine.start_pair(self.model)

    def run(self, at_once: Sequence[int], rounds: int) -> bool:
        """Whether all of it was measured."""
        rows: Rows = []
        good = True
        for machine in self.machines:
            try:
                machine.wait()
                said(f"{machine.system.name} is ready")
                rows += measured(machine, at_once, rounds)
            except (DidNotStart, subprocess.SubprocessError, grpc.RpcError) as error:
                good = False
                said(f"{machine.system.name} failed: {error}")
                machine.say_errors(30)
            keep(rows)
        show(rows)
        return good


def check_tokens(alone: Machine, pair: Machine, chats: int, aborts: int) -> bool:
    """Whether the pair's tokens are those of SGLang alone."""
    try:
        alone.wait()
        said("SGLang alone is ready")
        reference = run_alone(alone, chats)
        pair.wait()
        said("kvferry's pair is ready")
        return run_pair(pair, "large", reference, aborts) == 0
    except (DidNotStart, StackError, grpc.RpcError) as error:
        said(f"the tokens failed: {error}")
        pair.say_errors(30)
        return False


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=("tokens", "table"), default=["tokens", "table"])
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--aborts", type=int, default=100)
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shape", choices=("8b", "3b"), help="8b where the GPUs have room, else 3b")
    args = parser.parse_args(words)
    roomy = len(gpu_memories()) > 1 or gpu_memories()[0] >= ROOMY_MIB
    shape = args.shape or ("8b" if roomy else "3b")
    said(f"{len(gpu_memories())} GPUs of {gpu_memories()[0]} MiB; the table has the {shape} shape")
    good = True
    with ExitStack() as all_of_it:
        table = Table(all_of_it, shape_of(shape, max(args.at_once)))
        if "tokens" in args.steps:
            with Machine(System("alone", ALONE)) as alone, tokens_pair() as pair:
                model = model_of(None, LARGE)
                alone.start("a", model)
                pair.start_pair(model)
                said("the servers of the tokens are started")
                if "table" in args.steps and roomy:
                    table.start()
                    said("those of the table, too")
                good = check_tokens(alone, pair, args.chats, args.aborts)
                said("the tokens are over")
        if "table" in args.steps:
            if not ("tokens" in args.steps and roomy):
                table.start()
                said("the servers of the table are started")
            good = table.run(args.at_once, args.rounds) and good
    said("over")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
