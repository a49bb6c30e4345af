"""kvferry: moves and keeps the KV cache of disaggregated prefill/decode LLM serving."""

from typing import TYPE_CHECKING

__version__: str  # of what is installed; looked up where it is asked for, which takes longer than most commands

if not TYPE_CHECKING:  # a type checker would take any name for one of this module

    def __getattr__(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("kvferry")
        except PackageNotFoundError:  # running from sources that were never installed
            return "0.0.0"
