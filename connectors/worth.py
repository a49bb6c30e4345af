"""What is worth holding a prompt up for, learned from what that has brought."""

from __future__ import annotations

LEAST = 0.03  # of the tokens that are lacking: such a share is to come, in the mean,
STEP_TOKENS = 128  # and so many more: an engine computes them in the time that its steps take in which it waits
LAST = 0.05  # weight of the last prompt in the mean
FIRST = 0.065  # the mean of which nothing is known: of 8,192 tokens it is too little after 7 prompts for nothing
TRY_AGAIN = 8  # more prompts than this are not held up before one is; the more, the less has come
SELDOM = 24  # so many at most


class Worth:
    """Whether a prompt is to wait for what may be fetched. A wait for nothing (decode has no more, or cannot say so in
    time) costs a few steps of the engine or 3 % of the prompt's own time, one that brings all spares two thirds of it
    and more: one in twenty or thirty pays for the others, though of what comes so seldom most is computed all the same.
    Prompts that lack about as much, by powers of two, are judged together: an engine that keeps its chats lacks little
    of each, again and again, which nobody has; now and then it lacks a whole chat."""

    def __init__(self) -> None:
        self._brought: dict[int, float] = {}  # mean shares of what was lacking, by the bits of its number
        self._passed: dict[int, int] = {}  # prompts that were not held up since one was

    def hold_up(self, lacking: int) -> bool:
        """Decides on a prompt that lacks so many tokens, one at least; one that is not held up is counted."""
        size, least = lacking.bit_length(), LEAST + STEP_TOKENS / lacking
        brought, passed = self._brought.get(size, FIRST), self._passed.get(size, 0)
        if brought >= least:
            return True
        again = passed >= SELDOM or passed * brought >= TRY_AGAIN * least
        self._passed[size] = 0 if again else passed + 1
        return again

    def waited(self, lacking: int, brought: int) -> None:
        """A prompt that lacked so many tokens, one at least, was held up, and so many of them were fetched."""
        size = lacking.bit_length()
        before = self._brought.get(size, FIRST)
        self._brought[size] = before + LAST * (brought / lacking - before)
