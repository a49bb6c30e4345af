"""The chat that the demo shows: its turns, one behind a restart of the decode worker, and one whose prefix was evicted
from the decode daemon's pool meanwhile."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import grpc
from rich.console import Console
from rich.markup import escape

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import System, SystemSpec, restart_decode_worker
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common

NO_PROXY = [("grpc.enable_http_proxy", 0)]
REPLY_SECONDS = 120.0
RETRY_SECONDS = 0.5  # while the front end has not found the worker that is back
FILL_SECONDS = 240.0
MAX_SHOWN = 120  # characters of a reply
FILLER_TOKENS = 1024  # of a prompt that fills the pool, at most
MAX_FILL_TOKENS = 300_000  # of all of them
FILLER_IDS = (100, 1000)  # tokens that any vocabulary has
QUESTIONS = (
    "In one sentence: what is a ferry?",
    "Where would I meet one?",
    "And what might it carry?",
)
BEHIND_THE_RESTART = "Who steers it?"
BEHIND_THE_EVICTION = "Is it fast?"


class DemoError(RuntimeError):
    """The demo did not do what it is to show."""


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """One turn, by the front end's word and the decode daemon's counters."""

    prompt_tokens: int
    held_tokens: int  # by the decode daemon
    host_tokens: int  # of them, in its host tier
    pages_moved: int


def decode_stats(system: System) -> cache.SideStats:
    with grpc.insecure_channel(system.decodes[0].daemon_address, NO_PROXY) as channel:
        return next(side for side in fetch(channel).sides if side.role == common.ROLE_DECODE)


class ShownChat:
    """One conversation to look at, with what each of its turns moved."""

    def __init__(self, system: System, page_size: int, max_tokens: int, console: Console, *, is_text: bool) -> None:
        self._system, self._page_size, self._max_tokens = system, page_size, max_tokens
        self._console, self._is_text = console, is_text  # a synthetic worker's replies are no text
        self._messages: list[dict[str, str]] = []

    def turn(self, question: str) -> ShownTurn:
        """Asks, and prints the reply."""
        before = decode_stats(self._system)
        self._messages.append({"role": "user", "content": question})
        reply = self._asked("chat/completions", {"messages": self._messages, "max_tokens": self._max_tokens})
        text = reply["choices"][0]["message"]["content"]
        self._messages.append({"role": "assistant", "content": text})
        after = decode_stats(self._system)
        turn = ShownTurn(
            reply["usage"]["prompt_tokens"],
            reply["usage"]["prompt_tokens_details"]["cached_tokens"],
            after.requests.host_hit_tokens - before.requests.host_hit_tokens,
            after.transfers.delta_pages - before.transfers.delta_pages,
        )
        self._show(question, text, turn)
        return turn

    def fill_pool(self) -> None:
        """Has other prompts take every page of the decode daemon's pool."""
        pages = decode_stats(self._system).pool.pages
        number, deadline = random.Random(0), time.monotonic() + FILL_SECONDS
        ids = [number.randint(*FILLER_IDS) for _ in range(pages * self._page_size + FILLER_TOKENS)]
        for start in range(0, len(ids), FILLER_TOKENS):
            if time.monotonic() > deadline:
                raise DemoError(f"the decode daemon's pool of {pages} pages was not filled in {FILL_SECONDS:.0f} s")
            self._asked("completions", {"prompt": ids[start : start + FILLER_TOKENS], "max_tokens": 1})

    def _asked(self, path: str, body: dict[str, object]) -> Any:
        request = urllib.request.Request(
            f"{self._system.url}/v1/{path}",
            json.dumps({**body, "temperature": 0}).encode(),
            {"content-type": "application/json"},
        )
        deadline = time.monotonic() + REPLY_SECONDS
        while True:
            try:
                with urllib.request.urlopen(request, timeout=REPLY_SECONDS) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise DemoError(f"{path}: {error.code}: {error.read()[:500].decode(errors='replace')}") from error
                time.sleep(RETRY_SECONDS)

    def _show(self, question: str, text: str, turn: ShownTurn) -> None:
        held = f"{turn.held_tokens} held by the decode daemon"
        if turn.host_tokens:
            held += f" ({turn.host_tokens} in its host tier)"
        told = f"prompt {turn.prompt_tokens} tokens, {held}, {turn.pages_moved} of {self._pages(turn)} pages moved"
        if not self._is_text:
            self._console.print(f"  turn {len(self._messages) // 2}: {told}")
            return
        self._console.print(f"  [bold]user[/]       {escape(question)}")
        self._console.print(f"  [bold]assistant[/]  {escape(_printable(text))}")
        self._console.print(f"             [dim]{told}[/]")

    def _pages(self, turn: ShownTurn) -> int:
        """Pages of a prompt, the last of which may be partial."""
        return -(-turn.prompt_tokens // self._page_size)


def show_chat(chat: ShownChat, stack: Stack, spec: SystemSpec, system: System, console: Console) -> list[str]:
    """The whole chat; what did not go as it is to go."""
    problems: list[str] = []
    for question in QUESTIONS:
        chat.turn(question)
    console.print("The decode worker is restarted. A cache of its own would be gone; the daemon's is not:")
    restart_decode_worker(stack, spec, system.decodes[0])
    if not chat.turn(BEHIND_THE_RESTART).held_tokens:
        problems.append("nothing of the chat was held behind a restart of the decode worker")
    pool, host = decode_stats(system).pool, decode_stats(system).host
    if host.pages < pool.pages or pool.pages * spec.page_size > MAX_FILL_TOKENS:
        console.print(
            f"No prefix is evicted here: that takes a --host-bytes of the pool's size, and a pool of at most "
            f"{MAX_FILL_TOKENS} tokens; it has {pool.pages * spec.page_size}."
        )
        return problems
    console.print(
        f"Other prompts fill all {pool.pages} pages of the daemon's pool: the chat is evicted, and comes back from the "
        "host tier:"
    )
    chat.fill_pool()
    if not chat.turn(BEHIND_THE_EVICTION).host_tokens:
        problems.append("nothing of the evicted chat was found in the host tier")
    return problems


def _printable(text: str) -> str:
    """The text on one line; an untrained model's reply is hardly text."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 3] + "..."
