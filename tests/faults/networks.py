"""Two network namespaces joined by a wire that can be cut, lossy or slow."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import pytest


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
        try:
            for role, name in self._names.items():
                run("ip", "netns", "add", name)
                self._in(role, "ip", "link", "set", "lo", "up")
            ends = self._ends
            run("ip", "link", "add", ends["prefill"], "type", "veth", "peer", "name", ends["decode"])
            for role, name in self._names.items():
                run("ip", "link", "set", ends[role], "netns", name)
                self._in(role, "ip", "address", "add", f"{self._hosts[role]}/24", "dev", ends[role])
                self._in(role, "ip", "link", "set", ends[role], "up")
        except OSError as error:
            self.__exit__()
            pytest.skip(f"network namespaces cannot be made here: {error}")
        return self

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
        """So many of the packets that come to either side. OSError where iptables cannot."""
        rule = ("INPUT", "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")
        for role in self._names:
            self._in(role, "iptables", "-A", *rule)

    def lose_nothing(self) -> None:
        for role in self._names:
            self._in(role, "iptables", "-F", "INPUT")

    def slow_down(self, rate: str) -> None:
        """To a rate like 1mbit, of what goes to the decode side. OSError where tc cannot."""
        limit = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        self._in("prefill", "tc", "qdisc", "add", "dev", self._ends["prefill"], "root", *limit)

    def full_speed(self) -> None:
        self._in("prefill", "tc", "qdisc", "delete", "dev", self._ends["prefill"], "root")
