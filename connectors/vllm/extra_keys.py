"""What names a vLLM request's tokens beside their ids, as the installed vLLM says it itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.connectors.prompt_chain import KeysBetween
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
        keys: ExtraKeys | None = generate_block_hash_extra_keys(request, start, end, 0)[0]
        return keys

    return between
