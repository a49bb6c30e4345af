"""What engines with blocks of their own do with requests: they name blocks, have them back when Ended has come, hold
prefixes themselves, and hand in what they have computed.
"""

from __future__ import annotations

from kvferry.daemon.core.limits import Name
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from tests.simulation.clock import expect
from tests.simulation.daemons import ROOT
from tests.simulation.prompts import PAGE, Prompt
from tests.simulation.workers import STEP, Job, Leg, Process, Wanted

LOOK = (0.0005, 0.005)  # seconds between looks at blocks that are free
STORED = 0.6  # of what was decoded
STORED_EARLY = 0.2  # of prompts, while their requests live


class BlockJob(Job):
    """`blocks` are of all its tokens, in order; `named` of them, the daemon's until it has said Ended."""

    writes = False  # the daemon does, to what is named

    def __init__(self, process: Process, name: Name, wanted: Wanted, leg: Leg) -> None:
        super().__init__(process, name, wanted, leg)
        assert process.blocks is not None
        self.engine = process.blocks
        self.blocks: list[int] = []
        self.named: list[int] = []
        self.begun = False  # its daemon knows of it
        self.admitted = False
        self.ends_itself = False  # nothing more is said of it

    def wait_for_blocks(self, tokens: int) -> None:
        if self.stopped or not self.process.connected:
            return
        taken = self.engine.take(tokens)
        if taken is None:
            self.clock.counts["looks for free blocks in vain"] += 1
            self.process.after(self.clock.between(*LOOK), self.wait_for_blocks, tokens)
            return
        self.blocks = taken
        self.has_blocks()

    def has_blocks(self) -> None:
        raise NotImplementedError

    def name_blocks(self, blocks: list[int]) -> None:
        self.engine.name(blocks, writes=self.writes)
        self.named += blocks

    def daemon_says(self, kind: str, body: object) -> None:
        super().daemon_says(kind, body)
        if kind == "ended":
            self.daemon_lets_go()

    def hear(self, kind: str, body: object, generations: list[int]) -> None:
        if kind == "ended" and self.ends_itself:
            self.said_last = True  # its Admit was
        super().hear(kind, body, generations)

    def daemon_lets_go(self) -> None:
        """It touches nothing of the request any more."""
        self.engine.unname(self.named, writes=self.writes)
        self.named = []

    def cancel(self) -> None:
        if self.begun:
            super().cancel()
        elif not self.stopped:
            self.cancelled = self.stopped = self.said_last = True
            self.process.after(self.clock.between(0.00005, 0.002), self._leaves)

    def _leaves(self) -> None:
        if self.process.connected:
            self.over()

    def over(self) -> None:
        """Its blocks are the engine's again."""
        self.engine.give_back(self.blocks)
        self.blocks = []
        del self.process.jobs[self.name]
        self.leg.on_over(not self.cancelled)

    def on_ended(self) -> None:
        self.stopped = True
        self.over()


def may_end_itself(name: Name) -> bool:
    """Every other one; no draw, which would be taken from others."""
    return name.request_id[0] % 2 == 0


