"""The SGLang versions that this backend was run with, and a check that the installed one has what it uses."""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from typing import Any

from kvferry.connectors.sglang.plugin import WEIGHT_UPDATES

RUN = ("0.5.16",)
READ = ("0.5.23",)  # by its interfaces alone
READ_AHEAD = ("0.5.16",)  # whose prompts' pages are read before a step is launched: see read_ahead.py
_log = logging.getLogger(__name__)
_PD, _TREES = "sglang.srt.disaggregation", "sglang.srt.mem_cache"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

# What is hooked or implemented: arguments behind self. Several: of several versions; None: one has it not.
INTERFACES: dict[str, tuple[tuple[str, ...] | None, ...]] = {
    f"{_PD}.utils:get_kv_class": (("transfer_backend", "class_type"),),
    f"{_PD}.decode:DecodePreallocQueue._init_kv_manager": ((),),
    f"{_PD}.decode:DecodePreallocQueue._create_receiver_and_enqueue": (("req", "is_rebootstrap"),),
    f"{_PD}.decode:DecodePreallocQueue.resume_retracted_reqs": (("rids_to_check",),),
    "sglang.srt.mem_cache.common:release_kv_cache": (
        ("req", "tree_cache", "is_insert"),
        ("req", "tree_cache", "checkpoint"),
    ),
    f"{_TREES}.radix_cache:RadixCache.match_prefix": (("params",),),
    f"{_TREES}.radix_cache:RadixCache.inc_lock_ref": (("node",),),
    f"{_TREES}.radix_cache:RadixCache.dec_lock_ref": (("node", "params"),),
    f"{_TREES}.unified_radix_cache:UnifiedRadixCache.match_prefix": (("params",),),
    f"{_TREES}.unified_radix_cache:UnifiedRadixCache.path_device_indices": (("node",), None),
    f"{_TREES}.unified_radix_cache:UnifiedRadixCache.lock": (("node_id", "skip_lock_components"), None),
    f"{_TREES}.unified_radix_cache:UnifiedRadixCache.unlock": (("lock",), None),
    "sglang.srt.managers.scheduler:Scheduler.flush_cache": (("empty_cache",),),
    f"{_PD}.prefill:PrefillBootstrapQueue._init_kv_manager": ((),),
    f"{_PD}.prefill:PrefillBootstrapQueue.create_sender": (("req", "num_kv_heads"),),
    f"{_PD}.prefill:PrefillBootstrapQueue.pop_bootstrapped": (("return_failed_reqs", "rids_to_check"), ()),
    f"{_PD}.prefill:SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue": (("rids_to_check",),),
    f"{_PD}.prefill:maybe_release_metadata_buffer": (("req", "allocator"),),
    f"{_PD}.utils:MetadataBuffers.get_buf_infos": ((),),
    f"{_PD}.common.conn:CommonKVManager.__init__": (("args", "disaggregation_mode", "server_args", "is_mla_backend"),),
    f"{_PD}.common.conn:CommonKVManager.try_ensure_parallel_info": (("bootstrap_addr",),),
    f"{_PD}.common.conn:CommonKVManager.register_to_bootstrap": ((),),
    f"{_PD}.common.conn:CommonKVBootstrapServer.__init__": (("host", "port"),),
    f"{_PD}.common.conn:CommonKVBootstrapServer._setup_routes": ((),),
    f"{_PD}.base.conn:BaseKVSender.__init__": (
        ("mgr", "bootstrap_addr", "bootstrap_room", "dest_tp_ranks", "pp_rank", "req_has_disagg_prefill_dp_rank"),
        ("mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank"),
    ),
    f"{_PD}.base.conn:BaseKVSender.init": (("num_kv_indices", "aux_index"),),
    f"{_PD}.base.conn:BaseKVSender.send": (
        ("kv_indices", "state_indices"),
        ("kv_indices", "state_indices", "num_kv_tokens"),
    ),
    f"{_PD}.base.conn:BaseKVReceiver.__init__": (("mgr", "bootstrap_addr", "bootstrap_room"),),
    f"{_PD}.base.conn:BaseKVReceiver.init": (("prefill_dp_rank",),),
    f"{_PD}.base.conn:BaseKVReceiver.send_metadata": (
        ("kv_indices", "aux_index", "state_indices", "decode_prefix_len"),
        ("kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination"),
    ),
    **{f"{_UPDATER}.{way}": (("recv_req",),) for way in WEIGHT_UPDATES},
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_contiguous_buf_infos": ((),),
    "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool.get_contiguous_buf_infos": ((),),
}


class SGLangDiffers(ImportError):
    """The installed SGLang calls transfer backends in another way."""


def check() -> None:
    """SGLangDiffers says what is missing and what to do; a version that nobody tried gets a warning."""
    import sglang

    version = getattr(sglang, "__version__", "unknown")
    for where, allowed in INTERFACES.items():
        found = _arguments(where)
        if found not in allowed:
            wanted = " or ".join(f"({', '.join(arguments)})" for arguments in allowed if arguments is not None)
            shown = "is not there" if found is None else f"takes ({', '.join(found)}), not {wanted}"
            raise SGLangDiffers(
                f"kvferry.connectors.sglang was run with SGLang {', '.join(RUN)}; in the installed {version} "
                f"{where.replace(':', '.')} {shown}: install SGLang {RUN[-1]}, or a kvferry that names {version}"
            )
    if version not in (*RUN, *READ):
        _log.warning("kvferry's backend was run with SGLang %s, not with %s", ", ".join(RUN), version)


def _arguments(where: str) -> tuple[str, ...] | None:
    module, _, path = where.partition(":")
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    names = tuple(inspect.signature(inspect.unwrap(found)).parameters)
    return names[1:] if "." in path else names
