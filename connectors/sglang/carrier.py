"""The thread that has an engine's session with its daemon, and carries transfers out. SGLang's scheduler hands them in
and polls their states; nothing of it waits."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvferry.client.requests import HandshakeFailed
from kvferry.connectors.sglang.settings import BackendSettings
from kvferry.connectors.sglang.transfers import (
    FetchedPrompt,
    PageTransfer,
    PromptChunk,
    SentPrompt,
    StoredPrompt,
    Transfers,
)
from kvferry.connectors.worker_session import DaemonRefused, OpenSession, Sessions
from kvferry.connectors.worker_state import wait_for
from kvferry.threads import CallThread, name_thread
from kvferry.waiting import have_ended, slices

STOP_SECONDS = 10.0
ABORT_SECONDS, ABORT_LOOK_SECONDS = 30.0, 0.0005  # a copy that runs takes milliseconds
ASKERS = 4  # questions at a time: hosts that do not answer take seconds each
MEANWHILE = "requests wait or fail"

_log = logging.getLogger(__name__)


class Carrier:
    """`start`, then transfers; `close` ends it. `connected` hears the daemon's name and the namespace with each
    session, on a thread."""

    def __init__(
        self,
        settings: BackendSettings,
        connect: OpenSession,
        write_row: Callable[[int, bytes], None],
        connected: Callable[[str, bytes, threading.Event], None],
    ) -> None:
        self.there = False
        """Whether there is a session."""
        self.stows = False
        """Whether its daemon takes computed prompts into a host tier."""
        self._settings = settings
        self._connected = connected
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="kvferry requests", daemon=True)
        self._copier = CallThread("kvferry steps")
        self._asker = ThreadPoolExecutor(ASKERS, "kvferry peers", initializer=name_thread, initargs=("kvferry peers",))
        self._teller = ThreadPoolExecutor(1, "kvferry name", initializer=name_thread, initargs=("kvferry name",))
        self._outdated = threading.Event()  # what the newest session has told is said no more
        settled = asyncio.Event()
        settled.set()  # SGLang makes its manager behind its CUDA graphs
        self._sessions = Sessions(
            connect, quiet=self._quiet, changed=self._changed, settled=settled, meanwhile=MEANWHILE
        )
        self._transfers = Transfers(
            self._sessions,
            settings.deadline_seconds,
            settings.store_seconds,
            self._copier,
            write_row,
        )
        self._tasks: dict[PageTransfer, asyncio.Task[None]] = {}

    # -- the engine's thread

    def start(self, together_s: float = 0.0) -> None:
        """Opens the first session. Raises DaemonRefused where the daemon refuses this engine. Where none answers in
        time it goes on without. `together_s`: that other ranks of the engine may take to come."""
        self._thread.start()
        try:
            seconds = self._settings.connect_seconds
            wait_for(self._open(seconds), self._loop, seconds + together_s + STOP_SECONDS)
        except (HandshakeFailed, TimeoutError) as error:
            self.close()
            raise DaemonRefused(f"the session with the daemon: {error}") from error

    def receive(self, order: FetchedPrompt) -> None:
        self._loop.call_soon_threadsafe(self._begin, order.transfer, self._transfers.receive, order)

    def send(self, order: SentPrompt) -> None:
        self._loop.call_soon_threadsafe(self._begin, order.transfer, self._transfers.send, order)

    def stow(self, order: SentPrompt) -> None:
        """Has a computed prompt's pages taken over by the daemon: see `Transfers.stow`."""
        self._loop.call_soon_threadsafe(self._transfers.stow, order)

    def store(self, order: StoredPrompt) -> None:
        self._loop.call_soon_threadsafe(self._begin, order.transfer, self._transfers.store, order)

    def hand_in(self, order: SentPrompt, chunk: PromptChunk) -> None:
        """Hands in the next chunk of a prompt that is sent."""
        self._loop.call_soon_threadsafe(order.put, chunk)

    def abort(self, transfer: PageTransfer) -> None:
        """Ends it, if it was handed in; its state says when that is so."""
        self._loop.call_soon_threadsafe(self._cancel, transfer)

    def wait_over(self, transfer: PageTransfer) -> None:
        """Waits until a transfer that was aborted touches no page any more. TimeoutError: SGLang must not go on."""
        for part in slices(ABORT_SECONDS):
            end = time.monotonic() + part
            while time.monotonic() < end:
                if transfer.over:
                    return
                time.sleep(ABORT_LOOK_SECONDS)
        raise TimeoutError(f"the daemon does not let go of the pages of request {transfer.name}")

    def ask(self, question: Callable[[], None]) -> None:
        """Has something asked over the network, on a thread."""
        self._asker.submit(question)

    def close(self) -> None:
        if self._thread.is_alive():
            try:
                wait_for(self._sessions.close(), self._loop, STOP_SECONDS)
            except TimeoutError:
                _log.warning("the session with the daemon did not end within %g s", STOP_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            have_ended([self._thread], STOP_SECONDS)
        if not self._copier.close(STOP_SECONDS):
            _log.warning("the engine's steps did not end within %g s", STOP_SECONDS)
        self._outdated.set()
        self._teller.shutdown(wait=True, cancel_futures=True)
        self._asker.shutdown(wait=True, cancel_futures=True)

    # -- the loop's

    def _run_loop(self) -> None:
        name_thread("kvferry requests")
        self._loop.run_forever()

    async def _open(self, seconds: float) -> None:
        await self._sessions.open(seconds)
        if self._sessions.client is not None:
            self._changed(True)

    def _changed(self, there: bool) -> None:
        client = self._sessions.client
        self.stows = there and client is not None and client.welcome.stows
        self.there = there
        if there and client is not None:
            self._outdated.set()
            self._outdated = threading.Event()
            told = client.welcome
            self._teller.submit(self._connected, told.daemon, told.namespace_id, self._outdated)

    async def _quiet(self) -> None:
        """Ends all that uses the session that is over; each transfer waits itself for what the daemon may still do."""
        for transfer in list(self._tasks):
            transfer.reason = transfer.reason or "the session with the daemon is over"
            self._cancel(transfer)
        for task in self._transfers.behind:
            task.cancel()

    def _begin(
        self,
        transfer: PageTransfer,
        way: Callable[[Any], Coroutine[Any, Any, None]],
        order: FetchedPrompt | SentPrompt | StoredPrompt,
    ) -> None:
        task = self._loop.create_task(self._transfers.carry(transfer, way(order)))
        self._tasks[transfer] = task
        task.add_done_callback(lambda _: self._tasks.pop(transfer, None))

    def _cancel(self, transfer: PageTransfer) -> None:
        if (task := self._tasks.get(transfer)) is None:
            return
        work = task.get_coro()
        assert inspect.iscoroutine(work)
        if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            self._loop.call_soon(task.cancel)  # once it has begun: it sets its state, and other ranks wait for its word
        else:
            task.cancel()
