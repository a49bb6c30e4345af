"""What names a vLLM request's tokens beside their ids: what the installed vLLM says itself, with the kind of each key,
as later versions say it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.connectors.prompt_chain import Unnamed
from kvferry.connectors.vllm.weights import adapter_files
from kvferry.connectors.weight_files import hash_of

if TYPE_CHECKING:
    from kvferry.connectors.prompt_chain import KeysBetween
    from kvferry.radix.cbor import ExtraKey
    from kvferry.radix.digests import ExtraKeys

ADAPTERS = 1024  # whose names are kept; of others the files are hashed again


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

    name: tuple[ExtraKey, ...] = ()
    why = ""
    if request.lora_request is not None:
        try:
            name = (_name_of(request.lora_request),)  # once: its files may change while the request runs
        except Unnamed as error:
            why = str(error)

    def between(start: int, end: int) -> ExtraKeys | None:
        if why:
            raise Unnamed(why)
        keys: Sequence[Any] = generate_block_hash_extra_keys(request, start, end, 0)[0] or ()
        return (*name, *_of_kinds(keys[len(name) :])) or None  # an adapter's key is vLLM's first

    return between


def _name_of(adapter: Any) -> ExtraKey:
    """The key of an adapter, by its contents: others may have had its name, and its path. Unnamed."""
    if adapter.load_inplace:  # its files may have been others with every request
        raise Unnamed(f"its adapter {adapter.lora_name!r} is loaded in place, whatever its files have just then")
    return "lora", adapter.lora_name, _adapters.revision(adapter.lora_int_id, adapter.lora_path)


def _of_kinds(keys: Sequence[Any]) -> Iterator[ExtraKey]:
    """Keys with their kinds: an adapter's name and a salt are bare texts in earlier versions, and may be equal."""
    for key in keys:
        if isinstance(key, str):
            yield "cache_salt", key
        elif isinstance(key, bytes):
            yield "prompt_embeds", key
        elif isinstance(key[1], int):  # the name of an image and where it lies
            yield "mm", *key
        else:
            yield key


class Adapters:
    """What names adapters by their contents. An adapter's files are hashed when its first request comes. Once they have
    changed it has no name: nobody tells whether the engine has read them again."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, str], _Adapter] = OrderedDict()

    def revision(self, number: int, path: str) -> str:
        """The name of the adapter that the engine has as `number`, another one whenever one is loaded. Unnamed."""
        known = self._known.get(key := (number, path))
        if known is None:
            files = adapter_files(path)
            states = _states(files)
            known = self._known[key] = _Adapter(files, states, hash_of(files))
            if len(self._known) > ADAPTERS:
                self._known.popitem(last=False)
        if known.states is None or known.states != _states(known.files):
            known.states = None
            raise Unnamed(f"the files of its adapter, {path!r}, have changed: other contents need a path of their own")
        self._known.move_to_end(key)
        return known.revision


@dataclass(slots=True)
class _Adapter:
    files: list[Path]
    states: list[tuple[int, ...]] | None  # as they were when they were hashed; None: they have changed since
    revision: str


def _states(files: list[Path]) -> list[tuple[int, ...]]:
    """What no change of a file leaves as it was, of each. Unnamed where one is gone."""
    try:
        found = [file.stat() for file in files]
    except OSError as error:
        raise Unnamed(f"a file of its adapter is gone: {error}") from error
    return [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found]


_adapters = Adapters()
