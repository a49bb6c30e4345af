"""What names a vLLM request's tokens beside their ids: what the installed vLLM says itself, with the kind of each key,
as later versions say it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvferry.connectors.prompt_chain import Unnamed
from kvferry.connectors.vllm.facts import adapter_revision

if TYPE_CHECKING:
    from kvferry.connectors.prompt_chain import KeysBetween
    from kvferry.radix.cbor import ExtraKey
    from kvferry.radix.digests import ExtraKeys


def keys_of(request: Any) -> KeysBetween | None:
    """None where the token ids say all: then vLLM is not asked."""
    if not (
        request.mm_features
        or request.lora_request is not None
        or request.cache_salt
        or request.prompt_embeds is not None
    ):
        return None
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    def between(start: int, end: int) -> ExtraKeys | None:
        keys: Sequence[Any] | None = generate_block_hash_extra_keys(request, start, end, 0)[0]
        return None if keys is None else tuple(_of_kinds(request.lora_request, keys))

    return between


def _of_kinds(adapter: Any, keys: Sequence[Any]) -> Iterator[ExtraKey]:
    """`keys` with their kinds: an adapter's name and a salt are bare texts in earlier versions, and may be equal. An
    adapter, whose key is the first, is named by its contents: others may have had its name, and its path."""
    if adapter is not None:
        if adapter.load_inplace:  # its files may have been others with every request
            raise Unnamed(f"its adapter {adapter.lora_name!r} is loaded in place, whatever its files have just then")
        yield "lora", adapter.lora_name, _revision(adapter.lora_int_id, adapter.lora_path)
        keys = keys[1:]
    for key in keys:
        if isinstance(key, str):
            yield "cache_salt", key
        elif isinstance(key, bytes):
            yield "prompt_embeds", key
        elif isinstance(key[1], int):  # the name of an image and where it lies
            yield "mm", *key
        else:
            yield key


@lru_cache(maxsize=1024)
def _revision(number: int, path: str) -> str:
    """`number`: the engine's, another one whenever an adapter is loaded."""
    return adapter_revision(path)
