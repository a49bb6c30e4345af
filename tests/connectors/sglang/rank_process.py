"""The ranks of an engine of SGLang's classes, each in a process of its own, which do what a test tells all of them: as
SGLang's schedulers do, that are told the same requests in the same order."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import socket
import tempfile
import traceback
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from tests.connectors.sglang.engine_on_cpu import HEADS, SECONDS, Engine, new_request, until
from tests.connectors.sglang.rig import Pair, prepared
from tests.connectors.sglang.shared_kv import PAGE, Rank

SLACK_SECONDS = 20.0
CANARY = 0x5A


@dataclass(frozen=True)
class RankSetting:
    role: str
    rank: Rank
    latent: bool
    bootstrap_port: int
    tokens: int
    environment: str  # SGLANG_KVFERRY
    group: str  # a file by which the ranks find each other


class RankEngine(Engine):
    """One rank, by the rooms of its requests. What each method answers all ranks must answer alike."""

    def __init__(self, setting: RankSetting) -> None:
        port, tokens = setting.bootstrap_port, setting.tokens
        super().__init__(setting.role, port, tokens, rank=setting.rank, latent=setting.latent)
        self.port = setting.bootstrap_port
        self.requests: dict[int, Any] = {}
        self.rooms: dict[str, int] = {}

    # -- both

    def add(self, room: int, prompt: list[int], rid: str) -> None:
        request = self.requests[room] = new_request(prompt, room, self.port)
        request.rid = rid
        self.rooms[rid] = room
        if self.role == "prefill":
            self.queue.add(request, HEADS)
        else:
            self.admit(request)

    def there(self) -> bool:
        return bool(self.manager.carrier.there)

    def stows(self) -> bool:
        return bool(self.manager.carrier.stows)

    def holds(self) -> tuple[int, int, int]:
        """Tokens of locked and of free pages, and free metadata rows."""
        free = self.allocator.available_size() + self.tree.evictable_size()
        return int(self.tree.protected_size()), int(free), self.row_numbers.available_size()

    def evict(self) -> None:
        """Has SGLang evict all that it may, and others write what is free."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=1 << 20))
        for page in self.free_pages:
            slots = range(page * PAGE, (page + 1) * PAGE)
            self.shared.write(slots, np.full_like(self.shared.slots(slots), CANARY))

    def untouched(self) -> bool:
        """Whether nothing was written into free pages since."""
        pages = ([*range(page * PAGE, (page + 1) * PAGE)] for page in self.free_pages)
        return all(bool((self.shared.slots(slots) == CANARY).all()) for slots in pages)

    # -- prefill

    def may_begin(self) -> list[int]:
        """The rooms that may be computed since the last time."""
        return [self.rooms[request.rid] for request in self.queue.pop_bootstrapped()]

    def bootstrapped(self, room: int) -> None:
        begun: list[int] = []
        until(lambda: begun.extend(self.may_begin()) or room in begun)

    def computed(self, room: int, chunk: int = 0) -> None:
        self.compute(self.requests[room], chunk)

    def computed_part(self, room: int, start: int, end: int) -> None:
        request = self.requests[room]
        if start == 0:
            self.begin(request)
        self.compute_chunk(request, start, end)

    def ended(self) -> list[tuple[int, bool]]:
        """One look at what is on its way: the rooms that are over, and whether each was sent."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        return [
            (self.rooms[request.rid], not isinstance(request.finished_reason, FINISH_ABORT))
            for request in self.inflight()
        ]

    def refused(self) -> list[int]:
        """The rooms that SGLang has answered otherwise since the last time."""
        rooms = [self.rooms[request.rid] for request in self.sent]
        self.sent.clear()
        return rooms

    def make_room(self, tokens: int) -> None:
        """As SGLang does before it allocates."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if (lacks := tokens - self.allocator.available_size()) > 0:
            self.tree.evict(EvictParams(num_tokens=lacks))

    def sent_room(self, room: int) -> bool:
        return self.is_sent(self.requests[room])

    def gave_back(self) -> list[int]:
        """The rooms whose pages SGLang has back, though they are not sent."""
        queue = self.scheduler.disagg_prefill_inflight_queue
        orders = ((self.rooms[request.rid], request.disagg_kv_sender.order) for request in queue)
        return [room for room, order in orders if order is not None and order.gave_back]

    # -- decode

    def came(self, room: int) -> bool:
        """Turns until the prompt's KV is there: whether it came, and each byte is right."""
        request = self.requests[room]
        return self.arrived(request) and self.is_right(room)

    def is_right(self, room: int) -> bool:
        request = self.requests[room]
        prompt = list(request.origin_input_ids)
        got = self.shared.slots(self.slots(request, 0, len(prompt)))
        first = list(request.output_ids) == [1000 + len(prompt)]  # by the metadata row
        return first and np.array_equal(got, self.shared.kv_of(prompt, 0, len(prompt)))

    def look(self) -> tuple[list[tuple[int, bool]], list[int]]:
        """One turn: the rooms whose KV is there, and whether it is right; those that SGLang has given up."""
        there = [self.rooms[request.rid] for request in self.turn()]
        given_up = [self.rooms[request.rid] for request in self.sent]
        self.sent.clear()
        return [(room, self.is_right(room)) for room in there], given_up

    def finished(self, room: int) -> None:
        self.finish(self.requests[room])

    def settled(self) -> None:
        """Turns until what has finished is in the host tier."""
        until(lambda: self.turn() == [] and self.tree.protected_size() == 0)

    def kept(self) -> int:
        """The tokens that the radix cache has."""
        return int(self.tree.total_size())

    def given_up(self, room: int) -> bool:
        """As SGLang does for a client that is gone. False: there was nothing to give up."""
        if self.role == "prefill":
            self.requests[room].disagg_kv_sender.abort()
            return True
        queues = [*self.queue.queue, *self.transfers.queue]
        found = [queued.kv_receiver for queued in queues if queued.req is self.requests[room]]
        for receiver in found:
            receiver.abort()
        return bool(found)


