"""Systems with a way back, and conversations whose turns go through one prefill server after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, SystemSpec, start_replicas
from tests.support.engines import Engines, Turn, stats, wait_until
from tests.system.serving.ranks import ids

ALWAYS = ("--way-back", "always")


def started(stack: Stack, spec: SystemSpec) -> tuple[tuple[Replica, ...], tuple[Replica, ...]]:
    """Once their sessions are up: an Ask that waits for that comes too late."""
    prefills, decodes = start_replicas(stack, spec)
    for decode in decodes:
        wait_until(partial(is_up, decode), 30.0, "its sessions are up")
    return prefills, decodes


def is_up(decode: Replica) -> bool:
    return {peer.state for peer in stats(decode).peers} == {"up"}


def converse(decode: Replica, prefills: Sequence[Replica], turns: int, *, seed: int, first: int = 100) -> list[Turn]:
    """One conversation, which begins with `first` tokens, each turn with another prefill server."""
    rng = random.Random(seed)
    history, done = ids(rng, first), list[Turn]()
    for number in range(turns):
        with Engines(prefills[number % len(prefills)], decode) as engines:
            turn = engines.turn(history, 20)
        assert turn.error is None, turn.details
        done.append(turn)
        history = history + turn.output + ids(rng, 30)
    return done
