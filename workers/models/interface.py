"""The interface of a model to prefill and decode. A real one is in transformer.py, one without arithmetic in
synthetic.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.radix.digests import DIGEST_BYTES, DigestChain
from kvferry.workers.models.sampling import Sampling


class Prompt(NamedTuple):
    """A request's prompt as every layer sees it."""

    tokens: NDArray[np.uint32]
    digests: bytes  # 32 bytes for every full page
    tail_digest: bytes  # of the partial last page; empty without one

    def chain(self, page_size: int) -> DigestChain:
        """The chain behind the prompt's full pages, to be extended by output tokens; it holds the tail's tokens."""
        chain = DigestChain(page_size=page_size, parent=self.digests[-DIGEST_BYTES:] or None)
        chain.extend(self.tokens[len(self.digests) // DIGEST_BYTES * page_size :])
        return chain

    def extended(self, output: Sequence[int], page_size: int) -> Prompt:
        """This prompt with `output` behind it; its full pages are not hashed again."""
        behind = self.chain(page_size)
        behind.extend(output)
        tokens = np.concatenate([self.tokens, np.array(output, dtype=np.uint32)])
        return Prompt(tokens, self.digests + behind.digests, behind.tail_digest)


class WrongPage(Exception):
    """A page does not hold the bytes it must hold."""


class SequenceCompute(Protocol):
    """One request's computation over its pool pages. Called in the compute thread, one call at a time;
    `add_pages` is called between calls."""

    def add_pages(self, pages: Sequence[int]) -> None:
        """The request has these pages too, behind those it has."""

    def resume(self, tokens: int) -> None:
        """The first call: the KV of the first `tokens` tokens is in the pages. Raises WrongPage if it sees that it is
        wrong."""

    def prompt(self, start: int, end: int) -> None:
        """Computes and stores the KV of the prompt's tokens [start, end); what lies before is in the pool."""

    def first_token(self) -> int:
        """The first output token; after `prompt` up to the prompt's end."""

    def step(self, token: int, position: int) -> int:
        """Stores the KV of output token `token` at `position` (from the prompt's start) and returns the next token."""

    def check_first_token(self, token: int) -> None:
        """`token` came with the aux blob. Raises WrongPage where it can tell that it is wrong."""

    def finish(self) -> None:
        """The last call: raises WrongPage where the pages were overwritten by someone else meanwhile."""


class Compute(Protocol):
    """A model. `sequence` may be called from any thread."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""

    def sequence(
        self,
        prompt: Prompt,
        pages: Sequence[int],
        sampling: Sampling,
        *,
        shared_tokens: int,
        asked: Prompt | None = None,
    ) -> SequenceCompute:
        """`shared_tokens`: the pages of so many first tokens may be read by others too and are never written.
        `asked`: what `prompt` begins with, its tokens behind that are output of the same request; None: all of it."""


class Step(NamedTuple):
    """The next `SequenceCompute.step` of one of several requests."""

    sequence: SequenceCompute
    token: int
    position: int


class BatchCompute(Compute, Protocol):
    """A model that steps several requests at once."""

    def steps(self, steps: Sequence[Step]) -> list[int]:
        """The next token of each, as its `step` gives it but for rounding; at least one, of different sequences."""
