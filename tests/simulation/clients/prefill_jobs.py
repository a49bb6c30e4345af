"""What a prefill worker does with a prompt."""

from __future__ import annotations

from kvferry.daemon.core.limits import Name
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.kv_geometry import Layout
from tests.simulation.prompts import GARBAGE, PAGE, partial_content
from tests.simulation.workers import STEP, Job, Leg, Process, Wanted


class PrefillJob(Job):
    KIND = "prefill"

    def __init__(self, process: Process, name: Name, wanted: Wanted, leg: Leg) -> None:
        super().__init__(process, name, wanted, leg)
        self.computed = 0
        prompt = self.prompt
        message = self.message("begin")
        body = message.begin
        body.digests, body.tokens, body.tail_digest = prompt.digests, len(prompt.tokens), prompt.tail
        body.deadline_ms, body.priority, body.warmup = wanted.deadline_ms, wanted.priority, wanted.warmup
        self.may_keep(prompt.digests)
        process.send("begin", message)

    @property
    def _behind(self) -> bytes:
        """In an engine's own layout it is the engine's to clear."""
        return GARBAGE[:1] if self.process.side.setting.geometry.layout is not Layout.ENGINE else b"\0"

    def on_begun(self, body: wire.Begun, generations: list[int]) -> None:
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
        self.stopped = self.said_last = True
        message = self.message("aux")
        message.aux.blob = self.prompt.blob
        self.process.send("aux", message)
        self.leg.on_computed()

    def cancel(self) -> None:
        """Also behind aux: who waits for the other half no more says so."""
        self.stopped = self.said_last and self.cancelled
        self.said_last = self.said_last and self.cancelled
        super().cancel()

    def hear(self, kind: str, body: object, generations: list[int]) -> None:
        if kind == "failed" and self.said_last and not self.cancelled:
            self.said_last = False  # Failed came behind aux, and awaits its Abort all the same
        super().hear(kind, body, generations)
