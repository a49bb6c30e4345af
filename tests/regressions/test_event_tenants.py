"""KV events where tenants share a daemon: what one is told, and what is said of its pages, is its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvferry.daemon.core import kv_events
from kvferry.daemon.core.kv_events import KvEvent, Removed, Stored, TokenChain
from kvferry.daemon.core.limits import Name
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import chain_digests, root_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.namespace import NamespaceFacts
from tests.regressions.request_cores import NAMESPACE, OTHER_TENANT, PAGE, Decode, name

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=4, dtype="float16", page_size=PAGE)
FACTS = NamespaceFacts("model", "1", GEOMETRY, "sha256_cbor", root_digest("seed"))
WORKERS = {NAMESPACE: 1, OTHER_TENANT: 2}
TOKENS = list(range(100, 100 + 3 * PAGE))


def path_of(tokens: list[int], digest_tokens: int = PAGE) -> bytes:
    chained = chain_digests(tokens, page_size=digest_tokens, parent=FACTS.root_digest)
    each = PAGE // digest_tokens
    return chained[each - 1 :: each].tobytes()


def hashes(digests: bytes) -> tuple[bytes, ...]:
    return tuple(digests[at : at + 32] for at in range(0, len(digests), 32))


class Events(Decode):
    """A decode core whose KV events are on."""

    def __init__(self, chain: TokenChain | None) -> None:
        super().__init__(32)
        self.cache.log_events(chain)
        self.transfers = 0
        assert len(self.events()) == 1, "Cleared"

    def ready(self, number: Name, namespace: bytes, digests: bytes) -> int:
        """Admits, and brings whatever is missing. From which token on tokens are wanted."""
        pages = len(digests) // 32
        request = wire.Admit(name=number.to_proto(), digests=digests, tokens=pages * PAGE, prefill="p")
        request.max_new_tokens = 1
        self.core.admit(WORKERS[namespace], namespace, number, request, 60.0, 0.0)
        missing = pages - self.core.leases[number].matched
        self.transfers += 1
        if missing:
            self.core.pages_arrived(self.transfers, list(range(missing)), 0.0)
        self.core.transfer_completed(self.transfers, 0.0)
        self.core.aux("p", number, b"first token", 0.0)
        self.take()
        (ready,) = self.told("ready")
        return ready.ready.page_tokens_from

    def send(self, number: Name, namespace: bytes, tokens: list[int], first: int = 0) -> None:
        self.core.page_tokens(WORKERS[namespace], number, first, tokens, 0.0)
        self.take()
        assert not self.told("failed")

    def finish(self, number: Name, namespace: bytes) -> None:
        self.core.finish(WORKERS[namespace], number, self.core.leases[number].tokens, b"", 0.0)
        self.take()
        assert self.told("ended")

    def events(self) -> list[KvEvent]:
        assert self.cache.events is not None
        return self.cache.events.take()

    def flush(self, namespace: bytes) -> None:
        self.cache.flush([self.cache.namespace(namespace)])


def told_to_other(*, after_one: bool) -> list[tuple[int, int]]:
    """Of three requests of one prompt: pages that matched, and where wanted tokens begin. `after_one`: of another
    tenant, whose tokens are known."""
    decode, path = Events(TokenChain.of(FACTS)), path_of(TOKENS)
    if after_one:
        assert decode.ready(name(1), NAMESPACE, path) == 0
        decode.send(name(1), NAMESPACE, TOKENS)
        decode.finish(name(1), NAMESPACE)
    told = []
    for number in (2, 3, 4):
        first = decode.ready(name(number), OTHER_TENANT, path)
        told.append((decode.core.leases[name(number)].matched, first))
        if number > 2:
            decode.send(name(number), OTHER_TENANT, TOKENS[first:], first)
        decode.finish(name(number), OTHER_TENANT)
    return told


def test_whose_tokens_are_known_is_told_to_no_other_tenant() -> None:
    assert told_to_other(after_one=True) == told_to_other(after_one=False) == [(0, 0), (3, 0), (3, 3 * PAGE)]


def test_a_page_of_two_tenants_is_stored_once_and_removed_with_the_last_one() -> None:
    decode, path = Events(TokenChain.of(FACTS)), path_of(TOKENS)
    for number, namespace in ((1, NAMESPACE), (2, OTHER_TENANT)):
        decode.ready(name(number), namespace, path)
        decode.send(name(number), namespace, TOKENS)
        decode.finish(name(number), namespace)
    (stored,) = decode.events()
    assert isinstance(stored, Stored)
    assert (stored.digests, stored.parent, list(stored.tokens)) == (hashes(path), None, TOKENS)
    decode.flush(NAMESPACE)
    assert not decode.events(), "the other tenant has it"
    assert decode.ready(name(3), NAMESPACE, path) == 0, "its own pages went, so it is asked again"
    decode.finish(name(3), NAMESPACE)
    decode.flush(NAMESPACE)
    decode.flush(OTHER_TENANT)
    (removed,) = decode.events()
    assert isinstance(removed, Removed)
    assert set(removed.digests) == set(hashes(path))


def test_tokens_that_are_not_the_pages_are_not_announced() -> None:
    """Whoever sent them is asked again; another tenant's, of the same pages, are announced as they are."""
    decode, path = Events(TokenChain.of(FACTS)), path_of(TOKENS)
    wrong = [7] * PAGE
    decode.ready(name(1), NAMESPACE, path)
    decode.send(name(1), NAMESPACE, wrong * 3)
    decode.finish(name(1), NAMESPACE)
    assert not decode.events()
    assert decode.ready(name(2), NAMESPACE, path) == 0
    decode.send(name(2), NAMESPACE, TOKENS[: 2 * PAGE] + wrong)
    (stored,) = decode.events()
    assert isinstance(stored, Stored)
    assert stored.digests == hashes(path)[:2]
    decode.ready(name(3), OTHER_TENANT, path)
    decode.send(name(3), OTHER_TENANT, TOKENS)
    (rest,) = decode.events()
    assert isinstance(rest, Stored)
    assert (rest.digests, rest.parent, list(rest.tokens)) == (hashes(path)[2:], hashes(path)[1], TOKENS[2 * PAGE :])


