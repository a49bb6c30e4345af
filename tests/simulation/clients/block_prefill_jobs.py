"""What prefill engines with blocks of their own do with prompts.

Some wait for what decode holds of a prompt before they give it blocks, and name those when they are offered something.
Some want the blocks of a computed prompt back before it is asked for.
"""

from __future__ import annotations

from kvferry.daemon.core.limits import Name
from kvferry.proto import worker_pb2 as wire
from tests.simulation.clients.block_jobs import BlockJob
from tests.simulation.clients.prefill_jobs import begin_of, draw_patience, hand_over
from tests.simulation.clock import expect
from tests.simulation.prompts import PAGE
from tests.simulation.workers import STEP, Leg, Process, Wanted

STOWS = 3  # times that an engine tries, where there is no room
WANTS_NOTHING = 0.1  # of what is offered


class BlockPrefillJob(BlockJob):
    KIND = "prefill"

    def __init__(self, process: Process, name: Name, wanted: Wanted, leg: Leg) -> None:
        super().__init__(process, name, wanted, leg)
        self.computed = 0
        self.failed = False
        self.patience = draw_patience(self)
        self.offered = 0  # tokens that it may have fetched
        self.fetches = range(0)  # of its blocks, those that the daemon fetches into
        self.told = False  # Begun has come
        self._stows = 0
        if self.patience == wire.PATIENCE_FETCH:
            self._send_begin([])
        else:
            self.wait_for_blocks(len(self.prompt.tokens))

    def has_blocks(self) -> None:
        if not self.begun:  # some of them are known from the beginning
            self._send_begin(self._more(self.clock.random.randint(0, len(self.blocks))))
        elif self.told:
            self.compute(*STEP)
        elif self.offered:
            self._fetch()

    def _send_begin(self, blocks: list[int]) -> None:
        self.begun = True
        message = begin_of(self, self.patience)
        message.begin.blocks.extend(blocks)
        self.process.send("begin", message)

    def _more(self, upto: int) -> list[int]:
        more = self.blocks[len(self.named) : upto]
        self.name_blocks(more)
        return more

    # -- what is fetched -------------------------------------------------------------------------------------------

    def on_proceed(self, body: wire.Proceed, generations: list[int]) -> None:
        expect(self.patience == wire.PATIENCE_FETCH, f"{self.name} does not wait, and is told to proceed")
        expect(not self.told and not self.blocks, f"{self.name} is told to proceed once more")
        if self.stopped:
            return
        expect(body.fetch_tokens < len(self.prompt.tokens), f"{self.name}: {body.fetch_tokens} tokens are offered")
        self.offered = body.fetch_tokens
        if not self.offered:
            self.clock.counts["engines that waited long enough for pages"] += 1
        self.wait_for_blocks(len(self.prompt.tokens))

    def _fetch(self) -> None:
        """Into blocks that it has named, but for what it has come to hold itself."""
        size, random, counts = self.engine.tokens, self.clock.random, self.clock.counts
        held = random.choice((0, size * random.randint(0, len(self.prompt.tokens) // size)))
        message = self.message("fetch")
        self.engine.compute(self.blocks, 0, held, self.prompt.contents)
        message.fetch.held_tokens = held
        if not self.clock.chance(WANTS_NOTHING):
            least = max(self.offered, held) // size
            message.fetch.blocks.extend(self._more(random.choice((least, random.randint(least, len(self.blocks))))))
            self.fetches = range(held // size, self.offered // size)
            self.engine.name(self._fetched_into, writes=True)
            counts["fetches into blocks"] += len(self.fetches) > 0
            counts["fetches behind what ends within a page"] += len(self.fetches) > 0 and held % PAGE > 0
        self.process.send("fetch", message)

    @property
    def _fetched_into(self) -> list[int]:
        return self.blocks[self.fetches.start : self.fetches.stop]

    def daemon_says(self, kind: str, body: object) -> None:
        super().daemon_says(kind, body)
        if isinstance(body, wire.Begun):
            self._writes_no_more()
            if self.offered and not body.matched_tokens:  # then none of them is named
                self.engine.unname(self.named, writes=False)
                self.named = []
        elif isinstance(body, wire.Stowed) and body.stored:
            self.daemon_lets_go()

    def daemon_lets_go(self) -> None:
        self._writes_no_more()
        super().daemon_lets_go()

    def _writes_no_more(self) -> None:
        self.engine.unname(self._fetched_into, writes=True)
        self.fetches = range(0)

    # -- computing -------------------------------------------------------------------------------------------------

    def on_begun(self, body: wire.Begun, generations: list[int]) -> None:
        self.told = True
        if self.stopped:
            return
        matched = body.matched_tokens
        expect(not body.pages, f"{self.name}: pages are named to an engine with blocks")
        expect(matched <= self.offered, f"{self.name}: {matched} tokens matched, and {self.offered} were offered")
        self.computed = matched
        self.engine.check_tokens(self.blocks, 0, matched, self.prompt.contents, f"{self.name} reads what was fetched")
        if self.offered and not matched and self.clock.chance(0.5):  # it may begin anew with others
            self.engine.give_back(self.blocks)
            self.blocks = []
        if self.blocks:
            self.compute(*STEP)
        else:
            self.wait_for_blocks(len(self.prompt.tokens))

    def kernel(self) -> None:
        tokens, random = len(self.prompt.tokens), self.clock.random
        end = min(tokens, self.computed + random.randint(1, 3 * PAGE))
        self.engine.compute(self.blocks, self.computed, end, self.prompt.contents)
        self.computed = end
        if not self.process.connected and end < tokens:
            self.compute(*STEP)  # it has not noticed that its daemon is gone
        if self.stopped or not self.process.connected:
            return
        message = self.message("progress")
        message.progress.tokens = end
        least = -(-end // self.engine.tokens)
        message.progress.blocks.extend(self._more(random.choice((least, random.randint(least, len(self.blocks))))))
        self.process.send("progress", message)
        if end < tokens:
            self.compute(*STEP)
            return
        hand_over(self)
        if self.clock.chance(self.process.side.faults.stows):
            self._stow_soon()

    # -- giving blocks back ----------------------------------------------------------------------------------------

    def _stow_soon(self) -> None:
        self.process.after(self.clock.between(0.0, 0.02), self._stow)

    def _stow(self) -> None:
        """Where it was told that it may; some engines err."""
        process = self.process
        living = process.connected and process.jobs.get(self.name) is self and not (self.failed or self.cancelled)
        if not living:
            return
        errs = self.clock.chance(process.side.faults.blunders)
        if process.side.tiers.stows or errs:
            self._stows += 1
            self.clock.counts["stows"] += 1
            process.send("stow", self.message("stow"))

    def on_stowed(self, body: wire.Stowed, generations: list[int]) -> None:
        counts = self.clock.counts
        if body.stored:
            counts["prompts that wait in the host tier"] += 1
            self.engine.give_back(self.blocks)
            self.blocks = []
        elif body.asked:
            counts["stows of what was asked for"] += 1
        else:
            counts["stows that had no room, or failed"] += 1
            if self._stows < STOWS:
                self._stow_soon()

    # -- ends ------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Also behind aux: who waits for the other half no more says so."""
        if self.begun:
            self.stopped = self.said_last and self.cancelled
            self.said_last = self.said_last and self.cancelled
        super().cancel()

    def hear(self, kind: str, body: object, generations: list[int]) -> None:
        if kind == "failed":
            self.failed = True
            if self.said_last and not self.cancelled:
                self.said_last = False  # Failed came behind aux, and awaits its Abort all the same
        super().hear(kind, body, generations)
