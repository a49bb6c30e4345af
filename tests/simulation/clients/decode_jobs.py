"""What a decode worker does with a request: it fills what it holds itself, reads, decodes, grows and lets go."""

from __future__ import annotations

from kvferry.daemon.core.limits import Name, pages_for
from kvferry.proto import worker_pb2 as wire
from tests.simulation.clock import expect
from tests.simulation.daemons import ROOT
from tests.simulation.prompts import GARBAGE, PAGE, Prompt
from tests.simulation.workers import DRAINS, STEP, Job, Leg, Process, Wanted

FILL = (0.0005, 0.03)  # seconds of a copy from the worker's own memory
_DIGEST = 32


class DecodeJob(Job):
    KIND = "decode"

    def __init__(self, process: Process, name: Name, wanted: Wanted, leg: Leg, prefill: str) -> None:
        super().__init__(process, name, wanted, leg)
        self.asked = wanted.prompt
        self.output = list(wanted.output)
        self.total = len(self.prompt.tokens) + len(self.output) - 1  # tokens with KV at the end
        self.whole = Prompt([*self.prompt.tokens, *self.output[:-1]], ROOT)
        self.ready = self.growing = self.retracted = self.resumed = False
        if prefill:
            process.side.prompts[name] = self.prompt  # type: ignore[union-attr]
        self._admit(prefill, wanted.held_tokens)

    def _admit(self, prefill: str, held_tokens: int) -> None:
        prompt, wanted = self.prompt, self.wanted
        self.prefill, self.held = prefill, held_tokens
        self.position = self.computed = 0
        self.filled = 0  # tokens, of those that it holds itself
        self.tokens_from: int | None = None  # from where on the daemon wants to be told them
        self.pages, self.generations = [], []
        self.ready = self.retracted = self.stopped = self.said_last = self.growing = False
        message = self.message("admit")
        body = message.admit
        body.digests, body.tokens, body.tail_digest = prompt.digests, len(prompt.tokens), prompt.tail
        body.prefill, body.deadline_ms, body.priority = prefill, wanted.deadline_ms, wanted.priority
        body.max_new_tokens = self.total + 1 - len(prompt.tokens)
        body.warmup, body.held_tokens = wanted.warmup, held_tokens
        self.may_keep(self.whole.digests)
        self.process.send("admit", message)

    @property
    def filling(self) -> bool:
        """Whether it is still to fill pages before it says Progress."""
        return bool(self.pages and self.prefill) and self.filled < self.held

    # -- the daemon's words ----------------------------------------------------------------------------------------

    def on_admitted(self, body: wire.Admitted, generations: list[int]) -> None:
        self.take(body.pages, generations)
        expect(len(self.pages) == pages_for(len(self.prompt.tokens), PAGE), f"{self.name}: pages of the prompt")
        self.check_matched(body.matched_tokens, resumed=self.resumed)
        self.computed = body.local_tokens if not self.prefill else len(self.prompt.tokens)
        self.filled = body.matched_tokens
        if self.filling:
            self.clock.counts["prompts filled by their decode workers"] += 1
            hangs = self.wanted.hangs
            self.compute(*((hangs, hangs) if hangs else FILL))
            self.leg.on_filling()

    def on_ready(self, body: wire.Ready, generations: list[int]) -> None:
        if self.stopped:
            return
        expect(not self.filling, f"{self.name} is ready before its worker has filled what it holds")
        self.ready = True
        readable = len(self.pages) if self.prefill else self.computed // PAGE
        self.process.memory.check(
            self.pages[:readable], self.prompt.contents, f"{self.process.worker.name} reads its ready prompt"
        )
        if self.prefill:
            expect(body.aux == self.prompt.blob, f"{self.name}: the aux blob is {body.aux!r}")
            self.process.clock.counts["pages that travelled"] += body.delta_pages
        self._tell_tokens(body.page_tokens_from if body.HasField("page_tokens_from") else None)
        self.position = len(self.prompt.tokens)
        self.leg.on_ready()
        self.compute_or_end()

    def _tell_tokens(self, wanted_from: int | None) -> None:
        """Of the prompt, where its KV came from elsewhere; Finish tells the others."""
        published = self.process.side.published
        expect((wanted_from is not None) == (published is not None and not self.wanted.warmup), "page_tokens_from")
        self.tokens_from = wanted_from
        if published is None or wanted_from is None:
            return
        published.check_told(self.pages, self.generations, self.prompt.digests[: wanted_from // PAGE * _DIGEST])
        full = self.prompt.full * PAGE
        if self.prefill and wanted_from < full:
            message = self.message("page_tokens")
            message.page_tokens.first_token = wanted_from
            message.page_tokens.tokens.extend(published.said(self.name, self.prompt.tokens[wanted_from:full]))
            self.process.send("page_tokens", message)

    def on_grown(self, body: wire.Grown, generations: list[int]) -> None:
        if self.stopped or self.retracted:
            return
        expect(body.first_page == len(self.pages), f"{self.name}: grown at {body.first_page}, not {len(self.pages)}")
        self.take(body.pages, generations)
        self.growing = False
        self.compute_or_end()

    def on_retract(self, body: wire.Retract, generations: list[int]) -> None:
        self.clock.counts["retracted"] += 1
        if self.stopped:
            return
        self.retracted = True
        self.growing = False
        if not self.computing:
            self.compute_or_end()

    # -- computing -------------------------------------------------------------------------------------------------

    def compute_or_end(self) -> None:
        if self.stopped:
            return
        if self.computed < len(self.prompt.tokens):
            self.compute(*STEP)
        elif self.position >= self.total or self.retracted:
            self._finish()
        elif self.position // PAGE < len(self.pages):
            self.compute(*STEP)
        elif not self.growing:
            self.growing = True
            ahead = PAGE * self.clock.random.randint(1, 2)
            message = self.message("grow")
            message.grow.tokens = min(self.total, self.position + ahead)
            self.process.send("grow", message)

    def kernel(self) -> None:
        if self.filling:
            self._fill()
            return
        if self.computed < len(self.prompt.tokens):  # a missing part of the prompt
            end = self.held if self.computed < self.held else self.computed + PAGE  # what it holds is there at once
            for index in range(self.computed // PAGE, pages_for(end, PAGE)):
                self.write(index, self.prompt.contents[index])
            self.computed = min(end, len(self.prompt.tokens))
        else:
            index = self.position // PAGE
            self.position = min(self.total, (index + 1) * PAGE)
            full = self.position % PAGE == 0
            self.write(index, self.whole.contents[index] if full else GARBAGE)
        if self.process.connected:
            self.compute_or_end()
        elif self.position < self.total and self.position // PAGE < len(self.pages):
            self.compute(*STEP)  # it has not noticed that its daemon is gone

    def _fill(self) -> None:
        """Copies some pages from memory of its own; also what a hanging copy does in the end."""
        end = min(self.held, self.filled + PAGE * self.clock.random.randint(1, 3))
        for index in range(self.filled // PAGE, end // PAGE):
            self.write(index, self.prompt.contents[index])
        counts = self.clock.counts
        counts["pages filled by decode workers"] += (end - self.filled) // PAGE
        if not self.process.connected:
            counts["pages filled by workers that were lost"] += (end - self.filled) // PAGE
        elif self.stopped:
            counts["pages filled behind the end of their request"] += (end - self.filled) // PAGE
        self.filled = end
        if self.filling:
            self.compute(*FILL)
        elif not self.stopped:
            message = self.message("progress")
            message.progress.tokens = self.held
            self.process.send("progress", message)

    def _finish(self) -> None:
        self.stopped = self.said_last = True
        tokens = self.position
        full = tokens // PAGE
        self.process.memory.check(
            self.pages[:full], self.whole.contents, f"{self.process.worker.name} has decoded {self.name}"
        )
        self.process.memory.check_kept(self.pages, self.generations, f"{self.name} was decoded")
        message = self.message("finish")
        body = message.finish
        body.tokens, body.continues = tokens, self.position < self.total
        body.digests = self.whole.digests[self.prompt.full * _DIGEST : full * _DIGEST]
        published = self.process.side.published
        if published is not None and self.tokens_from is not None:
            first = self.prompt.full * PAGE if self.prefill else self.tokens_from
            body.page_tokens.first_token = first
            body.page_tokens.tokens.extend(published.said(self.name, self.whole.tokens[first : full * PAGE]))
        self.process.send("finish", message)

    # -- ends ------------------------------------------------------------------------------------------------------

    def on_ended(self) -> None:
        if self.retracted and self.position < self.total and not self.cancelled:
            done = self.position + 1  # one more token is known than has its KV
            self.prompt = Prompt((self.asked.tokens + self.output)[:done], ROOT)
            self.resumed = True
            self._admit("", 0)
            return
        super().on_ended()

    def hear(self, kind: str, body: object, generations: list[int]) -> None:
        if kind == "failed":
            if self.resumed:
                message = body.error.message  # type: ignore[attr-defined]
                expect(DRAINS not in message, f"{self.name}, which comes back, is refused: {message}")
            self.retracted = False  # it does not come back
            if self.filling:
                self.clock.counts["requests that failed while their worker filled pages"] += 1
        super().hear(kind, body, generations)
