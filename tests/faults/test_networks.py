"""Daemons in network namespaces whose wire is cut, loses packets or is slow: no wrong byte, every request ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import pytest

from tests.faults.networks import DelayedNetworks, Networks
from tests.faults.outcome import SHORT_DEADLINE_S, finish, write_table
from tests.faults.recovery import PEER_SEEN_S, Row, late
from tests.faults.storm import Storm
from tests.support.engines import settled
from tests.support.stacks import running_stack

pytestmark = pytest.mark.timeout(600)
DAEMONS = ("prefill-0", "prefill-1", "decode-0")
LONG_CUT_S = 6.0  # within which both sides have lost each other


class Wire(NamedTuple):
    fault: str
    break_it: Callable[[Networks], None]
    mend_it: Callable[[Networks], None]
    lasting: float


def cut(seconds: float) -> Wire:
    return Wire(f"wire cut for {seconds:g} s", Networks.cut, Networks.join, seconds)


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    """Of the long tests of a wire, each of which adds its rows."""
    rows: list[Row] = []
    yield rows
    if rows:
        write_table(rows, "faults-network.txt", "wires")


def wires_that_break(wires: Sequence[Wire], rows: list[Row], *, short: bool = False) -> None:
    """One after the other, under load, each a row: no byte is wrong, nothing stays held, and all is back in time."""
    load = {"clients": 2, "deadline_s": SHORT_DEADLINE_S} if short else {}
    with Networks() as networks, running_stack() as stack, Storm(stack, place=networks.place, **load) as storm:
        found = [suffer(storm, wire, networks, rates=not short) for wire in wires]
        finish(storm)
        settled(storm.replica("decode-0"))
    rows += storm.rows
    assert not any(found), "\n".join(found)


def suffer(storm: Storm, wire: Wire, networks: Networks, *, rates: bool) -> str:
    """What came back too late; empty: nothing."""

    def begin() -> Callable[[], None]:
        wire.break_it(networks)
        return lambda: wire.mend_it(networks)

    lost = wire.break_it is Networks.cut and wire.lasting >= LONG_CUT_S
    row = storm.suffer(wire.fault, begin, lasting=wire.lasting, loses=DAEMONS if lost else (), rates=rates)
    print(row, flush=True)
    return late(row, PEER_SEEN_S if lost else None)


@pytest.mark.nightly
def test_a_wire_that_is_cut() -> None:
    rows: list[Row] = []
    wires_that_break([cut(1.0)], rows, short=True)
    assert rows[0].ok > 0, "no turn was judged"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "wires",
    [
        pytest.param([cut(0.5), cut(2.0), cut(LONG_CUT_S)], id="cut"),
        pytest.param(
            [
                Wire(
                    f"{share:.0%} of packets lost for 5 s",
                    partial(Networks.lose, share=share),
                    Networks.lose_nothing,
                    5,
                )
                for share in (0.05, 0.3)
            ],
            id="lossy",
        ),
        pytest.param(
            [Wire("1 Mbit/s for 5 s", partial(Networks.slow_down, rate="1mbit"), Networks.full_speed, 5)], id="slow"
        ),
    ],
)
def test_wires(wires: list[Wire], table: list[Row]) -> None:
    wires_that_break(wires, table)


@pytest.mark.nightly
def test_a_wire_that_delays() -> None:
    """Each way, up to where heartbeats and acknowledgements come late enough that sessions end."""
    with DelayedNetworks() as networks:
        networks.delay(0.2)
        took = networks.round_trip()
        assert 0.4 <= took < 2.0, f"the relay delays by {took} s"
        networks.delay(0.0)
        with running_stack() as stack, Storm(stack, clients=4, place=networks.place) as storm:
            found = []
            for seconds in (0.02, 0.2, 1.0, 4.0):
                wire = Wire(
                    f"{seconds:g} s each way, for 6 s",
                    lambda _, delay=seconds: networks.delay(delay),  # type: ignore[misc]
                    lambda _: networks.delay(0.0),
                    6.0,
                )
                found.append(suffer(storm, wire, networks, rates=True))
            finish(storm)
            write_table(storm.rows, "faults-delay.txt", "delays")
            settled(storm.replica("decode-0"))
        assert not any(found), "\n".join(found)
