"""The daemon's own sides, services and sessions, with memory, copies and couriers of the simulation under them.

What a target asks of the product is the same everywhere (`Findings`): an input ends in an answer or in one of the
product's own errors; an exception of any other kind, an answer INTERNAL, or a broken invariant is a finding.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import grpc

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.daemon.memory.interface import CopyEnd, PoolMemory
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.session import Session, SessionBroken
from kvferry.daemon.sides import workers as side_workers
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.daemon.sides.side import AnySide
from kvferry.daemon.sides.workers import Worker
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.courier.config import CourierConfig
from kvferry.transfer.courier.link import CourierError, RemoteRank
from kvferry.transfer.courier.messages import (
    Connect,
    Connected,
    CourierEvent,
    PostDone,
    check_range,
    decode_order,
    encode_order,
)
from kvferry.transfer.geometry.layouts import Int64s
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, TENANTS, Setting, SimSide
from tests.simulation.faults import Faults
from tests.simulation.prompts import PAGE_BYTES, Prompt
from tests.simulation.storage.parts import SimPoolMemory
from tests.simulation.storage.slots import LooseSlots

EPOCH = 7
SLOTS, SLOT_BYTES = 4, 4096
FACTS, OTHER_FACTS = TENANTS
ROOT = FACTS.root_digest
PROMPTS = tuple(
    Prompt(tokens, ROOT) for tokens in (range(8), range(12), [*range(8), 99, 98, 97, 96, 95], range(50, 71))
)
NAMES = tuple(Name(bytes([number]) * 16, 1) for number in range(1, 7))
SETTING = replace(
    PLAIN,
    pages=24,
    host_pages=8,
    slots=SLOTS,
    slot_bytes=SLOT_BYTES,
    checksums=True,
    zero_freed=True,
)
STEP = 0.005  # virtual seconds of one turn of the loop
WORDS: tuple[bytes | str, ...] = (
    *(name.request_id for name in NAMES),
    *(prompt.digests for prompt in PROMPTS),
    *(prompt.tail for prompt in PROMPTS if prompt.tail),
    *(prompt.digests[-32:] for prompt in PROMPTS),
    FACTS.id,
    OTHER_FACTS.id,
    ROOT,
    "p",
    "d",
    "float16",
    "sha256_cbor",
    "lanes",
)


class Finding(Exception):
    """What must not be."""


class Findings:
    def __init__(self) -> None:
        self.all: list[str] = []

    def note(self, what: object) -> None:
        self.all.append(str(what))

    def hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """(the loop's exception handler) Broken invariants come here, and what nobody caught."""
        self.note(f"{context.get('message')}: {context.get('exception')!r}")


class Refused(Exception):
    """(a call's abort) The answer is an error."""


class Call:
    """As a servicer context: what the other side says, and what it is answered."""

    def __init__(self, messages: Sequence[object], findings: Findings, turn: Callable[[], object]) -> None:
        self._messages = list(messages)
        self._findings, self._turn = findings, turn
        self.answers: list[Any] = []
        self.on_answer: Callable[[Any], None] = lambda answer: None

    async def read(self) -> object:
        for _ in range(4):  # what it was answered may be written, and what that brings about may happen
            await asyncio.sleep(0)
        self._turn()
        return self._messages.pop(0) if self._messages else grpc.aio.EOF

    async def write(self, message: object) -> None:
        self.answers.append(message)
        self.on_answer(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: object = ()) -> NoReturn:
        if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            self._findings.note(f"{code.name}: {details}")
        raise Refused(f"{code.name}: {details}")

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def cancel(self) -> None:
        self._messages.clear()


class Tier:
    """Copies between the tiers that always end well; of any bytes, since who writes pages here is not honest."""

    unverified = 0
    reads_file = is_nothing = file_unopened = False
    survives = True
    stays = ""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def grow(self, cache: Cache, first: bytes, grown: Callable[[], None]) -> None:
        cache.grow_host(cache.host_asked, [])
        grown()

    def forget_unread(self, namespace_id: bytes) -> None:
        pass

    def forget(self, rows: Sequence[int]) -> None:
        pass

    def start(self, started: CopyStarted, done: Callable[[int, Sequence[int], int, float], None]) -> None:
        self._clock.after(0.002, done, started.number, [], 0, 0.001)

    async def close(self) -> None:
        pass


class Pools(SimPoolMemory):
    """Which a worker may be told of. Workers here finish requests whose pages they were not given yet: nobody judges
    in which state a page is cleared."""

    def zero_pages(self, pages: Int64s, done: CopyEnd) -> None:
        self.clock.after(0.001, done, "")

    def rank_pools(self) -> list[wire.RankPool]:
        return [wire.RankPool(segment="/nowhere", nbytes=self.shape.pages * PAGE_BYTES)]

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


PEERS = {"p": "127.0.0.1:1"}


class _Furnished(SimSide):
    def furnish(self, clock: Clock, setting: Setting, faults: Faults) -> None:
        super().furnish(clock, setting, faults)
        side = cast(AnySide, self)
        side.tiers.epoch = EPOCH
        memory = cast(PoolMemory, Pools(clock, self.pages_memory, 0.0))
        side.tiers.take(FACTS, side.cache, memory, cast(HostTier, Tier(clock)))
        side.tiers.has_pool.set()


class Decode(_Furnished, DecodeSide):
    def __init__(self, clock: Clock, config: DaemonConfig | None = None) -> None:
        DecodeSide.__init__(self, config or _config("decode", PEERS), bytes(16), lambda: clock.now)
        self.furnish(clock, SETTING, Faults())


class Prefill(_Furnished, PrefillSide):
    def __init__(self, clock: Clock, config: DaemonConfig | None = None) -> None:
        PrefillSide.__init__(self, config or _config("prefill", {}), bytes(16), lambda: clock.now)
        self.furnish(clock, SETTING, Faults())


def _folder() -> str:
    """This process' own. Not every end of a process runs its exit handlers (libFuzzer's, a test worker's): what such
    ones left is removed by the next."""
    place = os.environ.get("FUZZ_FOLDER") or ("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    for left in os.listdir(place):
        pid = left.removeprefix("kvferry-fuzz-").partition("-")[0]
        if left.startswith("kvferry-fuzz-") and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(os.path.join(place, left), ignore_errors=True)
    made = tempfile.mkdtemp(prefix=f"kvferry-fuzz-{os.getpid()}-", dir=place)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


FOLDER = _folder()


def engines_config(role: str, device: str = "cpu") -> DaemonConfig:
    """Of a daemon whose pool is its engine's memory."""
    return _config(role, PEERS if role == "decode" else {}, pool="engine", device=device)


def _config(role: str, peers: dict[str, str], **more: str) -> DaemonConfig:
    return DaemonConfig.model_validate(
        {
            "role": role,
            "name": role[0],
            "listen": "127.0.0.1:0",
            "socket": "/nowhere",
            "peers": peers,
            "page_size": 4,
            "max_tokens": 4096,
            "queue": 8,
            "slots": SLOTS,
            "slot_bytes": SLOT_BYTES,
            "shm_dir": FOLDER,
            "way_back": "always",
            **more,
        }
    )


class Honest:
    """A worker that keeps to the rules, by its messages."""

    def __init__(self, side: Decode | Prefill) -> None:
        self.side = side
        self.worker: Worker = side.enter(0, asyncio.Queue(8192))

    def say(self, kind: str, name: Name, **fields: Any) -> None:
        message = wire.WorkerMessage()
        body = getattr(message, kind)
        body.name.CopyFrom(name.to_proto())
        for field, value in fields.items():
            setattr(body, field, value)
        cast(AnySide, self.side).handle(self.worker, kind, message)

    def admit(self, name: Name, prompt: Prompt, prefill: str = "p", new: int = 4) -> None:
        self.say(
            "admit",
            name,
            digests=prompt.digests,
            tokens=len(prompt.tokens),
            tail_digest=prompt.tail,
            prefill=prefill,
            max_new_tokens=new,
        )

    def begin(self, name: Name, prompt: Prompt, *, computed: bool) -> None:
        self.say("begin", name, digests=prompt.digests, tokens=len(prompt.tokens), tail_digest=prompt.tail)
        if computed:
            self.say("progress", name, tokens=len(prompt.tokens))
            self.say("aux", name, blob=b"first token")

    def cache(self, name: Name, prompt: Prompt) -> None:
        """The prompt's full pages are in the tree, and nobody holds them."""
        if isinstance(self.side, DecodeSide):
            self.admit(name, prompt, prefill="", new=1)
            self.say("finish", name, tokens=len(prompt.tokens))
        else:
            self.begin(name, prompt, computed=True)

    def gone(self) -> None:
        side = cast(AnySide, self.side)
        side.workers.here.pop(self.worker.number, None)
        side.worker_gone(self.worker)


class Link:
    """In place of a courier's link: slots, and orders that are encoded, decoded and checked as a courier has them."""

    pid, oldest_post = 1, None

    def __init__(self, config: CourierConfig, on_event: Callable[[CourierEvent], None]) -> None:
        self.metadata, self.receive_address = b"metadata", 1 << 20
        self.receive_ranks: tuple[RemoteRank, ...] = ()
        self._config, self.on_event = config, on_event
        self.host_slots = LooseSlots(config)
        self._remote: Connect | None = None
        Stage.current.link = self

    @staticmethod
    async def start(config: CourierConfig, on_event: Callable[[CourierEvent], None], deadline_s: float) -> Link:
        return Link(config, on_event)

    def connect(
        self, metadata: bytes, receive_address: int, slots: int, slot_bytes: int, ranks: Sequence[RemoteRank] = ()
    ) -> None:
        order = Connect(bytes(metadata), receive_address, slots, slot_bytes, tuple(ranks))
        if decode_order(encode_order(order)) != order:
            raise Finding(f"{order} changes on its way")
        self._remote = order
        Stage.current.clock.after(0.001, self.on_event, Connected())

    def post(self, post_id: int, send_slot: int, remote_slot: int, nbytes: int, notification: bytes) -> None:
        assert self._remote is not None
        check_range("send_slot", send_slot, 0, self._config.send_slots - 1)
        check_range("remote_slot", remote_slot, 0, self._remote.slots - 1)
        check_range("nbytes", nbytes, 1, min(self._config.slot_bytes, self._remote.slot_bytes))
        Stage.current.clock.after(0.001, self.on_event, PostDone(post_id))

    def expect(self, active: int) -> None:
        pass

    async def stop(self, seconds: float) -> None:
        Stage.current.link = None


class Stage:
    """One input's: a clock that runs as long as the loop does, and what was found."""

    current: Stage

    def __init__(self) -> None:
        Stage.current = self
        self.clock = Clock(1)
        self.findings = Findings()
        self.link: Link | None = None
        self.sides: list[Decode | Prefill] = []

    def turn(self) -> None:
        self.clock.run_until(self.clock.now + STEP)

    async def play(self, act: Coroutine[Any, Any, None]) -> None:
        """The act, while time goes by."""
        asyncio.get_running_loop().set_exception_handler(self.findings.hear)
        playing = asyncio.ensure_future(act)
        while not playing.done():
            await asyncio.sleep(0)
            self.turn()
        with contextlib.suppress(Refused):
            await playing

    def settle(self) -> None:
        """Everybody is gone: nothing is held, and every copy has ended."""
        for seconds in (*[STEP] * 20, *[1.0] * 130):  # past every deadline
            self.clock.run_until(self.clock.now + seconds)
            for side in self.sides:
                side.tick()
        for side in self.sides:
            side.check()
            side.check_idle()

    def judge(self) -> None:
        if self.findings.all:
            raise Finding("; ".join(self.findings.all))


def watch_sessions() -> None:
    """Sessions get `Link` for a courier. What ends a task of theirs is shown as the reason of their end, whatever it
    is: an exception that is not the product's own is a finding.
    """
    session_module.CourierLink = Link  # type: ignore[misc, assignment]
    side_workers.SETTLE_SECONDS = 0.0  # of real time, which does not go by here
    reason = Session._reason

    def judged(session: Session, tasks: list[asyncio.Task[None]]) -> str:
        for task in tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and not isinstance(error, SessionBroken | ValueError | CourierError | Refused):
                Stage.current.findings.note(f"a session's task ended by {error!r}")
        return reason(session, tasks)

    Session._reason = judged  # type: ignore[method-assign]


class _Loop(asyncio.SelectorEventLoop):
    """What is given to a thread is done at once: no input's course depends on when a thread gets on."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


_LOOP = _Loop()


def run(act: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    """An input's act on a fresh stage. Finding, or whatever the product let through."""

    async def whole() -> None:
        stage = Stage()
        await stage.play(act(stage))
        stage.settle()
        stage.judge()

    _LOOP.run_until_complete(whole())
