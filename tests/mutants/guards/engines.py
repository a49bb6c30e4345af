"""The engine's side: client, connectors, front end, reference workers."""

from tests.mutants.guard import Guard

CLIENT = ("tests/client/test_client.py",)
RANK_POOLS = ("tests/client/test_rank_pools.py",)
POOLS_END = ("tests/client/test_pools_end.py",)
BLOCKS = ("tests/connectors/test_blocks.py",)
LOOKUPS = ("tests/connectors/worker_side/test_lookups.py",)
CHAIN = ("tests/connectors/test_prompt_chain.py",)
SCHEDULER = ("tests/connectors/test_scheduler_side.py",)
COPIES = ("tests/connectors/worker_side/test_copies.py",)
ENDS = ("tests/connectors/worker_side/test_ends.py",)
ENGINE_BLOCKS = ("tests/system/serving/test_engine_blocks.py",)
BLOCKS_WAY = ("tests/connectors/worker_side/test_blocks_way.py",)

PAGES: tuple[Guard, ...] = (
    Guard(
        "a worker writes a page that its pool does not have",
        "client/open_request.py",
        "OpenRequest._new_pages",
        "if page >= self.pool_pages:",
        "if False:",
        CLIENT,
    ),
    Guard(
        "a request is given more or fewer pages than it needs",
        "client/open_request.py",
        "OpenRequest._new_pages",
        "if len(pages) != count:",
        "if False:",
        CLIENT,
    ),
    Guard(
        "pages that a request grew by are another place's",
        "client/open_request.py",
        "OpenRequest.take",
        "if event.grown.first_page != self.pages:",
        "if False:",
        CLIENT,
    ),
    Guard(
        "a request that failed is not known to have",
        "client/open_request.py",
        "OpenRequest.take",
        "            self.fail(self.failure)\n",
        "            self.fail(self.failure)\n            self.failure = None\n",
        CLIENT,
    ),
    Guard(
        "a daemon that is gone leaves its requests waiting",
        "client/client.py",
        "DaemonClient._break",
        "request.lose(self._broken)",
        "pass",
        CLIENT,
    ),
    Guard(
        "two requests have one name",
        "client/client.py",
        "DaemonClient._open",
        "if name in self._requests:",
        "if False:",
        CLIENT,
    ),
    Guard(
        "a worker says that it is quiet before its devices are",
        "client/client.py",
        "DaemonClient._quiesced",
        "self._broken is not None or not await self._attachment.settled(deadline_s)",
        "self._broken is not None",
        CLIENT,
    ),
    Guard(
        "a worker's own memory goes while the daemon has it mapped",
        "client/client.py",
        "DaemonClient.close",
        "if owns and not heard else",
        "if False else",
        POOLS_END,
    ),
    Guard(
        "a worker attaches without its lock",
        "client/attachment.py",
        "Attachment._take_lock",
        "if not self._lock.try_acquire():",
        "if False:",
        (*CLIENT, *RANK_POOLS),
    ),
    Guard(
        "the lock goes while a device may still write pages",
        "client/attachment.py",
        "Attachment._close",
        "            self._lock.keep()\n",
        "",
        (*CLIENT, *POOLS_END),
    ),
)

