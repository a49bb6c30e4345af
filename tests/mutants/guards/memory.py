"""Pools and copies to and from the host tier: clearing, checksums, the order of an entry and its row's bytes."""

from tests.mutants.guard import Guard

TIER, SHARED = "daemon/memory/host_tier.py", "daemon/memory/shared.py"
GPU, RANKS, ENDS = "daemon/memory/gpu.py", "daemon/memory/gpu_ranks.py", "daemon/memory/gpu_completions.py"
THREADS, MAKING = "daemon/memory/copy_threads.py", "daemon/memory/making.py"
OF_TIER = ("tests/daemon/memory/test_tier_file.py",)
OF_GROWTH = ("tests/daemon/memory/test_tier_growth.py", "tests/daemon/memory/test_growing_rows.py")
GROWING = "daemon/memory/growing_rows.py"
OF_SHARED = ("tests/daemon/memory/test_shared.py",)
OF_MAKING = ("tests/daemon/memory/test_making.py",)
OF_WAITS = ("tests/daemon/memory/test_waits.py",)

GROWTH = (
    Guard(
        "rows that were found are nobody's before they are taken in",
        "daemon/core/cache.py",
        "Cache.grow_host",
        "self.host.claim(found, PageState.LEASED)",
        "pass",
        OF_GROWTH,
    ),
    Guard(
        "what pages of a file are found by goes when all are there",
        TIER,
        "HostTier.grow",
        "cache.end_recovery()",
        "pass",
        OF_GROWTH,
    ),
    Guard(
        "a chunk ends where a page of memory does",
        GROWING,
        "GrowingRows._rows_of_a_chunk",
        " // unit * unit",
        "",
        OF_GROWTH,
    ),
    Guard(
        "no copy goes over a chunk's end",
        GROWING,
        "GrowingRows.parts",
        "rows[1:] % self._step == 0",
        "rows[1:] < 0",
        OF_GROWTH,
    ),
    Guard(
        "rows are used once they are made",
        GROWING,
        "GrowingRows._touch",
        "self._rows.make(start, end, near)",
        "pass",
        OF_GROWTH,
    ),
    Guard(
        "a chunk that has no room is not made",
        GROWING,
        "GrowingRows._touch",
        "if lack := self._rows.lacks(start, end):",
        "if False:",
        OF_GROWTH,
    ),
    Guard(
        "a chunk made ahead of one that cannot be pinned is let go",
        GROWING,
        "GrowingRows.make",
        "self._let_coming_go()",
        "pass",
        OF_GROWTH,
    ),
    Guard(
        "a tier is pinned as a whole or not at all",
        GROWING,
        "GrowingRows._pin",
        "if self._pins:",
        "if False:",
        OF_GROWTH,
    ),
    Guard(
        "what is pinned is let go before its memory",
        GROWING,
        "GrowingRows.close",
        "self._pins.clear()",
        "pass",
        OF_GROWTH,
    ),
    Guard(
        "a tier that ends takes in nothing more",
        TIER,
        "HostTier.grow",
        """                if self._closing or self._halted:
                    return
""",
        "",
        OF_GROWTH,
    ),
    Guard(
        "a tier that cannot be had costs no more than the tier",
        TIER,
        "_rows_of",
        "except (OSError, ValueError) as error:",
        "except ZeroDivisionError as error:",
        ("tests/daemon/test_host_growth.py",),
    ),
    Guard(
        "rows that a file has already need no room on its disk",
        "transfer/host_tier/rows.py",
        "FileRows.lacks",
        "end - max(start, there)",
        "end - start",
        ("tests/transfer/host_tier/test_recovery.py",),
    ),
    Guard(
        "each cgroup around a process bounds its memory",
        "transfer/mapping/memory_room.py",
        "rooms",
        "(folder, *folder.parents)",
        "(folder,)",
        ("tests/transfer/mapping/test_memory_room.py",),
    ),
)

