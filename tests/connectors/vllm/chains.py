"""The connector's chain against the installed vLLM's own `sha256_cbor` chain, over random requests with random extra
keys. A program for vLLM's environments:

python tests/connectors/vllm/chains.py [REQUESTS]

Of each request all pages are as vLLM's formula names them where every key has its kind and an adapter is named by its
contents. Of later versions, whose keys have kinds, that is vLLM's own chain, but for adapters. Of 0.26, whose keys have
none, the pages before the first one with a key are vLLM's own. A twin that differs in one image, the adapter or the
salt alone has no page in common from there on.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from kvferry.connectors.prompt_chain import PromptChain
from kvferry.connectors.vllm.extra_keys import keys_of
from kvferry.connectors.vllm.weights import adapter_files
from kvferry.connectors.weight_files import hash_of
from kvferry.radix.digests import split_digests

BLOCK = 16
ADAPTERS = 3


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
    prompt_token_ids: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def adapters_in(folder: Path) -> list[Any]:
    """Some, one with the name of a salt."""
    made = []
    for number in range(ADAPTERS):
        (own := folder / str(number)).mkdir()
        (own / "adapter_model.safetensors").write_bytes(bytes([number]))
        (own / "adapter_config.json").write_text("{}")
        name = f"salt-{number}" if number else "adapter"
        made.append(SimpleNamespace(lora_name=name, lora_int_id=number + 1, lora_path=str(own), load_inplace=False))
    return made


def random_request(chosen: Random, adapters: Sequence[Any]) -> Request:
    tokens = [chosen.randrange(1 << 17) for _ in range(chosen.randrange(1, 9 * BLOCK))]
    request = Request(tokens)
    at = 0
    while chosen.random() < 0.5 and at < len(tokens):
        offset = at + chosen.randrange(BLOCK * 2)
        length = chosen.randrange(1, BLOCK * 3)
        request.mm_features.append(image(f"{chosen.randrange(4):x}" * 8, offset, length))
        at = offset + length
    if chosen.random() < 0.3:
        request.cache_salt = f"salt-{chosen.randrange(4)}"
    if chosen.random() < 0.1:
        import torch

        request.prompt_embeds = torch.full((len(tokens), 2), float(chosen.randrange(3)))
    if chosen.random() < 0.1:
        request.lora_request = chosen.choice(adapters)
    return request


def image(name: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def twin_of(request: Request, chosen: Random, adapters: Sequence[Any]) -> tuple[Request, int]:
    """One that differs in a single key, and its first page that is another."""
    fresh = replace(request, block_hashes=[], _prompt_embeds_per_block_hashes={})
    what = chosen.choice(["salt", "adapter", *(["image"] if request.mm_features else [])])
    if what == "salt":
        fresh.cache_salt = f"{request.cache_salt or ''}+"
        return fresh, 0
    if what == "adapter":
        fresh.lora_request = chosen.choice([each for each in (None, *adapters) if each is not request.lora_request])
        return fresh, 0
    number = chosen.randrange(len(request.mm_features))
    place = request.mm_features[number].mm_position
    fresh.mm_features = [*request.mm_features]
    fresh.mm_features[number] = image("another", place.offset, place.length)
    return fresh, place.offset // BLOCK


def kinds_of_keys(request: Request, start: int, end: int) -> tuple[Any, ...] | None:
    """The keys of a page, made from the request alone."""
    keys: list[Any] = []
    if (adapter := request.lora_request) is not None:
        keys.append(("lora", adapter.lora_name, hash_of(adapter_files(adapter.lora_path))))
    for each in request.mm_features:
        place = each.mm_position
        if place.offset < end and start < place.offset + place.length:
            keys.append(("mm", each.identifier, place.offset - start))
    if request.cache_salt and not start:
        keys.append(("cache_salt", request.cache_salt))
    if request.prompt_embeds is not None:
        import hashlib

        keys.append(("prompt_embeds", hashlib.sha256(request.prompt_embeds[start:end].numpy().tobytes()).digest()))
    return tuple(keys) or None


class Checker:
    def __init__(self, adapters: Sequence[Any]) -> None:
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core import kv_cache_utils

        kv_cache_utils.init_none_hash(sha256_cbor)
        self._formula, self._hash = kv_cache_utils.hash_block_tokens, sha256_cbor
        self._own = kv_cache_utils.get_request_block_hasher(BLOCK, sha256_cbor)
        keys = kv_cache_utils.generate_block_hash_extra_keys(Request([1], cache_salt="s"), 0, 1, 0)[0]
        self.has_kinds = keys == (("cache_salt", "s"),)
        self._adapters = adapters
        self.counts: Counter[str] = Counter()

    def check(self, request: Request, chosen: Random) -> None:
        ours = pages_of(request, chosen)
        keys = [kinds_of_keys(request, at * BLOCK, (at + 1) * BLOCK) for at in range(len(ours))]
        assert ours == self._by_formula(request, keys), f"not vLLM's formula: {request}"
        own = list(self._own(request))
        if request.lora_request is None and self.has_kinds:
            first = len(ours)
        else:
            first = next((page for page, each in enumerate(keys) if each), len(ours))
        assert ours[:first] == own[:first], f"not vLLM's own chain: {request}"
        assert not set(ours[first:]) & set(own[first:]), f"vLLM's own chain behind a key of another kind: {request}"
        self.counts["vLLM's own" if first == len(ours) else "vLLM's own before the first page with a key"] += 1
        twin, parts = twin_of(request, chosen, self._adapters)
        others = pages_of(twin, chosen)
        assert others[:parts] == ours[:parts], f"the twin differs too early: {request}, {twin}"
        assert not set(others[parts:]) & set(ours[parts:]), f"the twin has pages in common: {request}, {twin}"

    def _by_formula(self, request: Request, keys: Sequence[tuple[Any, ...] | None]) -> list[bytes]:
        chain: list[bytes] = []
        for page, each in enumerate(keys):
            tokens = request.all_token_ids[page * BLOCK : (page + 1) * BLOCK]
            chain.append(self._formula(self._hash, chain[-1] if chain else None, tokens, each))
        return chain


def pages_of(request: Request, chosen: Random) -> list[bytes]:
    """Our names of its full pages, asked for in two steps."""
    whole = len(request.all_token_ids)
    chain = PromptChain(request, BLOCK, keys_of(request))
    chain.pages(chosen.randint(0, whole))
    return split_digests(chain.pages(whole))


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    os.environ["PYTHONHASHSEED"] = "vllm-none-hash"  # what later versions begin with by themselves
    import vllm

    chosen = Random(7)
    with tempfile.TemporaryDirectory() as folder:
        adapters = adapters_in(Path(folder))
        checker = Checker(adapters)
        for _ in range(count):
            checker.check(random_request(chosen, adapters), chosen)
    kinds = "keys with kinds" if checker.has_kinds else "keys without kinds"
    told = ", ".join(f"{number} {what}" for what, number in sorted(checker.counts.items()))
    print(f"vLLM {vllm.__version__}, {kinds}: {count} requests and as many twins; {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
