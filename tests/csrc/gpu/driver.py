"""The fake driver's answers, and how often it was called."""

import ctypes


def answer(fake: ctypes.CDLL, name: str, status: int) -> None:
    """From now on the function gives this status; 0: it does its work."""
    fake.fake_answer(name.encode(), status)


def calls(fake: ctypes.CDLL, name: str) -> int:
    return int(fake.fake_calls(name.encode()))
