"""A prefill core with its pages' contents, and what its workers, decode daemons and senders know of it."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.effects import EndSend, FailAsk, OpenSend, SendAux, SendProgress, StartCopy, ToWorker, ZeroTail
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE

PAGE = 4
PAGES = 16
TABLE = 8
NAMESPACE = bytes(32)


@dataclass
class Job:
    """A request as its worker and its decode daemon know it."""

    digests: list[bytes]
    tail: bytes
    tokens: int
    worker: int | None = None  # that began it and has not heard its end
    pages: list[int] | None = None  # as in Begun
    computed: int = 0
    owes_abort: bool = False
    begun: bool = False

    @property
    def whole(self) -> list[bytes]:
        return [*self.digests, self.tail] if self.tail else self.digests


@dataclass
class Send:
    """As the session's sender has it."""

    name: Name
    first_page: int
    page_ids: tuple[int, ...]
    ready: int  # prompt pages
    sent: int = 0  # pages of the run
    ending: bool = False


class PrefillWorld(RuleBasedStateMachine):
    """Carries the core's effects out, and does what workers, decode daemons and copies do, checking it on the spot."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.jobs: dict[Name, Job] = {}
        self.content: dict[int, bytes] = {}
        self.sessions = {1, 2}
        self.next_session = 3
        self.next_transfer = 1
        self.sends: dict[tuple[int, int], Send] = {}
        self.workers = {1, 2}
        self.lost: set[int] = set()
        self.aux_sent: set[Name] = set()
        self.copies: list[CopyStarted] = []
        self.zeroing: dict[ZeroTail, int] = {}  # tails that are being cleared, and their pages' generations
        self.host_content: dict[int, bytes] = {}

    @initialize(host=st.sampled_from([0, 5, 40]))
    def configure(self, host: int) -> None:
        self.core = PrefillCore(Cache(PAGES, PAGE, host_pages=host), PrefillLimits(table=TABLE, overtakes=2))

    # -- effects -------------------------------------------------------------------------------------------------------

    def run_effects(self) -> None:
        while effects := self.core.take_effects():
            for effect in effects:
                if isinstance(effect, OpenSend):
                    key = (effect.session, effect.transfer)
                    assert effect.session in self.sessions and key not in self.sends
                    name = self.core._sends.open[key].name
                    assert effect.first_page >= 0 and effect.pages_ready >= 0
                    assert effect.first_page + len(effect.page_ids) <= len(self.jobs[name].whole)
                    self.sends[key] = Send(name, effect.first_page, effect.page_ids, effect.pages_ready)
                elif isinstance(effect, SendProgress):
                    send = self.sends.get((effect.session, effect.transfer))
                    if send is not None:
                        assert effect.pages_ready >= send.ready
                        send.ready = effect.pages_ready
                elif isinstance(effect, EndSend):
                    send = self.sends.get((effect.session, effect.transfer))
                    if send is not None:
                        send.ending = True
                    else:
                        self.core.send_ended(effect.session, effect.transfer, self.now)
                elif isinstance(effect, SendAux):
                    assert effect.name not in self.aux_sent, "the aux blob was sent twice"
                    self.aux_sent.add(effect.name)
                elif isinstance(effect, ZeroTail):
                    self.begin_zeroing(effect)
                elif isinstance(effect, ToWorker):
                    self.hear(effect)
                elif isinstance(effect, StartCopy):
                    self.copies.append(effect.started)
                else:
                    assert isinstance(effect, FailAsk)

    def begin_zeroing(self, effect: ZeroTail) -> None:
        """What is gathered later is behind it: for that it has been done."""
        owners = [job for job in self.jobs.values() if job.pages and job.pages[-1] == effect.page]
        assert len(owners) == 1 and effect.tokens == owners[0].tokens % PAGE
        assert self.content[effect.page] == b"unclean " + owners[0].tail
        self.content[effect.page] = owners[0].tail
        self.zeroing[effect] = self.core.cache.pool.generation(effect.page)

    def hear(self, effect: ToWorker) -> None:
        kind = effect.event.WhichOneof("kind")
        message = getattr(effect.event, kind)
        job = self.jobs[Name(message.name.request_id, message.name.attempt)]
        if kind == "begun":
            job.pages = list(message.pages)
            job.computed = message.matched_tokens
            assert job.computed < job.tokens and job.computed % PAGE == 0
            assert len(job.pages) == len(job.whole)
            matched = job.computed // PAGE
            assert [self.content[page] for page in job.pages[:matched]] == job.digests[:matched]
        elif kind == "failed":
            job.owes_abort = True
        else:
            assert kind == "ended"
            job.worker = job.pages = None
            job.owes_abort = False

    # -- what workers, decode daemons and copies do --------------------------------------------------------------------

    def begun(self) -> list[Name]:
        """Names that a living worker may still speak of."""
        return [name for name, job in self.jobs.items() if job.worker in self.workers]

    def zeroed(self, effect: ZeroTail) -> None:
        generation = self.zeroing.pop(effect)
        assert self.core.cache.pool.generation(effect.page) == generation, "a page was given on while it was cleared"
        self.core.tail_zeroed(effect.name, self.now)
        self.run_effects()

    def end_copy(self, number: int, failed: list[int]) -> None:
        started = self.copies.pop(number)
        copy = started.copy
        restore = copy.kind == RESTORE
        wanted = PageState.RESTORING if restore else PageState.SPILLING
        assert set(self.core.cache.pool.states(copy.device)) == {wanted}, "a page was reused while a copy runs"
        for page, row in zip(copy.device, copy.host, strict=True):
            if restore:
                self.content[page] = b"garbage" if page in failed else self.host_content[row]
            else:
                self.host_content[row] = b"garbage" if page in failed else self.content[page]
        self.core.copy_ended(started.number, failed, 0, 0.001, self.now)
        self.run_effects()

    def say_begin(self, worker: int, name: Name, seconds: float) -> None:
        job = self.jobs[name]
        job.begun, job.worker = True, worker
        request = wire.Begin(digests=b"".join(job.digests), tokens=job.tokens, tail_digest=job.tail)
        try:
            self.core.begin(worker, NAMESPACE, name, request, self.now + seconds, self.now)
        except RequestError:
            job.worker = None
        self.run_effects()

    def write(self, job: Job, upto: int) -> None:
        """A worker computes: its pages must be its own, whatever has become of the request meanwhile."""
        assert job.pages is not None
        for index in range(job.computed // PAGE, -(-upto // PAGE)):
            page = job.pages[index]
            assert self.core.cache.pool.state(page) in (PageState.LEASED, PageState.ORPHANED), "not the writer's page"
            clean = index < len(job.digests) and (index + 1) * PAGE <= upto
            self.content[page] = job.whole[index] if clean else b"unclean " + job.whole[index]

    def prove_gone(self, worker: int) -> None:
        for job in self.jobs.values():
            if job.worker == worker:
                job.pages = None
                job.owes_abort = False
        self.core.worker_gone(worker, self.now)
        self.run_effects()
        for job in self.jobs.values():
            if job.worker == worker:
                job.worker = None
        self.workers.add(worker)

    def say_ask(self, session: int, name: Name, first: int, lie: str, seconds: float) -> None:
        job = self.jobs[name]
        ask = peer.Ask(
            transfer=self.next_transfer,
            name=name.to_proto(),
            namespace_id=NAMESPACE,
            first_page=first,
            pages=len(job.whole) - first,
            tokens=job.tokens,
            last_full_digest=job.digests[-1] if job.digests else b"",
            tail_digest=job.tail,
        )
        if lie == "past the end":
            ask.first_page = (1 << 32) - 1
        elif lie == "other tokens":
            ask.tokens += 1
        elif lie == "long":
            ask.tail_digest = bytes(1 << 16)
        if lie == "old number":
            ask.transfer = max((number for of, number in self.sends if of == session), default=0)
        else:
            self.next_transfer += 1
        self.core.ask(session, name, ask, self.now + seconds, self.now)
        self.run_effects()

    def break_session(self, session: int) -> None:
        """No copy of it runs any more when the core hears of it."""
        self.sessions.discard(session)
        for key in [key for key in self.sends if key[0] == session]:
            del self.sends[key]
        self.core.session_down(session, self.now)
        self.run_effects()
        assert not any(key[0] == session for key in self.core._sends.open), "a send outlives its session"
