"""SGLang's way to find the backend by its name: it calls `register` in each of its processes, as the entry point
`kvferry` of the group sglang.srt.plugins, and then carries out the hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

BACKEND = "kvferry"
_log = logging.getLogger(__name__)
WEIGHTS_STAY = "kvferry's pages are of the weights that the engine started with: start it anew to have others"
WEIGHT_UPDATES = {
    "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
}
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_DISAGGREGATION = "sglang.srt.disaggregation"


def register() -> None:
    """Makes `--disaggregation-transfer-backend kvferry` known, in one process as often as it likes."""
    from sglang.srt import server_args
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND not in server_args.DISAGG_TRANSFER_BACKEND_CHOICES:
        server_args.add_disagg_transfer_backend_choices([BACKEND])
    if BACKEND not in [member.value for member in utils.TransferBackend]:
        _extend(utils.TransferBackend)
        HookRegistry.register(f"{_DISAGGREGATION}.utils.get_kv_class", _kv_class, HookType.AROUND)
        decode, prefill = f"{_DISAGGREGATION}.decode.DecodePreallocQueue", f"{_DISAGGREGATION}.prefill"
        HookRegistry.register(f"{decode}._init_kv_manager", _with_queue, HookType.AROUND)
        HookRegistry.register(f"{prefill}.PrefillBootstrapQueue._init_kv_manager", _with_queue, HookType.AROUND)
        HookRegistry.register(f"{decode}._create_receiver_and_enqueue", _give_receiver, HookType.AFTER)
        HookRegistry.register(f"{prefill}.PrefillBootstrapQueue.create_sender", _give_sender, HookType.AFTER)
        HookRegistry.register(f"{prefill}.PrefillBootstrapQueue.pop_bootstrapped", _take_in, HookType.AROUND)
        HookRegistry.register("sglang.srt.mem_cache.common.release_kv_cache", _release, HookType.AROUND)
        HookRegistry.register(f"{decode}.resume_retracted_reqs", _tidy, HookType.BEFORE)
        inflight = f"{prefill}.SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue"
        HookRegistry.register(inflight, _give_back, HookType.BEFORE)
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", _settle, HookType.AROUND)
        for way, answer in WEIGHT_UPDATES.items():
            HookRegistry.register(f"{_UPDATER}.{way}", partial(_update_weights, answer), HookType.AROUND)
        _read_ahead(HookRegistry, HookType)


def _read_ahead(registry: Any, kinds: Any) -> None:
    """Hooks versions of which it is known what changes a prompt's pages, and that nothing else does: a wrong one would
    be wrong bytes."""
    from sglang.version import __version__

    from kvferry.connectors.sglang.versions import READ_AHEAD

    if __version__ not in READ_AHEAD:
        return
    registry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", _read_pages, kinds.BEFORE)
    sends = f"{_DISAGGREGATION}.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk"
    registry.register(sends, _send_chunk, kinds.AROUND)
    common = "sglang.srt.mem_cache.common"
    registry.register(f"{common}.maybe_cache_unfinished_req", _cache_unfinished, kinds.AROUND)
    registry.register(f"{common}.kv_to_page_indices", _pages_of, kinds.AROUND)


def _extend(backends: Any) -> None:
    """Adds a member to the enumeration, which has no place to register one."""
    member = object.__new__(backends)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    backends._member_map_[member._name_] = member
    backends._value2member_map_[BACKEND] = member
    backends._member_names_.append(member._name_)


def _kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    if transfer_backend.value != BACKEND:
        return original(transfer_backend, class_type)
    from kvferry.connectors.sglang.backend import class_of

    return class_of(class_type)


def _with_queue(original: Callable[..., Any], queue: Any) -> Any:
    """The manager is made for a queue, and is not told for which."""
    if queue.transfer_backend.value != BACKEND:
        return original(queue)
    from kvferry.connectors.sglang.engine import being_made

    with being_made(queue):
        return original(queue)


def _give_receiver(result: Any, queue: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """The receiver is made without its request, which has the tokens."""
    if queue.transfer_backend.value == BACKEND and hasattr(result.kv_receiver, "take_request"):
        result.kv_receiver.take_request(request, rebootstrap=result.is_rebootstrap)


def _give_sender(result: Any, queue: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    if result and queue.transfer_backend.value == BACKEND and hasattr(request.disagg_kv_sender, "take_request"):
        request.disagg_kv_sender.take_request(request)


def _take_in(original: Callable[..., Any], queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Prompts are asked whether they may be computed; where some may not yet, room is made."""
    if queue.transfer_backend.value != BACKEND:
        return original(queue, *args, **kwargs)
    waiting = queue.kv_manager.waiting
    waiting.look()
    result = original(queue, *args, **kwargs)
    if queue.queue:
        waiting.make_room(queue.scheduler.disagg_prefill_inflight_queue)
    return result


