"""A courier's process, as its daemon starts, hears and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import deque
from collections.abc import Mapping

from kvferry.transfer.courier.config import CourierError
from kvferry.waiting import within

log = logging.getLogger(__name__)

OUTPUT_LIMIT_BYTES = 64 * 1024  # of a courier's output that is logged
OUTPUT_KEPT_LINES = 4  # for error messages


class CourierProcess:
    """Made by `start`, ended by `reap`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use `start`."""
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=OUTPUT_KEPT_LINES)
        self._output = asyncio.create_task(self._log_output())

    @classmethod
    async def start(cls, descriptors: tuple[int, ...], environment: Mapping[str, str]) -> CourierProcess:
        """Gives it the descriptors, their numbers as arguments. The kernel ends it when the calling thread ends."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvferry.transfer.courier.main",
            *(str(descriptor) for descriptor in descriptors),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=descriptors,
            env=environment,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self, deadline_s: float) -> None:
        """Waits for its end, at most so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(deadline_s, self._process.wait())

    async def reap(self, deadline_s: float) -> str:
        """Kills it and waits for its end; how it ended. CourierError where that takes longer than `deadline_s`."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        try:
            code = await within(deadline_s, self._process.wait())
            await within(deadline_s, asyncio.shield(self._output))
        except asyncio.TimeoutError:
            raise CourierError(f"courier {self.pid} did not end within {deadline_s} s of SIGKILL") from None
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def said(self) -> str:
        """The courier's last words, for an error message."""
        lines = [line for line in self._last_lines if line]
        return f"; its last words: {' | '.join(lines)}" if lines else ""

    async def _log_output(self) -> None:
        """Logs the first OUTPUT_LIMIT_BYTES, drops the rest: a peer may be able to make it talk."""
        assert self._process.stdout is not None
        logged, rest = 0, b""
        while chunk := await self._process.stdout.read(4096):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > 4096:
                lines, rest = [*lines, rest], b""
            for line in lines:
                text = line.decode(errors="backslashreplace").rstrip()
                self._last_lines.append(text[:500])
                if logged <= OUTPUT_LIMIT_BYTES:
                    log.info("courier %d: %s", self.pid, text)
                    if (logged := logged + len(line) + 1) > OUTPUT_LIMIT_BYTES:
                        log.warning("courier %d: it said more than %d bytes, the rest is dropped", self.pid, logged)
        if rest:
            self._last_lines.append(rest.decode(errors="backslashreplace")[:500])
