"""Computed prompts that wait in the host tier, and are sent from there; in SGLang with which pages they are sent."""

from tests.mutants.guard import Guard

CORE = ("tests/daemon/core/test_stows.py",)
LANES = ("tests/daemon/memory/test_tier_lanes.py",)
READ_AHEAD = ("tests/connectors/sglang/test_read_ahead.py",)
_AHEAD = "connectors/sglang/read_ahead.py"
_STOWS = "daemon/core/blocks/stows.py"
_ENTRIES = "daemon/core/prefill_entries.py"

GUARDS: tuple[Guard, ...] = (
    Guard(
        "a request has not ended while its pages are copied to the tier",
        _ENTRIES,
        "EntryKeeper.copies_run",
        "entry.zeroing or entry.stowing or",
        "entry.zeroing or",
        CORE,
    ),
    Guard(
        "one that was asked for meanwhile keeps its pages",
        _STOWS,
        "Stows.ended",
        "failed or entry.state is not EntryState.COMPUTED",
        "failed",
        CORE,
    ),
    Guard(
        "a wrong copy is sent to nobody",
        _STOWS,
        "Stows.ended",
        "failed or entry.state is not EntryState.COMPUTED",
        "entry.state is not EntryState.COMPUTED",
        CORE,
    ),
    Guard(
        "what was asked for is not moved",
        _STOWS,
        "Stows.begin",
        "or entry.state is not EntryState.COMPUTED",
        "",
        CORE,
    ),
    Guard(
        "a prompt goes to the tier whole or not at all",
        _STOWS,
        "Stows.begin",
        "host.free >= len(pages)",
        "host.free > 0",
        CORE,
    ),
    Guard(
        "what is in the tier is sent from its rows",
        _ENTRIES,
        "PrefillSends.open_asks",
        "ready, from_rows = prompt.pages_ready, bool(prompt.rows)",
        "ready, from_rows = prompt.pages_ready, False",
        CORE,
    ),
    Guard(
        "rows are given back with the request",
        "daemon/core/prefill_scheduler.py",
        "PrefillSupply.drop",
        "if prompt.rows:",
        "if False:",
        CORE,
    ),
    Guard(
        "only pages that are one block each are moved",
        "daemon/sides/prefill.py",
        "PrefillSide.handle",
        "can=self.tiers.stows and self.tiers.can_be_sent",
        "can=self.tiers.can_be_sent",
        ("tests/daemon/sides/test_stowing.py",),
    ),
    Guard(
        "what lies behind a prompt's end is not in the tier",
        "daemon/memory/shared.py",
        "SharedPoolMemory.spill",
        "clear_tails(self.shape, self.block_table, pages, self._tier_rows, rows)",
        "pass",
        LANES,
    ),
    Guard(
        "rows that came later are sent, too",
        "daemon/memory/tier_lanes.py",
        "TierLanes.of",
        "if rows is not self._now:",
        "if self._now is None:",
        LANES,
    ),
    Guard(
        "pages that gave way to others are not sent",
        _AHEAD,
        "until_others_are_there",
        "if slots.numel():",
        "if False:",
        READ_AHEAD,
    ),
    Guard(
        "no more pages are named than were read",
        _AHEAD,
        "PagesRead.of",
        " or start + tokens > self.end",
        "",
        READ_AHEAD,
    ),
    Guard(
        "pages are not named from the middle of one",
        _AHEAD,
        "PagesRead.of",
        " or first % page_size",
        "",
        READ_AHEAD,
    ),
)
