"""The two tiers of one side: its pool's memory, and the host tier behind it. Shell.

They are made when the first worker says what model it serves; later workers must fit them. An engine's memory
(`--pool engine`) goes with its engine; the next engine's takes its place, before the host tier that stayed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import shutil
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Protocol

from kvferry.daemon.config.model import STORAGES, DaemonConfig
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.errors import RequestError, exhausted, precondition
from kvferry.daemon.core.limits import BlockShape
from kvferry.daemon.memory.block_table import BlockTable, page_ids_of
from kvferry.daemon.memory.capacity import MORE_SHM
from kvferry.daemon.memory.held_pages import HeldPages
from kvferry.daemon.memory.host_tier import HostTier, open_tier
from kvferry.daemon.memory.interface import PoolMemory
from kvferry.daemon.memory.making import make_in_thread, make_pool, map_pool
from kvferry.proto import common_pb2 as common
from kvferry.transfer.geometry.kv_geometry import Layout, StorageOrder
from kvferry.transfer.geometry.namespace import NamespaceFacts, differences
from kvferry.transfer.geometry.pool_shape import PoolShape, page_bytes_of
from kvferry.transfer.geometry.registration import Registration
from kvferry.transfer.host_tier.copy_strategies import CopyStatistics
from kvferry.waiting import complete

log = logging.getLogger(__name__)


class TiersOwner(Protocol):
    """A side, as far as its tiers go."""

    def new_cache(self, facts: NamespaceFacts, pages: int, host_pages: int, in_blocks: bool) -> Cache:
        """Makes a cache of empty tiers, for a model. ValueError where they cannot be so."""

    def tiers_made(self, cache: Cache) -> None:
        """Called when tiers are there for the first time."""

    def flush(self) -> None:
        """Whoever is told what the tiers hold hears of a change."""


class SideTiers:
    def __init__(self, role: str, config: DaemonConfig, incarnation: bytes, side: TiersOwner) -> None:
        self.facts: NamespaceFacts | None = None  # of the first worker
        self.epoch = secrets.randbits(63)  # of the pool's memory
        self.has_pool = asyncio.Event()
        self.refused = ""  # why the last pool that was to be made has no room; empty since one was made
        self._role = role
        self._config = config
        self._incarnation = incarnation
        self._side = side
        self._making = asyncio.Lock()
        self._cache: Cache | None = None
        self._memory: PoolMemory | None = None
        self._shape: PoolShape | None = None  # of the memory that is, or was last
        self._host: HostTier | None = None
        self._blocks: BlockShape | None = None  # likewise, where an engine names blocks
        self._engine_stows = False  # what is in its blocks may be moved out of them
        self._held: HeldPages | None = None  # of the cache, for its present number of pages
        self._indexes = 0  # ever made
        self._copies_before = CopyStatistics()  # of memory that was let go

    # -- what they are -------------------------------------------------------------------------------------------

    @property
    def cache(self) -> Cache:
        assert self._cache is not None, "no worker has come yet"
        return self._cache

    @property
    def memory(self) -> PoolMemory:
        assert self._memory is not None
        return self._memory

    @property
    def host(self) -> HostTier:
        assert self._host is not None
        return self._host

    def block_shape(self, named: int, field: str = "blocks") -> BlockShape | None:
        """The shape of the blocks that requests name; None where they name none. `named`: how many one does, in this
        field. FAILED_PRECONDITION."""
        if named and self._blocks is None:
            raise precondition(f"{field} has {named} entries; the pool is of pages, which this daemon gives out")
        return self._blocks

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, where an engine names those that its requests have; 0: the pool is of pages."""
        return self._blocks.block_tokens if self._blocks is not None else 0

    @property
    def welcome_pages(self) -> int:
        """Pages that workers may be told of, or blocks that they may name."""
        return self.cache.pool.pages if self._blocks is None else self._blocks.blocks

    @property
    def block_table(self) -> BlockTable:
        """The blocks that pages are."""
        table = self.memory.block_table
        assert table is not None, "the pool is of pages"
        return table

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all ranks."""
        assert self._shape is not None
        return self._shape.page_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a page in the host tier."""
        assert self._shape is not None
        return self._shape.row_bytes

    @property
    def unverified_pages(self) -> int:
        """Pages of the host tier that were found in its file, and never read since."""
        return self._host.unverified if self._host is not None else 0

    @property
    def host_stays(self) -> str:
        """See `HostTier.stays`."""
        return self._host.stays if self._host is not None else ""

    @property
    def file_unopened(self) -> bool:
        """Whether there may be a file of the host tier, which could not be opened: a later daemon finds what it has."""
        return self._host is not None and self._host.file_unopened

    @property
    def keeps_nothing(self) -> bool:
        """Whether pages that are blocks of their engine's have no host tier to be kept in."""
        return self.cache.limits.in_blocks and (self._host is None or self._host.is_nothing)

    @property
    def host_survives(self) -> bool:
        """Whether there is a host tier, and the next daemon finds again what it holds."""
        return self._host is not None and self._host.survives

    @property
    def reads_file(self) -> bool:
        """See `HostTier.reads_file`."""
        return self._host is not None and self._host.reads_file

    def forget_unread(self, namespace_id: bytes) -> None:
        """See `HostTier.forget_unread`."""
        if self._host is not None:
            self._host.forget_unread(namespace_id)

    @property
    def stows(self) -> bool:
        """Whether computed prompts of a prefill engine that has blocks of its own may wait in the host tier."""
        return self._role == "prefill" and self._engine_stows and self._host is not None

    @property
    def can_be_sent(self) -> bool:
        """See `HostTier.can_be_sent`."""
        return self._host is not None and self._host.can_be_sent

    def copy_statistics(self) -> CopyStatistics:
        """Counts of the copies between the tiers."""
        if self._memory is None:
            return self._copies_before
        return self._copies_before + self._memory.copy_statistics()

    def copy_workers(self) -> dict[str, Executor]:
        """The threads that copy, by name; none before the pool is made."""
        workers = self._memory.workers if self._memory is not None else {}
        return workers | self._host.workers if self._host is not None else workers

    def late_copies(self, now: float) -> dict[str, float]:
        """Seconds for which the oldest copies run, by name: see `PoolMemory.late_copies`."""
        late = self._memory.late_copies(now) if self._memory is not None else {}
        return late | {"oldest copy between the tiers": self._host.oldest(now)} if self._host is not None else late

    # -- how they come to be -------------------------------------------------------------------------------------

    async def fit(self, facts: NamespaceFacts, registration: Registration | None = None) -> None:
        """Makes the tiers for the first worker's model; of later ones it must be the same. `registration`: of memory
        that becomes the pool. RequestError.
        """
        async with self._making:
            if self.facts is None:
                await self._make_first(facts, registration)
                return
            for difference in differences(self.facts, facts):
                if difference.field != "tenant_salt_digest":
                    raise precondition(f"this daemon serves another model: {difference}, or restart it")
            if registration is not None:
                self._check_layout(facts, registration.order)
                # What an engine leaves unsaid of how its pages are cut, the one before it may have said.
                await self._replace_memory(replace(self.facts, geometry=facts.geometry), registration)

    async def _make_first(self, facts: NamespaceFacts, registration: Registration | None) -> None:
        try:
            await self._make(facts, registration)
        except RequestError as error:
            if error.code == common.ERROR_RESOURCE_EXHAUSTED:
                self.refused = error.message
            raise
        self.refused = ""

    async def _make(self, facts: NamespaceFacts, registration: Registration | None) -> None:
        self._check_layout(facts, STORAGES[self._config.storage] if registration is None else registration.order)
        pages, host_pages = self._sizes(facts, registration)
        if registration is not None:
            memory = await map_pool(self._config, facts.geometry, registration)
        else:
            name = f"kvferry-{self._incarnation.hex()}-{self._role}-pool"
            memory = await make_pool(self._config, facts.geometry, pages, name)
        host: HostTier | None = None
        try:
            cache = self._side.new_cache(facts, pages, host_pages, memory.block_table is not None)
            held = await self._new_index(pages, host_pages)
            if host_pages:
                opening = partial(open_tier, self._config, self._role, facts, memory, cache)
                host = await make_in_thread(opening, HostTier.discard)
        except BaseException as error:
            self._withdraw()
            await _let_go(memory)
            if isinstance(error, ValueError):
                raise precondition(f"this daemon cannot make the tiers: {error}") from error
            raise
        self.take(facts, cache, memory, host)
        self._blocks = self._shape_of(registration)
        self._engine_stows = self._may_stow(registration)
        held.show(cache)
        self._side.tiers_made(cache)
        self.has_pool.set()
        log.info(
            "%s pool: %s, host tier: %d pages to come, of %d bytes for %s on %d ranks",
            *(self._role, self._described(registration), host_pages, self.page_bytes, facts.model, self._config.ranks),
        )

    async def grow_host(self) -> None:
        """Has the host tier come: see `HostTier.grow`."""
        assert self.facts is not None
        await self.host.grow(self.cache, self.facts.id, self._side.flush)

    def _described(self, registration: Registration | None) -> str:
        """The pool for an operator."""
        if registration is None:
            return f"{self.cache.pool.pages} pages of this daemon's"
        if registration.block_tokens:
            return f"{registration.pages} blocks of {registration.block_tokens} tokens, the engine's"
        return f"{registration.pages} pages in the engine's memory"

    def _shape_of(self, registration: Registration | None) -> BlockShape | None:
        if registration is None or not registration.block_tokens:
            return None
        return BlockShape(registration.pages, registration.block_tokens, self._config.page_size)

    def _sizes(self, facts: NamespaceFacts, registration: Registration | None) -> tuple[int, int]:
        """Pages of the pool and of the host tier."""
        config = self._config
        try:
            page_bytes, row_bytes = page_bytes_of(facts.geometry, config.ranks), facts.geometry.page_bytes
        except ValueError as error:
            raise precondition(f"this daemon cannot serve the model: {error}") from error
        pages = config.pool_bytes // page_bytes if registration is None else page_ids_of(registration, config.page_size)
        if not 1 <= pages < 1 << 31:
            raise exhausted(
                f"--pool-bytes is {config.pool_bytes}, a page of this model {page_bytes}; "
                "the pool must hold 1 to 2^31 - 1 pages"
            )
        host_pages = config.host_bytes // row_bytes
        if config.host_bytes and not 1 <= host_pages < 1 << 31:
            raise exhausted(
                f"--host-bytes is {config.host_bytes}, a page of this model {row_bytes}; "
                "the host tier must hold 1 to 2^31 - 1 pages"
            )
        if registration is not None and registration.block_tokens:
            return pages, self._host_pages_below_blocks(host_pages, self._may_stow(registration))
        return pages, host_pages

    def _may_stow(self, registration: Registration | None) -> bool:
        """Only pages that are one block each: of smaller ones a last page lacks some."""
        return registration is not None and registration.stows and registration.block_tokens == self._config.page_size

    def _host_pages_below_blocks(self, pages: int, stows: bool) -> int:
        """The host tier's size below an engine's blocks; the log says what else of the settings is of no use there.
        A prefill engine's is for computed prompts that wait, and for nothing that the next daemon could use."""
        config, prefill = self._config, self._role == "prefill"
        idle = {
            "zero_freed": config.zero_freed == "on",
            "quotas of the device": any(quota.soft or quota.hard for quota in config.quotas.values()),
            "host_bytes": bool(pages) and prefill and not stows,
            "host_dir": bool(pages and config.host_dir) and prefill and stows,
        }
        if said := [name for name, is_set in idle.items() if is_set]:
            log.warning("%s: of no use, the %s engine has its blocks itself", ", ".join(said), self._role)
        return 0 if prefill and not stows else pages

    def _check_layout(self, facts: NamespaceFacts, storage: StorageOrder) -> None:
        if facts.geometry.layout is Layout.ENGINE and storage is not StorageOrder.PAGE_MAJOR:
            raise precondition(
                f"storage is {storage.name}; a page in an engine's own layout is one run of bytes on each rank: it "
                "takes --storage page"
            )

    def take(self, facts: NamespaceFacts, cache: Cache, memory: PoolMemory, host: HostTier | None) -> None:
        """Makes these tiers this side's own from now on."""
        self.facts, self._cache, self._host = facts, cache, host
        self._take_memory(memory)

    def _take_memory(self, memory: PoolMemory) -> None:
        self._memory, self._shape = memory, memory.shape

    # -- what others may read ------------------------------------------------------------------------------------

    @property
    def held(self) -> HeldPages | None:
        """The index of what they hold; None where there is no pool."""
        return self._held if self.has_pool.is_set() else None

    def beat(self) -> None:
        """Tells who reads the index that this daemon lives."""
        if self._held is not None:
            self._held.beat()

    async def _new_index(self, pages: int, host_pages: int) -> HeldPages:
        """Makes the index anew, for so many pages. RequestError."""
        self._withdraw()
        self._indexes += 1
        name = f"kvferry-{self._incarnation.hex()}-{self._role}-held-{self._indexes}"
        making = partial(HeldPages, self._config.shm_dir, name, pages + host_pages)
        try:
            self._held = await make_in_thread(making, HeldPages.close)
        except OSError as error:
            nbytes, where = HeldPages.bytes_for(pages + host_pages), self._config.shm_dir
            what = f"index of {pages + host_pages} pages that may be held, {nbytes} bytes in {where}: {error}"
            if error.errno == errno.ENOSPC:
                what += f" ({shutil.disk_usage(where).free} are free); a smaller --host-bytes, {MORE_SHM}"
            raise exhausted(what) from error
        return self._held

    def _withdraw(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    # -- an engine's memory goes, and another one comes ----------------------------------------------------------

    async def forget_pool(self) -> None:
        """Lets the pool's memory go, which nothing uses."""
        self._copies_before = self.copy_statistics()
        memory, self._memory = self.memory, None
        forgotten = self.cache.forget_device()
        self._side.flush()  # routers hear of it
        if self._host is not None:
            self._host.detach()
        await _let_go(memory)
        log.info(
            "%s pool: the engine's memory is unmapped; %d pages are forgotten, %d are in the host tier",
            *(self._role, forgotten, self.cache.host_pages),
        )

    async def _replace_memory(self, facts: NamespaceFacts, registration: Registration) -> None:
        """Maps the memory of an engine that has come again; the host tier has kept what it had."""
        if bool(registration.block_tokens) != self.cache.limits.in_blocks:
            before = "blocks" if self.cache.limits.in_blocks else "pages"
            raise precondition(
                f"pool.block_tokens is {registration.block_tokens}; engines have registered {before} before: start "
                "another daemon for this one"
            )
        memory = await map_pool(self._config, facts.geometry, registration)
        try:
            pages, host_pages = self._sizes(facts, registration)
            held = await self._new_index(pages, host_pages)
        except BaseException:
            await _let_go(memory)
            raise
        if self._host is not None:
            self._host.attach(memory)
        self.cache.resize(pages)
        self._blocks = self._shape_of(registration)
        self._engine_stows = self._may_stow(registration)
        held.show(self.cache)
        self.epoch = secrets.randbits(63)
        self.facts = facts
        self._take_memory(memory)
        self.has_pool.set()
        log.info("%s pool: %s, registered again", self._role, self._described(registration))

    def halt(self) -> None:
        """See `HostTier.halt`."""
        if self._host is not None:
            self._host.halt()

    async def close(self) -> None:
        """Waits for copies between the tiers. One that cannot end well does not keep the other's memory."""
        self._withdraw()
        try:
            if self._host is not None:
                await self._host.close()
        finally:
            memory, self._memory = self._memory, None
            if memory is not None:
                self.has_pool.clear()
                await _let_go(memory)


async def _let_go(memory: PoolMemory) -> None:
    """Lets memory go that nothing uses. In a thread, since it may wait for its devices."""
    memory.stop()
    await complete(asyncio.to_thread(memory.close))
