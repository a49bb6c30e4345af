"""SGLang's own Python files, imported where there is no GPU: from its unpacked wheel, with empty modules in the place
of what a transfer backend never calls."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ.get("SGLANG_WHEELS", Path(__file__).parents[3] / "build" / "sglang"))
VERSIONS = ("0.5.16", "0.5.23")
# Imported by SGLang's modules, called by none of those that are tested here.
EMPTY = frozenset(
    """
    IPython apache_tvm_ffi compressed_tensors dill flashinfer gguf interegular llguidance modelscope openai
    openai_harmony orjson outlines partial_json_parser pybase64 setproctitle sgl_kernel soundfile tiktoken
    torch_memory_saver torchao torchvision triton tvm_ffi uvloop watchfiles xgrammar cuda numba smg_grpc_proto
    decord2 torchcodec einops sglang_kernel kernels PIL blake3 cloudpickle timm av mistral_common sentencepiece
    """.split()  # noqa: SIM905
)


_ABSENT = ("triton.runtime", "triton.runtime.driver")  # by which SGLang asks for the device
_RESULTS: dict[str, Any] = {"dill.dumps": lambda _: b""}  # what becomes of it must be bytes


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Anything(metaclass=_Names):
    """A name of an empty module: a decorator, a base class, a context; never more than imported."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __call__(self, *args: Any, **kwargs: object) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: object) -> Any:
        return self

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__


class _EmptyModule(ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or f"{self.__name__}.{name}" in _ABSENT:
            raise AttributeError(name)
        return _RESULTS.get(f"{self.__name__}.{name}", type(name, (_Anything,), {}))


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] in EMPTY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def unpacked(version: str) -> Path | None:
    """The folder with this version's wheel unpacked; None: there is none."""
    folder = FOLDER / version
    return folder if (folder / "sglang").is_dir() else None


def load(version: str) -> None:
    """Makes `sglang` importable in this process, which can have one version only."""
    folder = unpacked(version)
    assert folder is not None
    import torch._inductor.ir  # noqa: F401
    import transformers  # it looks for packages that are empty from here on

    register = transformers.AutoConfig.register  # of another release, it may have SGLang's models itself
    transformers.AutoConfig.register = staticmethod(partial(register, exist_ok=True))
    sys.path.append(str(folder))
    sys.meta_path.append(_EmptyModules())
