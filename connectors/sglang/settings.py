"""`SGLANG_KVFERRY`: what a user may set of the backend, checked. SGLang has no option of its own for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "SGLANG_KVFERRY"
DP_RANK = "{dp_rank}"
_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "float": (int, float)}


class Unset(ValueError):
    """The settings are none that the backend can start with; the message says what to change."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    socket: str  # of the daemon beside this engine; with data parallelism one for each rank, by `{dp_rank}`
    revision: str = ""  # of the weights; empty: read from the files
    deadline_seconds: float = 60.0  # of a request's transfer, at most the daemons' --transfer-seconds
    connect_seconds: float = 20.0  # at the start; later it is tried again and again
    waiting_share: float = 0.5  # of the pages: of prefill's, that prompts may hold before decode has room; of decode's,
    # that finished requests may lock while they are copied
    store_seconds: float = 5.0  # that a finished request waits at most for its copy to the host tier to begin

    @staticmethod
    def of(environment: Mapping[str, str]) -> BackendSettings:
        """Unset names the field, its value and the bound."""
        text = environment.get(VARIABLE, "")
        if not text:
            raise Unset(f'{VARIABLE} is not set; it must be JSON: {{"socket": "/run/kvferry/decode.sock"}}')
        try:
            config = json.loads(text)
        except ValueError as error:
            raise Unset(f"{VARIABLE} is {text[:100]!r}, which is no JSON: {error}") from error
        if not isinstance(config, dict):
            raise Unset(f"{VARIABLE} is {text[:100]!r}; it must be an object of JSON")
        fields = {field.name: field for field in dataclasses.fields(BackendSettings)}
        if unknown := sorted(set(config) - set(fields)):
            raise Unset(f"{VARIABLE}.{unknown[0]}: no such setting; there are {', '.join(fields)}")
        for name, value in config.items():
            if isinstance(value, bool) or not isinstance(value, _KINDS[str(fields[name].type)]):
                raise Unset(f"{VARIABLE}.{name} is {value!r}; it must be a {fields[name].type}")
        if not config.get("socket"):
            raise Unset(f"{VARIABLE}.socket is not set; it names the Unix socket of kvferry's daemon")
        settings = BackendSettings(**config)
        for name in ("deadline_seconds", "connect_seconds", "store_seconds"):
            if not 0 < getattr(settings, name) <= 3600:
                raise Unset(f"{VARIABLE}.{name} is {getattr(settings, name)}; it must be above 0, at most 3600")
        if not 0 < settings.waiting_share <= 1:
            raise Unset(f"{VARIABLE}.waiting_share is {settings.waiting_share}; it must be above 0, at most 1")
        return settings

    def at_rank(self, dp_rank: int, dp_size: int) -> str:
        """The socket of data-parallel rank `dp_rank` of `dp_size`. Unset where ranks would meet on one daemon."""
        if dp_size > 1 and DP_RANK not in self.socket:
            raise Unset(
                f"{VARIABLE}.socket is {self.socket!r}, for all {dp_size} data-parallel ranks; each needs a daemon of "
                f"its own: name their sockets by {DP_RANK}, /run/kvferry/decode-{DP_RANK}.sock"
            )
        return self.socket.replace(DP_RANK, str(dp_rank))
