"""The way back off against on: multi-turn chats, four prefill servers in turn, one decode server that holds every chat;
then prompts of which nobody holds anything.

    python bench/e2e/return.py [--clock 0.5]

Fetches move this machine's small pages, and take as long as the model's link would.
"""

import sys
from collections import Counter
from dataclasses import replace

from claims import PAGE, Bench, Chats, main
from rig import Run, Setup, run

from kvferry.workers.models.engine_model import read_engine_model

PREFILLS = 4
AT_ONCE = 3  # chats, whose turns come to the servers in turn: each to another than the one before
SLOWER_LIMIT = 3.0  # percent, where nothing can be fetched


def endless(chats: Chats) -> int:
    """Prompt tokens that one endless prefill cache computes, which holds the output, too, in full pages."""
    shared = chats.system // PAGE * PAGE
    held, computed = shared, 0
    for turn in range(chats.turns):
        prompt = chats.system + chats.user + turn * (chats.user + chats.output)
        computed += prompt - held
        held = (prompt + chats.output - 1) // PAGE * PAGE
    return shared + chats.conversations * computed


def both(bench: Bench, title: str, setup: Setup, load: list[str]) -> tuple[Run, Run]:
    off, on = run(setup, load), run(replace(setup, way_back="auto"), load)
    bench.console.rule(title, align="left")
    for name, measured in (("off", off), ("on", on)):
        ttft = measured.report.ttft_ms
        bench.console.print(
            f"way back {name:<4} TTFT p50 {ttft.p50:8.1f} ms  p90 {ttft.p90:8.1f} ms  prompt tokens computed "
            f"{measured.computed_tokens:>9,}  fetched {measured.fetched_tokens:>9,}",
            highlight=False,
        )
    reasons: Counter[str] = Counter()
    for side in on.prefills:
        reasons.update({choice.reason: choice.count for choice in side.way_back.choices})
    said = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    bench.console.print(f"choices, on: {said or 'none'}", highlight=False)
    return off, on


def claim(bench: Bench) -> None:
    chats = Chats(conversations=48, turns=5)
    setup = replace(bench.setup(2 * chats.working_set, chats), prefills=PREFILLS)
    _, on = both(bench, f"multi-turn chats, {AT_ONCE} at a time", setup, chats.load(AT_ONCE))
    bound = endless(chats)
    fetches = sum(side.way_back.transfers.completed for side in on.prefills)
    model = read_engine_model(bench.engine)
    mean_ms = 1000 * model.transfer_s(on.fetched_tokens // max(1, fetches))
    bench.console.print(
        f"one endless prefill cache computes {bound:,}; on: {100 * on.computed_tokens / bound - 100:+.1f} %"
    )
    bench.console.print(f"{fetches} fetches, of which a mean one takes {mean_ms:.0f} ms, in TTFT above")

    alone = Chats(conversations=48, turns=1, system=0)
    setup = replace(bench.setup(2 * alone.working_set, alone), prefills=PREFILLS)
    off, on = both(bench, "nothing to fetch, 4 at a time", setup, alone.load(4))
    slower = 100 * on.report.ttft_ms.p50 / off.report.ttft_ms.p50 - 100
    bench.console.print(f"on: TTFT p50 {slower:+.1f} % (limit +{SLOWER_LIMIT:g} %)", highlight=False)


if __name__ == "__main__":
    sys.exit(main(__doc__, claim))
