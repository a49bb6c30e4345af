"""`kv_connector_extra_config`: what a user may set, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace

DP_RANK = "{dp_rank}"  # in a setting: the engine's data-parallel rank
_WHERE = "kv_connector_extra_config"
_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}


@dataclass(frozen=True, slots=True)
class Settings:
    socket: str  # of the daemon beside this engine; with data parallelism one for each rank, by `{dp_rank}`
    page_size: int = 0  # tokens, as the daemon has it; 0: the engine's block size
    pool: str = "daemon"  # "engine": the engine's own blocks are registered with a daemon of --pool engine
    prefill: str = ""  # name of the prefill daemon, where a request names none; it may have `{dp_rank}`, too
    revision: str = ""  # of the weights; empty: read from the files
    weights_file: str = ""  # has the name of the weights that the engine has from a reset of its caches on
    deadline_seconds: float = 30.0  # until a prompt's pages are there
    lookup_seconds: float = 1.0  # that the daemon has to answer where it tells what it holds
    store_seconds: float = 5.0  # that a finished request's blocks wait at most for room in the daemon
    connect_seconds: float = 20.0  # at the start; later it is tried again and again

    @staticmethod
    def of(config: Mapping[str, object]) -> Settings:
        """ValueError names the field, its value and the bound."""
        fields = {field.name: field for field in dataclasses.fields(Settings)}
        unknown = sorted(set(config) - set(fields))
        if unknown:
            raise ValueError(f"{_WHERE}.{unknown[0]}: no such setting; there are {', '.join(fields)}")
        values: dict[str, str | int | float] = {}
        for name, value in config.items():
            kind = _KINDS[str(fields[name].type)]
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"{_WHERE}.{name} is {value!r}; it must be a {fields[name].type}")
            values[name] = value  # type: ignore[assignment]
        if not values.get("socket"):
            raise ValueError(f"{_WHERE}.socket is not set; it names the Unix socket of kvferry's daemon")
        settings = Settings(**values)  # type: ignore[arg-type]
        for name in ("deadline_seconds", "lookup_seconds", "store_seconds", "connect_seconds"):
            if not 0 < getattr(settings, name) <= 3600:
                raise ValueError(f"{_WHERE}.{name} is {getattr(settings, name)}; it must be above 0, at most 3600")
        if settings.pool not in ("daemon", "engine"):
            raise ValueError(f"{_WHERE}.pool is {settings.pool!r}; it must be 'daemon' or 'engine'")
        if settings.page_size < 0:
            raise ValueError(f"{_WHERE}.page_size is {settings.page_size}; it must be at least 0")
        return settings

    def at_rank(self, dp_rank: int, dp_size: int) -> Settings:
        """The settings of data-parallel rank `dp_rank` of `dp_size`. ValueError where ranks would meet on one daemon:
        it would take what one computes for what another holds in its blocks."""
        if (dp_size > 1 or dp_rank > 0) and DP_RANK not in self.socket:
            raise ValueError(
                f"{_WHERE}.socket is {self.socket!r}, for data-parallel rank {dp_rank}, too; each rank needs a daemon "
                f"of its own: name their sockets by {DP_RANK}, /run/kvferry/decode-{DP_RANK}.sock"
            )
        named = {name: getattr(self, name).replace(DP_RANK, str(dp_rank)) for name in ("socket", "prefill")}
        return replace(self, **named)

    def blocks_per_page(self, block_tokens: int) -> int:
        """ValueError where a page is not a whole number of blocks."""
        page_size = self.page_size or block_tokens
        if page_size % block_tokens:
            raise ValueError(
                f"{_WHERE}.page_size is {page_size}; it must be a multiple of the block size, {block_tokens}"
            )
        return page_size // block_tokens
