"""What a prefill worker does with a prompt."""

from __future__ import annotations

from kvferry.daemon.core.limits import Name
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.kv_geometry import Layout
from tests.simulation.clock import expect
from tests.simulation.prompts import GARBAGE, PAGE, partial_content
from tests.simulation.workers import STEP, Job, Leg, Process, Wanted


def draw_patience(job: Job) -> wire.Patience:
    """For what its worker waits."""
    patience: wire.Patience = wire.PATIENCE_PAGES
    if job.process.side.faults.patience:
        kinds = (wire.PATIENCE_FETCH, wire.PATIENCE_FETCH, wire.PATIENCE_FETCH, wire.PATIENCE_NONE, patience)
        patience = job.clock.random.choice(kinds)
        job.fetchable = patience != wire.PATIENCE_NONE
    return patience


def begin_of(job: Job, patience: wire.Patience) -> wire.WorkerMessage:
    """What tells the daemon of the job's prompt."""
    prompt, wanted = job.prompt, job.wanted
    message = job.message("begin")
    body = message.begin
    body.digests, body.tokens, body.tail_digest = prompt.digests, len(prompt.tokens), prompt.tail
    body.deadline_ms, body.priority, body.warmup = wanted.deadline_ms, wanted.priority, wanted.warmup
    body.patience = patience
    if job.process.side.faults.patience and job.clock.chance(0.3):
        body.held_tokens = job.clock.random.randint(0, len(prompt.tokens))
    return message


def hand_over(job: Job) -> None:
    """All of the prompt is computed."""
    job.stopped = job.said_last = True
    message = job.message("aux")
    message.aux.blob = job.prompt.blob
    job.process.send("aux", message)
    job.leg.on_computed()


class PrefillJob(Job):
    KIND = "prefill"

    def __init__(self, process: Process, name: Name, wanted: Wanted, leg: Leg) -> None:
        super().__init__(process, name, wanted, leg)
        self.computed = 0
        self.may_keep(self.prompt.digests)
        self.patience = draw_patience(self)
        self.told = False  # to compute
        process.send("begin", begin_of(self, self.patience))

    def on_proceed(self, body: wire.Proceed, generations: list[int]) -> None:
        """It computes elsewhere until its pages are there."""
        waits = self.patience == wire.PATIENCE_FETCH and not self.told
        expect(waits and not body.fetch_tokens, f"{self.name} is told to proceed with {body.fetch_tokens} tokens")
        self.clock.counts["engines that waited long enough for pages"] += 1
        self.told = True

    @property
    def _behind(self) -> bytes:
        """In an engine's own layout it is the engine's to clear."""
        return GARBAGE[:1] if self.process.side.setting.geometry.layout is not Layout.ENGINE else b"\0"

    def on_begun(self, body: wire.Begun, generations: list[int]) -> None:
        self.told = True
        if self.stopped:
            return
        self.take(body.pages, generations)
        self.check_matched(body.matched_tokens)
        self.computed = body.matched_tokens
        self.process.memory.check(
            self.pages[: self.computed // PAGE], self.prompt.contents, f"{self.process.worker.name} reads what matched"
        )
        self.compute(*STEP)

    def kernel(self) -> None:
        tokens = len(self.prompt.tokens)
        for _ in range(self.clock.random.randint(1, 3)):
            index = self.computed // PAGE
            left = tokens - index * PAGE
            data = self.prompt.contents[index]
            if left < PAGE:  # what lies behind the last token is whatever it was
                data = partial_content(self.prompt.tail, left, self._behind)
            self.write(index, data)
            self.computed = min(tokens, (index + 1) * PAGE)
            if self.computed == tokens:
                break
        if not self.process.connected and self.computed < tokens:
            self.compute(*STEP)  # it has not noticed that its daemon is gone
        if self.stopped or not self.process.connected:
            return
        message = self.message("progress")
        message.progress.tokens = self.computed
        self.process.send("progress", message)
        if self.computed < tokens:
            self.compute(*STEP)
            return
        hand_over(self)

    def cancel(self) -> None:
        """Also behind aux: who waits for the other half no more says so."""
        self.stopped = self.said_last and self.cancelled
        self.said_last = self.said_last and self.cancelled
        super().cancel()

    def hear(self, kind: str, body: object, generations: list[int]) -> None:
        if kind == "failed" and self.said_last and not self.cancelled:
            self.said_last = False  # Failed came behind aux, and awaits its Abort all the same
        super().hear(kind, body, generations)
