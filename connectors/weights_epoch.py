"""The epoch of an engine's weights: where its digest chains begin. Pages of another epoch are named otherwise, on every
daemon and in every host file, whether or not it has heard of a reset."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from kvferry.radix.digests import root_digest

_log = logging.getLogger(__name__)


class WeightsEpoch:
    """`root` is the parent of first pages; None: the default one, of the weights that the engine started with.

    A reset says that the weights have changed, not to what. So an epoch is one engine's alone, and prompts from engines
    of another are computed here, until both were reset to weights of one name.
    """

    def __init__(self, name_of: Callable[[], str]) -> None:
        """`name_of`: the name of the weights that the engine has from a reset on; empty: none is known."""
        self.root: bytes | None = None
        self.name = ""  # empty: the first, or an engine's own
        self._name_of = name_of
        self._had: set[str] = set()

    def advance(self, *, named: bool) -> None:
        """Another epoch. It has a name where it may be `named`, and where no epoch of this process had that name:
        pages of one that had it may be about."""
        name = self._name_of() if named else ""
        self.name = "" if name in self._had else name
        if name and not self.name:
            _log.warning("an epoch was named %r before: a reset under another name is one that others can share", name)
        self._had.add(name)
        # Nobody else ever begins with random bytes, nor this engine when it is started again.
        self.root = root_digest(f"kvferry weights named {name}" if self.name else f"kvferry {secrets.token_hex(16)}")
        shown = f"named {self.name!r}" if self.name else f"{self.root.hex()[:12]}, of this engine alone"
        _log.info("caches are reset: nothing computed before is used again; the weights' epoch is %s", shown)
