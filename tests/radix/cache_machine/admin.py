"""Orders of an operator to a `World`: a flush, and a new process over what its host tier has kept."""

from __future__ import annotations

import random

from kvferry.radix.pool import PageState
from tests.radix.cache_machine.model import NO_PARENT, Path, Side, digest, place
from tests.radix.cache_machine.world import World


def flush(world: World, sides: list[Side]) -> None:
    world.settle()
    device = host = skipped = 0
    copying = {(f.side.number, path) for f in world.flights for path in f.attached}
    for side in sides:
        every = dict.fromkeys((*side.device, *side.host))
        stay: set[Path] = set()
        for path in sorted(every, key=len, reverse=True):
            if path in side.locks or (side.number, path) in copying or path in stay:
                stay |= {path, path[:-1]}
        going = [path for path in every if path not in stay]
        device += sum(path in side.device for path in going)
        host += sum(path in side.host for path in going)
        skipped += len(every) - len(going)
        side.drop(going)
    result = world.cache.flush([side.namespace for side in sides])
    assert (result.device, result.host, result.skipped) == (device, host, skipped)
    world.sync()


def restart(world: World, keep: int, order: int, batches: int) -> None:
    """A new process finds those host pages that are in the mask `keep`."""
    found = [(side.number, path, at.page, side.outputs[path]) for side in world.sides for path, at in side.host.items()]
    found = [entry for i, entry in enumerate(found) if keep >> i & 1]
    random.Random(order).shuffle(found)
    world.start()
    if not found:
        return
    size = -(-len(found) // batches)
    parts = [found[at : at + size] for at in range(0, len(found), size)]
    if order & 1:  # the longest path first, so that the rest branches off it at several places
        number, longest = max(((number, path) for number, path, _, _ in found), key=lambda entry: len(entry[1]))
        spine = [entry for entry in found if entry[0] == number and longest[: len(entry[1])] == entry[1]]
        parts = [spine, [entry for entry in found if entry not in spine]]
    for part in parts:
        for side in world.sides:
            _recover(world, side, [entry[1:] for entry in part if entry[0] == side.number])
    assert world.cache.tiers.recovered == len(found) and world.cache.tiers.discarded_entries == 0
    world.sync()


def _recover(world: World, side: Side, entries: list[tuple[Path, int, bool | None]]) -> None:
    if not entries:
        return
    assert world.host is not None
    paths = [path for path, _, _ in entries]
    world.host.claim([row for _, row, _ in entries], PageState.LEASED)
    world.cache.recover(
        side.namespace,
        b"".join(digest(path) for path in paths),
        b"".join(digest(path[:-1]) if len(path) > 1 else NO_PARENT for path in paths),
        [row for _, row, _ in entries],
        bytes(bool(output) for _, _, output in entries),
    )
    for path, row, output in entries:
        side.host[path] = place(world.host, row)
        side.outputs[path] = bool(output)
