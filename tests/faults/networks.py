"""Two network namespaces joined by a wire that can be cut, lossy or slow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def need(tool: str) -> None:
    """Skips the test where it is not there."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed here")


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


class Networks:
    """A context; skips the test where namespaces cannot be made. Prefill daemons are in one, decode daemons in the
    other."""

    def __init__(self) -> None:
        self._names = {role: f"kvf-{role[0]}{os.getpid()}" for role in ("prefill", "decode")}
        self._hosts = {"prefill": "10.77.0.1", "decode": "10.77.0.2"}
        self._ends = {"prefill": f"kvp{os.getpid() % 100000}", "decode": f"kvd{os.getpid() % 100000}"}

    def __enter__(self) -> Networks:
        need("ip")
        try:
            for role, name in self._names.items():
                run("ip", "netns", "add", name)
                self._in(role, "ip", "link", "set", "lo", "up")
            self.make_wire()
            for role, name in self._names.items():
                run("ip", "link", "set", self._ends[role], "netns", name)
                self._in(role, "ip", "address", "add", f"{self._hosts[role]}/24", "dev", self._ends[role])
                self._in(role, "ip", "link", "set", self._ends[role], "up")
        except OSError as error:
            self.__exit__()
            pytest.skip(f"network namespaces cannot be made here: {error}")
        return self

    def make_wire(self) -> None:
        run("ip", "link", "add", self._ends["prefill"], "type", "veth", "peer", "name", self._ends["decode"])

    def __exit__(self, *error: object) -> None:
        for name in self._names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def _in(self, role: str, *words: str) -> None:
        run("ip", "netns", "exec", self._names[role], *words)

    def place(self, name: str) -> tuple[Sequence[str], str]:
        """(Storm's `place`) Workers stay outside: they reach their daemons by Unix sockets."""
        if name.endswith("-worker"):
            return (), "127.0.0.1"
        role = name.partition("-")[0]
        return ("ip", "netns", "exec", self._names[role]), self._hosts[role]

    def cut(self) -> None:
        self._in("decode", "ip", "link", "set", self._ends["decode"], "down")

    def join(self) -> None:
        self._in("decode", "ip", "link", "set", self._ends["decode"], "up")

    def lose(self, share: float) -> None:
        """So many of the packets that come to either side. Skips the test where there is no iptables."""
        need("iptables")
        rule = ("INPUT", "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")
        for role in self._names:
            self._in(role, "iptables", "-A", *rule)

    def lose_nothing(self) -> None:
        for role in self._names:
            self._in(role, "iptables", "-F", "INPUT")

    def slow_down(self, rate: str) -> None:
        """To a rate like 1mbit, of what goes to the decode side. Skips the test where there is no tc."""
        need("tc")
        limit = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        self._in("prefill", "tc", "qdisc", "add", "dev", self._ends["prefill"], "root", *limit)

    def full_speed(self) -> None:
        self._in("prefill", "tc", "qdisc", "delete", "dev", self._ends["prefill"], "root")


class DelayedNetworks(Networks):
    """Its wire is two, with a relay between them in a namespace of its own that holds back what goes either way."""

    def __init__(self) -> None:
        super().__init__()
        self._middle = f"kvf-m{os.getpid()}"
        self._inner = (f"kvx{os.getpid() % 100000}", f"kvy{os.getpid() % 100000}")
        self._relay: subprocess.Popen[str] | None = None

    def make_wire(self) -> None:
        run("ip", "netns", "add", self._middle)
        for role, inner in zip(self._ends, self._inner, strict=True):
            run("ip", "link", "add", self._ends[role], "type", "veth", "peer", "name", inner)
            run("ip", "link", "set", inner, "netns", self._middle)
            run("ip", "netns", "exec", self._middle, "ip", "link", "set", inner, "up")
        relay = [sys.executable, str(Path(__file__).with_name("relay.py")), *self._inner]
        self._relay = subprocess.Popen(
            ["ip", "netns", "exec", self._middle, *relay],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._relay.stdout is not None and self._relay.stderr is not None
        if not self._relay.stdout.readline():
            raise OSError(f"the relay does not start: {self._relay.stderr.read()[-300:]}")

    def __exit__(self, *error: object) -> None:
        if self._relay is not None:
            self._relay.communicate(timeout=10)  # the end of its input is its end
        super().__exit__(*error)
        subprocess.run(["ip", "netns", "delete", self._middle], capture_output=True, check=False)

    def delay(self, seconds: float) -> None:
        """From now on, one way; what is on its way keeps its time."""
        relay = self._relay
        assert relay is not None and relay.stdin is not None and relay.stdout is not None
        relay.stdin.write(f"{seconds}\n")
        relay.stdin.flush()
        assert relay.stdout.readline().strip() == str(seconds)

    def round_trip(self) -> float:
        """Seconds, by a connection from the decode side that is refused."""
        words = ["ip", "netns", "exec", self._names["decode"], sys.executable, "-c", _REFUSED, self._hosts["prefill"]]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
        return float(done.stdout)


_REFUSED = """
import socket, sys, time
for _ in range(2):  # for the first one, the address is asked for
    began = time.monotonic()
    with socket.socket() as tried:
        tried.settimeout(20)
        assert tried.connect_ex((sys.argv[1], 9)) == 111
    took = time.monotonic() - began
print(took)
"""
