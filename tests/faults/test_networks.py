"""Daemons in network namespaces whose wire is cut, loses packets or is slow: no wrong byte, every request ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import settled
from networks import Networks
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
