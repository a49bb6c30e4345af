"""A model without arithmetic: a page's bytes follow from its digest, so every byte that arrives can be checked.

A full page's bytes are a counter-based random stream (Philox) seeded by its digest. A partial page's follow from the
tail digest in the same way; where they arrive, the bytes behind the last token of every fragment must be zero, and
where they are made they are not: so it shows that the daemon cleared them; not in an engine's own layout, where the
daemon cannot. Output token i of a prompt is a function of
the prompt's digests and i, whether the request was retracted meanwhile or not.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.byte_tokens import VOCABULARY
from kvferry.client.rank_pools import RankPools
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.workers.models.interface import Prompt, WrongPage
from kvferry.workers.models.sampling import Sampling

KEPT_BYTES = 32 << 20  # of contents that are kept for the next comparison, instead of being made once more
Bytes = NDArray[np.uint8]


class SimulatedTime(NamedTuple):
    """The time that the model which is not there would take, in seconds."""

    prefill_token_s: float = 0.0
    decode_step_s: float = 0.0


def page_content(digest: bytes, page_bytes: int) -> Bytes:
    """The bytes of the full page with this digest."""
    words = np.frombuffer(digest, dtype=np.uint64)
    counter = np.zeros(4, dtype=np.uint64)
    counter[2:] = words[2:]
    stream = np.random.Philox(key=words[:2], counter=counter)
    return stream.random_raw(-(-page_bytes // 8)).view(np.uint8)[:page_bytes]


def kept_contents(page_bytes: int) -> Callable[[bytes], Bytes]:
    """A function that gives `page_content` of pages of this size, read-only; the latest are kept."""

    @lru_cache(maxsize=KEPT_BYTES // page_bytes)
    def content(digest: bytes) -> Bytes:
        made = page_content(digest, page_bytes)
        made.setflags(write=False)
        return made

    return content


def arrived_tail(tail_digest: bytes, tokens: int, geometry: KVGeometry) -> Bytes:
    """Bytes of a partial page of `tokens` tokens after a transfer: zeros behind the last token of every fragment."""
    content = page_content(tail_digest, geometry.page_bytes)
    start = 0
    for cache in geometry.caches:
        own = content[start : start + cache.page_bytes].reshape(cache.fragments, cache.fragment_bytes)
        own[:, tokens * cache.fragment_token_bytes :] = 0
        start += cache.page_bytes
    return content


def computed_tail(tail_digest: bytes, tokens: int, geometry: KVGeometry) -> Bytes:
    """Bytes of a partial page of `tokens` tokens as the prefill engine leaves them."""
    if geometry.layout is Layout.ENGINE:
        return arrived_tail(tail_digest, tokens, geometry)
    return page_content(tail_digest, geometry.page_bytes)


def output_token(prompt: Prompt, index: int) -> int:
    """Output token `index` of a prompt."""
    identity = prompt.digests[-DIGEST_BYTES:] + prompt.tail_digest
    word = hashlib.sha256(identity + index.to_bytes(8, "little")).digest()
    return int.from_bytes(word[:8], "little") % VOCABULARY


class SyntheticCompute:
    """Fills and checks pages of `pools`, on every rank."""

    def __init__(self, pools: RankPools, simulated: SimulatedTime) -> None:
        self._pools = pools
        self._simulated = simulated
        self._content = kept_contents(pools.geometry.page_bytes)

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    def sequence(
        self,
        prompt: Prompt,
        pages: Sequence[int],
        sampling: Sampling,
        *,
        shared_tokens: int,
        asked: Prompt | None = None,
    ) -> SyntheticSequence:
        return SyntheticSequence(
            self._pools, self._simulated, self._content, prompt, list(pages), shared_tokens, asked or prompt
        )


class SyntheticSequence:
    """One request. The page that is being filled with output keeps the prompt's tail until its last token is known:
    only then has it a digest."""

    def __init__(
        self,
        pools: RankPools,
        simulated: SimulatedTime,
        content: Callable[[bytes], Bytes],
        prompt: Prompt,
        pages: list[int],
        shared_tokens: int,
        asked: Prompt,
    ) -> None:
        self._pools = pools
        self._geometry = geometry = pools.geometry
        self._simulated = simulated
        self._content = content
        self._prompt = prompt
        self._asked = asked
        self._pages = pages
        self._shared_pages = shared_tokens // geometry.page_size
        self._full_pages, self._tail_tokens = divmod(len(prompt.tokens), geometry.page_size)
        self._tail: Bytes | None = None  # what the prompt's partial page holds, while it is there
        self._behind = prompt.chain(geometry.page_size)
        self._stored_pages = 0  # full pages that hold their digest's bytes

    def add_pages(self, pages: Sequence[int]) -> None:
        self._pages.extend(pages)

    def resume(self, tokens: int) -> None:
        self._check_own_output()
        full = tokens // self._geometry.page_size
        self._stored_pages = full
        if self._tail_tokens and tokens == len(self._prompt.tokens):
            self._tail = arrived_tail(self._prompt.tail_digest, self._tail_tokens, self._geometry)
        self._check()

    def prompt(self, start: int, end: int) -> None:
        _spend(self._simulated.prefill_token_s * (end - start))
        for index in range(start // self._geometry.page_size, end // self._geometry.page_size):
            self._store_full(index)
        if end == len(self._prompt.tokens) and self._tail_tokens:
            self._tail = computed_tail(self._prompt.tail_digest, self._tail_tokens, self._geometry)
            self._store(self._full_pages, self._tail)

    def first_token(self) -> int:
        return self._output_behind(len(self._prompt.tokens))

    def check_first_token(self, token: int) -> None:
        if token != (expected := self.first_token()):
            raise WrongPage(f"the aux blob gives first token {token}; the prompt's is {expected}")

    def step(self, token: int, position: int) -> int:
        _spend(self._simulated.decode_step_s)
        self._behind.extend([token])
        full_tokens = self._full_pages * self._geometry.page_size
        assert full_tokens + self._behind.tokens == position + 1, f"{self._behind.tokens} tokens; position {position}"
        if (position + 1) % self._geometry.page_size == 0:
            if self._tail is not None:
                self._check_page(self._full_pages, self._tail, "the prompt's tail")
                self._tail = None
            self._store_full(position // self._geometry.page_size)
        return self._output_behind(position + 1)

    def finish(self) -> None:
        self._check()

    def _output_behind(self, tokens: int) -> int:
        """The token behind the first `tokens` tokens of prompt and output."""
        return output_token(self._asked, tokens - len(self._asked.tokens))

    def _check_own_output(self) -> None:
        """Checks the output so far of a request that was retracted, with which its prompt ends."""
        for position in range(len(self._asked.tokens), len(self._prompt.tokens)):
            expected = self._output_behind(position)
            if (token := int(self._prompt.tokens[position])) != expected:
                raise WrongPage(f"token {position} of the prompt is {token}; as output it was {expected}")

    def _digest(self, index: int) -> bytes:
        if index < self._full_pages:
            return self._prompt.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        behind = (index - self._full_pages) * DIGEST_BYTES
        return self._behind.digests[behind : behind + DIGEST_BYTES]

    def _store_full(self, index: int) -> None:
        assert index == self._stored_pages, f"page {index} of the request after {self._stored_pages}"
        self._store(index, self._content(self._digest(index)))
        self._stored_pages += 1

    def _store(self, index: int, content: Bytes) -> None:
        assert index >= self._shared_pages, f"page {index} of the request is shared"
        self._pools.store(self._pages[index], content)

    def _check(self) -> None:
        for index in range(self._stored_pages):
            self._check_page(index, self._content(self._digest(index)), "its digest")
        if self._tail is not None:
            self._check_page(self._full_pages, self._tail, "the prompt's tail")

    def _check_page(self, index: int, content: Bytes, source: str) -> None:
        wrong = self._pools.wrong_bytes(self._pages[index], content)
        if len(wrong):
            raise WrongPage(
                f"page {self._pages[index]} (page {index} of the request) does not hold the bytes of {source}: "
                f"{len(wrong)} of {len(content)} are wrong, the first at byte {wrong[0]}"
            )


def _spend(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)
