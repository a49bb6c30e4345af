"""In which order unlocked leaves are evicted.

lru       least recently used first; the default
lfu       fewest locks first, then least recently used
fifo      oldest first
priority  least important first (the largest number), then least recently used
learned   what is least likely to be used again soon, as learned from this cache's own past: `docs/eviction.md`

Before all of these go orphans of the host tier, then output pages if the policy was made with `evict_output_first`. A
policy is one small class (`csrc/radix/policy.h`); trees that share a pool share a policy and a clock, and so compare.
"""

from kvferry._core import Clock, Policy, policy_names

__all__ = ["Clock", "Policy", "policy_names"]
