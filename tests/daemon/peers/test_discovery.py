"""Peers found by a name of DNS: they come, move and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.peers import discovery
from kvferry.daemon.peers.discovery import ROUNDS_GONE, Discovery
from kvferry.proto.limits import MAX_NAME_CHARS
from kvferry.waiting import complete


@dataclass
class FakeLink:
    address: str
    state: str = "down"
    runs: int = 0
    ended: bool = False

    async def run(self) -> None:
        self.runs += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


@dataclass
class World:
    """DNS, the daemons at its addresses, and the side."""

    names: dict[str, str] = field(default_factory=dict)  # address -> daemon
    links: dict[str, FakeLink] = field(default_factory=dict)
    most: int = 8
    broken: bool = False
    removed: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def resolve(self, service: str) -> list[str]:
        assert service == "prefill:7071"
        if self.broken:
            raise OSError("no such name")
        return sorted(self.names)

    async def ask_name(self, address: str) -> str:
        self.asked.append(address)
        return self.names[address]

    def room_for_peers(self) -> int:
        return self.most - len(self.links)

    def link_of(self, name: str) -> FakeLink | None:
        return self.links.get(name)

    def add_peer(self, name: str, address: str) -> FakeLink:
        self.links[name] = FakeLink(address)
        return self.links[name]

    def remove_peer(self, name: str, error: RequestError) -> None:
        assert self.links[name].ended, "its task still runs"
        assert "is no longer at prefill:7071" in error.message
        del self.links[name]
        self.removed.append(name)


def run(world: World, story: Callable[[Discovery], object]) -> None:
    async def told() -> None:
        found = Discovery("prefill:7071", world, lambda task: None, resolve=world.resolve, ask_name=world.ask_name)
        await story(found)  # type: ignore[misc]

    asyncio.run(told())


def test_daemons_are_found_by_their_own_names_and_dialled() -> None:
    world = World({"10.0.0.1:7071": "p0", "10.0.0.2:7071": "p1", "10.0.0.3:7071": ""})

    async def story(found: Discovery) -> None:
        await found.look()
        await asyncio.sleep(0)
        assert {name: link.address for name, link in world.links.items()} == {
            "p0": "10.0.0.1:7071",
            "p1": "10.0.0.2:7071",
        }
        assert [link.runs for link in world.links.values()] == [1, 1]
        world.links["p0"].state = "up"
        world.asked.clear()
        await found.look()
        assert world.asked == ["10.0.0.2:7071", "10.0.0.3:7071"]  # who is connected is not asked again

    run(world, story)


def test_one_that_comes_back_elsewhere_keeps_its_link() -> None:
    world = World({"10.0.0.1:7071": "p0"})

    async def story(found: Discovery) -> None:
        await found.look()
        link = world.links["p0"]
        world.names = {"10.0.0.9:7071": "p0"}
        link.state = "up"
        await found.look()
        assert link.address == "10.0.0.1:7071"  # a session that lives is left alone
        link.state = "down"
        await found.look()
        assert link.address == "10.0.0.9:7071"
        assert world.links["p0"] is link and not world.removed

    run(world, story)


def test_one_that_is_gone_is_forgotten_after_some_rounds_unless_it_is_connected() -> None:
    world = World({"10.0.0.1:7071": "p0", "10.0.0.2:7071": "p1"})

    async def story(found: Discovery) -> None:
        await found.look()
        await asyncio.sleep(0)
        world.names = {}
        world.links["p1"].state = "up"
        for _ in range(ROUNDS_GONE - 1):
            await found.look()
        assert not world.removed
        await found.look()
        assert world.removed == ["p0"]
        assert list(world.links) == ["p1"]
        world.links["p1"].state = "down"
        world.broken = True
        for _ in range(2 * ROUNDS_GONE):
            await found.look()
        assert list(world.links) == ["p1"]  # DNS that fails says nothing of anybody

    run(world, story)


def test_an_address_that_answers_under_another_name_is_no_longer_the_first_ones() -> None:
    world = World({"10.0.0.1:7071": "p0"})

    async def story(found: Discovery) -> None:
        await found.look()
        await asyncio.sleep(0)
        world.names = {"10.0.0.1:7071": ""}
        for _ in range(2 * ROUNDS_GONE):
            await found.look()
        assert list(world.links) == ["p0"]  # nobody answers there: it may be on its way back
        world.names = {"10.0.0.1:7071": "p1"}
        for _ in range(ROUNDS_GONE):
            await found.look()
        assert list(world.links) == ["p1"] and world.removed == ["p0"]

    run(world, story)


def test_configured_peers_are_never_touched_and_bounds_hold() -> None:
    world = World({"10.0.0.1:7071": "p0", "10.0.0.2:7071": "p1", "10.0.0.3:7071": "p2"}, most=2)
    world.links["p0"] = FakeLink("configured:1")

    async def story(found: Discovery) -> None:
        await found.look()
        assert world.links["p0"].address == "configured:1" and world.links["p0"].runs == 0
        assert set(world.links) == {"p0", "p1"}

    run(world, story)


@pytest.mark.parametrize("name", ["p" * (MAX_NAME_CHARS + 1), "x" * 100_000, "p 0", 'p"0', "p\n0", "-p"])
def test_what_cannot_be_a_name_is_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World({"10.0.0.1:7071": name, "10.0.0.2:7071": "p1"})

    async def story(found: Discovery) -> None:
        await found.look()
        assert set(world.links) == {"p1"}
        (said,) = (record.message for record in caplog.records if "calls itself" in record.message)
        assert said.startswith("10.0.0.1:7071 calls itself") and len(said) < 400 and "\n" not in said

    run(world, story)


def test_so_many_are_asked_at_once() -> None:
    world = World({f"10.0.{i}.1:7071": "" for i in range(200)})
    asking = most = 0

    async def ask(address: str) -> str:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        await asyncio.sleep(0.001)
        asking -= 1
        return ""

    world.ask_name = ask  # type: ignore[method-assign]
    run(world, lambda found: found.look())
    assert most == discovery.ASKS_AT_ONCE


def test_a_link_that_loses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "CANCEL_SECONDS", 0.01)
    world = World({"10.0.0.1:7071": "p0"})

    monkeypatch.setattr(world, "add_peer", lambda name, address: world.links.setdefault(name, Deaf(address)))

    async def story(found: Discovery) -> None:
        await found.look()
        await asyncio.sleep(0)
        world.names = {}
        for _ in range(ROUNDS_GONE):
            await found.look()
        assert world.removed == ["p0"]

    run(world, story)


def test_its_tasks_end_with_it() -> None:
    world = World({"10.0.0.1:7071": "p0"})

    async def story(found: Discovery) -> None:
        task = asyncio.create_task(found.run())
        while not world.links or not world.links["p0"].runs:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert world.links["p0"].ended

    run(world, story)


class Slow(FakeLink):
    """Its session is torn down, which takes a while and cannot be cancelled."""

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await complete(self.tear_down())

    async def tear_down(self) -> None:
        await asyncio.sleep(0.2)
        self.ended = True


class Deaf(FakeLink):
    """It loses its first cancellation."""

    async def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await super().run()


@pytest.mark.parametrize("kind", [Slow, Deaf])
def test_its_end_waits_for_its_links_however_often_it_is_cancelled(
    kind: type[FakeLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "CANCEL_SECONDS", 0.05)
    world = World({"10.0.0.1:7071": "p0"})
    monkeypatch.setattr(world, "add_peer", lambda name, address: world.links.setdefault(name, kind(address)))
    links: list[asyncio.Task[None]] = []

    async def told() -> None:
        found = Discovery("prefill:7071", world, links.append, resolve=world.resolve, ask_name=world.ask_name)
        task = asyncio.create_task(found.run())
        while not links:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        for _ in range(2):
            task.cancel()
            await asyncio.wait([task], timeout=0.02)
        await asyncio.wait([task])
        assert world.links["p0"].ended and links[0].done(), "a link outlives what owns it"
        assert task.cancelled()

    asyncio.run(told())


def test_what_is_wrong_is_said_once_whatever_else_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    world = World({"10.0.0.1:7071": "p 0", "10.0.0.2:7071": "p 1"})

    async def story(found: Discovery) -> None:
        for turn in range(6):
            world.names["10.0.0.1:7071"] = f"p {turn % 2}"
            await found.look()
        assert sum("calls itself" in record.message for record in caplog.records) == 3
        for number in range(2 * discovery.MAX_SAID):
            world.names["10.0.0.1:7071"] = f"p {number}"
            await found.look()
        assert sum("calls itself" in record.message for record in caplog.records) == discovery.MAX_SAID
        world.names.clear()
        await found.look()
        caplog.clear()
        world.names["10.0.0.1:7071"] = "p 0"
        await found.look()
        await found.look()
        assert sum("calls itself" in record.message for record in caplog.records) == 1

    run(world, story)


def test_a_name_is_resolved_to_addresses_with_the_port() -> None:
    assert "127.0.0.1:7071" in asyncio.run(discovery.resolve_addresses("localhost:7071"))
