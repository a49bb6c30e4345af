"""The vLLM versions that this connector was run with, and a check that the installed one has what it uses."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

TESTED = ("0.26.0", "0.32.0")
_log = logging.getLogger(__name__)

# What vLLM calls, with the names of the arguments that it passes.
HOOKS = {
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "on_new_request": ("request",),
    "request_finished": ("request", "block_ids"),
    "bind_gpu_block_pool": ("gpu_block_pool",),
    "bind_connector_metadata": ("connector_metadata",),
    "register_kv_caches": ("kv_caches",),
    "get_handshake_metadata": (),
    "set_xfer_handshake_metadata": ("metadata",),
    "start_load_kv": ("forward_context", "kwargs"),
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "build_connector_worker_meta": (),
    "get_kv_connector_stats": (),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "reset_cache": (),
    "shutdown": (),
}


class InterfaceDiffers(ImportError):
    """The installed vLLM calls connectors in another way."""


class Call(NamedTuple):
    """How a function of a class or module of vLLM's is called."""

    owner: object
    name: str
    positional: int = 1  # a method's self, too
    keywords: tuple[str, ...] = ()


def check(base: type[Any], version: str) -> None:
    """InterfaceDiffers says what is missing and what to do; a version that nobody tried gets a warning."""
    for name, arguments in HOOKS.items():
        found = _arguments_of(getattr(base, name, None))
        if found != arguments:
            raise _differs(version, f"KVConnectorBase_V1.{name}", found, arguments)
    if version.split("+")[0] not in TESTED:
        _log.warning("kvferry's connector was run with vLLM %s, not with %s", ", ".join(TESTED), version)


def check_calls(version: str, *calls: Call) -> None:
    """InterfaceDiffers where the installed vLLM cannot be called so."""
    for call in calls:
        called = getattr(call.owner, call.name, None)
        if called is None or not _takes(called, call):
            where = getattr(call.owner, "__name__", "vllm").rpartition(".")[2]
            wanted = (*(f"argument {number + 1}" for number in range(call.positional)), *call.keywords)
            raise _differs(version, f"{where}.{call.name}", _arguments_of(called), wanted)


def _takes(called: Callable[..., object], call: Call) -> bool:
    try:
        inspect.signature(called).bind(*range(call.positional), **dict.fromkeys(call.keywords))
    except TypeError:
        return False
    return True


def _arguments_of(called: Callable[..., object] | None) -> tuple[str, ...] | None:
    return None if called is None else tuple(name for name in inspect.signature(called).parameters if name != "self")


def _differs(version: str, where: str, found: tuple[str, ...] | None, wanted: tuple[str, ...]) -> InterfaceDiffers:
    shown = "is not there" if found is None else f"takes ({', '.join(found)}), not ({', '.join(wanted)})"
    return InterfaceDiffers(
        f"kvferry.connectors.vllm was run with vLLM {', '.join(TESTED)}; in the installed {version} "
        f"{where} {shown}: install vLLM {TESTED[-1]}, or a kvferry that names {version}"
    )
