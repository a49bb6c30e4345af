"""Operations that the fake device was given in no order, and who waited for them (fake_gpu/orders.h)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

HOST = "host"
"""This process, where a process is to be named."""


class Orders:
    """Of one test. A process is whom its name says, and knows at first nothing of what was done here."""

    def __init__(self, fake: ctypes.CDLL) -> None:
        self._fake = fake
        fake.fake_process_access.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
        for function in (fake.fake_hold, fake.fake_release):
            function.argtypes = [ctypes.c_uint64]
        fake.fake_orders_found.restype = ctypes.c_char_p
        fake.fake_orders_begin()

    def take(self) -> list[str]:
        """What was found since the last time."""
        found: bytes = self._fake.fake_orders_found()
        return found.decode().splitlines()

    def check(self) -> None:
        """AssertionError where there is something."""
        found = self.take()
        assert not found, "the device found:\n" + "\n".join(found)

    @contextlib.contextmanager
    def thread_waits_for_nothing(self) -> Iterator[None]:
        """This thread makes no call meanwhile that waits for a device, or may: those are found."""
        self._fake.fake_let_wait(0)
        try:
            yield
        finally:
            self._fake.fake_let_wait(1)

    def reads(self, process: str, address: int, nbytes: int) -> None:
        self._fake.fake_process_access(process.encode(), address, nbytes, 0)

    def writes(self, process: str, address: int, nbytes: int) -> None:
        self._fake.fake_process_access(process.encode(), address, nbytes, 1)

    def tells(self, process: str) -> None:
        """A message to it: what it does from now on comes behind what the host knows to be done, not behind what still
        runs on streams."""
        self._fake.fake_tells(process.encode())

    def told_by(self, process: str) -> None:
        """A message of it was heard."""
        self._fake.fake_told_by(process.encode())

    def hold(self, stream: int = 0) -> None:
        """What the stream (0: any) is given from now on does not end, before its release or a wait of the host for it:
        who asks for its events is told that they are not ready."""
        self._fake.fake_hold(stream)

    def release(self, stream: int = 0) -> None:
        self._fake.fake_release(stream)

    def lag(self, queries: int) -> None:
        """Events recorded from now on are asked for so often in vain, unless the host knows all that is before them."""
        self._fake.fake_lag(queries)
