"""A device tier that holds one, two or four prompts, under more chats that all come back: nobody starves, nothing is
restored twice for a request, and nothing that was restored for it is evicted before it is ready."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.limits import Name
from kvferry.radix.tree import RESTORE
from tests.daemon.core.decode_machine import CoreMachine
from tests.daemon.core.decode_world import NAMESPACES, PAGE

PROMPT = 10  # pages of a chat's first turn
CHATS, TURNS = 6, 5


@dataclass
class Chat:
    number: int
    turns: int = 0
    name: Name | None = None


class SmallDevice(CoreMachine):
    """Chats in a closed loop; copies and transfers end in any order."""

    def __init__(self, pages: int, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.core = DecodeCore(
            Cache(pages, PAGE, host_pages=40 * PROMPT),
            DecodeLimits(
                max_tokens=4 * PROMPT * PAGE,
                page_bytes=64,
                admission_seconds=1e6,
                queue=CHATS,
                overtakes=2,
                overcommit=1.0,
            ),
        )
        self.chats = [Chat(number) for number in range(CHATS)]
        self.restored: dict[Name, Counter[bytes]] = {}  # while each ran
        self.hit_on_host = 0

    def ask(self, chat: Chat) -> None:
        symbols = [100 + chat.number] * (PROMPT + chat.turns // 2)  # a page more in every second turn
        self.admit(symbols, 1, 2, 1, "p", 0, False, NAMESPACES[0])
        chat.name = Name(self.count.to_bytes(16, "big"), 1)
        self.restored[chat.name] = Counter()

    def end_any_copy(self) -> None:
        number = self.random.randrange(len(self.copies))
        copy = self.copies[number].copy
        if copy.kind == RESTORE:
            for name in self.names():
                if self.core.leases[name].state is not LeaseState.WAITING:
                    mine = set(self.prompts[name][0])
                    digests = [copy.digests[at : at + 32] for at in range(0, len(copy.digests), 32)]
                    self.restored[name].update(digest for digest in digests if digest in mine)
                    self.hit_on_host += len(digests)
        self.end_copy(number, [])

    def step(self) -> None:
        """Something ends, or a chat asks."""
        self.now += 0.01
        self.core.tick(self.now)
        self.run_effects()
        idle = [chat for chat in self.chats if chat.name is None and chat.turns < TURNS]
        moves: list[Callable[[], None]] = [self.end_any_copy] * bool(self.copies)
        for transfer, (name, first, pages) in self.transfers.items():
            if transfer not in self.stopping:
                moves.append(partial(self.arrive, transfer, name, first, pages, len(pages)))
        for chat in idle:
            moves.append(partial(self.ask, chat))
        for name in self.names():
            if name in self.ready:
                moves.append(partial(self.finish, name))
        assert moves, "nothing is under way, and chats wait"
        self.random.choice(moves)()
        for name in self.names():
            self.core.aux("p", name, b"first token", self.now)
        self.run_effects()

    def finish(self, name: Name) -> None:
        assert max(self.restored[name].values(), default=0) <= 1, "a page was restored twice for one request"
        self.end(name, 2)
        chat = next(each for each in self.chats if each.name == name)
        chat.name, chat.turns = None, chat.turns + 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prompts", [1.2, 2.0, 4.0])
def test_all_chats_come_to_their_turns(prompts: float, seed: int) -> None:
    largest = PROMPT + TURNS // 2 + 1
    world = SmallDevice(int(prompts * largest), seed)
    for _ in range(40 * CHATS * TURNS):
        world.step()
        if all(chat.turns == TURNS for chat in world.chats):
            break
    assert [chat.turns for chat in world.chats] == [TURNS] * CHATS
    assert world.hit_on_host > PROMPT, "nothing came back from the host"
    world.core.cache.settle()
    assert world.core.cache.locks == 0 and not world.core.leases
