"""What names a request's pages: kvferry's chain is vLLM's own, of whatever a request carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.prompt_chain import PromptChain
from kvferry.connectors.vllm.extra_keys import keys_of

BLOCK = 16


@dataclass
class Request:
    """The part of vLLM's Request that its hashing reads."""

    all_token_ids: list[int]
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None
    prompt_embeds: Any = None
    block_hashes: list[bytes] = field(default_factory=list)
    _prompt_embeds_per_block_hashes: dict[Any, bytes] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def test_a_request_that_its_tokens_name_is_not_looked_at() -> None:
    assert keys_of(Request([1, 2, 3])) is None
    assert keys_of(Request([1, 2, 3], cache_salt="")) is None


def random_request(chosen: Random) -> Request:
    tokens = [chosen.randrange(1 << 17) for _ in range(chosen.randrange(1, 9 * BLOCK))]
    request = Request(tokens)
    at = 0
    while chosen.random() < 0.5 and at < len(tokens):
        offset = at + chosen.randrange(BLOCK * 2)
        length = chosen.randrange(1, BLOCK * 3)
        place = SimpleNamespace(offset=offset, length=length)
        request.mm_features.append(SimpleNamespace(identifier=f"{chosen.randrange(4):x}" * 8, mm_position=place))
        at = offset + length
    if chosen.random() < 0.3:
        name = f"adapter-{chosen.randrange(4)}"
        request.lora_request = SimpleNamespace(lora_name=name, lora_path=f"/{name}")
    if chosen.random() < 0.3:
        request.cache_salt = f"salt-{chosen.randrange(4)}"
    if chosen.random() < 0.1:
        import torch

        request.prompt_embeds = torch.full((len(tokens), 2), float(chosen.randrange(3)))
    return request


@pytest.mark.nightly
def test_the_chain_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 requests; in an environment that has vLLM."""
    cache = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    from vllm.utils.hashing import sha256_cbor

    monkeypatch.setenv("PYTHONHASHSEED", "vllm-none-hash")  # what later versions begin with by themselves
    cache.init_none_hash(sha256_cbor)
    hasher = cache.get_request_block_hasher(BLOCK, sha256_cbor)
    chosen = Random(7)
    for _ in range(100_000):
        request = random_request(chosen)
        whole = len(request.all_token_ids)
        chain = PromptChain(request, BLOCK, keys_of(request))
        chain.pages(chosen.randint(0, whole))
        assert chain.pages(whole) == b"".join(hasher(request))
