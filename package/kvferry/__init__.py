"""kvferry: moves and keeps the KV cache of disaggregated prefill/decode LLM serving."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvferry")
except PackageNotFoundError:  # running from sources that were never installed
    __version__ = "0.0.0"
