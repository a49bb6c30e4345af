"""A trace in Mooncake's format through four prefill servers, with pools of a tenth of it each: the prompt tokens that
they compute with the way back off and on, beside what one endless prefill cache would compute.

    python bench/e2e/trace_return.py --trace FILE [--requests 600] [--in-flight 4]

Every prompt in arrival order, one output token each, pages of 256 tokens with 1 KiB of payload, every byte of which the
synthetic workers check. First one decode server with a tenth of it, or all, then two with a tenth each, or all that
comes to them, chosen by load alone: without and with look-ups at the one that does not ask.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rig import RigError, Run, Setup, run

from kvferry.loadgen.trace import BLOCK_TOKENS, read_trace

PAGE = 256
PAGE_BYTES = 1024
PREFILLS = 4
BY_LOAD = ("--load-factor", "1", "--load-slack", "0")


@dataclass(frozen=True, slots=True)
class Endless:
    """A prefill cache without end, asked in order."""

    tokens: int  # of all prompts
    computed: int
    pages: int  # that it holds at the end


def endless(path: Path, limit: int | None) -> Endless:
    """The last token of a prompt is computed in any case."""
    held: set[tuple[int, int]] = set()  # a block's id names all that is before it, too
    tokens = computed = 0
    for request in read_trace(path, limit):
        each = BLOCK_TOKENS // PAGE
        pages = [(request.blocks[page // each], page % each) for page in range(request.input_tokens // PAGE)]
        most = (request.input_tokens - 1) // PAGE
        found = next((i for i, page in enumerate(pages[:most]) if page not in held), min(most, len(pages)))
        tokens, computed = tokens + request.input_tokens, computed + request.input_tokens - found * PAGE
        held.update(pages)
    return Endless(tokens, computed, len(held))


def line(what: str, measured: Run, bound: Endless) -> str:
    """One row of the table."""
    back = [side.way_back for side in measured.prefills]
    found = sum(each.look_ups.found for each in back)
    over = 100 * measured.computed_tokens / bound.computed - 100
    hits = 100 - 100 * measured.computed_tokens / bound.tokens
    numbers = (
        f"{measured.computed_tokens:>12,} {over:>+8.1f} % {hits:>6.1f} %",
        f"{measured.fetched_tokens:>12,}",
        f"{sum(each.elsewhere_tokens for each in back):>12,} {found:>8,}",
        f"{sum(each.followed_tokens for each in back):>10,}",
    )
    return f"{what:<52}" + " ".join(numbers)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--requests", type=int, default=600, help="the first so many")
    parser.add_argument("--in-flight", type=int, default=4)
    given = parser.parse_args(words)
    bound = endless(given.trace, given.requests)
    tenth = bound.pages // 10
    one = Setup(
        decode_pages=tenth,
        prefill_pages=tenth,
        engine=None,
        prefills=PREFILLS,
        page_size=PAGE,
        page_bytes=PAGE_BYTES,
        chunk_tokens=1 << 17,
    )
    two = replace(one, decodes=2, front_flags=BY_LOAD)
    all_back = replace(two, decode_pages=2 * bound.pages, way_back="always")
    load = ["--workload", "trace", "--file", str(given.trace), "--max-tokens", "1"]
    load += ["--concurrency", str(given.in_flight), "--conversations", str(given.requests)]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {given.trace.name}")
    print(f"{given.requests:,} requests, {given.in_flight} at a time; {bound.tokens:,} prompt tokens")
    print(f"{bound.pages:,} pages of {PAGE} tokens in all; each pool has {tenth:,}")
    print(f"one endless prefill cache computes {bound.computed:,} tokens\n")
    print(f"{'':<52}{'computed':>12} {'over it':>10} {'hits':>8}", end=" ")
    print(f"{'fetched':>12} {'elsewhere':>12} {'found':>8} {'followed':>10}")
    runs = (
        ("one decode server, way back off", one),
        ("one decode server, way back on", replace(one, way_back="always")),
        ("one that holds all, way back on", replace(one, decode_pages=2 * bound.pages, way_back="always")),
        ("two by load, way back off", two),
        ("two by load, way back on, look-ups off", replace(two, way_back="always", look_ups="off")),
        ("two by load, way back on, look-ups on", replace(two, way_back="always")),
        ("two that hold all, way back on, look-ups off", replace(all_back, look_ups="off")),
        ("two that hold all, way back on, look-ups on", all_back),
    )
    try:
        for what, setup in runs:
            print(line(what, run(setup, load), bound), flush=True)
    except RigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
