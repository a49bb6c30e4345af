"""Daemons in network namespaces whose wire is cut, loses packets or is slow: no wrong byte, every request ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import settled
from networks import DelayedNetworks, Networks
from stacks import running_stack
from storm import Storm
from test_processes import finish, write_table

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def suffer(storm: Storm, what: str, fault: Callable[[], None], mend: Callable[[], None], lasting: float) -> None:
    def begin() -> Callable[[], None]:
        fault()
        return mend

    print(storm.suffer(what, begin, lasting=lasting), flush=True)


def test_cut_lossy_and_slow_wires() -> None:
    with Networks() as networks, running_stack() as stack, Storm(stack, clients=4, place=networks.place) as storm:
        for seconds in (0.5, 2.0, 6.0):
            suffer(storm, f"wire cut for {seconds:g} s", networks.cut, networks.join, seconds)
        tried = []
        for what, fault, mend in (
            ("5 % of packets lost for 5 s", lambda: networks.lose(0.05), networks.lose_nothing),
            ("30 % of packets lost for 5 s", lambda: networks.lose(0.3), networks.lose_nothing),
            ("1 Mbit/s for 5 s", lambda: networks.slow_down("1mbit"), networks.full_speed),
        ):
            try:
                suffer(storm, what, fault, mend, 5.0)
            except OSError as error:
                tried.append(f"{what}: not tried, {error}")
        print("\n".join(tried))
        finish(storm)
        write_table(storm, "faults-network.txt", "wires")
        settled(storm.replica("decode-0"))


def test_a_wire_that_delays() -> None:
    """Each way, up to where heartbeats and acknowledgements come late enough that sessions end."""
    with DelayedNetworks() as networks:
        networks.delay(0.2)
        took = networks.round_trip()
        assert 0.4 <= took < 2.0, f"the relay delays by {took} s"
        networks.delay(0.0)
        with running_stack() as stack, Storm(stack, clients=4, place=networks.place) as storm:
            for seconds in (0.02, 0.2, 1.0, 4.0):
                suffer(
                    storm,
                    f"{seconds:g} s each way, for 6 s",
                    lambda delay=seconds: networks.delay(delay),  # type: ignore[misc]
                    lambda: networks.delay(0.0),
                    6.0,
                )
            finish(storm)
            write_table(storm, "faults-delay.txt", "delays")
            settled(storm.replica("decode-0"))
