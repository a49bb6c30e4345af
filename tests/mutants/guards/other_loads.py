"""What is loaded beside pages of kvferry's own: the reply's first token, and blocks of vLLM's other connectors."""

from tests.mutants.guard import Guard

TOKENS = ("tests/connectors/test_first_tokens.py",)
ARRIVALS = ("tests/connectors/worker_side/test_arrivals.py",)
SEEN = ("tests/connectors/vllm/test_other_loads.py",)
KEPT = ("tests/connectors/test_loads_of_others.py",)

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
    Guard(
        "another connector's load within a step is not seen",
        "connectors/vllm/other_loads.py",
        "OtherLoads.step",
        "request.num_computed_tokens <= accounted",
        "True",
        SEEN,
    ),
    Guard(
        "a load from here counts as another's",
        "connectors/vllm/other_loads.py",
        "OtherLoads.allocated",
        "held + ours",
        "held",
        SEEN,
    ),
    Guard(
        "a load is under way for ever",
        "connectors/vllm/other_loads.py",
        "OtherLoads.step",
        "if request not in scheduled}",
        "}",
        SEEN,
    ),
    Guard(
        "a load is under way behind its report",
        "connectors/vllm/other_loads.py",
        "OtherLoads.received",
        "self._under_way.difference_update(requests)",
        "pass",
        SEEN,
    ),
    Guard(
        "what another connector may have failed to load is sent",
        "connectors/scheduler_prefill.py",
        "PrefillScheduler.step",
        "counted(tracked) if self.awaits_outcomes else ahead",
        "ahead",
        KEPT,
    ),
    Guard(
        "a prompt's last chunk is never sent where outcomes are awaited",
        "connectors/scheduler_prefill.py",
        "PrefillScheduler.finished",
        "self.awaits_outcomes and",
        "False and",
        KEPT,
    ),
    Guard(
        "what a request had before its first step is right, whatever that says",
        "connectors/scheduler_side.py",
        "counted",
        "tokens if tokens > tracked.since else 0",
        "tokens",
        KEPT,
    ),
    Guard(
        "a preempted request is believed by its steps before",
        "connectors/scheduler_side.py",
        "SchedulerSide._mark",
        "tracked.since = -1",
        "pass",
        KEPT,
    ),
    Guard(
        "blocks that another connector writes are sent, and freed twice",
        "connectors/scheduler_prefill.py",
        "PrefillScheduler.finished",
        "tracked.loading or tracked.elsewhere",
        "tracked.loading",
        KEPT,
    ),
    Guard(
        "blocks that another connector writes are stored",
        "connectors/scheduler_side.py",
        "SchedulerSide.loads_elsewhere",
        "tracked.alone = tracked.elsewhere = True",
        "tracked.elsewhere = True",
        KEPT,
    ),
    Guard(
        "held blocks that another connector may fail to load are handed in",
        "connectors/scheduler_decode.py",
        "DecodeScheduler.step",
        "if self.awaits_outcomes:",
        "if False:",
        KEPT,
    ),
)
