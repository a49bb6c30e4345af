"""What the scripts of one claim each have in common: chats of long turns, a system, pairs of runs side by side."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rig import RigError, Run, Setup, run

from kvferry.loadgen.tables import print_comparison
from kvferry.workers.models.engine_model import read_engine_model

ENGINE = Path(__file__).with_name("engine_8b.json")
PAGE = 64
WIDTH = 118


@dataclass(frozen=True, slots=True)
class Chats:
    """Multi-turn chats behind one system prompt; sizes in tokens."""

    conversations: int = 32
    turns: int = 5
    system: int = 2_000
    user: int = 1_000
    output: int = 96
    seed: int = 1

    @property
    def tokens(self) -> int:
        """Of a conversation at its end."""
        return self.system + self.turns * (self.user + self.output)

    @property
    def pages(self) -> int:
        return -(-self.tokens // PAGE)

    @property
    def working_set(self) -> int:
        """Pages of all conversations at their ends, the shared ones once."""
        shared = self.system // PAGE
        return shared + self.conversations * (self.pages - shared)

    def load(self, concurrency: int, *more: str) -> list[str]:
        words = ["--api", "completions-tokens", "--ignore-eos", "--seed", str(self.seed)]
        words += ["--conversations", str(self.conversations), "--turns", str(self.turns)]
        words += ["--system-words", str(self.system), "--user-words", str(self.user)]
        words += ["--max-tokens", str(self.output), "--concurrency", str(concurrency)]
        return [*words, *more]


@dataclass(frozen=True, slots=True)
class Bench:
    """One script's run."""

    clock: float
    engine: Path
    console: Console

    def setup(self, decode_pages: int, chats: Chats) -> Setup:
        return Setup(
            decode_pages=decode_pages,
            prefill_pages=2 * chats.working_set,
            engine=self.engine,
            clock=self.clock,
            page_size=PAGE,
        )

    def pair(self, title: str, baseline: Setup, ours: Setup, load: Sequence[str], names: tuple[str, str]) -> None:
        """Both in turn, side by side; prints as it goes."""
        runs = (run(baseline, load), run(ours, load))
        self.console.rule(title, align="left")
        print_comparison(names, (runs[0].report, runs[1].report), self.console)
        self.notes(names, runs)

    def notes(self, names: tuple[str, str], runs: tuple[Run, Run]) -> None:
        for name, measured in zip(names, runs, strict=True):
            self.console.print(
                f"{name}: {measured.report.requests} requests, {measured.report.failed} failed, "
                f"judged: no wrong page, no second try; decode pool "
                f"{measured.setup.decode_pages:,} pages, {measured.decode.pool.evicted:,} evicted; "
                f"{'; '.join(measured.engine_log)}",
                highlight=False,
            )


def main(doc: str, claim: Callable[[Bench], None], words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", type=float, default=0.5, help="waits so many times shorter (default %(default)s)")
    parser.add_argument("--engine", type=Path, default=ENGINE)
    given = parser.parse_args(words)
    console = Console(width=WIDTH)
    model = read_engine_model(given.engine)
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; engine: {model.name}; "
        f"clock x {given.clock:g}; pages of 4 KiB stand for {model.kv_bytes_per_token * PAGE / 2**20:g} MiB",
        highlight=False,
    )
    try:
        claim(Bench(given.clock, given.engine, console))
    except RigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
