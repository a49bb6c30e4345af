"""A KV connector whose loads all fail: it claims whole prompts, writes noise where their KV should be, in the step that
uses it, and says so when the step is over. Beside kvferry, in vLLM's MultiConnector, nothing of that may get out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

NOISE = 7.0


@dataclass
class Claims(KVConnectorMetadata):  # type: ignore[misc]
    blocks: set[int] = field(default_factory=set)


class FaultyLoads(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._claimed: set[str] = set()
        self._blocks: set[int] = set()  # scheduler: of this step
        self._caches: dict[str, torch.Tensor] = {}
        self._failed: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id in self._claimed:
            return 0, False
        whole = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        return max(0, whole - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._claimed.add(request.request_id)
        if num_external_tokens:
            end = (request.num_prompt_tokens - 1) // self._block_size
            self._blocks |= set(blocks.get_block_ids()[0][end - num_external_tokens // self._block_size : end])

    def build_connector_meta(self, scheduler_output: Any) -> Claims:
        blocks, self._blocks = self._blocks, set()
        return Claims(blocks)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        blocks = sorted(self._get_connector_metadata().blocks)
        for cache in self._caches.values() if blocks else ():
            cache[blocks] = NOISE
        self._failed |= set(blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: the noise is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
