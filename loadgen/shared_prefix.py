"""Requests behind a few long prefixes: documents, agents, long system prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvferry.loadgen.distributions import Constant, Distribution, generator
from kvferry.loadgen.scripts import TextScript, TextTurn, TokenRun, TokenScript, TokenTurn, WorkloadError
from kvferry.loadgen.workload import MultiTurn, random_run


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a workload; prefixes and suffixes in tokens, or words of text."""

    prefixes: int
    prefix: int
    suffix: int
    output: int
    requests: int
    concurrency: int

    def __post_init__(self) -> None:
        for name in ("prefixes", "prefix", "suffix", "output", "requests", "concurrency"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name} must be >= 1, got {getattr(self, name)}")


PRESETS = {
    "published": Sizes(20, 50_000, 4_500, 350, 1_000, 128),
    "published-tenth": Sizes(20, 5_000, 450, 35, 1_000, 128),
    "small": Sizes(8, 2_000, 200, 32, 200, 32),
    "tiny": Sizes(4, 256, 32, 8, 32, 8),
}


class SharedPrefix:
    """One request a conversation, each of a prefix chosen evenly and a suffix of its own."""

    def __init__(
        self, sizes: Sizes, *, seed: int, vocabulary: int, output_tokens: Distribution | None = None, label: str = ""
    ) -> None:
        self.sizes = sizes
        self._seed = seed
        self._label = label
        self._output = output_tokens or Constant(sizes.output)
        self._texts = MultiTurn(1, Constant(1), Constant(1), self._output, seed=seed, vocabulary=vocabulary)
        self._vocabulary = vocabulary
        self._prefix_run = lru_cache(maxsize=256)(self._make_prefix_run)
        self._prefix_text = lru_cache(maxsize=256)(self._make_prefix_text)

    @property
    def name(self) -> str:
        sizes = self.sizes
        return (
            f"{self._label or 'shared-prefix'}: {sizes.requests} requests, {sizes.prefixes} prefixes of {sizes.prefix} "
            f"+ {sizes.suffix}, output {self._output}"
        )

    @property
    def conversations(self) -> int:
        return self.sizes.requests

    def turns(self, conversation: int) -> int:
        return 1

    def start_s(self, conversation: int) -> float | None:
        return None

    def prefix_of(self, conversation: int) -> int:
        return int(generator(self._seed, "prefix of", conversation).integers(0, self.sizes.prefixes))

    def tokens(self, conversation: int) -> TokenScript:
        source = generator(self._seed, "suffix", conversation)
        suffix = random_run(source, self.sizes.suffix, self._vocabulary)
        runs = (self._prefix_run(self.prefix_of(conversation)), suffix)
        return TokenScript((TokenTurn(runs, self._output.count(source, 1)),))

    def text(self, conversation: int) -> TextScript:
        source = generator(self._seed, "suffix", conversation)
        script = MultiTurn(
            1, Constant(1), Constant(self.sizes.suffix), self._output, seed=int(source.integers(1 << 62))
        )
        prefix = self._prefix_text(self.prefix_of(conversation))
        return TextScript(prefix, (TextTurn(script.text(0).turns[0].text, self._output.count(source, 1)),))

    def _make_prefix_run(self, prefix: int) -> TokenRun:
        return random_run(generator(self._seed, "prefix", prefix), self.sizes.prefix, self._vocabulary)

    def _make_prefix_text(self, prefix: int) -> str:
        seed = int(generator(self._seed, "prefix", prefix).integers(1 << 62))
        return MultiTurn(1, Constant(1), Constant(self.sizes.prefix), self._output, seed=seed).text(0).turns[0].text
