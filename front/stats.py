"""Counts of the front end, as given at /kvferry/stats."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel

from kvferry.front.reply_memory import SpliceCounts


class RepliesReport(BaseModel):
    """Replies of earlier turns, met again in prompts (see reply_memory.py)."""

    spliced_replies: int
    spliced_tokens: int
    lost_replies: int
    lost_tokens: int
    unknown_replies: int
    unknown_tokens: int
    remembered_replies: int
    remembered_tokens: int


class ServerReport(BaseModel):
    address: str
    state: str  # "up", "down"
    daemon: str
    error: str
    outstanding: int
    assigned: int


class LookupsReport(BaseModel):
    asked: int
    failed: int
    skipped: int  # not asked, because the server's last look-up failed shortly before


class StatsReport(BaseModel):
    ready: bool
    model: str | None
    requests: int
    running: int
    finished: int
    failed: int
    cancelled: int  # by the client's leaving
    local_prefill: int  # no prefill server was used
    paused: int  # times that a running request waited for pages again
    tried_again: int  # prefills that failed and were tried once at another server
    moved: int  # times that a request was given to another decode server, since the first one was away
    decode_alone: int  # requests whose prompts decode computed, since no prefill server was there
    prompt_tokens: int
    matched_tokens: int
    output_tokens: int
    delta_pages: int
    delta_bytes: int
    replies: RepliesReport
    lookups: LookupsReport
    prefill: list[ServerReport]
    decode: list[ServerReport]


@dataclass(slots=True)
class FrontStats:
    requests: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    local_prefill: int = 0
    paused: int = 0
    tried_again: int = 0  # prefills that failed before the prompt was ready
    moved: int = 0
    decode_alone: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    output_tokens: int = 0
    delta_pages: int = 0
    delta_bytes: int = 0
    replies: SpliceCounts = field(default_factory=SpliceCounts)

    def add_replies(self, counts: SpliceCounts) -> None:
        mine = self.replies
        mine.spliced_replies += counts.spliced_replies
        mine.spliced_tokens += counts.spliced_tokens
        mine.lost_replies += counts.lost_replies
        mine.lost_tokens += counts.lost_tokens
        mine.unknown_replies += counts.unknown_replies
        mine.unknown_tokens += counts.unknown_tokens
