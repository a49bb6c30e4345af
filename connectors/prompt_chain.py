"""A request's page digests, hashed here from its token ids and what else names its pages: how its engine hashes, and
whether it does, is nothing to kvferry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvferry.connectors.orders import PromptPages
from kvferry.radix.digests import DIGEST_BYTES, digests_and_tail, joined_digests

if TYPE_CHECKING:
    from kvferry.client.requests import RequestName
    from kvferry.radix.digests import ExtraKeys

KeysBetween: TypeAlias = "Callable[[int, int], ExtraKeys | None]"
"""What names the tokens [start, end) of a request beside their ids: adapters, images and where they lie, a salt.
`start` begins a page, `end` ends it or the tokens, or is one behind it."""


class Unnamed(RuntimeError):
    """Nothing names the request's pages; the message says why."""


class TokenSource(Protocol):
    """The part of a request that is hashed. Its tokens grow, and do not change."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """The first of them; None: they are not there by themselves."""


class PromptChain:
    """The digests of one request's pages, each hashed once, when it is first asked for."""

    def __init__(
        self, source: TokenSource, page_size: int, keys: KeysBetween | None, root: bytes | None = None
    ) -> None:
        """`keys`: None where the token ids say all. `root`: the digest before the first page; None: the default."""
        self._source = source
        self._root = root
        self._page_size = page_size
        self._keys = keys
        self._digests = bytearray()
        self._last: PromptPages | None = None  # that `prompt` gave: it is asked for the same again

    def pages(self, tokens: int) -> bytes:
        """32 bytes for each full page of the first `tokens`, which the request must have."""
        size, wanted = self._page_size, tokens // self._page_size
        first = self._hashed(tokens)
        if wanted > first:
            fresh, extra = self._between(first, wanted * size)
            self._digests += joined_digests(fresh, page_size=size, parent=self._parent(first), extra=extra)
        return bytes(self._digests[: wanted * DIGEST_BYTES])

    def prompt(self, tokens: int) -> PromptPages:
        """The pages of the first `tokens`, with the digest of the partial last one."""
        if self._last is not None and self._last.tokens == tokens:
            return self._last
        full = tokens // self._page_size
        first = min(self._hashed(tokens), full)
        fresh, extra = self._between(first, tokens)
        parent = self._parent(first)
        more, tail = digests_and_tail(fresh, page_size=self._page_size, parent=parent, extra=extra)
        self._digests += more
        self._last = PromptPages(bytes(self._digests[: full * DIGEST_BYTES]), tokens, tail)
        return self._last

    def _hashed(self, tokens: int) -> int:
        """Pages that have their digests, where the first `tokens` are asked for."""
        return len(self._digests) // DIGEST_BYTES

    def _between(self, page: int, tokens: int) -> tuple[Sequence[int], Mapping[int, ExtraKeys | None] | None]:
        """The tokens from this page on, up to `tokens`, and the keys of its pages, counted from there."""
        size, start = self._page_size, page * self._page_size
        whole = None if start else self._source.prompt_token_ids  # a slice would touch each of them once more
        fresh = whole if whole is not None and len(whole) == tokens else self._source.all_token_ids[start:tokens]
        assert len(fresh) == tokens - start, f"the request has not {tokens} tokens"
        if (keys := self._keys) is None:
            return fresh, None
        return fresh, {i: keys(at, min(at + size, tokens)) for i, at in enumerate(range(start, tokens, size))}

    def digest(self, page: int) -> bytes:
        """The digest of one of the pages that were asked for; empty where it is not one of them."""
        return bytes(self._digests[page * DIGEST_BYTES : (page + 1) * DIGEST_BYTES])

    def _parent(self, page: int) -> bytes | None:
        return bytes(self._digests[(page - 1) * DIGEST_BYTES : page * DIGEST_BYTES]) if page else self._root


AHEAD_NAMES = "ends by request, next token by its keys"
"""The rule by which AheadChain names pages. It is part of an engine's facts: who names them otherwise shares none."""


class AheadChain(PromptChain):
    """The digests where the KV of a page's last token is also of the token behind it: a page has that token in its
    name, and what names it beside its id. One at the prompt's very end has the request's in its place, by which both
    halves of the request know it, and no other request: the token behind it is still to be sampled. Once the request
    goes on, it and what follows are named anew."""

    def __init__(
        self, source: TokenSource, page_size: int, keys: KeysBetween | None, root: bytes | None, name: RequestName
    ) -> None:
        super().__init__(source, page_size, self._with_next, root)
        self._beside = keys
        self._name = name
        self._open = -1  # the page that was named without the token behind it

    def _hashed(self, tokens: int) -> int:
        if 0 <= self._open < tokens // self._page_size and len(self._source.all_token_ids) > self._ends(self._open):
            del self._digests[self._open * DIGEST_BYTES :]
            self._open = -1
        return super()._hashed(tokens)

    def prompt(self, tokens: int) -> PromptPages:
        self._last = None  # its last page may have another name by now
        return super().prompt(tokens)

    def _ends(self, page: int) -> int:
        return (page + 1) * self._page_size

    def _with_next(self, start: int, end: int) -> ExtraKeys | None:
        full, is_there = end - start == self._page_size, end < len(self._source.all_token_ids)
        upto = end + 1 if full and is_there else end  # all images have one id
        keys = () if self._beside is None else self._beside(start, upto) or ()
        if not full:
            return keys or None
        if is_there:
            return (*keys, ("next_token", self._source.all_token_ids[end]))
        self._open = start // self._page_size
        return (*keys, ("request", *self._name))
