"""Whether pools that are not made yet could be made: a daemon that cannot make one serves nobody. Shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.memory.capacity import pool_lacks
from kvferry.daemon.sides.side import AnySide

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class RoomWatch:
    """`lacks`: the reasons, with remedies; `changed` is called when there are others, and when there are none again."""

    def __init__(self, config: DaemonConfig, sides: Mapping[str, AnySide], changed: Callable[[], None]) -> None:
        self.lacks: list[str] = []
        self._config = config
        self._sides = sides
        self._changed = changed

    async def look(self) -> None:
        """Looks once. What a made pool took is not asked for again."""
        without = [side for side in self._sides.values() if not side.tiers.has_pool.is_set()]
        found = await asyncio.to_thread(pool_lacks, self._config, len(without)) if without else []
        found += [f"{side.role}: {side.tiers.refused}" for side in without if side.tiers.refused]
        before, self.lacks = self.lacks, found
        for lack in found:
            if lack.partition(":")[0] not in {old.partition(":")[0] for old in before}:
                log.error("no worker can be served: %s", lack)
        if before and not found:
            log.info("workers can be served")
        if before != found:
            self._changed()

    async def run(self) -> None:
        """Looks again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()