HOST_TIER = (
    Guard(
        "a host row's index entry is cleared before the row is overwritten",
        TIER,
        "HostTier.start",
        "self.forget(copy.host)",
        "pass",
        OF_TIER,
    ),
    Guard(
        "a row's checksum is of what was copied, not of what was there before",
        TIER,
        "HostTier._copy",
        """        (memory.spill if known is None else memory.restore)(device, rows, self._there.parts(rows))
        if known is None and (self._checksums or self._file is not None):
            sums = checksum_rows(self._rows.buffer, rows, size)
            if self._file is not None:
                self._write_entries(self._file, started, rows, sums)
""",
        """        if known is None and (self._checksums or self._file is not None):
            sums = checksum_rows(self._rows.buffer, rows, size)
            if self._file is not None:
                self._write_entries(self._file, started, rows, sums)
        (memory.spill if known is None else memory.restore)(device, rows, self._there.parts(rows))
""",
        OF_TIER,
    ),
    Guard(
        "restored rows are compared with their checksums",
        TIER,
        "HostTier._copy",
        "if known is not None and known.any():",
        "if False:",
        OF_TIER,
    ),
    Guard(
        "rows that were found in the file are to be verified",
        TIER,
        "HostTier._take",
        "self._verify[rows] = True",
        "pass",
        OF_TIER,
    ),
    Guard(
        "rows that were spilled are to be verified where checksums are on",
        TIER,
        "HostTier._spilled",
        "self._verify[rows] = outcome.sums is not None and self._checksums",
        "pass",
        OF_TIER,
    ),
    Guard(
        "a row that was wrong once is not believed the next time",
        TIER,
        "HostTier._restored",
        " and not outcome.failed",
        "",
        OF_TIER,
    ),
    Guard(
        "a copy that raised has no right page",
        TIER,
        "HostTier._outcome",
        "_Outcome(list(started.copy.device), 0)",
        "_Outcome([], 0)",
        OF_TIER,
    ),
    Guard(
        "no entry is written once an invariant is broken",
        TIER,
        "HostTier._write_entries",
        """                if self._halted:
                    return
""",
        "",
        OF_TIER,
    ),
    Guard(
        "no copy starts at the end",
        TIER,
        "HostTier.start",
        """        if self._closing or self._halted:
            return
""",
        "",
        OF_TIER,
    ),
    Guard(
        "entries of copies that run at the end are written",
        TIER,
        "HostTier.close",
        """        while self._running:
            await asyncio.wait(self._running)
""",
        "",
        OF_TIER,
    ),
    Guard(
        "entries of namespaces too many go out of the file",
        TIER,
        "HostTier._take",
        "cache.discard(rows.tolist())",
        "pass",
        OF_TIER,
    ),
    Guard(
        "the namespace that is served is not among those too many",
        TIER,
        "HostTier._take",
        "cache.namespaces.keys() | {first}",
        "cache.namespaces.keys()",
        OF_TIER,
    ),
    Guard(
        "rows that were freed have no entry in the file",
        TIER,
        "HostTier.forget",
        "self._file.clear(rows)",
        "pass",
        OF_TIER,
    ),
)

