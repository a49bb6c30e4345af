"""The daemon's side of worker.proto: pages are handed out once, in order; no cache unless `keep` is set. For unit tests
only."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np

from kvferry.daemon.services.worker_frames import FramedWorkers, FrameTalk
from kvferry.frames import SUFFIX
from kvferry.proto import common_pb2, worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry

Message = worker_pb2.WorkerMessage
Event = worker_pb2.WorkerEvent

GIVEN_BACK = 0xEE  # in every byte of a page that a finished request gave back


class FakeDaemon:
    """One session. `received` has all messages; `override[kind]` replaces the default answer to such messages."""

    def __init__(self, folder: Path, geometry: KVGeometry, *, pages: int = 64, max_tokens: int = 4096) -> None:
        self.socket = str(folder / "daemon.sock")
        self.geometry = geometry
        self.page_bytes = geometry.page_bytes
        self.max_tokens = max_tokens
        self.received: list[Message] = []
        self.override: dict[str, Callable[[Message], list[Event]]] = {}
        self.prefix_tokens = 0  # what Admitted, Begun call matched, in pages 0..: fill them in the test
        self.host_tokens = 0  # what Admitted says of them
        self.aux = b""
        # Given the full pages of a request that finishes, how many of the first ones are kept and matched later.
        self.keep: Callable[[int], int] | None = None
        self.given_back: list[int] = []  # pages that nobody may touch any more: with `keep`, they are GIVEN_BACK
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.lock_was_held = False
        self.refuse: str | None = None
        self.broken: list[AssertionError] = []
        self._segment = folder / "segment"
        self._session_file = folder / "session"
        self._session_file.touch()
        with self._segment.open("w+b") as file:
            file.truncate(pages * self.page_bytes)
            self._map = mmap.mmap(file.fileno(), pages * self.page_bytes)
        self.pool = np.frombuffer(self._map, dtype=np.uint8).reshape(pages, self.page_bytes)
        self._next_page = 0
        self._pages: dict[bytes, list[int]] = {}
        self._kept: dict[bytes, int] = {}  # pages by digest
        self._living: dict[bytes, worker_pb2.Admit] = {}  # with `keep`, by request id
        self._arrived = asyncio.Condition()

    async def __aenter__(self) -> FakeDaemon:
        self._server = FramedWorkers(self._session, 16)
        await self._server.start(self.socket + SUFFIX)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(0)
        os.unlink(self.socket + SUFFIX)
        assert not self.broken, f"the worker broke the protocol: {self.broken[0]}"
        assert (self.pool[self.given_back] == GIVEN_BACK).all(), "a page was touched after it was given back"

    def kinds(self) -> list[str]:
        return [str(message.WhichOneof("kind")) for message in self.received]

    def last(self, kind: str) -> Message:
        return next(message for message in reversed(self.received) if message.WhichOneof("kind") == kind)

    async def wait_for(self, kind: str, count: int = 1) -> Message:
        async def arrived() -> None:
            async with self._arrived:
                await self._arrived.wait_for(lambda: self.kinds().count(kind) >= count)

        await asyncio.wait_for(arrived(), 10)
        return self.last(kind)

    def lock_is_held(self) -> bool:
        with self._session_file.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def pages_of(self, name: common_pb2.RequestName) -> list[int]:
        return self._pages[name.request_id]

    def fail(self, name: common_pb2.RequestName, code: common_pb2.ErrorCode, message: str) -> None:
        error = common_pb2.Error(code=code, message=message)
        self.events.put_nowait(Event(failed=worker_pb2.Failed(name=name, error=error)))

    def retract(self, name: common_pb2.RequestName) -> None:
        self.events.put_nowait(Event(retract=worker_pb2.Retract(name=name)))

    async def _session(self, talk: FrameTalk) -> None:
        if self.refuse is not None:
            await talk.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuse)
        reader = asyncio.create_task(self._read(talk))
        try:
            while (event := await self.events.get()) is not None:
                await talk.write([event])
        finally:
            reader.cancel()

    async def _read(self, talk: FrameTalk) -> None:
        while isinstance(message := await talk.read(), Message):
            kind = str(message.WhichOneof("kind"))
            answer = self.override.get(kind, getattr(self, f"_on_{kind}", lambda message: []))
            try:
                events = answer(message)
            except AssertionError as error:
                self.broken.append(error)
                break
            for event in events:
                self.events.put_nowait(event)
            async with self._arrived:
                self.received.append(message)
                self._arrived.notify_all()
        self.events.put_nowait(None)

    def _on_hello(self, message: Message) -> list[Event]:
        return [
            Event(
                welcome=worker_pb2.Welcome(
                    protocol=1,
                    daemon="fake",
                    incarnation=bytes(16),
                    namespace_id=bytes(32),
                    geometry=self.geometry.to_proto(),
                    epoch=1,
                    pages=len(self.pool),
                    segment=str(self._segment),
                    session_file=str(self._session_file),
                    peer_address="127.0.0.1:7070",
                    max_tokens=self.max_tokens,
                )
            )
        ]

    def _on_attached(self, message: Message) -> list[Event]:
        self.lock_was_held = self.lock_is_held()
        return []

    def _allocate(self, name: common_pb2.RequestName, tokens: int) -> list[int]:
        pages = self._pages.setdefault(name.request_id, [])
        first = len(pages)
        if first == 0:
            pages.extend(range(self.prefix_tokens // self.geometry.page_size))
            self._next_page = max(self._next_page, len(pages))
        while len(pages) * self.geometry.page_size < tokens:
            pages.append(self._next_page)
            self._next_page += 1
        return pages[first:]

    def _match(self, admit: worker_pb2.Admit) -> int:
        """Tokens of the prompt that are kept; their pages are the request's first."""
        assert admit.name.request_id not in self._living, "a name that lives is admitted again"
        self._living[admit.name.request_id] = admit
        digests = [admit.digests[start : start + 32] for start in range(0, len(admit.digests), 32)]
        pages: list[int] = []
        while len(pages) < (admit.tokens - 1) // self.geometry.page_size and digests[len(pages)] in self._kept:
            pages.append(self._kept[digests[len(pages)]])
        self._pages[admit.name.request_id] = pages
        return len(pages) * self.geometry.page_size

    def _on_admit(self, message: Message) -> list[Event]:
        admit = message.admit
        matched = self.prefix_tokens if self.keep is None else self._match(admit)
        self._allocate(admit.name, admit.tokens)
        admitted = worker_pb2.Admitted(
            name=admit.name,
            matched_tokens=matched,
            pages=self._pages[admit.name.request_id],
            local_tokens=0 if admit.prefill else matched,
            host_tokens=self.host_tokens,
        )
        ready = worker_pb2.Ready(
            name=admit.name, aux=self.aux, delta_pages=1, delta_bytes=self.page_bytes, elapsed_us=7
        )
        return [Event(admitted=admitted), Event(ready=ready)]

    def _on_begin(self, message: Message) -> list[Event]:
        begin = message.begin
        pages = self._allocate(begin.name, begin.tokens)
        return [Event(begun=worker_pb2.Begun(name=begin.name, matched_tokens=self.prefix_tokens, pages=pages))]

    def _on_grow(self, message: Message) -> list[Event]:
        first = len(self._pages[message.grow.name.request_id])
        pages = self._allocate(message.grow.name, message.grow.tokens)
        return [Event(grown=worker_pb2.Grown(name=message.grow.name, first_page=first, pages=pages))]

    def _on_aux(self, message: Message) -> list[Event]:
        return [Event(ended=worker_pb2.Ended(name=message.aux.name))]

    def _on_finish(self, message: Message) -> list[Event]:
        if self.keep is not None:
            self._take_back(message.finish, self.keep)
        return [Event(ended=worker_pb2.Ended(name=message.finish.name))]

    def _take_back(self, finish: worker_pb2.Finish, keep: Callable[[int], int]) -> None:
        admit = self._living.pop(finish.name.request_id)
        pages = self._pages[finish.name.request_id]
        digests = admit.digests + finish.digests
        full = finish.tokens // self.geometry.page_size
        last = min(admit.tokens + admit.max_new_tokens - 1, len(pages) * self.geometry.page_size)
        assert admit.tokens <= finish.tokens <= last, f"{admit.tokens} <= {finish.tokens} <= {last}"
        assert len(digests) == full * 32, f"{len(digests)} bytes of digests for {full} pages"
        kept = keep(full)
        for index in range(kept):
            self._kept.setdefault(digests[index * 32 : (index + 1) * 32], pages[index])
        held = set(self._kept.values())
        gone = [page for page in pages if page not in held]
        self.pool[gone] = GIVEN_BACK
        self.given_back += gone

    def _on_abort(self, message: Message) -> list[Event]:
        self._living.pop(message.abort.name.request_id, None)
        return [Event(ended=worker_pb2.Ended(name=message.abort.name))]

    def _on_quiesced(self, message: Message) -> list[Event]:
        return []
