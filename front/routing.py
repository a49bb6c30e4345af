"""The choice of the decode and the prefill server that take a request. Pure: the look-ups are made elsewhere.

**Decode.** The server that holds the longest part of the prompt takes it, unless it is *overloaded*; overloaded servers
are passed over, and when all are, none is. Equal matches (no match at all, too) go to the least loaded server, then to
the one that was given the fewest requests so far.

* load: the larger of what the server's daemon says is running and waiting (other front ends' requests count there), and
  this front end's own unfinished requests on it (known at once, while the daemon's numbers lag).
* overloaded: load > `load_factor` x the mean load of all servers + `load_slack` (defaults 1.5 and 4), or the pages its
  daemon could give (free + evictable - promised) do not hold the pages that the request needs beyond its match.
* A server whose look-up failed counts as matching nothing; only its own unfinished requests are known of it.

**Prefill.** The server with the fewest of this front end's unfinished requests, then the one given the fewest so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RoutingRule:
    load_factor: float = 1.5
    load_slack: float = 4.0


class Lookup(NamedTuple):
    """The answer of a decode server's daemon about one prompt."""

    matched_tokens: int
    running: int
    waiting: int
    free_pages: int  # free + evictable - promised


class DecodeCandidate(NamedTuple):
    outstanding: int  # unfinished requests of this front end
    assigned: int  # requests ever given to it
    lookup: Lookup | None  # None: not asked, or it failed

    @property
    def matched_tokens(self) -> int:
        return 0 if self.lookup is None else self.lookup.matched_tokens

    @property
    def load(self) -> int:
        reported = 0 if self.lookup is None else self.lookup.running + self.lookup.waiting
        return max(reported, self.outstanding)


class PrefillCandidate(NamedTuple):
    outstanding: int
    assigned: int


def pages_needed(prompt_tokens: int, max_new_tokens: int, page_size: int) -> int:
    """Pages that a request may come to hold: the KV of its last token is never computed."""
    return -(-(prompt_tokens + max_new_tokens - 1) // page_size)


def overloaded(
    candidate: DecodeCandidate, *, mean_load: float, pages: int, page_size: int, rule: RoutingRule = RoutingRule()
) -> bool:
    """Whether a server is passed over for a request of `pages` pages (see above)."""
    if candidate.load > rule.load_factor * mean_load + rule.load_slack:
        return True
    if candidate.lookup is None:
        return False
    return candidate.lookup.free_pages < pages - candidate.matched_tokens // page_size


def choose_decode(
    candidates: Sequence[DecodeCandidate], *, pages: int, page_size: int, rule: RoutingRule = RoutingRule()
) -> int:
    """The index of the server that takes a request of `pages` pages."""
    assert candidates, "no decode server to choose from"
    mean_load = sum(candidate.load for candidate in candidates) / len(candidates)
    fit = [
        i
        for i, candidate in enumerate(candidates)
        if not overloaded(candidate, mean_load=mean_load, pages=pages, page_size=page_size, rule=rule)
    ]

    def order(i: int) -> tuple[int, int, int, int]:
        candidate = candidates[i]
        return (-candidate.matched_tokens, candidate.load, candidate.assigned, i)

    return min(fit or range(len(candidates)), key=order)


def choose_prefill(candidates: Sequence[PrefillCandidate]) -> int:
    assert candidates, "no prefill server to choose from"
    return min(range(len(candidates)), key=lambda i: (candidates[i].outstanding, candidates[i].assigned, i))