COPIES = (
    Guard(
        "rows outside of the host tier are not copied",
        SHARED,
        "SharedPoolMemory._tier_runs",
        "if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):",
        "if False:",
        OF_SHARED,
    ),
    Guard(
        "pages whose clearing failed are not told to be clear",
        SHARED,
        "SharedPoolMemory.zero_pages",
        'done("; ".join(filter(None, ended.result())))',
        'done("")',
        OF_WAITS,
    ),
    Guard(
        "pages are clear on every rank",
        SHARED,
        "SharedPoolMemory._zero",
        "for planes, _ in self._planes:",
        "for planes, _ in self._planes[:1]:",
        OF_SHARED,
    ),
    Guard(
        "an engine's file keeps its name",
        SHARED,
        "SharedPoolMemory.close",
        "if not self.shape.places:",
        "if True:",
        OF_SHARED,
    ),
    Guard(
        "a part's sum is in its header",
        SHARED,
        "SharedPartCopies.gather",
        "header = header.with_sum(rows.gather_part_summed(*part))",
        "rows.gather_part_summed(*part)",
        OF_SHARED,
    ),
    Guard(
        "a spill or restore that one device refuses waits for the others",
        RANKS,
        "run_all",
        "        _wait_whatever_comes(copies)\n",
        "",
        OF_WAITS,
    ),
    Guard(
        "a spill or restore that fails on one device waits for the others",
        RANKS,
        "wait_all",
        "            problem = error\n",
        "            raise OSError(str(error)) from error\n",
        OF_WAITS,
    ),
    Guard(
        "a spill or restore that is late is waited for",
        RANKS,
        "wait_all",
        "                copy.wait()\n",
        "",
        OF_WAITS,
    ),
    Guard(
        "a spill or restore that failed on a device is said",
        RANKS,
        "wait_all",
        "if problem is not None:",
        "if False:",
        OF_WAITS,
    ),
    Guard(
        "a page is clear when it is on all devices",
        GPU,
        "_when_all",
        "if len(problems) == count:",
        "if len(problems) == 1:",
        OF_WAITS,
    ),
    Guard(
        "a page is not clear where one device failed",
        GPU,
        "_when_all",
        'done("; ".join(filter(None, problems)))',
        "done(problem)",
        OF_WAITS,
    ),
    Guard(
        "a GPU's memory goes once no copy of it runs",
        ENDS,
        "CopyEnds.close",
        "                waited.copy.wait()\n",
        "                waited.copy.done()\n",
        ("tests/csrc/test_pool_orders.py::test_an_engines_memory_is_let_go_when_no_copy_runs",),
    ),
    Guard(
        "memory that workers know stays to the daemon's end",
        RANKS,
        "OwnRank.rank_pools",
        "        self.memory.leave()\n",
        "",
        ("tests/csrc/test_pool_orders.py::test_the_daemons_own_pool_stays_to_its_end",),
    ),
    Guard(
        "an engine's memory is on the device that it says",
        RANKS,
        "MappedRank.__init__",
        "if there != device:",
        "if False:",
        ("tests/csrc/test_engine_memory.py",),
    ),
    Guard(
        "a GPU's copy that failed is told to have failed",
        ENDS,
        "CopyEnds._tell",
        'problem = f"GpuError: {error}"',
        "pass",
        OF_WAITS,
    ),
    Guard(
        "nobody is told of an end in a pool that goes",
        ENDS,
        "CopyEnds._tell",
        """            if self._closing:
                return
""",
        "",
        OF_WAITS,
    ),
    Guard(
        "no more copies run than are waited for",
        ENDS,
        "CopyEnds.issue",
        "if len(self._waiting) >= MAX_COPIES:",
        "if False:",
        ("tests/csrc/test_copy_ends.py",),
    ),
    Guard(
        "a tail is cleared before a gather that is issued later",
        RANKS,
        "RankMemory.zero_tail",
        "self.parts.gather_stream",
        "self.parts.scatter_stream",
        ("tests/csrc/test_pool_orders.py::test_requests_at_random_are_in_order",),
    ),
    Guard(
        "a tail is cleared on every rank",
        SHARED,
        "SharedPoolMemory.zero_tail",
        "for planes, token_bytes in self._planes:",
        "for planes, token_bytes in self._planes[:1]:",
        OF_SHARED,
    ),
    Guard(
        "heads that several ranks have are restored on each",
        SHARED,
        "SharedPoolMemory.restore",
        "for rank in shard.ranks:",
        "for rank in shard.ranks[:1]:",
        OF_SHARED,
    ),
    Guard(
        "a copy on the copy threads that raised is told to have failed",
        THREADS,
        "attempt",
        'return f"{type(error).__name__}: {error}"',
        'return ""',
        (*OF_SHARED, *OF_WAITS),
    ),
    Guard(
        "memory that nobody waits for any more is let go",
        MAKING,
        "make_in_thread",
        "await complete(loop.run_in_executor(None, undo, making.result()))",
        "pass",
        OF_MAKING,
    ),
    Guard(
        "a worker's memory is not mapped by a daemon with its own pool",
        MAKING,
        "registration_of",
        "        if registers:\n",
        "        if False:\n",
        OF_MAKING,
    ),
    Guard(
        "an engine's memory is of the kind that its daemon copies",
        MAKING,
        "registration_of",
        "if registration.on_gpus != bool(config.devices):",
        "if False:",
        OF_MAKING,
    ),
)

GUARDS: tuple[Guard, ...] = (*GROWTH, *HOST_TIER, *COPIES)
