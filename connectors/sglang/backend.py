"""The classes of the backend, by what SGLang asks for."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvferry.connectors.sglang import versions


@cache
def _classes() -> dict[str, type[Any]]:
    """The classes by the names of SGLang's KVClassType. SGLangDiffers where the installed SGLang is not known."""
    versions.check()
    from sglang.srt.disaggregation.base import KVArgs

    from kvferry.connectors.sglang.bootstrap import KVFerryBootstrapServer
    from kvferry.connectors.sglang.manager import KVFerryManager
    from kvferry.connectors.sglang.receiver import KVFerryReceiver
    from kvferry.connectors.sglang.sender import KVFerrySender

    return {
        "KVARGS": KVArgs,
        "MANAGER": KVFerryManager,
        "SENDER": KVFerrySender,
        "RECEIVER": KVFerryReceiver,
        "BOOTSTRAP_SERVER": KVFerryBootstrapServer,
    }


def class_of(class_type: Any) -> type[Any]:
    """`class_type`: a KVClassType of SGLang's."""
    return _classes()[class_type.name]
