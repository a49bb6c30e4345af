"""Digests of recent prompts, so that a client which is given whole prompts hashes no page twice.

A small tree of token runs, cut at page boundaries: prompts share the runs that they have in common. A prompt is
compared with what is held in the integer width that it comes in; only the pages behind are copied and hashed. Tokens
are compared, not hashes of them: the answers are exact.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable

from kvferry import _core
from kvferry.radix.digests import (
    DIGEST_BYTES,
    TOKEN_BYTES,
    EncodedExtra,
    Extra,
    PromptDigests,
    Tokens,
    check_page_size,
    checked_parent,
    tail_of,
    token_view,
)

MAX_TOKENS = 4 << 20
MAX_RUNS = 4096
_UINT32 = "I"
_NO_EXTRA = EncodedExtra.of(None)

assert array(_UINT32).itemsize == TOKEN_BYTES


class _Run:
    """Full pages behind those of `parent`; the runs that follow, by the tokens of their first page. A root has none."""

    __slots__ = ("children", "digests", "key", "parent", "tokens")

    def __init__(self, parent: _Run | None, key: Hashable, tokens: array[int], digests: bytearray) -> None:
        self.parent = parent
        self.key = key  # in the parent's children; a root's is its encoded extra keys
        self.tokens = tokens
        self.digests = digests
        self.children: dict[Hashable, _Run] = {}


class PromptCache:
    """`digests` is `prompt_digests` at one page size behind one parent, fast for what begins like a recent prompt.

    Kept: at most `max_tokens` tokens (each 4 bytes and its share of a page's 32) in at most `max_runs` runs; a prompt
    that shares nothing is one run, one that extends the last of a run makes that run longer. The runs that were used
    least recently go first. Partial pages are not kept: hashing one costs less than finding it. One owner at a time.
    """

    def __init__(
        self,
        *,
        page_size: int,
        parent: bytes | None = None,
        max_tokens: int = MAX_TOKENS,
        max_runs: int = MAX_RUNS,
    ) -> None:
        """parent: of the first page (None: the default root). ValueError: page_size, parent or a bound below 0."""
        check_page_size(page_size)
        for field, bound in (("max_tokens", max_tokens), ("max_runs", max_runs)):
            if bound < 0:
                raise ValueError(f"{field}: {bound}, must be >= 0")
        self.tokens = 0  # that are kept
        self._page_size = page_size
        self._parent = checked_parent(parent)
        self._max_tokens = max_tokens
        self._max_runs = max_runs
        self._roots: dict[Hashable, _Run] = {}  # none without children
        # Least recently used first. A run comes after all that are behind it in the tree, being used whenever they are:
        # the first is a leaf.
        self._order: OrderedDict[_Run, None] = OrderedDict()

    @property
    def runs(self) -> int:
        return len(self._order)

    def digests(self, tokens: Tokens, *, extra: Extra = None) -> PromptDigests:
        """Digests of the prompt, as `prompt_digests` gives them. ValueError or TypeError name the field and its bound,
        and leave the cache as it was."""
        encoded = EncodedExtra.of(extra) if extra is not None else _NO_EXTRA
        return self._digests(token_view(tokens), encoded)

    def clear(self) -> None:
        self._roots.clear()
        self._order.clear()
        self.tokens = 0

    def _digests(self, view: _core.TokenView, extra: EncodedExtra) -> PromptDigests:
        total, page_size = len(view), self._page_size
        full = total - total % page_size
        name: Hashable = (extra.common, *sorted(extra.by_page.items())) if extra.by_page else extra.common
        root = self._roots.get(name)
        run = root if root is not None else _Run(None, name, array(_UINT32), bytearray())
        known: list[bytes | bytearray] = []
        at, inside = 0, len(run.tokens)  # tokens that are known; of `run`, those that are
        while at < full and inside == len(run.tokens):
            child = run.children.get(view.narrow(at, at + page_size))
            if child is None:
                break
            inside = view.common(at, child.tokens)
            inside -= inside % page_size
            pages = inside // page_size * DIGEST_BYTES
            known.append(child.digests if inside == len(child.tokens) else child.digests[:pages])
            run, at = child, at + inside

        # All that may raise comes before the first change.
        fresh = array(_UINT32, view.narrow(at, full) if at < full else b"")
        rest = view.narrow(full, total)
        extra.check_pages(-(-total // page_size))
        parent = bytes(known[-1][-DIGEST_BYTES:]) if known else self._parent
        if fresh:
            digests = self._hash(fresh, parent, extra, at // page_size)
            known.append(digests)
            parent = digests[-DIGEST_BYTES:]
        answer = PromptDigests(b"".join(known), tail_of(rest, parent, extra.page(full // page_size)), total)

        if fresh and full <= self._max_tokens and self._max_runs:
            if root is None:
                root = self._roots[name] = run
            run = self._store(run, inside, fresh, digests)
        self._use(run)
        while self.tokens > self._max_tokens or len(self._order) > self._max_runs:
            self._drop(next(iter(self._order)))
        return answer

    def _hash(self, tokens: array[int], parent: bytes, extra: EncodedExtra, first_page: int) -> bytes:
        view = _core.TokenView.of(tokens)
        assert view is not None
        return _core.chain_digests(view, b"", self._page_size, parent, extra.common, extra.by_page, first_page)[0]

    def _store(self, run: _Run, inside: int, tokens: array[int], digests: bytes) -> _Run:
        """Puts pages behind the first `inside` tokens of `run`; returns the run that ends with them."""
        self.tokens += len(tokens)
        if inside < len(run.tokens):
            run = self._cut(run, inside)
        elif run.parent is not None and not run.children:
            run.tokens += tokens
            run.digests += digests
            return run
        leaf = _Run(run, self._key(tokens), tokens, bytearray(digests))
        run.children[leaf.key] = leaf
        self._order[leaf] = None
        return leaf

    def _cut(self, run: _Run, inside: int) -> _Run:
        """Cuts `run` behind its first `inside` tokens; returns the upper part, a new run. `run` is the lower part."""
        parent, pages = run.parent, inside // self._page_size * DIGEST_BYTES
        assert parent is not None
        upper = _Run(parent, run.key, run.tokens[:inside], run.digests[:pages])
        parent.children[upper.key] = upper
        run.parent, run.tokens, run.digests = upper, run.tokens[inside:], run.digests[pages:]
        run.key = self._key(run.tokens)
        upper.children[run.key] = run
        self._order[upper] = None
        return upper

    def _use(self, run: _Run) -> None:
        while run.parent is not None:
            self._order.move_to_end(run)
            run = run.parent

    def _drop(self, leaf: _Run) -> None:
        del self._order[leaf]
        self.tokens -= len(leaf.tokens)
        parent = leaf.parent
        assert parent is not None and not leaf.children
        del parent.children[leaf.key]
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]

    def _key(self, tokens: array[int]) -> bytes:
        return tokens[: self._page_size].tobytes()
