"""The digest chain: names of pages that are equal exactly when the whole prefixes are.

digest = SHA-256(canonical CBOR of [parent, [token, ...], extra]), 32 raw bytes, page by page; the formula of vLLM's
`sha256_cbor`. The extra item is null, or the list of a page's extra keys (LoRA, multimodal items, and
`("cache_salt", salt)` in page 0). The hashing is C++ (`csrc/digests/digest_chain.cpp`), one call a prompt;
a long one lets the GIL go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from kvferry import _core
from kvferry.radix import cbor
from kvferry.radix.cbor import ExtraKey

if TYPE_CHECKING:  # below it is imported where it is used: commands that show settings import this, and need none
    import numpy as np
    from numpy.typing import NDArray

DIGEST_BYTES = 32
TOKEN_BYTES = 4  # of a token that is kept
MAX_PAGE_SIZE = _core.MAX_PAGE_SIZE
MAX_TOKEN = 2**32 - 1
DEFAULT_SEED = "vllm-none-hash"

ExtraKeys: TypeAlias = Sequence[ExtraKey]
Extra: TypeAlias = ExtraKeys | Mapping[int, ExtraKeys | None] | None
"""None; keys that each page of a call has; or keys by page index. An empty list is no keys (null), as in vLLM."""

# Whatever numpy turns into uint32 without loss. Contiguous buffers of 32 or 64 bits are read as they are, a list or
# tuple of ints is copied once, all else goes through numpy.
Tokens: TypeAlias = "NDArray[np.integer] | Sequence[int] | Iterable[int] | memoryview"


def split_digests(digests: bytes) -> list[bytes]:
    """Joined digests, each by itself."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


class PromptDigests(NamedTuple):
    digests: bytes  # 32 for each full page, joined
    tail: bytes  # 32 of the partial last page, or empty
    tokens: int


def root_digest(seed: str | None = None) -> bytes:
    """The parent of a first page: SHA-256 of the CBOR text string `seed`."""
    return _core.sha256(cbor.encode(DEFAULT_SEED if seed is None else seed, field="seed"))


_ROOT = root_digest()


