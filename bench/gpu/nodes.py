"""Processes for the proofs and rates, each an actor that does what it is told over a pipe, and may be killed."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from actor import ACKNOWLEDGED, STOP, Actor, now

_context = mp.get_context("spawn")


def _live(connection: Connection, actor: Actor, environment: Mapping[str, str], log: str) -> None:
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = connection.recv()
            try:
                answer = (True, getattr(actor, name)(*arguments))
            except Exception as error:
                answer = (False, f"{name}: {type(error).__name__}: {error}")
            connection.send(answer)
    os._exit(0)


class NodeError(RuntimeError):
    """What a node answered instead of a result."""


class Node:
    """A process of the proofs, from the controlling one."""

    def __init__(self, actor: Actor, environment: Mapping[str, str], log: str) -> None:
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_live, args=(theirs, actor, dict(environment), log), daemon=True)
        self.process.start()
        theirs.close()
        self.send("start")

    def send(self, name: str, *arguments: object) -> None:
        """Starts a call; `answer` waits for it."""
        self._connection.send((name, arguments))

    def answer(self, timeout: float = 30.0) -> Any:
        if not self._connection.poll(timeout):
            raise NodeError(f"no answer within {timeout} s")
        try:
            good, result = self._connection.recv()
        except (EOFError, ConnectionError):
            raise NodeError(f"the process ended ({self.process.exitcode})") from None
        if not good:
            raise NodeError(result)
        return result

    def call(self, name: str, *arguments: object) -> Any:
        self.send(name, *arguments)
        return self.answer()

    def kill(self) -> tuple[int, int]:
        """SIGKILL, and the wait for the process's end: when it was sent, when the process was reaped."""
        sent = now()
        self.process.kill()
        self.process.join()
        return sent, now()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)


def make_board() -> Any:
    return _context.RawArray("q", 64)


@dataclass(frozen=True)
class Options:
    tls: str
    logs: str
    scale: int  # bytes are divided by it, for a rehearsal


class Bench:
    """The board, the nodes and the environment of one proof."""

    def __init__(self, options: Options, actor: type[Actor] = Actor) -> None:
        self.options = options
        self.actor = actor
        self.board = make_board()
        self.nodes: list[Node] = []

    def node(self, *ordinals: int, **environment: str) -> Node:
        base = {"UCX_TLS": self.options.tls, "UCX_NET_DEVICES": "lo", "UCX_TCP_USER_TIMEOUT": "3000ms", "HOME": "/"}
        log = os.path.join(self.options.logs, f"node-{len(self.nodes)}-{os.getpid()}.log")
        node = Node(self.actor(self.board, ordinals), base | environment, log)
        self.nodes.append(node)
        return node

    def size(self, nbytes: int) -> int:
        return max(65536, nbytes // self.options.scale)

    def stop(self, *nodes: Node) -> list[Any]:
        self.board[STOP] = 1
        return [node.answer() for node in nodes]

    def watching(self, watcher: Node) -> None:
        """Starts it; returns when it looks."""
        self.board[ACKNOWLEDGED] = 0
        watcher.send("watch", "slots")
        while not self.board[ACKNOWLEDGED]:
            time.sleep(0.0001)

    def end(self) -> None:
        for node in self.nodes:
            node.end()
        self.nodes.clear()


@contextmanager
def bench(options: Options, actor: type[Actor] = Actor) -> Iterator[Bench]:
    made = Bench(options, actor)
    try:
        yield made
    finally:
        made.end()
