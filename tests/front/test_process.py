"""`kvferry front` as a process: its word when it is ready, and its end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from kvferry.front.server import listen
from tests.support.front_stack import Stack

READY = "ready: front "


@contextmanager
def front(stack: Stack, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL."""
    command = [sys.executable, "-m", "kvferry", "front", "--listen", "127.0.0.1:0", *arguments]
    for role, servers in (("--prefill", stack.prefill), ("--decode", stack.decode)):
        command += [role, *(server.address for server in servers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(READY), line
        yield process, f"http://{line.removeprefix(READY).strip()}"
    finally:
        process.kill()
        process.communicate()


def test_sigterm_lets_running_requests_end() -> None:
    with Stack(decode=2) as stack:

        async def slow() -> None:
            await asyncio.sleep(0.1)

        for decode in stack.decode:
            decode.between = slow
        with front(stack, "--model-name", "mine") as (process, url):
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
            body = {"prompt": "x", "max_tokens": 8, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
                lines = response.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert first.startswith("data: {")
            assert rest[-1] == "data: [DONE]"
            assert len(rest) == 7 + 1 + 1
            assert process.wait(15) == 0


def test_without_servers_ready_comes_after_the_wait() -> None:
    def configure(stack: Stack) -> None:
        stack.decode[0].absent = True
        stack.wait_s = 0.1

    with Stack(configure=configure) as stack, front(stack, "--wait-seconds", "0.5") as (process, url):
        assert httpx.get(f"{url}/health").status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert process.stderr is not None
        assert "after 0.5 s the servers are not up" in process.stderr.read()


def test_told_so_it_listens_on_every_address() -> None:
    with Stack() as stack, front(stack, "--listen", "0.0.0.0:0", "--insecure") as (_, url):
        assert url.startswith("http://0.0.0.0:")
        assert httpx.get(f"{url.replace('0.0.0.0', '127.0.0.1')}/health").status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_nothing_waits_for_acknowledgements(host: str) -> None:
    """A stream's first event would come 40 ms late, with Nagle's algorithm on."""

    async def run() -> None:
        made: asyncio.Queue[asyncio.BaseTransport] = asyncio.Queue()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.put_nowait(transport)

        with listen(host, 0) as listener:
            server = await asyncio.get_running_loop().create_server(Protocol, sock=listener)
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            transport = await asyncio.wait_for(made.get(), 5)
            assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            transport.close()  # type: ignore[attr-defined]
            writer.close()
            server.close()

    asyncio.run(run())


def test_an_address_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "kvferry", "front", "--listen", address, "--prefill", "x:1", "--decode", "x:2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == f"kvferry front: --listen {address}: Address already in use\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "8000"], "must be HOST:PORT with a port of 0 to 65535, got '8000'"),
        (["--reply-memory-entries", "0"], "must be a whole number >= 1, got '0'"),
        (["--first-token-seconds", "0"], "must be > 0, got '0'"),
        (["--load-slack", "-1"], "must be a number >= 0, got '-1'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvferry.daemon.cli.main import main

    with pytest.raises(SystemExit):
        main(["front", "--prefill", "x:1", "--decode", "x:2", *arguments])
    assert message in capsys.readouterr().err