def _read_pages(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """A step is about to be launched; of a prefill engine's prompts the pages are read before, where the next step is
    launched before this one's results are looked at."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    if queue is None or queue.transfer_backend.value != BACKEND or not scheduler.enable_overlap:
        return
    from kvferry.connectors.sglang import read_ahead

    if batch.forward_mode.is_extend() and read_ahead.can_read(scheduler.tree_cache):
        ours = [request for request in batch.reqs if hasattr(request.disagg_kv_sender, "pages_read")]
        pool = scheduler.req_to_token_pool
        read_ahead.read(ours, pool.req_to_token, scheduler.token_to_kv_pool_allocator.page_size)


def _send_chunk(original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    from kvferry.connectors.sglang.read_ahead import being_sent

    with being_sent(request):
        return original(scheduler, request, *args, **kwargs)


def _cache_unfinished(original: Callable[..., Any], request: Any, tree: Any, *args: Any, **kwargs: Any) -> Any:
    from kvferry.connectors.sglang import read_ahead

    if getattr(getattr(request, "disagg_kv_sender", None), "pages_read", None) is None:
        return original(request, tree, *args, **kwargs)
    with read_ahead.until_others_are_there(request, tree.token_to_kv_pool_allocator):
        return original(request, tree, *args, **kwargs)


def _pages_of(original: Callable[..., Any], slots: Any, page_size: int) -> Any:
    """Called by a prefill engine's `send_kv_chunk`, for the prompt's pages alone: models that have other state are
    refused. And elsewhere."""
    from kvferry.connectors.sglang.read_ahead import pages_being_sent

    read = pages_being_sent(len(slots), page_size)
    return original(slots, page_size) if read is None else read


def _release(original: Callable[..., Any], request: Any, tree: Any, *args: Any, **kwargs: Any) -> Any:
    """A request gives its pages back: a decode engine's to the radix cache, unless it was given up."""
    from kvferry.connectors.sglang.engine import manager_of
    from kvferry.connectors.sglang.waiting import gave_back

    if gave_back(request):  # a prefill engine's, when it was moved to the host tier
        return None
    manager = manager_of(tree)
    kept = args[0] if args else kwargs.get("is_insert", kwargs.get("checkpoint", True))
    if manager is None or not kept:
        return original(request, tree, *args, **kwargs)
    tokens = request.origin_input_ids + request.output_ids
    result = original(request, tree, *args, **kwargs)
    manager.keep_finished(request, tokens, tree)
    return result


def _tidy(queue: Any, *args: Any, **kwargs: Any) -> None:
    """Called in each turn of a decode engine's loop."""
    if queue.transfer_backend.value == BACKEND:
        queue.kv_manager.finished.tidy()


def _give_back(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Called in each turn of a prefill engine's loop."""
    queue = scheduler.disagg_prefill_bootstrap_queue
    if queue.transfer_backend.value == BACKEND:
        queue.kv_manager.waiting.give_back(scheduler)


def _settle(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The radix cache is emptied, unless the daemon reads of it: False is SGLang's own word for that it was not."""
    from kvferry.connectors.sglang.engine import manager_of

    manager = manager_of(scheduler.tree_cache)
    if manager is None or manager.settle_finished():
        return original(scheduler, *args, **kwargs)
    _log.warning("the cache is not flushed: the daemon still copies pages of requests that have finished")
    return False


def _update_weights(answer: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`answer`: the name of what SGLang is to be answered with."""
    from kvferry.connectors.sglang.engine import in_use

    if not in_use():
        return original(*args, **kwargs)
    from sglang.srt.managers import io_struct

    return getattr(io_struct, answer)(success=False, message=WEIGHTS_STAY)
