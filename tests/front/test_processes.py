"""Several processes of the front end before vLLM servers: they share the requests, come again, and end together."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvferry.front.main import MAX_PROCESSES
from tests.front.test_vllm_front import CHAT, FakeVllm, until
from tests.support.front_process import refused
from tests.support.http_apps import serving

READY = "ready: front "
ASK = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def started(*words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A front end's process of these words for Python, and its URL."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=pipe, stderr=pipe)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        assert line.startswith(READY), line
        yield process, f"http://{line.removeprefix(READY).strip()}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def front(fake: FakeVllm, *more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its URL, before one decode server."""
    async with serving(fake.app()) as url:
        words = ["-m", "kvferry", "front", "--listen", "127.0.0.1:0", "--vllm-decode", url, *more]
        async with started(*words) as process_and_url:
            yield process_and_url


def children(pid: int) -> set[int]:
    told = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return {int(each) for each in told.split()}


def lives(pid: int) -> bool:
    """It may be a zombie whose parent is not this process: nobody waits for those here."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


async def answered(url: str) -> bool:
    async with httpx.AsyncClient(timeout=10) as client:
        return (await client.post(url + CHAT, json=ASK)).status_code == 200


def test_one_that_is_killed_comes_again_and_all_end_in_order() -> None:
    async def story() -> None:
        fake = FakeVllm("decode")
        async with front(fake, "--processes", "3") as (process, url):
            first = children(process.pid)
            assert len(first) == 3
            assert all([await answered(url) for _ in range(12)])
            killed = min(first)
            os.kill(killed, signal.SIGKILL)
            await until(lambda: len(children(process.pid) - first) == 1)
            assert all([await answered(url) for _ in range(12)])
            fake.chunk.clear()
            body = {**ASK, "stream": True}
            async with httpx.AsyncClient(timeout=20) as client, client.stream("POST", url + CHAT, json=body) as reply:
                lines = reply.aiter_lines()
                told = [await anext(lines)]
                process.send_signal(signal.SIGTERM)
                await until(lambda: len(children(process.pid)) == 1)
                fake.chunk.set()
                told += [line async for line in lines if line]
            assert told[-1] == "data: [DONE]"
            _, stderr = await asyncio.wait_for(process.communicate(), 20)
            assert process.returncode == 0, stderr
            assert b"ended by itself (-9); another is started" in stderr

    asyncio.run(story())


def test_they_end_with_their_parent_however_it_ends() -> None:
    async def story() -> None:
        async with front(FakeVllm("decode"), "--processes", "2") as (process, _):
            those = children(process.pid)
            assert len(those) == 2
            process.kill()
            await until(lambda: not any(map(lives, those)))

    asyncio.run(story())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vllm-decode", "http://h:1", "--processes", "65"], f"--processes is 65; it must be 1 to {MAX_PROCESSES}"),
        (["--prefill", "h:1", "--decode", "h:2", "--processes", "2"], "before reference workers it must be 1"),
        (["--vllm-decode", "http://h:1", "--processes", "0"], "--processes"),
    ],
)
def test_how_many_there_may_be(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(*words) == 2 and said in capsys.readouterr().err
