"""A device tier that holds one, two or four prompts, the daemon's own or an engine's blocks, under more chats that all
come back: nobody starves, nothing is restored twice for a request, and nothing that was restored for it is evicted or
written before it is ready."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.limits import BlockShape, Name
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.tree import RESTORE
from tests.daemon.core.decode_machine import CoreMachine
from tests.daemon.core.decode_world import NAMESPACES, PAGE
from tests.daemon.core.prompts import chain
from tests.daemon.core.test_block_model import BLOCK, CANARY, PER_PAGE, SPACE, BlockMachine, Job

PROMPT = 10  # pages of a chat's first turn
CHATS, TURNS = 6, 5
LARGEST = PROMPT + TURNS // 2 + 1  # of one, its last page too


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
        self.failing = 0.0  # of the copies, in one page

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
        fails = self.random.random() < self.failing
        self.end_copy(number, [self.random.choice(copy.device)] if fails else [])

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


class SmallEngine(BlockMachine):
    """An engine whose blocks hold few prompts. It begins requests in the order in which they came, once it has blocks
    for them, keeps what nobody uses as long as it needs no block, and hands each prompt in when its request is over."""

    def __init__(self, blocks: int, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.memory, self.free = [CANARY] * blocks, set(range(blocks))
        self.shape = BlockShape(blocks, BLOCK, PAGE)
        limits = DecodeLimits(max_tokens=4 * PROMPT * PAGE, page_bytes=64, admission_seconds=1e6, queue=CHATS)
        cache = Cache(2 * blocks, PAGE, host_pages=40 * PROMPT, limits=CacheLimits(in_blocks=True))
        self.core = DecodeCore(cache, limits)
        self.chats = [Chat(number) for number in range(CHATS)]
        self.queue: list[Chat] = []
        self.kept: dict[bytes, list[int]] = {}  # blocks of pages that nobody uses; first what goes first
        self.using: dict[Name, list[int]] = {}  # the blocks of a chat's prompt that the engine held
        self.restored: dict[Name, Counter[bytes]] = {}
        self.hit_on_host = 0
        self.failing = 0.0

    def begin(self) -> bool:
        """Whether there were blocks for the first in the queue."""
        chat = self.queue[0]
        digests = chain([100 + chat.number] * (PROMPT + chat.turns // 2))
        tokens = len(digests) * PAGE + 1
        held = next((i for i, digest in enumerate(digests) if digest not in self.kept), len(digests))
        size = -(-tokens // BLOCK) - held * PER_PAGE
        if size > len(self.free) + sum(map(len, self.kept.values())) - held * PER_PAGE:
            return False
        using = [block for digest in digests[:held] for block in self.kept.pop(digest)]
        while len(self.free) < size:
            self.let_go(self.kept.pop(next(iter(self.kept))))
        blocks = [self.free.pop() for _ in range(size)]
        self.queue.pop(0)
        job = Job(1, digests, tokens, held * PAGE, tokens, blocks, prefill=True, stores=False)
        chat.name = self.admit_job(job)
        self.using[chat.name], self.restored[chat.name] = using, Counter()
        return True

    def admit_job(self, job: Job) -> Name:
        self.count += 1
        name = Name(self.count.to_bytes(16, "big"), 1)
        self.jobs[name] = job
        request = wire.Admit(
            name=name.to_proto(),
            digests=b"".join(job.digests),
            tokens=job.tokens,
            tail_digest=bytes(32) if job.tokens % PAGE else b"",
            prefill="p" if job.prefill else "",
            max_new_tokens=1,
            held_tokens=job.tokens if job.stores else job.start,
            blocks=job.blocks,
            blocks_from=job.start,
        )
        self.core.admit(1, SPACE, name, request, self.now + 1e6, self.now, self.shape.named_by(request))
        self.run_effects()
        return name

    def let_go(self, blocks: list[int]) -> None:
        for block in blocks:
            self.memory[block] = CANARY
        self.free |= set(blocks)

    def give_back(self, name: Name) -> None:
        """Its request has ended: its prompt is handed in, then its blocks are the engine's cache."""
        job = self.jobs.pop(name)
        assert job.state == "finished", "no request fails"
        chat = next(each for each in self.chats if each.name == name)
        if not job.stores:
            assert max(self.restored[name].values(), default=0) <= 1, "a page was restored twice for one request"
            full = len(job.digests)
            blocks = self.using.pop(name) + job.blocks
            self.let_go(blocks[full * PER_PAGE :])
            tokens = full * PAGE
            chat.name = self.admit_job(
                Job(1, job.digests, tokens, 0, tokens, blocks[: full * PER_PAGE], prefill=False, stores=True)
            )
            return
        for page in reversed(range(len(job.digests))):  # a prompt's end goes before its beginning
            self.kept[job.digests[page]] = job.blocks[page * PER_PAGE : (page + 1) * PER_PAGE]
        chat.name, chat.turns = None, chat.turns + 1

    def end_any_copy(self) -> None:
        number = self.random.randrange(len(self.copies))
        copy = self.copies[number].copy
        if copy.kind == RESTORE:
            for at, page in enumerate(copy.device):
                digest = copy.digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
                (name,) = (name for name, job in self.jobs.items() if set(self.bound[page]) & set(job.blocks))
                self.restored[name][digest] += 1
                self.hit_on_host += 1
        fails = self.random.random() < self.failing
        self.end_copy(number, [self.random.choice(copy.device)] if fails else [])

    def step(self) -> None:
        """Something ends, or a chat asks."""
        self.now += 0.01
        self.core.tick(self.now)
        self.run_effects()
        moves: list[Callable[[], None]] = [self.end_any_copy] * bool(self.copies)
        for transfer, (_, _, pages) in self.transfers.items():
            if transfer not in self.stopping and self.arrived[transfer] < max(1, len(pages)):
                moves.append(partial(self.arrive, transfer, len(pages), True))
        for chat in self.chats:
            if chat.name is None and chat not in self.queue and chat.turns < TURNS:
                moves.append(partial(self.queue.append, chat))
        moves += [partial(self.finish_one, name) for name in self.of_state("ready")]
        moves += [self.transfer_drains] * bool(self.stopping)
        assert moves or self.queue, "nothing is under way, and chats wait"
        if moves:
            self.random.choice(moves)()
        while self.queue and self.begin():
            pass
        assert not self.queue or self.jobs, "no request runs, and the first that waits has no blocks"

    def finish_one(self, name: Name) -> None:
        job = self.jobs[name]
        job.state = "finished"
        self.core.finish(job.worker, name, job.tokens, b"", self.now)
        self.run_effects()


WORLDS: dict[str, Callable[[float, int], SmallDevice | SmallEngine]] = {
    "the daemon's pool": lambda prompts, seed: SmallDevice(int(prompts * LARGEST), seed),
    "an engine's blocks": lambda prompts, seed: SmallEngine(int(prompts * LARGEST) * PER_PAGE, seed),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("seed", "failing"), [*((seed, 0.0) for seed in range(6)), (6, 0.3)])
@pytest.mark.parametrize("prompts", [1.2, 2.0, 4.0])
def test_all_chats_come_to_their_turns(prompts: float, seed: int, world: str, failing: float) -> None:
    made = WORLDS[world](prompts, seed)
    made.failing = failing
    for _ in range(40 * CHATS * TURNS):
        made.step()
        if all(chat.turns == TURNS for chat in made.chats):
            break
    assert [chat.turns for chat in made.chats] == [TURNS] * CHATS
    assert made.hit_on_host > PROMPT, "nothing came back from the host"
    tiers = made.core.cache.tiers
    assert (tiers.restore_failed > 0) == (tiers.spill_failed > 0) == (failing > 0)
    made.core.cache.settle()
    assert made.core.cache.locks == 0 and not made.core.leases
