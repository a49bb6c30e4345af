"""Guards of the connectors: replies that begin with the prefill engine's first token."""

from tests.mutants.guard import Guard

TOKENS = ("tests/connectors/test_first_tokens.py",)
ARRIVALS = ("tests/connectors/worker_side/test_arrivals.py",)

GUARDS: tuple[Guard, ...] = (
    Guard(
        "a load that failed is told with its blocks",
        "connectors/worker_state.py",
        "Reports.take_good",
        "good = self.received - self.failed",
        "good = set(self.received)",
        TOKENS,
    ),
    Guard(
        "a token is told once its prompt is",
        "connectors/worker_state.py",
        "Reports._first_of",
        "requests & self.first.keys()",
        "list(self.first)",
        TOKENS,
    ),
    Guard(
        "a prompt goes on to decode with its first token",
        "connectors/worker_state.py",
        "Push.aux",
        "await self.until(lambda: self.decided)",
        "pass",
        ARRIVALS,
    ),
    Guard(
        "a request that is over, or of other weights, begins with no token",
        "connectors/scheduler_decode.py",
        "DecodeScheduler.received",
        " and not (tracked.alone or tracked.storing)",
        "",
        TOKENS,
    ),
    Guard(
        "a request begins once",
        "connectors/scheduler_decode.py",
        "DecodeScheduler.received",
        "first, tracked.first = tracked.first, None",
        "first = tracked.first",
        TOKENS,
    ),
)
