"""The way back: whether to fetch, and how long to wait."""

from tests.mutants.guard import Guard

FETCHES = ("tests/daemon/core/way_back/test_fetches.py",)
CHOICE = ("tests/daemon/core/way_back/test_choice.py",)
BUSY = ("tests/daemon/core/way_back/test_busy_engines.py",)
SCHEDULER = ("tests/connectors/test_way_back.py",)
_FETCHES = "daemon/core/way_back/fetches.py"
_CHOICE, _ASK_WAITS = "daemon/core/way_back/choice.py", "daemon/core/way_back/ask_waits.py"

GUARDS: tuple[Guard, ...] = (
    Guard("fetching is to be twice as fast", _CHOICE, "Judge.choose", "if MARGIN * self", "if self", CHOICE),
    Guard("few tokens are computed", _CHOICE, "Judge.choose", "if tokens < LEAST_TOKENS:", "if tokens < 0:", CHOICE),
    Guard(
        "a rate is forgotten",
        _CHOICE,
        "SessionRates._of",
        " or (of.brings.idle and now - of.at > RATE_SECONDS)",
        "",
        CHOICE,
    ),
    Guard(
        "a session that was too slow is tried again",
        _CHOICE,
        "Judge.choose",
        " and self.rates.too_slow(session, now)",
        "",
        CHOICE,
    ),
    Guard(
        "an Ask is waited for no longer than the prompt's own tokens take",
        _CHOICE,
        "Judge.more_patience",
        "tokens / self.speed.per_second - waited",
        "math.inf",
        CHOICE,
    ),
    Guard(
        "a prompt waits for its Ask while others are computed",
        _ASK_WAITS,
        "AskWaits.until",
        "now + self._judge",
        "now + 0 * self._judge",
        FETCHES,
    ),
    Guard(
        "nobody waits on for an idle engine",
        "daemon/core/prefill_entries.py",
        "EntryKeeper.computes_no_more",
        "self.fetches.ask_waits.engine_idle()",
        "pass",
        BUSY,
    ),
    Guard(
        "who waited on is looked at when its engine is idle",
        _ASK_WAITS,
        "AskWaits.next_over",
        "(self._judge.speed.seconds_left or self.first(entry.prompt) > now)",
        "True",
        BUSY,
    ),
    Guard(
        "what waits for pages keeps no engine busy",
        _FETCHES,
        "Fetches._computes",
        " if prompt.is_ahead else 0",
        "",
        BUSY,
    ),
    Guard(
        "bytes are counted as they come",
        _FETCHES,
        "Fetches.arrived",
        "self.judge.rates.progress(fetch.session, number, nbytes, self._cache.clock.now)",
        "pass",
        BUSY,
    ),
    Guard(
        "a fetch that is over is on its way no more",
        _FETCHES,
        "Fetches._over",
        "self.judge.rates.ends(fetch.session, fetch.number, now)",
        "pass",
        BUSY,
    ),
    Guard(
        "what brings nothing is slow",
        _FETCHES,
        "Fetches._over",
        "fetch.number, 1, now)",
        "fetch.number, 0, now)",
        BUSY,
    ),
    Guard(
        "a session's rate goes with it",
        _FETCHES,
        "Fetches.session_down",
        "        self.judge.rates.forget(session)",
        "        pass",
        BUSY,
    ),
    Guard(
        "followers wait as long as a busy engine would take",
        _CHOICE,
        "Judge.worth_waiting",
        "seconds <= self._compute(pages * self.page_size)",
        "seconds <= pages * self.page_size / self.speed.per_second",
        CHOICE,
    ),
    Guard(
        "one that lines up was found worth a wait",
        "connectors/scheduler_prefill.py",
        "PrefillScheduler._may_fetch",
        " and tracked.lines_up is None",
        "",
        SCHEDULER,
    ),
    Guard(
        "nobody lines up for long",
        "connectors/scheduler_prefill.py",
        "PrefillScheduler._holds_up",
        "self.now() >= tracked.lines_up",
        "False",
        SCHEDULER,
    ),
    Guard(
        "who lacks little lines up for little time",
        "connectors/scheduler_prefill.py",
        "PrefillScheduler._holds_up",
        "min(LINE_SECONDS, lacking / LINE_SPEED)",
        "LINE_SECONDS",
        SCHEDULER,
    ),
    Guard(
        "a few prompts that are fetched pay for the others",
        "connectors/worth.py",
        "Worth.hold_up",
        "self._brought.get(size, FIRST) >= LEAST",
        "self._brought.get(size, FIRST) >= 4 * LEAST",
        SCHEDULER,
    ),
    Guard(
        "prompts that lack little say nothing of those that lack much",
        "connectors/worth.py",
        "Worth.waited",
        "size = lacking.bit_length()",
        "size = 14",
        SCHEDULER,
    ),
)