class BlockDecodeJob(BlockJob):
    KIND = "decode"
    writes = True

    def __init__(self, process: Process, name: Name, wanted: Wanted, leg: Leg, prefill: str) -> None:
        super().__init__(process, name, wanted, leg)
        self.prefill = prefill
        self.whole = Prompt([*self.prompt.tokens, *wanted.output[:-1]], ROOT)
        self.hands_in = not prefill and wanted.held_tokens == len(self.prompt.tokens)
        self.finished = self.blunder = False
        self.held: list[int] = []  # blocks that it holds itself, which may go back to prefill
        self.reading: list[int] = []  # of them, those that the daemon may read now
        self.computed = True  # what it holds itself is
        self._storing, self._leaving = 0, False
        self.local_tokens = 0
        self.wait_for_blocks(len(self.prompt.tokens))

    def has_blocks(self) -> None:
        if self.hands_in:
            self.begun = self.stopped = self.said_last = True  # nothing of it is asked for
            self._decode_soon()
            return
        self.begun = True
        prompt, wanted, random, size = self.prompt, self.wanted, self.clock.random, self.engine.tokens
        tokens = len(prompt.tokens)
        self.start = size * random.randint(0, (tokens - 1) // size) if self.clock.chance(0.5) else 0
        self._hold()
        self.end = tokens
        if not self.prefill and self.clock.chance(0.7):  # what it computes itself need not be named
            self.end = max((tokens - 1) // PAGE * PAGE, self.start + 1)
        if self.start % PAGE:
            self.clock.counts["prefixes that end within a page"] += 1
        message = self.message("admit")
        body = message.admit
        body.digests, body.tokens, body.tail_digest = prompt.digests, tokens, prompt.tail
        body.prefill, body.deadline_ms, body.priority = self.prefill, wanted.deadline_ms, wanted.priority
        body.max_new_tokens, body.warmup = 1, wanted.warmup
        body.held_tokens, body.blocks_from = self.start // PAGE * PAGE, self.start
        body.held_blocks.extend(self.held)
        self.ends_itself = body.ends_itself = not self.held and may_end_itself(self.name)
        named = self.blocks[self.start // size : -(-self.end // size)]
        if self.prefill:
            self.process.side.prompts[self.name] = prompt  # type: ignore[union-attr]
        self.name_blocks(named)
        body.blocks.extend(self._with_blunder(named))
        self.process.send("admit", message)

    def _hold(self) -> None:
        """It holds them itself. Where they may go back, some are computed in the very step in which it names them."""
        whole = self.start // PAGE * PAGE // self.engine.tokens
        if whole and self.prefill and self.process.side.setting.way_back and self.clock.chance(0.8):
            self.held, self.computed = self.blocks[:whole], False
            self.process.after(self.clock.between(*STEP), self._step_ends)
        else:
            self.engine.compute(self.blocks, 0, self.start, self.prompt.contents)

    def _step_ends(self) -> None:
        if not (self.computed or self.stopped) and self.process.connected:
            self._compute_held()
            self._say_held()

    def _say_held(self) -> None:
        """What it holds is computed: the daemon may read it until Ready, or the end."""
        if not (self.held and self.computed and self.admitted):
            return
        self.clock.counts["prefixes that may go back"] += 1
        self.reading = self.held
        self.engine.name(self.reading, writes=False)
        message = self.message("progress")
        message.progress.tokens = self.start // PAGE * PAGE
        self.process.send("progress", message)

    def _compute_held(self) -> None:
        if not self.computed:
            self.computed = True
            self.engine.compute(self.blocks, 0, self.start, self.prompt.contents)

    def _reads_no_more(self) -> None:
        self.engine.unname(self.reading, writes=False)
        self.reading = []

    def daemon_says(self, kind: str, body: object) -> None:
        super().daemon_says(kind, body)
        if kind == "ready":
            self._reads_no_more()
            if self.ends_itself:
                self.daemon_lets_go()

    def daemon_lets_go(self) -> None:
        super().daemon_lets_go()
        self._reads_no_more()

    def _with_blunder(self, named: list[int]) -> list[int]:
        """Some engines err, and name a block of another request's that has surely not ended."""
        if not self.clock.chance(self.process.side.faults.blunders):
            return named
        others = [job for job in self.process.jobs.values() if isinstance(job, BlockDecodeJob | StoreJob)]
        living = [job for job in others if job.admitted and not (job.said_last or job.ends_itself) and job.named]
        if not living:
            return named
        self.clock.counts["blocks that were named twice"] += 1
        self.blunder = True
        return [*named[:-1], self.clock.random.choice(self.clock.random.choice(living).named)]

    # -- the daemon's words ----------------------------------------------------------------------------------------

    def on_admitted(self, body: wire.Admitted, generations: list[int]) -> None:
        expect(not self.blunder, f"{self.name} is admitted, though it has named another one's block")
        expect(not body.pages, f"{self.name}: pages are named to an engine with blocks")
        self.admitted = True
        if not self.stopped:
            self._say_held()
        self.check_matched(body.matched_tokens)
        self.local_tokens = body.local_tokens
        self.clock.counts["tokens loaded into blocks"] += max(0, body.matched_tokens - self.start)

    def on_ready(self, body: wire.Ready, generations: list[int]) -> None:
        if self.stopped:
            return
        self._compute_held()
        self._check("reads its ready prompt")
        if self.prefill:
            expect(body.aux == self.prompt.blob, f"{self.name}: the aux blob is {body.aux!r}")
            self.clock.counts["pages that travelled"] += body.delta_pages
        self.leg.on_ready()
        if self.prefill and self.prompt.full and not self.wanted.warmup and self.clock.chance(STORED_EARLY):
            self.clock.counts["stores of blocks that are another request's too"] += 1
            self._store(self.prompt.full)
        if self.ends_itself:
            self.clock.counts["requests that end by being ready"] += 1
            self.stopped = self.said_last = self.finished = True
            self._decode_soon()
        else:
            self.compute(*STEP)

    def _check(self, what: str) -> None:
        readable = len(self.prompt.tokens) if self.prefill else max(self.start, min(self.local_tokens, self.end))
        contents = self.prompt.contents
        self.engine.check_tokens(self.blocks, 0, readable, contents, f"{self.process.worker.name} {what}")

    def hear(self, kind: str, body: object, generations: list[int]) -> None:
        if kind == "failed" and self.blunder:
            self.stopped = True
            self.leg.on_failed(common.ERROR_ABORTED, "it named another one's block")
            self.abort_soon()
            return
        super().hear(kind, body, generations)

    # -- reading, decoding, handing in -------------------------------------------------------------------------------

    def kernel(self) -> None:
        if self.finished or self.stopped or not self.process.connected:
            return
        self._check("has read its prompt")
        self.stopped = self.said_last = self.finished = True
        message = self.message("finish")
        message.finish.tokens = len(self.prompt.tokens)
        self.process.send("finish", message)

    def on_ended(self) -> None:
        if self.ends_itself and self.finished:
            return  # Ready stood for it
        self.stopped = True
        if self.finished and not self.cancelled:
            self._check("decodes from its prompt")
            self._decode_soon()
        else:
            self.over()

    def _decode_soon(self) -> None:
        self.process.after(self.clock.between(*STEP), self._decode)

    def _decode(self) -> None:
        """In blocks that are its own again, and more of them."""
        if not self.process.connected:
            return
        have, tokens = len(self.blocks) * self.engine.tokens, len(self.whole.tokens)
        self.blocks += self.engine.take(max(0, tokens - have)) or []
        tokens = min(tokens, len(self.blocks) * self.engine.tokens)
        self.engine.compute(self.blocks, 0, tokens, self.whole.contents)
        full = tokens // PAGE
        if full and not self.wanted.warmup and (self.hands_in or self.clock.chance(STORED)):
            if self.hands_in:
                self.leg.on_ready()
            self._store(full)
        self.over()

    def _store(self, full: int) -> None:
        self._storing += 1
        StoreJob(self, full)

    def stored(self, full: int) -> None:
        self.engine.check_tokens(self.blocks, 0, full * PAGE, self.whole.contents, "what was handed in")
        self._storing -= 1
        if self._leaving:
            self.over()

    def over(self) -> None:
        self._leaving = True
        if not self._storing:
            super().over()


class _StoreLeg:
    """What becomes of it changes nothing for its request."""

    def __init__(self, parent: BlockDecodeJob) -> None:
        self.parent = parent

    def on_ready(self) -> None:
        pass

    def on_filling(self) -> None:
        pass

    def on_computed(self) -> None:
        pass

    def on_failed(self, code: int, message: str) -> None:
        expect(code not in _NEVER, f"pages that {self.parent.name} hands in: {message}")
        self.parent.clock.counts["stores that failed"] += 1

    def on_over(self, done: bool) -> None:
        pass

    def on_lost(self) -> None:
        pass


_NEVER = (
    common.ERROR_INVALID_ARGUMENT,
    common.ERROR_NOT_FOUND,
    common.ERROR_FAILED_PRECONDITION,
    common.ERROR_INTERNAL,
    common.ERROR_OUT_OF_RANGE,
)


class StoreJob(BlockJob):
    """Full pages of what a request has decoded, handed in."""

    KIND = "decode"

    def __init__(self, parent: BlockDecodeJob, full: int) -> None:
        process, clock = parent.process, parent.clock
        prompt = Prompt(parent.whole.tokens[: full * PAGE], ROOT)
        name = Name(clock.random.randbytes(16), 1)
        super().__init__(process, name, Wanted(prompt, priority=parent.wanted.priority), _StoreLeg(parent))
        self._parent, self._full, self.begun = parent, full, True
        self.may_keep(prompt.digests)
        message = self.message("admit")
        body = message.admit
        body.digests, body.tokens, body.held_tokens = prompt.digests, len(prompt.tokens), len(prompt.tokens)
        body.max_new_tokens, body.priority = 1, parent.wanted.priority
        self.ends_itself = body.ends_itself = may_end_itself(name)
        self.name_blocks(parent.blocks[: full * PAGE // self.engine.tokens])
        body.blocks.extend(self.named)
        clock.counts["stores"] += 1
        process.send("admit", message)
        if clock.chance(process.side.faults.aborts):
            process.after(clock.between(0.0, 0.02), self.cancel)

    def on_admitted(self, body: wire.Admitted, generations: list[int]) -> None:
        expect(not body.pages, f"{self.name}: pages are named to an engine with blocks")
        self.admitted = True

    def on_ready(self, body: wire.Ready, generations: list[int]) -> None:
        if not (self.stopped or self.ends_itself):
            self.compute(*STEP)

    def kernel(self) -> None:
        if self.stopped or not self.process.connected:
            return
        self.stopped = self.said_last = True
        message = self.message("finish")
        message.finish.tokens = len(self.prompt.tokens)
        self.process.send("finish", message)

    def over(self) -> None:
        del self.process.jobs[self.name]
        self._parent.stored(self._full)
