"""Processes that are killed, stopped and ended under load: no wrong byte, every request ends, nothing stays held."""

from __future__ import annotations

import pytest

from tests.faults.outcome import SHORT_DEADLINE_S, finish, write_table
from tests.faults.recovery import PEER_SEEN_S, WORKER_SEEN_S, Row, late
from tests.faults.storm import Storm
from tests.support.engines import settled
from tests.support.stacks import running_stack

FAULTS = (
    ("SIGKILL", "kill", 0.0),
    ("SIGTERM", "terminate", 0.0),
    ("SIGSTOP 1 s", "stop", 1.0),
    ("SIGSTOP 5 s", "stop", 5.0),
)
SHORT = (("SIGTERM decode-0", "terminate", 0.0, "decode-0"), ("SIGSTOP 1 s prefill-0", "stop", 1.0, "prefill-0"))


def seen_within(what: str, part: str) -> float | None:
    """Seconds in which the others are to see that it is lost; None: it is not, or tells them itself."""
    if part.endswith("-worker"):
        return WORKER_SEEN_S if what == "SIGKILL" else None
    return PEER_SEEN_S if what in ("SIGKILL", "SIGSTOP 5 s") else None


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_daemon_that_is_ended_and_one_that_is_stopped() -> None:
    with running_stack() as stack, Storm(stack, clients=2, seed=1, deadline_s=SHORT_DEADLINE_S) as storm:
        for what, method, lasting, part in SHORT:
            storm.suffer(what, lambda m=method, p=part: getattr(storm, m)(p), lasting=lasting)
        finish(storm)
    assert all(row.ok for row in storm.rows), "no turn was judged"
    found = [said for row in storm.rows if (said := late(row, None))]
    assert not found, "\n".join(found)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", ["prefill-0", "decode-0"])
def test_daemons_that_die_or_stop_while_prompts_travel_both_ways(killed: str) -> None:
    """Workers check what was fetched for them, too."""
    both_ways = ["--way-back", "always"]
    with running_stack() as stack, Storm(stack, seed=3, deadline_s=SHORT_DEADLINE_S, flags=both_ways) as storm:
        rows = [
            storm.suffer(f"SIGKILL {killed}", lambda: storm.kill(killed), lasting=1.0, loses=[killed]),
            storm.suffer("SIGSTOP 5 s prefill-1", lambda: storm.stop("prefill-1"), lasting=5.0, loses=["prefill-1"]),
            storm.suffer("SIGSTOP 1 s decode-0", lambda: storm.stop("decode-0"), lasting=1.0),
        ]
        finish(storm)
        ways = [settled(storm.replica(name)).way_back for name in ("prefill-0", "prefill-1", "decode-0")]
    for way in ways:  # of those that were killed, since they are there again
        assert way.transfers.completed > 0 and way.transfers.mismatched_parts == 0
    assert all(way.fetched_tokens > 0 for way in ways[:2])
    found = [
        said for row, within in zip(rows, (PEER_SEEN_S, PEER_SEEN_S, None), strict=True) if (said := late(row, within))
    ]
    assert not found, "\n".join(found)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_process_and_every_fault() -> None:
    found: list[str] = []

    def judged(row: Row, within: float | None) -> None:
        print(row, flush=True)
        if said := late(row, within):
            found.append(said)

    with running_stack() as stack, Storm(stack, clients=4, seed=1) as storm:
        for part in sorted(storm.parts):
            for what, method, lasting in FAULTS:
                within = seen_within(what, part)
                row = storm.suffer(
                    f"{what} {part}",
                    lambda m=method, p=part: getattr(storm, m)(p),
                    lasting=lasting,
                    loses=[part] if within else [],
                    rates=True,
                )
                judged(row, within)
        for daemon in ("prefill-0", "decode-0"):
            killed = storm.suffer(f"SIGKILL a courier of {daemon}", lambda d=daemon: storm.kill_courier(d), rates=True)
            judged(killed, None)
            stopped = storm.suffer(
                f"SIGSTOP 5 s courier of {daemon}", lambda d=daemon: storm.stop_courier(d), lasting=5.0, rates=True
            )
            judged(stopped, None)
        finish(storm)
        write_table(storm.rows, "faults.txt", "every_process")
    assert not found, "\n".join(found)
