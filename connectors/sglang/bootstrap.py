"""How a decode engine learns which daemon serves a prefill engine: from SGLang's bootstrap server, which both know."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import requests
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvferry.proto.limits import MAX_NAME_CHARS

ROUTE = "/kvferry"
ASK_SECONDS = 5.0
ANNOUNCE_SECONDS = 600.0
RETRY_SECONDS = 0.5
MAX_RANKS = 1024

_log = logging.getLogger(__name__)


class KVFerryBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's, which also keeps the names of the daemons beside a prefill engine's data-parallel ranks."""

    def _setup_routes(self) -> None:
        self._daemons: dict[int, str] = {}
        super()._setup_routes()
        self.app.router.add_put(ROUTE, self._put_daemon)
        self.app.router.add_get(ROUTE, self._get_daemon)

    async def _put_daemon(self, request: web.Request) -> web.Response:
        try:
            told: Any = await request.json()
            rank, name = told["dp_rank"], told["daemon"]
        except (ValueError, KeyError, TypeError):
            return web.Response(status=400, text="the body must be JSON with dp_rank and daemon")
        if type(rank) is not int or not 0 <= rank < MAX_RANKS:
            return web.Response(status=400, text=f"dp_rank is {rank!r}; it must be 0 to {MAX_RANKS - 1}")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            return web.Response(status=400, text=f"daemon must be text of 1 to {MAX_NAME_CHARS} characters")
        self._daemons[rank] = name
        return web.Response(text="OK")

    async def _get_daemon(self, request: web.Request) -> web.Response:
        name = self._daemons.get(_number(request.query.get("dp_rank", "")))
        if name is None:
            return web.Response(status=404, text="no such rank has told the name of its daemon")
        return web.json_response({"daemon": name})


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 9 else -1


def announce(address: str, dp_rank: int, daemon: str, outdated: threading.Event) -> None:
    """Tells a bootstrap server, at host:port, the name, until it is outdated. Waits for one that is about to start."""
    end = time.monotonic() + ANNOUNCE_SECONDS
    while not outdated.is_set():
        try:
            body: dict[str, int | str] = {"dp_rank": dp_rank, "daemon": daemon}
            answer = requests.put(f"http://{address}{ROUTE}", json=body, timeout=ASK_SECONDS)
            if answer.ok:
                return
            error = f"{answer.status_code} {answer.text[:200]}"
        except requests.RequestException as failed:
            error = str(failed)
        if time.monotonic() >= end:
            _log.error("the bootstrap server at %s does not take the daemon's name: %s", address, error)
            return
        outdated.wait(RETRY_SECONDS)


def tell_rank(address: str, room: int, dp_rank: int) -> None:
    """Tells a bootstrap server which data-parallel rank computes the prompt of a room, as SGLang's own backends do."""
    try:
        body = {"bootstrap_room": room, "dp_rank": dp_rank}
        answer = requests.post(f"http://{address}/register_dp_rank", json=body, timeout=ASK_SECONDS)
        error = "" if answer.ok else f"{answer.status_code} {answer.text[:200]}"
    except requests.RequestException as failed:
        error = str(failed)
    if error:
        _log.error("the bootstrap server at %s does not take the rank of room %d: %s", address, room, error)


def daemon_of(address: str, dp_rank: int) -> str:
    """The name of the daemon beside a prefill engine; empty: it is not known there yet."""
    try:
        answer = requests.get(f"http://{address}{ROUTE}", params={"dp_rank": dp_rank}, timeout=ASK_SECONDS)
        name = answer.json()["daemon"] if answer.ok else ""
    except (requests.RequestException, ValueError, KeyError, TypeError) as error:
        _log.warning("the bootstrap server at %s does not name its daemon: %s", address, error)
        return ""
    return name if isinstance(name, str) and len(name) <= MAX_NAME_CHARS else ""
