"""The published workload through the synthetic engine: the baseline as it was fitted, and reuse as a prediction.

    python bench/e2e/published.py                               # the whole of it: 1,000 requests, in real time / 1.5
    python bench/e2e/published.py --fewer 10                    # a tenth of the tokens, the same times for each request
    python bench/e2e/published.py --simulate                    # parameters +-25 % by simulation alone, in seconds

3 prefill + 1 decode worker, the decode pool of 37 requests' pages, page payload 4 KiB standing for 16 MiB. Every page's
bytes are checked wherever they arrive. Engine: published_engine.json, see fit_published.py.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fit_published import BASELINE, FILE, REQUESTS_IN_POOL, SIZES, fit, prefixes, request_pages, scaled
from rig import RigError, Run, Setup, run
from simulation import simulate

from kvferry.loadgen.shared_prefix import Sizes
from kvferry.workers.models.engine_model import EngineModel, read_engine_model

PREFILL_PAGES = 262_144  # each; nothing is evicted there
CAP = 64
KINDS = {  # of runs: what they are called, reuse, how many requests may run
    "off": ("kvferry, reuse off", "off", 0),
    "on": ("kvferry, reuse on: predicted", "on", 0),
    "cap": (f"kvferry, reuse on, at most {CAP} running", "on", CAP),
}
FITTED = ("prefill_tokens_per_s", "decode_step_ms", "decode_context_ns", "transfer_gb_per_s")
FIXED_SHARES = (0.1, 0.25, 0.5, 0.6, 0.75)


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    requests_per_s: float
    ttft_p50_s: float
    ttft_mean_s: float | None
    inter_token_ms: float


PUBLISHED = {  # with reuse only ratios were published: its numbers are the baseline's times the ratios
    "off": Row("published, reuse off", 1.21, 73.2, None, 65.6),
    "on": Row("reuse on, from the published ratios", 1.60, 9.0, None, 131.0),
}


def of_run(what: str, measured: Run, fewer: int) -> Row:
    report = measured.report
    ttft = report.ttft_ms
    return Row(what, report.requests_per_s, ttft.p50 / 1000, ttft.mean / 1000, report.token_ms.mean / fewer)


def of_simulation(what: str, model: EngineModel, sizes: Sizes, reuse: str, cap: int = 0, fewer: int = 1) -> Row:
    system = replace(BASELINE, reuse=reuse, max_running=cap, pool_pages=REQUESTS_IN_POOL * request_pages(sizes))
    outcome = simulate(model, sizes, system, prefixes())
    return Row(what, outcome.requests_per_s, outcome.ttft_p50_s, outcome.ttft_mean_s, outcome.inter_token_ms / fewer)


def table(rows: Sequence[Row], baseline: Row) -> Iterator[str]:
    yield f"{'':<46} {'req/s':>6} {'':>6} {'TTFT p50':>9} {'':>7} {'mean':>8} {'inter-token':>12} {'':>6}"
    for row in rows:
        mean = "" if row.ttft_mean_s is None else f"{row.ttft_mean_s:.1f} s"
        yield (
            f"{row.what:<46} {row.requests_per_s:>6.2f} {row.requests_per_s / baseline.requests_per_s:>5.2f}x "
            f"{row.ttft_p50_s:>7.2f} s {baseline.ttft_p50_s / row.ttft_p50_s:>6.1f}x {mean:>8} "
            f"{row.inter_token_ms:>9.1f} ms {row.inter_token_ms / baseline.inter_token_ms:>5.2f}x"
        )


def sensitivity(model: EngineModel, sizes: Sizes) -> Iterator[str]:
    """By simulation: each parameter changed alone, for baseline and reuse; and the share of a step that was stated."""
    yield "each parameter -25 % and +25 %, baseline and reuse both (simulated):"
    heads = f"{'off req/s':>9} {'on req/s':>9} {'':>6} {'off TTFT p50':>13} {'on':>8} {'':>7} {'inter-token':>12}"
    yield f"{'':<32} {heads}"
    for name in FITTED:
        for factor in (0.75, 1.25):
            changed = replace(model, **{name: getattr(model, name) * factor})
            yield _pair(f"{name} x {factor:g}", changed, sizes, 0)
    yield _pair("as fitted", model, sizes, 0)
    yield _pair(f"as fitted, at most {CAP} running", model, sizes, CAP)
    yield "the share of a step that does not grow with context, the rest fitted anew:"
    for share in FIXED_SHARES:
        yield _pair(f"share {share:g}", fit(share)[0], sizes, 0)


def _pair(what: str, model: EngineModel, sizes: Sizes, cap: int) -> str:
    off = of_simulation(what, model, sizes, "off")
    on = of_simulation(what, model, sizes, "on", cap)
    ratio = on.requests_per_s / off.requests_per_s
    return (
        f"{what:<32} {off.requests_per_s:>9.2f} {on.requests_per_s:>9.2f} {ratio:>5.2f}x "
        f"{off.ttft_p50_s:>11.1f} s {on.ttft_p50_s:>6.2f} s {off.ttft_p50_s / on.ttft_p50_s:>6.1f}x "
        f"{on.inter_token_ms:>6.1f} ms {on.inter_token_ms / off.inter_token_ms:>4.2f}x"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=SIZES.requests)
    parser.add_argument("--clock", type=float, default=1.5)
    parser.add_argument("--fewer", type=int, default=1, metavar="N", help="tokens, N times; each N times slower")
    parser.add_argument("--engine", type=Path, default=FILE)
    parser.add_argument("--runs", default="off,on,cap", help="of: off, on, cap (default: all)")
    parser.add_argument("--simulate", action="store_true", help="no run, only the sensitivity")
    given = parser.parse_args(words)
    if unknown := sorted(set(given.runs.split(",")) - KINDS.keys()):
        parser.error(f"--runs: {unknown[0]!r} is none of {', '.join(KINDS)}")
    model = read_engine_model(given.engine)
    sizes = replace(SIZES, requests=given.requests)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        f"{sizes.requests} requests, {sizes.concurrency} at a time, clock x {given.clock:g}"
    )
    print(f"engine: {', '.join(f'{f.name}={getattr(model, f.name)}' for f in fields(model) if f.name != 'name')}\n")
    if not given.simulate:
        try:
            for line in measured_rows(model, sizes, given):
                print(line, flush=True)
        except RigError as error:
            print(error, file=sys.stderr)
            return 1
        print()
    for line in sensitivity(model, sizes):
        print(line, flush=True)
    return 0


def measured_rows(model: EngineModel, sizes: Sizes, given: argparse.Namespace) -> Iterator[str]:
    rows: list[Row] = []
    notes: list[str] = []
    model, sizes = scaled(model, sizes, given.fewer)
    if given.fewer > 1:
        yield f"tokens {given.fewer} times fewer and slower: {sizes.prefix} + {sizes.suffix}, output {sizes.output}; "
        yield "times between tokens are given for the full number of them"
    folder = tempfile.TemporaryDirectory()
    engine = Path(folder.name) / "engine.json"
    engine.write_text(model.json())
    for kind in given.runs.split(","):
        what, reuse, cap = KINDS[kind]
        began = time.perf_counter()
        measured = run(
            Setup(
                decode_pages=REQUESTS_IN_POOL * request_pages(sizes),
                prefill_pages=PREFILL_PAGES,
                engine=engine,
                clock=given.clock,
                prefills=3,
                stream_interval=25 if given.fewer == 1 else 4,
                reuse=reuse,
                max_running=cap,
            ),
            load_of(sizes),
        )
        rows.append(of_run(what, measured, given.fewer))
        rows.append(of_simulation("  the same, simulated", model, sizes, reuse, cap, given.fewer))
        notes.append(
            f"{what}: {time.perf_counter() - began:.0f} s here; {measured.report.requests} requests, "
            f"{measured.report.failed} failed; judged: no wrong page, no second try; "
            f"{measured.decode.transfers.delta_pages:,} pages moved, hit rate {measured.hit_share:.1%}"
        )
        notes += [f"  {line}" for line in measured.engine_log]
    folder.cleanup()
    yield from table([PUBLISHED["off"], PUBLISHED["on"]], PUBLISHED["off"])
    yield from table(rows, rows[0])
    yield ""
    yield from notes


def load_of(sizes: Sizes) -> list[str]:
    words = ["--workload", "shared-prefix", "--preset", "published", "--api", "completions-tokens", "--ignore-eos"]
    words += ["--prefix-tokens", str(sizes.prefix), "--suffix-tokens", str(sizes.suffix)]
    return [*words, "--max-tokens", str(sizes.output), "--requests", str(sizes.requests), "--seed", "0"]


if __name__ == "__main__":
    sys.exit(main())
