"""A compressed radix tree of pages on two tiers, keyed by chained digests: how it works as a whole.

The tree is C++: `csrc/radix/README.md` says where. What each call takes, does and returns is in its docstring
(`kvferry._core`, from `csrc/bindings/tree.cpp`).

A node is a run of pages and splits only between pages. It has page ids on the device for all of them or none, and on
the host for all or none, and at least one of both. Digests are chained, so equality at page i implies equality of all
before it: a node is compared by its last digest, and by bisection where the paths part.

**Paths.** A node on the device has its parent on the device: a path is device nodes, then host-only ones. A device leaf
has no child on the device; a host leaf is host-only and has no child. Each tier evicts its own unlocked leaves.

**Locks.** `lock` splits at the match's end and counts on the node and all its ancestors, so a locked node is never
evicted or freed. A split makes a new upper node with the same count and leaves the lower part its identity: the end of
a lock always is the end of a node. `insert` adds children and never lengthens a node, so what a lock covers never
changes, but by `relock`, which moves its end on. `Lock.device_pages` grows when what it covers is restored.

**Arriving pages.** Device pages of an unlocked node are CACHED, or SPILLING under a copy. ARRIVING ones stand in locked
nodes only:

* `insert` of ARRIVING pages makes a node that is not evictable, to be locked before the caller's step ends;
* `unlock` of the last lock over an ARRIVING page is an assertion; that lock is given up by `prune(lock, start)`;
* pages that other locks hold stay when one prunes, also ARRIVING ones: they go when their last holder prunes.

Device pages that go by `evict` or `flush` are FREE when it returns. Those that go by `prune` keep their state and are
the caller's to free, since copies of the caller's may still name them.

**Copies** between the tiers are asked for by `evict` (spill), `backups` (write-through) and `restore`, carried out by
the caller, and ended by `finish_copy`. Until then a copy belongs to its nodes, through splits too: they may be matched
and locked, but not evicted or copied again. A restore holds its path by a lock of its own. A node that is locked while
it is spilled stays on the device. If `prune` takes a node from under its copy, its pages are freed when the copy ends.

**Recovery.** Pages of a host tier that outlived the tree come back by `recover`, linked by their parents' digests.
Those whose parent is not known are kept as orphans: first to be evicted, never matched, and linked when a page with
their parent's digest comes. From `begin_recovery` to `end_recovery` pages are found by their digests, in a time that
does not grow with the tree; an orphan that adopts another goes up its own chain once more, however long that is.

**Eviction.** A `Policy` names the order in which unlocked leaves go:

lru       least recently used first; the default
lfu       fewest locks first, then least recently used
fifo      oldest first
priority  least important first (the largest number), then least recently used
learned   what is least likely to be used again soon, as learned from this cache's own past: `docs/eviction.md`

Before all of these go orphans of the host tier, then output pages if the policy was made with `evict_output_first`. A
policy is one small class (`csrc/radix/policy.h`); trees that share a pool share a policy and a clock, and so compare.

Broken invariants are AssertionErrors, unknown ids IndexErrors, wrong shapes ValueErrors; nothing has changed when a
call raises. Not thread-safe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvferry._core import (
    BACKUP,
    OUTPUT,
    PROMPT,
    RESTORE,
    SPILL,
    Clock,
    Copy,
    Evicted,
    Finished,
    Flushed,
    InsertResult,
    Lock,
    Match,
    NodeView,
    PagedRadixTree,
    Policy,
    Recovered,
    policy_names,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Digests: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.uint8]"
"""n * 32 bytes, or a (n, 32) array."""

__all__ = [
    "BACKUP",
    "OUTPUT",
    "PROMPT",
    "RESTORE",
    "SPILL",
    "Clock",
    "Copy",
    "Digests",
    "Evicted",
    "Finished",
    "Flushed",
    "InsertResult",
    "Lock",
    "Match",
    "NodeView",
    "PagedRadixTree",
    "Policy",
    "Recovered",
    "policy_names",
]