def test_tokens_of_more_pages_than_an_event_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_PAGES", 2)
    tokens = list(range(5 * PAGE))
    decode, path = Events(TokenChain.of(FACTS)), path_of(tokens)
    decode.ready(name(1), NAMESPACE, path)
    decode.send(name(1), NAMESPACE, tokens)
    stored = [event for event in decode.events() if isinstance(event, Stored)]
    assert [len(event.digests) for event in stored] == [2, 2, 1]
    assert [token for event in stored for token in event.tokens] == tokens
    assert [event.parent for event in stored] == [None, hashes(path)[1], hashes(path)[3]]


def test_where_the_first_page_does_not_fit_no_other_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def noted(tokens: Sequence[int], *, page_size: int, parent: bytes) -> object:
        hashed.append(len(tokens))
        return chain_digests(tokens, page_size=page_size, parent=parent)

    monkeypatch.setattr(kv_events, "chain_digests", noted)
    decode = Events(TokenChain.of(FACTS))
    keyed = chain_digests(TOKENS, page_size=PAGE, parent=FACTS.root_digest, extra=["adapter"]).tobytes()
    decode.ready(name(1), NAMESPACE, keyed)
    decode.send(name(1), NAMESPACE, TOKENS)
    assert not decode.events()
    assert hashed == [PAGE]


@pytest.mark.parametrize("digest_tokens", [1, 2, PAGE])
def test_digests_of_fewer_tokens_than_a_page_are_judged_too(digest_tokens: int) -> None:
    chain = TokenChain.of(replace(FACTS, digest_tokens=digest_tokens))
    decode, path = Events(chain), path_of(TOKENS, digest_tokens)
    decode.ready(name(1), NAMESPACE, path)
    decode.send(name(1), NAMESPACE, TOKENS)
    (stored,) = decode.events()
    assert isinstance(stored, Stored)
    assert stored.digests == hashes(path)


def test_tokens_are_believed_where_the_algorithm_is_not_known() -> None:
    chain = TokenChain.of(replace(FACTS, digest_algorithm="xxhash_cbor"))
    assert chain is None
    decode = Events(chain)
    decode.ready(name(1), NAMESPACE, path_of(TOKENS))
    decode.send(name(1), NAMESPACE, [7] * len(TOKENS))
    (stored,) = decode.events()
    assert isinstance(stored, Stored)
    assert list(stored.tokens) == [7] * len(TOKENS)
