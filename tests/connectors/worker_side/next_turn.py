"""The next turn of a conversation whose history decode's daemon holds, and prefill's has never seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.client.requests import RequestName
from kvferry.connectors.orders import Begin, Fill, Load, News, PromptPages, Release, Save, StorePages
from kvferry.connectors.settings import Settings
from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.core.way_back.choice import LEAST_SECONDS
from tests.connectors.engine_memory import BLOCK
from tests.connectors.worker_side.block_pair import BlockPair, SharedEngine
from tests.connectors.worker_side.engine_pair import PAGE, Pair, new_name, new_prompt, received, sent, until

HISTORY = 6 * PAGE
TOKENS = HISTORY + PAGE + 3
STORED = range(40, 40 + HISTORY // BLOCK)  # decode's blocks with the history
THEIRS = tuple(range(20, 20 + -(-TOKENS // BLOCK)))  # prefill's
DEADLINE_SECONDS = 2 * LEAST_SECONDS  # behind a fetch that stalls there is time to compute
OURS = tuple(range(-(-TOKENS // BLOCK)))  # decode's, of the next turn


class BackPair(Pair):
    """With a way back that is always taken."""

    deadline_seconds = DEADLINE_SECONDS

    def pool_words(self, role: str) -> list[str]:
        return [*super().pool_words(role), "--way-back", "always", "--checksums", "on"]


class EngineBackPair(BlockPair):
    """Likewise; the prefill daemon fetches straight into its engine's blocks."""

    deadline_seconds = DEADLINE_SECONDS

    def pool_words(self, role: str) -> list[str]:
        words = super().pool_words(role) if role == "prefill" else [*Pair.pool_words(self, role), "--checksums", "on"]
        return [*words, "--way-back", "always"]

    def settings(self, role: str) -> Settings:
        return super().settings(role) if role == "prefill" else Pair.settings(self, role)


class BothEnginesPair(EngineBackPair):
    """Likewise, and the decode daemon sends back straight from its engine's blocks."""

    def pool_words(self, role: str) -> list[str]:
        return [*BlockPair.pool_words(self, role), "--way-back", "always"]

    def settings(self, role: str) -> Settings:
        return BlockPair.settings(self, role)


def up(pair: Pair) -> None:
    """Waits for the daemons' session."""
    until(lambda: [peer.state for peer in pair.stats("decode").peers] == ["up"])


@contextmanager
def made(kind: type[Pair], stack: Stack) -> Iterator[Pair]:
    """A pair whose daemons have their session."""
    pair = kind(stack)
    try:
        up(pair)
        yield pair
    finally:
        for side in pair.sides.values():
            side.close()
        for engine in pair.engines.values():
            if isinstance(engine, SharedEngine):
                engine.file.unlink()


def store(pair: Pair) -> PromptPages:
    """A conversation's history, which decode's daemon holds and prefill's has never seen: its next turn's prompt."""
    history = new_prompt(HISTORY)
    pair.give("decode", StorePages("history", new_name(), history, tuple(STORED)))
    sent(pair.sides["decode"], "history")
    return new_prompt(TOKENS, shared=history)


def begin(pair: Pair, request: str, prompt: PromptPages, held: int = 0) -> RequestName:
    name = new_name()
    pair.give("prefill", Begin(request, name, prompt, waits=True, held=held))
    return name


def load(pair: Pair, request: str, name: RequestName, prompt: PromptPages) -> None:
    """Decode's engine holds nothing itself."""
    pair.give("decode", Load(request, name, prompt, "p", 0, (), OURS))


def news(pair: Pair, request: str) -> News:
    """Waits for what prefill's scheduler is told of the request."""
    told = News()

    def there() -> bool:
        nonlocal told
        told = pair.sides["prefill"].reports.take_news() or News()
        return request in told.found or request in told.failed

    until(there)
    return News(told.failed & {request}, found={each: n for each, n in told.found.items() if each == request})


def fill(pair: Pair, request: str, start: int, end: int) -> set[int]:
    pair.give("prefill", Fill(request, start, end, THEIRS[: start // BLOCK], THEIRS[start // BLOCK : end // BLOCK]))
    return received(pair.sides["prefill"], request)


def compute(pair: Pair, request: str) -> None:
    """The rest of it, whatever that is."""
    pair.give("prefill", Save(request, TOKENS, THEIRS))
    pair.give("prefill", Release(request, 7))
    sent(pair.sides["prefill"], request)


def history_is_in(pair: Pair, upto: int = HISTORY // BLOCK, start: int = 0) -> bool:
    prefill, decode = pair.engines["prefill"], pair.engines["decode"]
    return all(prefill.block(THEIRS[i]) == decode.block(STORED[i]) for i in range(start, upto))


def arrived(pair: Pair, start: int = 0) -> bool:
    """The next turn's prompt, from this block of it on, is in decode's blocks, byte for byte as it is in prefill's."""
    prefill, decode = pair.engines["prefill"], pair.engines["decode"]
    last = prefill.beginning(THEIRS[-1], (TOKENS - 1) % BLOCK + 1) == decode.block(OURS[-1])
    return last and all(prefill.block(THEIRS[i]) == decode.block(OURS[i]) for i in range(start, len(OURS) - 1))


def history_is_whole(pair: Pair) -> bool:
    """Each block of the next turn's history has what was stored, or what prefill has: an engine that computes the same
    tokens anew has other bytes here."""
    prefill, decode = pair.engines["prefill"], pair.engines["decode"]
    return all(
        decode.block(ours) in (decode.block(stored), prefill.block(theirs))
        for ours, stored, theirs in zip(OURS, STORED, THEIRS, strict=False)
    )


def rest(pair: Pair) -> None:
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))
    for role in pair.daemons:
        assert pair.stats(role).way_back.transfers.active == 0
