"""Guards of what an engine with blocks of its own is given back, and when."""

from __future__ import annotations

from tests.mutants.guard import Guard

MOMENTS = ("tests/connectors/worker_side/test_moments.py",)
ENGINE_BLOCKS = ("tests/system/serving/test_engine_blocks.py",)
BLOCKS_WAY = ("tests/connectors/worker_side/test_blocks_way.py",)
AHEAD = ("tests/daemon/core/test_ahead.py",)

GUARDS: tuple[Guard, ...] = (
    Guard(
        "what was ordered begins behind the word that nothing does any more",
        "connectors/worker_side.py",
        "WorkerSide.give_up",
        "self._flush()",
        "pass",
        MOMENTS,
    ),
    Guard(
        "a device that is lost keeps orders for ever",
        "connectors/worker_side.py",
        "WorkerSide._when_computed",
        "except Exception:",
        "except ZeroDivisionError:",
        MOMENTS,
    ),
    Guard(
        "an end overtakes its load",
        "connectors/worker_side.py",
        "WorkerSide.take",
        "if self._pushing or not self._loading:",
        "if self._pushing or step.begun is None:",
        MOMENTS,
    ),
    Guard(
        "what was computed for another of the same id is sent",
        "connectors/worker_side.py",
        "WorkerSide._save",
        " and push.since <= step",
        "",
        MOMENTS,
    ),
    Guard(
        "blocks are given back while the daemon may write them",
        "client/client.py",
        "DaemonClient.release",
        "while not await is_done(request.released, LATE_SECONDS):",
        "while False:",
        BLOCKS_WAY,
    ),
    Guard(
        "a daemon that is gone has ended",
        "client/client.py",
        "DaemonClient.release",
        "await self.end.wait()",
        "pass",
        ENGINE_BLOCKS,
    ),
    Guard(
        "a load ends before its abort is heard",
        "connectors/block_requests.py",
        "BlockRequests._give_up",
        "await complete(client.release(name, UNWANTED))",
        "self._tools.later(client.release(name, UNWANTED))",
        BLOCKS_WAY,
    ),
    Guard(
        "blocks of a preempted prompt are read on",
        "connectors/block_requests.py",
        "BlockRequests.take_away",
        "            task.cancel()\n            await asyncio.wait([task])\n",
        "            pass\n",
        BLOCKS_WAY,
    ),
    Guard(
        "who waits for Begun is ahead of it",
        "daemon/core/prefill_entries.py",
        "EntryKeeper.objection",
        "entry.queued and not prompt.is_ahead",
        "False",
        AHEAD,
    ),
    Guard(
        "what was computed before there were pages is not sent",
        "daemon/core/prefill_entries.py",
        "EntryKeeper._begin",
        "if prompt.is_ahead:",
        "if False:",
        AHEAD,
    ),
    Guard(
        "a last word before there are pages is not the last",
        "daemon/core/prefill.py",
        "PrefillCore.progress",
        " or prompt.aux is not None",
        "",
        AHEAD,
    ),
    Guard(
        "blocks are named from the beginning on again",
        "connectors/block_requests.py",
        "_Sending._say_computed",
        "save.blocks[self._named : upto]",
        "save.blocks[:upto]",
        BLOCKS_WAY,
    ),
)