COPIED: tuple[Guard, ...] = (
    Guard(
        "a block or page that is not there is copied",
        "connectors/blocks.py",
        "BlockMap.places",
        "if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < bound:",
        "if False:",
        BLOCKS,
    ),
    Guard(
        "a pool of other pages is written",
        "connectors/blocks.py",
        "BlockMap.places",
        "if pool.page_bytes != self.page_bytes:",
        "if False:",
        BLOCKS,
    ),
    Guard(
        "the token behind the last one is sent",
        "connectors/blocks.py",
        "BlockMap.tail",
        "divmod(behind - 1, self.block_tokens)",
        "divmod(behind, self.block_tokens)",
        BLOCKS,
    ),
    Guard(
        "pages that are hashed later hang on nothing",
        "connectors/prompt_chain.py",
        "PromptChain.pages",
        "parent=self._parent(first)",
        "parent=self._parent(0)",
        CHAIN,
    ),
    Guard(
        "another adapter's page has the same digest",
        "connectors/prompt_chain.py",
        "PromptChain.pages",
        "if (keys := self._keys) is not None:",
        "if (keys := self._keys) is not None and not first:",
        CHAIN,
    ),
    Guard(
        "another adapter's tail has the same digest",
        "connectors/prompt_chain.py",
        "PromptChain.prompt",
        "{0: self._keys(start, tokens)}",
        "None",
        CHAIN,
    ),
    Guard(
        "a page is named by what is in another one",
        "connectors/prompt_chain.py",
        "PromptChain.pages",
        "keys((first + i) * size, (first + i + 1) * size)",
        "keys(i * size, (i + 1) * size)",
        CHAIN,
    ),
    Guard(
        "a resumed request keeps the blocks that it had",
        "connectors/vllm/block_ids.py",
        "BlockIds.follow",
        "if request in cached.resumed_req_ids:",
        "if False:",
        ("tests/connectors/vllm/test_block_ids.py",),
    ),
    Guard(
        "blocks are reported while a copy into them runs",
        "connectors/worker_state.py",
        "run_whole",
        "cancelled = error",
        "raise",
        COPIES,
    ),
    Guard(
        "pages that are another's are written",
        "connectors/pool_requests.py",
        "PoolRequests.load",
        "                client.check(order.name)  # the pages are still ours\n",
        "",
        ENDS,
    ),
    Guard(
        "a load whose pages were taken away is good",
        "connectors/pool_requests.py",
        "PoolRequests.load",
        "            client.check(order.name)  # the pages were ours until now\n",
        "",
        COPIES,
    ),
    Guard(
        "a restore whose pages were taken away is good",
        "connectors/pool_requests.py",
        "PoolRequests.restore",
        "            client.check(order.name)\n",
        "",
        COPIES,
    ),
    Guard(
        "preempted blocks are another's while they are read",
        "connectors/pool_requests.py",
        "PoolRequests.take_away",
        "push.save = None",
        "pass",
        COPIES,
    ),
    Guard(
        "a chunk is told of before it is copied",
        "connectors/pool_requests.py",
        "PoolRequests._push_chunks",
        "            push.copying.clear()\n",
        "            push.copying.clear()\n            client.progress(push.order.name, end)\n",
        COPIES,
    ),
    Guard(
        "blocks of a push are given back before it is over",
        "connectors/worker_side.py",
        "WorkerSide._report_push",
        "push.over and push.released and",
        "push.released and",
        COPIES,
    ),
)

BLOCK_WAY: tuple[Guard, ...] = (
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
        "blocks are named from the beginning on again",
        "connectors/block_requests.py",
        "BlockRequests._push_chunks",
        "save.blocks[named:upto]",
        "save.blocks[:upto]",
        BLOCKS_WAY,
    ),
)

DECIDED: tuple[Guard, ...] = (
    Guard(
        "a daemon that stands still is taken for up",
        "connectors/lookups.py",
        "_Daemon.lives",
        "time.monotonic_ns() - self.index.last_beat < BEAT_SECONDS * 1e9",
        "self.index.last_beat > 0",
        LOOKUPS,
    ),
    Guard(
        "the index of a daemon that is gone is believed",
        "connectors/lookups.py",
        "HeldPrefixes.held_pages",
        "found is not None and found.lives",
        "found is not None",
        LOOKUPS,
    ),
    Guard(
        "another daemon's index is never asked for",
        "connectors/lookups.py",
        "HeldPrefixes._follow",
        "self._ask.is_set() or not self.up",
        "self._ask.is_set() or self._daemon is None",
        LOOKUPS,
    ),
    Guard(
        "what a step under way computes is stored",
        "connectors/scheduler_side.py",
        "counted",
        "tracked.request.num_computed_tokens - tracked.request.num_in_flight_tokens",
        "tracked.request.num_computed_tokens",
        SCHEDULER,
    ),
    Guard(
        "what is held in part is not stored",
        "connectors/scheduler_decode.py",
        "DecodeScheduler.finished",
        "self._view.held_pages(tracked.chain.pages(tokens)) * self.shape.page_size >= tokens",
        "self._view.held_pages(tracked.chain.pages(tokens))",
        SCHEDULER,
    ),
    Guard(
        "a prompt that cannot be named ends the engine",
        "connectors/scheduler_side.py",
        "SchedulerSide._name",
        "except Exception:",
        "except ZeroDivisionError:",
        SCHEDULER,
    ),
    Guard(
        "a session that is fed as it goes is matched by its first prompt",
        "connectors/scheduler_side.py",
        "SchedulerSide._name",
        "if request.resumable:",
        "if False:",
        SCHEDULER,
    ),
    Guard(
        "decode is told of a prompt that is not sent",
        "connectors/scheduler_prefill.py",
        "PrefillScheduler.finished",
        "whole and not tracked.unsent and",
        "whole and",
        SCHEDULER,
    ),
    Guard(
        "a reply's ids are put where another reply stood",
        "front/reply_memory.py",
        "_Building.reply",
        "known is None and self._memory.answered(key.prompt) is None",
        "known is None",
        ("tests/front/test_reply_memory.py",),
    ),
    Guard(
        "the ids of replies have no bound",
        "front/reply_memory.py",
        "ReplyMemory.remember",
        " or self._tokens > self._max_tokens",
        "",
        ("tests/front/test_reply_memory.py",),
    ),
)

GUARDS: tuple[Guard, ...] = (*PAGES, *COPIED, *BLOCK_WAY, *DECIDED)