class Line:
    """One end of a way between two processes, for JSON."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rw", encoding="utf-8")

    def send(self, message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def recv(self, seconds: float | None = None) -> Any:
        """Waits at most so long. One message is on its way at a time: none is in the buffer."""
        ready, _, _ = select.select([self._end], [], [], seconds)
        assert ready, f"no answer within {seconds} s"
        return json.loads(self._file.readline())


def serve(end: socket.socket) -> None:
    """The process of one rank: a RankSetting, then [method, arguments] -> [whether it went well, answer]."""
    torch.set_num_threads(1)  # those of the process that it was forked from are not here
    told = Line(end)
    given = told.recv()
    setting = RankSetting(**{**given, "rank": Rank(**given["rank"])})
    os.environ.update(SGLANG_KVFERRY=setting.environment, GLOO_SOCKET_IFNAME="lo")
    with ExitStack() as patches:
        prepared(patches, setting.rank, setting.group)
        engine = RankEngine(setting)
        told.send((True, None))
        while (order := told.recv()) is not None:
            method, arguments = order
            try:
                told.send((True, getattr(engine, method)(*arguments)))
            except Exception:
                told.send((False, traceback.format_exc()))
        engine.close()
    told.send((True, None))


class RankProcesses:
    """Processes that are forked from one that has imported SGLang and has no threads yet, and wait for what they are to
    be. A context."""

    def __init__(self, most: int) -> None:
        context = multiprocessing.get_context("fork")
        self._processes = []
        self._idle: list[Line] = []
        for _ in range(most):
            ours, theirs = socket.socketpair()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._idle.append(Line(ours))

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join(SLACK_SECONDS)

    def take(self, setting: RankSetting) -> Line:
        told = self._idle.pop()
        told.send(asdict(setting))
        return told


class Ranks:
    """All ranks of one engine, as a test sees them: `ranks.came(room)` has each do it, and is what all of them say."""

    def __init__(self, told: list[Line]) -> None:
        self._told = told
        self._answers(3 * SECONDS)

    def _answers(self, seconds: float) -> Any:
        answers = [told.recv(seconds) for told in self._told]
        failed = [answer for well, answer in answers if not well]
        assert not failed, failed[0]
        assert all(answer == answers[0] for answer in answers), f"ranks differ: {answers}"
        return answers[0][1]

    def __getattr__(self, method: str) -> Any:
        def tell(*arguments: Any) -> Any:
            for told in self._told:
                told.send((method, arguments))
            return self._answers(SECONDS + SLACK_SECONDS)

        return tell

    def close(self) -> None:
        for told in self._told:
            told.send(None)
        self._answers(SLACK_SECONDS)


class RankPair(Pair):
    """A prefill and a decode engine of several ranks each."""

    def __init__(
        self, processes: RankProcesses, *args: Any, ranks: dict[str, int], latent: bool = False, **kwargs: Any
    ) -> None:
        self._processes, self._ranks, self._latent = processes, ranks, latent
        self.folder = tempfile.TemporaryDirectory(prefix="kvferry-ranks-")
        super().__init__(*args, **kwargs)

    def start(self, role: str, *more: str) -> None:
        super().start(role, *more, "--ranks", str(self._ranks[role]))

    def engine(self, role: str, tokens: int) -> Ranks:
        count, group = self._ranks[role], f"{self.folder.name}/{role}"
        told = os.environ["SGLANG_KVFERRY"]
        every = (Rank(rank, count) for rank in range(count))
        settings = [RankSetting(role, rank, self._latent, self.port, tokens, told, group) for rank in every]
        return Ranks([self._processes.take(setting) for setting in settings])

    def close(self) -> None:
        super().close()
        self.folder.cleanup()

    def give(self, prompt: list[int], *roles: str) -> int:
        """Tells a prompt to the engines, or to those of `roles`, and returns its room."""
        room = next(self.rooms)
        for role in roles or ("decode", "prefill"):
            self.engines[role].add(room, prompt, f"r{room}")
        return room

    def exchanged(self, prompt: list[int], chunk: int = 0) -> int:
        """One prompt from its beginning to its end on prefill; decode's request still has its pages."""
        room = self.give(prompt)
        self.prefill.bootstrapped(room)
        self.prefill.computed(room, chunk)
        assert self.decode.came(room)
        assert self.prefill.sent_room(room)
        return room
