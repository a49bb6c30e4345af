"""Whose memory the pools of a seed are, where engines have blocks of their own, and how many there are of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.daemons import Setting
from tests.simulation.faults import Faults
from tests.simulation.prompts import ENGINE_GEOMETRY, PAGE
from tests.simulation.storage.blocks import BLOCK_PAGES, BLOCK_TOKENS

# Of decode and of prefill.
_WITH_BLOCKS = (
    ("blocks", "blocks"),
    ("blocks", "blocks"),
    ("blocks", "daemon"),
    ("blocks", "engine"),
    ("daemon", "blocks"),
    ("engine", "blocks"),
)


def pools_with_blocks(faults: Faults, random: Random) -> dict[str, str]:
    """By role. Only prefill engines stow, or wait for what is fetched into their blocks."""
    some = [pools for pools in _WITH_BLOCKS if pools[1] == "blocks" or not faults.stows]
    if faults.patience:
        some = [("daemon", "blocks"), ("blocks", "blocks")]
    decode, prefill = random.choice(some)
    return {"decode": decode, "prefill": prefill}


def of_blocks(setting: Setting, faults: Faults, role: str, pool: str, random: Random) -> Setting:
    """The setting where one side's pages, or both sides', are blocks."""
    if not faults.blocks:
        return setting
    setting = replace(setting, geometry=ENGINE_GEOMETRY, ranks=1)
    if pool != "blocks":
        return setting
    tokens = block_tokens(faults, role, random)
    blocks = random.choice(BLOCK_PAGES[role]) * PAGE // tokens
    stows = faults.stows > 0 and tokens == PAGE
    return replace(
        setting,
        pages=2 * blocks,
        blocks=blocks,
        block_tokens=tokens,
        host_pages=setting.host_pages if role == "decode" or stows else 0,  # else of no use there
        overcommit=1.0,
        quota=None,
        zero_freed=False,
    )


def block_tokens(faults: Faults, role: str, random: Random) -> int:
    """Of a side's first engine. What stows has pages of one block each."""
    if faults.stows and not faults.patience and role == "prefill":
        return PAGE
    return random.choice(BLOCK_TOKENS)
