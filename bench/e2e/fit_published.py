"""Fits an engine's parameters to the published baseline row alone, by simulation, and writes published_engine.json.

    python bench/e2e/fit_published.py [--fixed-share 0.5]

The row (github.com/sgl-project/sglang/pull/19746: Qwen3-32B, 3 prefill + 1 decode server, no reuse on the decode side;
20 prefixes of 50,000 tokens + 4,500, 350 output tokens, 1,000 requests, 128 at a time) has three numbers, and three
parameters are fitted to them: the link's GB/s to 1.21 requests/s, prefill tokens/s to the TTFT p50 of 73.2 s (how long
the start takes, when no prefix is computed yet), and the decode step to 65.6 ms between tokens.

What the row cannot tell is stated, not fitted:
* KV of a token: 64 layers x 8 heads x 128 x 2 x 2 bytes. Attention against the rest of a prompt token's computing: by
  FLOPs, 4 x 64 x 8,192 for each token before it to 2 x 32.8e9.
* How much of a step is there whatever the batch's context: half (--fixed-share). If a step were nothing but reading
  weights and KV at one bandwidth it would be 0.1; what GPUs that hold such a pool can read suggests 0.6.
* Latency of a transfer: 5 ms. The host tier is not used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from simulation import Outcome, System, simulate

from kvferry.loadgen.shared_prefix import PRESETS, SharedPrefix, Sizes
from kvferry.workers.models.engine_model import EngineModel

FILE = Path(__file__).with_name("published_engine.json")
SIZES = PRESETS["published"]
REQUESTS_IN_POOL = 37
PAGE_TOKENS = 64
ROW = (1.21, 73.2, 65.6)  # requests/s, TTFT p50 in s, inter-token ms
KV_BYTES = 64 * 2 * 8 * 128 * 2
ATTENTION = 4 * 64 * 8192 * 1000 / (2 * 32.8e9)  # of a token's other computing, for each 1,000 tokens before it
CONTEXT = SIZES.prefix + SIZES.suffix + SIZES.output / 2  # of a sequence, in the mean


def engine(prefill: float, link: float, step_ms: float, fixed_share: float, batch: float) -> EngineModel:
    """`step_ms`: of a step at `batch` sequences."""
    return EngineModel(
        name="Qwen3-32B as published, baseline row",
        prefill_tokens_per_s=prefill,
        prefill_context_ns=1e9 * ATTENTION / prefill,
        decode_step_ms=step_ms * fixed_share,
        decode_sequence_us=0.0,
        decode_context_ns=1e6 * step_ms * (1 - fixed_share) / (batch * CONTEXT),
        kv_bytes_per_token=KV_BYTES,
        transfer_gb_per_s=link,
        transfer_latency_ms=5.0,
        restore_gb_per_s=50.0,
    )


def scaled(model: EngineModel, sizes: Sizes, tokens: int) -> tuple[EngineModel, Sizes]:
    """The same requests of `tokens` times fewer tokens, on an engine that needs as long for each: for machines that
    cannot carry the real number of tokens. Tokens come `tokens` times slower."""
    slower = replace(
        model,
        prefill_tokens_per_s=model.prefill_tokens_per_s / tokens,
        prefill_context_ns=model.prefill_context_ns * tokens**2,
        decode_step_ms=model.decode_step_ms * tokens,
        decode_context_ns=model.decode_context_ns * tokens**2,
        kv_bytes_per_token=model.kv_bytes_per_token * tokens,
    )
    fewer = replace(sizes, prefix=sizes.prefix // tokens, suffix=sizes.suffix // tokens, output=sizes.output // tokens)
    return slower, fewer


def request_pages(sizes: Sizes) -> int:
    return -(-(sizes.prefix + sizes.suffix + sizes.output - 1) // PAGE_TOKENS)


def prefixes() -> list[int]:
    workload = SharedPrefix(SIZES, seed=0, vocabulary=32_000)
    return [workload.prefix_of(i) for i in range(SIZES.requests)]


POOL_PAGES = REQUESTS_IN_POOL * request_pages(SIZES)
BASELINE = System(prefills=3, pool_pages=POOL_PAGES, reuse="off")


def observed(outcome: Outcome) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.log([outcome.requests_per_s, outcome.ttft_p50_s, outcome.inter_token_ms])


def fit(fixed_share: float) -> tuple[EngineModel, Outcome]:
    """Newton's method on logarithms, damped."""
    prefix_of = prefixes()

    def run(x: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Outcome:
        return simulate(engine(*np.exp(x).tolist(), fixed_share, 27.0), SIZES, BASELINE, prefix_of)

    target = np.log(ROW)
    x = np.log([20_000.0, 18.0, 66.0])
    best = (np.inf, x)
    for _ in range(25):
        miss = observed(run(x)) - target
        best = min(best, (float(np.abs(miss).max()), x), key=lambda pair: pair[0])
        if best[0] < 0.002:
            break
        moves = np.diag([0.08, 0.02, 0.02])
        slopes = np.array([(observed(run(x + move)) - target - miss) / move.sum() for move in moves]).T
        x = x - np.clip(0.7 * np.linalg.solve(slopes, miss), -0.3, 0.3)
    model = engine(*np.exp(best[1]).tolist(), fixed_share, 27.0)
    return model, simulate(model, SIZES, BASELINE, prefix_of)


def rounded(model: EngineModel) -> EngineModel:
    values = {name: value for name, value in asdict(model).items() if isinstance(value, float)}
    return replace(model, **{name: float(f"{value:.4g}") for name, value in values.items()})


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed-share", type=float, default=0.5, help="of a step (default %(default)s)")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args(words)
    model, _ = fit(given.fixed_share)
    model = rounded(model)
    outcome = simulate(model, SIZES, BASELINE, prefixes())
    note = f"fitted by bench/e2e/fit_published.py --fixed-share {given.fixed_share:g} to {ROW}; see there"
    given.out.write_text(json.dumps({"note": note, **asdict(model)}, indent=2) + "\n")
    print(f"{'':<22} {'requests/s':>10} {'TTFT p50, s':>12} {'inter-token, ms':>16}")
    print(f"{'published baseline':<22} {ROW[0]:>10.2f} {ROW[1]:>12.1f} {ROW[2]:>16.1f}")
    print(
        f"{'fitted, simulated':<22} {outcome.requests_per_s:>10.2f} {outcome.ttft_p50_s:>12.1f} "
        f"{outcome.inter_token_ms:>16.1f}   mean batch {outcome.mean_batch:.1f}"
    )
    print(model.json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
