"""The memory that a daemon's pools need and that is there, for `kvferry doctor` and for a daemon's start: the memory
itself is allocated only when the first worker comes. Shell.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import size
from kvferry.daemon.memory.gpu_probe import Driver, DriverError
from kvferry.radix.pool import HeldIndex
from kvferry.transfer.host_tier.rows import disk_room, stem_of, wanted_in_memory
from kvferry.transfer.mapping import memory_room

MORE_SHM = (
    "another --shm-dir, or more: mount -o remount,size=...; in a container --shm-size, or a memory-backed emptyDir "
    "with a sizeLimit"
)
SHM_REMEDY = f"a smaller --pool-bytes, {MORE_SHM}"
MOST_PAGES = 1 << 31
SMALL_PAGE_BYTES = 64 << 10  # few models have smaller ones, of 16 tokens


def pools(config: DaemonConfig, roles: int | None = None) -> int:
    """Bytes of the pools of so many roles, by default of all; an engine's are its own."""
    return config.pool_bytes * (len(config.roles) if roles is None else roles) if config.pool == "daemon" else 0


def in_shm(config: DaemonConfig, roles: int | None = None) -> int:
    """Bytes of the pools that will be in shared memory."""
    return 0 if config.devices else pools(config, roles)


def in_memory(config: DaemonConfig) -> int:
    """Bytes of the host tiers that will be in memory: the daemon's own, or a tmpfs's."""
    on_disk = bool(config.host_dir) and not memory_room.is_memory(existing(config.host_dir))
    return 0 if on_disk else config.host_bytes * len(config.roles)


def existing(path: str | Path) -> Path:
    """The path, or the nearest of its parents that can be seen. (Path.exists raises where a folder above may not be
    read.)"""
    whole = Path(path).absolute()
    return next(parent for parent in (whole, *whole.parents) if os.path.exists(parent))


def already_in_files(config: DaemonConfig) -> int:
    """Bytes of the host tiers that an earlier run has left in --host-dir."""
    found = 0
    for role in config.roles if config.host_dir else ():
        with contextlib.suppress(OSError):
            found += min(os.stat(f"{stem_of(config.host_dir, role)}.rows").st_blocks * 512, config.host_bytes)
    return found


def file_room(config: DaemonConfig) -> tuple[int, int]:
    """Bytes that are free where --host-dir is, and what is to be made there, pools on the same file system too."""
    there = existing(config.host_dir)
    wanted = config.host_bytes * len(config.roles) - already_in_files(config)
    if os.path.isdir(config.shm_dir) and os.stat(config.shm_dir).st_dev == os.stat(there).st_dev:
        wanted += in_shm(config)
    free = disk_room(there)
    return sys.maxsize if free is None else free, wanted


def shared_memory(config: DaemonConfig, roles: int | None = None) -> tuple[str, bool]:
    """The room that --shm-dir has and what it is to hold, in words, and whether that is enough."""
    free, needed = shutil.disk_usage(config.shm_dir).free, in_shm(config, roles)
    return f"{size(free)} free" + (f"; pools take {size(needed)}" if needed else ""), free >= needed


def index_room(config: DaemonConfig) -> tuple[int, int]:
    """Bytes that are left in --shm-dir for each role's index of what is held, beside the pools, and the bytes that a
    page must have for the index to fit: how many an engine's have is not known yet."""
    left = max(0, shutil.disk_usage(config.shm_dir).free - in_shm(config)) // len(config.roles)
    pages = 1
    # It is as large for all up to a power of two, and more than the last have no ids.
    while pages < MOST_PAGES and HeldIndex.bytes_for(2 * pages) <= left:
        pages *= 2
    return left, -(-(config.host_bytes + pools(config, 1)) // pages)


def index_lacks(config: DaemonConfig) -> list[str]:
    """The reason for which engines with small pages will be refused, with its remedy."""
    if not os.path.isdir(config.shm_dir) or in_shm(config) > shutil.disk_usage(config.shm_dir).free:
        return []  # said of the pools
    left, page_bytes = index_room(config)
    if page_bytes <= SMALL_PAGE_BYTES:
        return []
    there = f"shared memory {config.shm_dir}: {size(left)} are left for the index of the pages that are held"
    return [f"{there}; an engine whose pages have less than {size(page_bytes)} is refused. {MORE_SHM}"]


def lacks_on_gpus(config: DaemonConfig, driver: Driver, roles: int | None = None) -> Iterator[str]:
    """One line for each GPU that is not there or smaller than its share of the pools. DriverError."""
    count = driver.count() if config.devices else 0
    for device in config.devices:
        share = pools(config, roles) // config.ranks
        if device >= count:
            yield f"--device names GPU {device}; the driver has {count}"
        elif (whole := driver.total_bytes(device)) < share:
            yield f"GPU {device} has {size(whole)}; its part of the pools takes {size(share)}"


def pool_lacks(config: DaemonConfig, roles: int | None = None) -> list[str]:
    """The reasons for which the pools of so many roles (by default all) cannot be made, with remedies. Blocks while a
    CUDA driver starts."""
    found = []
    if os.path.isdir(config.shm_dir):
        text, enough = shared_memory(config, roles)
        found += [] if enough else [f"shared memory {config.shm_dir}: {text}; {SHM_REMEDY}"]
    if config.devices:
        try:
            lacking = list(lacks_on_gpus(config, Driver(), roles))
            found += [f"{lack}; a smaller --pool-bytes, or another --device" for lack in lacking]
        except DriverError as error:
            remedy = "a machine or a container with NVIDIA's driver, or --device cpu"
            found.append(f"--device is {config.device}: {error}; {remedy}")
    return found


def host_wanted(config: DaemonConfig) -> int:
    """Bytes that must be free for what is to come of the host tiers of all roles, with what is left free besides."""
    to_come = max(0, in_memory(config) - already_in_files(config))
    return to_come + host_spared(config) if to_come else 0


def host_spared(config: DaemonConfig) -> int:
    """Bytes of memory that are left free beside the host tier that is made last."""
    return wanted_in_memory(0, config.host_bytes) - config.host_bytes


def host_lacks(config: DaemonConfig) -> list[str]:
    """The reason for which the host tier will stay small, with its remedy."""
    tier, wanted, room = in_memory(config), host_wanted(config), memory_room.tightest()
    if room is not None and wanted > room.nbytes:
        there = f"host tier: {size(tier)} are asked for, {size(room.nbytes)} are there ({room.name})"
        spared = f"{size(host_spared(config))} stay free beside it"
        return [f"{there}, and {spared}; it grows that far. A smaller --host-bytes, or a file on a disk by --host-dir"]
    if not config.host_dir:
        return []
    free, to_come = file_room(config)
    if to_come <= free:
        return []
    there = f"host tier: {size(to_come)} are to be made in --host-dir {config.host_dir}, {size(free)} are free there"
    return [f"{there}; it grows that far. A smaller --host-bytes, or a larger disk"]
