"""A cluster rehearsed on one machine: every replica on a node of its own, a network namespace with its own address.

    python bench/e2e/cluster.py [--prefills 3] [--decodes 1] [--clock 0.5]        (as root: it makes namespaces)

Daemons and couriers talk over veth links through a bridge; what the kernel counted on the decode nodes' links stands
beside what the daemons say that they moved. Decode-side reuse off, then on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from claims import ENGINE, PAGE, WIDTH, Chats
from rich.console import Console
from rig import RigError, Setup, drive, in_model_time, judge_workers, tried_again, wrong_pages

from kvferry.daemon.cli.stack import Stack, StackError
from kvferry.loadgen.report import Report
from kvferry.loadgen.tables import print_comparison

NETWORK = "10.213.77"  # /24, of the bridge and the nodes
BRIDGE = "kvf-br"
PATIENCE_S = 20.0


def ip(*words: str) -> None:
    """Raises RigError."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise RigError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    address: str

    @property
    def inside(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def received_bytes(self) -> int:
        """By its link, so far; as the bridge's end of it sent them."""
        return int(Path(f"/sys/class/net/{self.name}/statistics/tx_bytes").read_text())


@contextmanager
def bridge() -> Iterator[None]:
    ip("link", "add", BRIDGE, "type", "bridge")
    try:
        ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        yield
    finally:
        ip("link", "del", BRIDGE)


@contextmanager
def node(name: str, number: int) -> Iterator[Node]:
    ip("netns", "add", name)
    try:
        made = Node(name, f"{NETWORK}.{10 + number}")
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", name, "master", BRIDGE, "up")
        ip("-n", name, "addr", "add", f"{made.address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        ip("netns", "del", name)


@dataclass(frozen=True, slots=True)
class Outcome:
    report: Report  # in the model's time
    link_bytes: int  # received by the decode nodes


def run(setup: Setup, load: Sequence[str], shm: str) -> Outcome:
    spec = setup.spec(shm)
    with ExitStack() as nodes, Stack() as stack:
        nodes.enter_context(bridge())
        kinds = [("prefill", i) for i in range(spec.prefills)] + [("decode", i) for i in range(spec.decodes)]
        all_nodes = [nodes.enter_context(node(f"kvf-{kind[0]}{i}", at)) for at, (kind, i) in enumerate(kinds)]
        peers: list[str] = []
        front = ["front", "--listen", "127.0.0.1:0", *spec.front_flags]
        stats: list[str] = []
        logs: list[Path] = []
        for place, (kind, i) in zip(all_nodes, kinds, strict=True):
            socket = os.path.join(stack.folder, f"{place.name}.sock")
            words = ["serve", "--role", kind, "--name", f"{kind}-{i}", "--listen", f"{place.address}:0", "--insecure"]
            words += ["--socket", socket, "--page-size", str(spec.page_size)]
            pool = spec.prefill_pool_bytes if kind == "prefill" else spec.decode_pool_bytes
            words += ["--pool-bytes", str(pool), *(spec.prefill_flags if kind == "prefill" else spec.decode_flags)]
            words += peers if kind == "decode" else []
            daemon = stack.ready(stack.start(place.name, words, prefix=place.inside))
            worker = ["worker", kind, "--synthetic", "--socket", socket, "--listen", f"{place.address}:0"]
            worker += ["--insecure"]
            worker += [*spec.worker_flags, *(spec.decode_worker_flags if kind == "decode" else [])]
            started = stack.start(f"{place.name}-worker", worker, prefix=place.inside)
            logs.append(Path(started.log_path))
            address = stack.ready(started)
            front += [f"--{kind}", address]
            if kind == "prefill":
                peers += ["--peer", f"{kind}-{i}={daemon}"]
            else:
                stats += ["--stats", daemon]
        url = f"http://{stack.ready(stack.start('front', front))}"
        decodes = all_nodes[spec.prefills :]
        before = sum(place.received_bytes() for place in decodes)
        report = drive(url, [*stats, *load], 600.0)
        moved = sum(place.received_bytes() for place in decodes) - before
        judge_workers(wrong_pages(logs), tried_again(url))
        stack.close()
    return Outcome(in_model_time(report, setup.clock), moved)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefills", type=int, default=3)
    parser.add_argument("--decodes", type=int, default=1)
    parser.add_argument("--clock", type=float, default=0.5)
    given = parser.parse_args(words)
    if os.geteuid() != 0:
        print("cluster: network namespaces need root", file=sys.stderr)
        return 2
    chats = Chats(conversations=24, turns=4)
    setup = Setup(
        decode_pages=chats.working_set,
        prefill_pages=2 * chats.working_set,
        engine=ENGINE,
        clock=given.clock,
        prefills=given.prefills,
        decodes=given.decodes,
        page_size=PAGE,
        page_bytes=64 * 1024,
    )
    console = Console(width=WIDTH)
    outcomes = []
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    try:
        for reuse in ("off", "on"):
            with tempfile.TemporaryDirectory(prefix="kvferry-e2e-", dir=shm) as folder:
                outcomes.append(run(replace(setup, reuse=reuse), chats.load(24), folder))
    except (RigError, StackError) as error:
        print(error, file=sys.stderr)
        return 1
    off, on = outcomes
    nodes = f"{given.prefills} prefill and {given.decodes} decode nodes, each in a network namespace"
    console.print(f"{nodes}; clock x {given.clock:g}, pages of 64 KiB", highlight=False)
    print_comparison(("reuse off", "reuse on"), (off.report, on.report), console)
    for name, outcome in (("off", off), ("on", on)):
        counts = outcome.report.daemons
        assert counts is not None
        console.print(
            f"reuse {name}: {counts.moved_bytes:,} bytes of pages moved, {counts.wire_bytes:,} with slot headers; the "
            f"decode nodes' links received {outcome.link_bytes:,} bytes in all",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