def chain_digests(
    tokens: Tokens, *, page_size: int, parent: bytes | None = None, extra: Extra = None
) -> NDArray[np.uint8]:
    """Digests of the full pages of `tokens`, shape (n, 32); tokens behind the last full page are left out.

    parent: digest of the page before (None: the default root). extra: see `Extra`; page indexes count from this call's
    first page, and may name the partial page. ValueError or TypeError name the field and its bound.
    """
    import numpy as np

    digests = joined_digests(tokens, page_size=page_size, parent=parent, extra=extra)
    return np.frombuffer(bytearray(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def joined_digests(tokens: Tokens, *, page_size: int, parent: bytes | None = None, extra: Extra = None) -> bytes:
    """The digests of `chain_digests`, one behind the other."""
    return _chained(tokens, page_size, checked_parent(parent), EncodedExtra.of(extra))[0]


def digests_and_tail(
    tokens: Tokens, *, page_size: int, parent: bytes | None = None, extra: Extra = None
) -> tuple[bytes, bytes]:
    """`joined_digests`, and the digest of the partial page behind them: b"" where there is none."""
    first, encoded = checked_parent(parent), EncodedExtra.of(extra)
    digests, rest = _chained(tokens, page_size, first, encoded)
    return digests, tail_of(rest, digests[-DIGEST_BYTES:] or first, encoded.page(len(digests) // DIGEST_BYTES))


def _chained(tokens: Tokens, page_size: int, parent: bytes, encoded: EncodedExtra) -> tuple[bytes, bytes]:
    """Joined digests of full pages, and the tokens behind them as uint32."""
    check_page_size(page_size)
    view = token_view(tokens)
    encoded.check_pages(-(-len(view) // page_size))
    return _core.chain_digests(view, b"", page_size, parent, encoded.common, encoded.by_page, 0)


def tail_digest(tokens: Tokens, *, page_size: int, parent: bytes | None = None, extra: Extra = None) -> bytes:
    """The same formula over a partial page: `tokens` are only those behind the last full page, fewer than `page_size`.

    parent: digest of the last full page. Page 0 of `extra` is the partial page. No tokens: b"".
    """
    check_page_size(page_size)
    view = token_view(tokens)
    if len(view) >= page_size:
        raise ValueError(f"tokens: {len(view)} of them, must be fewer than page_size ({page_size})")
    encoded = EncodedExtra.of(extra)
    encoded.check_pages(1)
    return tail_of(view.narrow(0, len(view)), checked_parent(parent), encoded.page(0))


def prompt_digests(tokens: Tokens, *, page_size: int, extra: Extra = None) -> PromptDigests:
    """All that an admission asks for, of a prompt that begins at the default root."""
    chain = DigestChain(page_size=page_size, extra=extra)
    chain.extend(tokens)
    chain.check_extra()
    return PromptDigests(chain.digests, chain.tail_digest, chain.tokens)


class DigestChain:
    """A conversation's chain: extended turn by turn, and never hashed again.

    Page indexes in `extra` count from the chain's first page; pages that never come are no error. One owner at a time.
    """

    def __init__(self, *, page_size: int, parent: bytes | None = None, extra: Extra = None) -> None:
        check_page_size(page_size)
        self._page_size = page_size
        self._parent = checked_parent(parent)  # of the partial page
        self._extra = EncodedExtra.of(extra)
        self._digests = bytearray()
        self._partial = b""  # its tokens, uint32

    def extend(self, tokens: Tokens) -> None:
        """Appends tokens. Bad tokens raise and leave the chain as it was."""
        common, by_page = self._extra
        fresh, self._partial = _core.chain_digests(
            token_view(tokens), self._partial, self._page_size, self._parent, common, by_page, self.pages
        )
        if fresh:
            self._digests += fresh
            self._parent = fresh[-DIGEST_BYTES:]

    @property
    def digests(self) -> bytes:
        """32 bytes for each full page, joined."""
        return bytes(self._digests)

    @property
    def tail_digest(self) -> bytes:
        """Digest of the partial last page; b"" when there is none."""
        return tail_of(self._partial, self._parent, self._extra.page(self.pages))

    @property
    def tokens(self) -> int:
        return self.pages * self._page_size + len(self._partial) // TOKEN_BYTES

    @property
    def pages(self) -> int:
        """The number of full pages."""
        return len(self._digests) // DIGEST_BYTES

    def check_extra(self) -> None:
        """ValueError if `extra` names a page that the chain has not reached."""
        self._extra.check_pages(self.pages + (1 if len(self._partial) else 0))


class EncodedExtra(NamedTuple):
    common: bytes
    by_page: dict[int, bytes]

    @classmethod
    def of(cls, extra: Extra) -> EncodedExtra:
        if isinstance(extra, Mapping):
            by_page = {}
            for page, keys in extra.items():
                if isinstance(page, bool) or not isinstance(page, int):
                    raise TypeError(f"extra: page index {page!r}, must be an int")
                if page < 0:
                    raise ValueError(f"extra: page index {page}, must be >= 0")
                by_page[page] = _encode_keys(keys, f"extra[{page}]")
            return cls(cbor.NULL, by_page)
        return cls(_encode_keys(extra, "extra"), {})

    def page(self, index: int) -> bytes:
        return self.by_page.get(index, self.common)

    def check_pages(self, pages: int) -> None:
        for page in self.by_page:
            if page >= pages:
                raise ValueError(f"extra: page index {page}, must be < {pages} (pages of the tokens)")


def _encode_keys(keys: ExtraKeys | None, field: str) -> bytes:
    if keys is None:
        return cbor.NULL
    if not isinstance(keys, (list, tuple)):
        raise TypeError(f"{field}: {type(keys).__name__}, must be None or a list of keys")
    return cbor.encode(keys, field=field) if keys else cbor.NULL


def tail_of(tokens: bytes, parent: bytes, extra: bytes) -> bytes:
    """Digest of a partial page of these tokens (uint32), b"" without any; `extra` is encoded."""
    return _core.page_digest(tokens, parent, extra) if tokens else b""


def check_page_size(page_size: int) -> None:
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"page_size: {page_size}, must be in [1, {MAX_PAGE_SIZE}] tokens")


def checked_parent(parent: bytes | None) -> bytes:
    if parent is None:
        return _ROOT
    if len(parent) != DIGEST_BYTES:
        raise ValueError(f"parent: {len(parent)} bytes, must be {DIGEST_BYTES}")
    return bytes(parent)


def token_view(tokens: Tokens) -> _core.TokenView:
    """A view from which the C++ core reads the tokens. One may be out of range still: whatever copies or hashes it will
    say so."""
    view = _core.TokenView.of(tokens)
    if view is None:
        view = _core.TokenView.of(_converted(tokens))
        assert view is not None
    return view


def _converted(tokens: Tokens) -> NDArray[np.uint32]:
    """A contiguous, aligned uint32 view or checked copy."""
    import numpy as np

    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"tokens: {type(tokens).__name__}, must be integers")
    if not hasattr(tokens, "__len__"):
        tokens = list(cast(Iterable[int], tokens))
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens: {array.ndim} dimensions, must be 1")
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.dtype.kind not in "iu":
        raise _refused_token(tokens, array)
    if not (array.dtype.kind == "u" and array.itemsize <= 4):
        wrong = (array < 0) | (array > MAX_TOKEN)
        if wrong.any():
            index = int(wrong.argmax())
            raise _out_of_range(index, int(array[index]))
    return np.require(array, np.uint32, ["C", "A"])


def _refused_token(tokens: Tokens, array: NDArray[np.generic]) -> Exception:
    """numpy makes floats or objects of a list with integers outside of 64 bits: then one of those is what is wrong."""
    import numpy as np

    for index, token in enumerate(tokens):
        if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
            return TypeError(f"tokens[{index}]: {token!r}, must be an int")
        if not 0 <= token <= MAX_TOKEN:
            return _out_of_range(index, int(token))
    return TypeError(f"tokens: array of {array.dtype}, must hold integers")


def _out_of_range(index: int, value: int) -> ValueError:
    return ValueError(f"tokens[{index}]: {value}, must be in [0, {MAX_TOKEN}]")
