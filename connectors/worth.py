"""What is worth holding a prompt up for, learned from what that has brought."""

from __future__ import annotations

TRY_AGAIN = 16  # prompts that were not held up, behind which half as much is enough


class Worth:
    """How much a prompt must lack to be held up for what may be fetched, by what that has brought so far: each wait
    costs at least a step of the engine, for nothing where decode has no more, or cannot say so in time."""

    def __init__(self) -> None:
        self._least = 0
        self._passed = 0  # prompts, since `_least` changed

    def hold_up(self, lacking: int) -> bool:
        """Decides on a prompt that lacks so many tokens; one that is not held up is counted."""
        if lacking >= self._least:
            return True
        self._passed += 1
        if self._passed >= TRY_AGAIN:
            self._least, self._passed = self._least // 2, 0
        return False

    def waited(self, lacking: int, *, brought: bool) -> None:
        """A prompt was held up, and something of it was fetched, or nothing."""
        self._least = min(self._least, lacking // 2) if brought else max(self._least, 2 * lacking)
        self._passed = 0
