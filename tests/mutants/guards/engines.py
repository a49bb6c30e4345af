"""The engine's side: client, connectors, front end, reference workers."""

from tests.mutants.guard import Guard

CLIENT = ("tests/client/test_client.py",)
RANK_POOLS = ("tests/client/test_rank_pools.py",)
POOLS_END = ("tests/client/test_pools_end.py",)
BLOCKS = ("tests/connectors/test_blocks.py",)
LOOKUPS = ("tests/connectors/test_lookups.py",)
CHAIN = ("tests/connectors/test_prompt_chain.py",)
SCHEDULER = ("tests/connectors/test_scheduler_side.py",)
COPIES = ("tests/connectors/worker_side/test_copies.py",)
ENDS = ("tests/connectors/worker_side/test_ends.py",)

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
        "request.fail(self._broken)",
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
        "self._broken is not None or not await self._settled(deadline_s)",
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
        "connectors/worker_side.py",
        "WorkerSide._copy",
        "await complete(self._loop.run_in_executor(self._copier, work))",
        "await self._loop.run_in_executor(self._copier, work)",
        COPIES,
    ),
    Guard(
        "pages that are another's are written",
        "connectors/worker_side.py",
        "WorkerSide._load",
        "                client.check(order.name)  # the pages are still ours\n",
        "",
        ENDS,
    ),
    Guard(
        "a load whose pages were taken away is good",
        "connectors/worker_side.py",
        "WorkerSide._load",
        "            client.check(order.name)  # the pages were ours until now\n",
        "",
        COPIES,
    ),
    Guard(
        "a restore whose pages were taken away is good",
        "connectors/worker_side.py",
        "WorkerSide._restore",
        "            client.check(order.name)\n",
        "",
        COPIES,
    ),
    Guard(
        "preempted blocks are another's while they are read",
        "connectors/worker_side.py",
        "WorkerSide._preempt",
        "push.save = None",
        "pass",
        COPIES,
    ),
    Guard(
        "a chunk is told of before it is copied",
        "connectors/worker_side.py",
        "WorkerSide._push_chunks",
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

DECIDED: tuple[Guard, ...] = (
    Guard(
        "a pin that nobody wants any more is kept",
        "connectors/lookups.py",
        "PinLookup.answered",
        "if not self._released:",
        "if True:",
        LOOKUPS,
    ),
    Guard(
        "a pin is let go twice",
        "connectors/lookups.py",
        "PinLookup.release",
        "pin, self._pin = self._pin, 0",
        "pin = self._pin",
        LOOKUPS,
    ),
    Guard(
        "what a step under way computes is stored",
        "connectors/scheduler_decode.py",
        "DecodeScheduler.finished",
        "request.num_computed_tokens - request.num_in_flight_tokens",
        "request.num_computed_tokens",
        SCHEDULER,
    ),
    Guard(
        "a daemon that does not answer is waited for without end",
        "connectors/scheduler_side.py",
        "SchedulerSide._answer",
        "if self._now() - tracked.asked_at < self._lookup_seconds:",
        "if True:",
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
        "a request that ends keeps its lock at the daemon",
        "connectors/scheduler_decode.py",
        "DecodeScheduler.finished",
        "        tracked.let_go()\n",
        "",
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

GUARDS: tuple[Guard, ...] = (*PAGES, *COPIED, *DECIDED)
