"""The blocks of a prefill engine's requests, followed from the outputs of its scheduler, which are the same in all
versions and for both of vLLM's model runners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput


class BlockIds:
    """The blocks of each request that has been computed and is not over, of the one KV cache group."""

    def __init__(self) -> None:
        self._of: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def follow(self, output: SchedulerOutput) -> None:
        """Takes in a step. Requests that run on get blocks behind those that they have; new ones and those that were
        preempted come with all of theirs."""
        for request in output.finished_req_ids:
            self._of.pop(request, None)
        for new in output.scheduled_new_reqs:
            self._of[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request in cached.resumed_req_ids:
                assert more is not None, f"request {request} was resumed without blocks"
                self._of[request] = list(more[0])
            elif more is not None:
                self._of[request] += more[0]

    def of(self, request: str) -> Sequence[int]:
        """The blocks of a request of the last step, from its first token on."""
        return self._of[request]


def is_empty(pool: BlockPool) -> bool:
    """Whether no request has a block, and none finds one by its hash: the engine has reset its own cache."""
    used: int = pool.num_gpu_blocks - pool.get_num_free_blocks()
    return used == 1 and not len(pool.cached_block_hash_to_block)  # the null block is always in use
