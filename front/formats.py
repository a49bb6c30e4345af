"""A generation's pieces as bodies of the OpenAI API: whole, and as the chunks of a stream. Pure."""

from __future__ import annotations

from typing import Protocol

from pydantic import BaseModel

from kvferry.front.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessageReply,
    ChatReply,
    ChatRequest,
    CompletionChoice,
    CompletionReply,
    CompletionRequest,
    PromptTokensDetails,
    TransferReport,
    Usage,
)
from kvferry.front.service import Finished, ReplyBegun
from kvferry.front.text import Delta


class Format(Protocol):
    """One request's bodies. Each method gives JSON texts without newlines."""

    def opened(self, opened: ReplyBegun) -> list[str]: ...

    def delta(self, delta: Delta) -> list[str]: ...

    def finished(self, finished: Finished) -> list[str]: ...

    def whole(self, opened: ReplyBegun, text: str, tokens: list[int], finished: Finished) -> str: ...


def usage(finished: Finished) -> Usage:
    return Usage(
        prompt_tokens=finished.prompt_tokens,
        completion_tokens=finished.output_tokens,
        total_tokens=finished.prompt_tokens + finished.output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=finished.started.matched_tokens),
    )


def _dump(model: BaseModel) -> str:
    return model.model_dump_json(exclude_unset=True)


class _Common:
    def __init__(self, request: ChatRequest | CompletionRequest, request_id: bytes, created: int, prefix: str) -> None:
        self._request_id = request_id.hex()
        self._id = f"{prefix}-{self._request_id}"
        self._created = created
        self._model = ""
        self._with_usage = request.include_usage
        self._with_ids = request.return_token_ids

    def _transfer(self, finished: Finished) -> TransferReport:
        started = finished.started
        return TransferReport(
            request_id=self._request_id,
            decode=finished.decode,
            prefill=finished.prefill,
            matched_tokens=started.matched_tokens,
            delta_pages=started.delta_pages,
            delta_bytes=started.delta_bytes,
            admit_to_ready_us=started.admit_to_ready_us,
            host_tokens=started.host_tokens,
            spliced_tokens=finished.replies.spliced_tokens,
            lost_tokens=finished.replies.lost_tokens,
        )

    def _sent(self, delta: Delta) -> bool:
        """Whether a chunk is worth sending: tokens whose text is still held back are not, unless the ids are wanted."""
        return bool(delta.text or (self._with_ids and delta.tokens))


class ChatFormat(_Common):
    def __init__(self, request: ChatRequest, request_id: bytes, created: int) -> None:
        super().__init__(request, request_id, created, "chatcmpl")

    def opened(self, opened: ReplyBegun) -> list[str]:
        self._model = opened.model
        chunk = self._chunk([self._choice(ChatDelta(role="assistant", content=""), None)])
        if self._with_ids:
            chunk.prompt_token_ids = opened.prompt_tokens
        return [_dump(chunk)]

    def delta(self, delta: Delta) -> list[str]:
        if not self._sent(delta):
            return []
        choice = self._choice(ChatDelta(content=delta.text), None)
        if self._with_ids:
            choice.token_ids = delta.tokens
        return [_dump(self._chunk([choice]))]

    def finished(self, finished: Finished) -> list[str]:
        chunks = self.delta(Delta(finished.rest, []))
        last = self._chunk([self._choice(ChatDelta(), finished.reason)])
        if self._with_ids:
            last.kvferry = self._transfer(finished)
        chunks.append(_dump(last))
        if self._with_usage:
            total = self._chunk([])
            total.usage = usage(finished)
            chunks.append(_dump(total))
        return chunks

    def whole(self, opened: ReplyBegun, text: str, tokens: list[int], finished: Finished) -> str:
        message = ChatMessageReply(role="assistant", content=text, refusal=None)
        choice = ChatChoice(index=0, message=message, logprobs=None, finish_reason=finished.reason)
        reply = ChatReply(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=opened.model,
            choices=[choice],
            usage=usage(finished),
        )
        if self._with_ids:
            choice.token_ids = tokens
            reply.prompt_token_ids = opened.prompt_tokens
            reply.kvferry = self._transfer(finished)
        return _dump(reply)

    def _choice(self, delta: ChatDelta, reason: str | None) -> ChatChunkChoice:
        return ChatChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=reason)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._model, choices=choices
        )
        if self._with_usage:
            chunk.usage = None  # every chunk names it, the last one gives it
        return chunk


class CompletionFormat(_Common):
    def __init__(self, request: CompletionRequest, request_id: bytes, created: int) -> None:
        super().__init__(request, request_id, created, "cmpl")
        self._prompt_tokens: list[int] | None = None  # to be sent with the next chunk

    def opened(self, opened: ReplyBegun) -> list[str]:
        self._model = opened.model
        self._prompt_tokens = opened.prompt_tokens
        return []

    def delta(self, delta: Delta) -> list[str]:
        if not self._sent(delta):
            return []
        choice = self._choice(delta.text, None)
        if self._with_ids:
            choice.token_ids = delta.tokens
        return [_dump(self._chunk([choice]))]

    def finished(self, finished: Finished) -> list[str]:
        last = self._chunk([self._choice(finished.rest, finished.reason)])
        if self._with_ids:
            last.kvferry = self._transfer(finished)
        chunks = [_dump(last)]
        if self._with_usage:
            total = self._chunk([])
            total.usage = usage(finished)
            chunks.append(_dump(total))
        return chunks

    def whole(self, opened: ReplyBegun, text: str, tokens: list[int], finished: Finished) -> str:
        self.opened(opened)
        choice = self._choice(text, finished.reason)
        reply = self._chunk([choice])
        reply.usage = usage(finished)
        if self._with_ids:
            choice.token_ids = tokens
            reply.kvferry = self._transfer(finished)
        return _dump(reply)

    def _choice(self, text: str, reason: str | None) -> CompletionChoice:
        return CompletionChoice(index=0, text=text, logprobs=None, finish_reason=reason)

    def _chunk(self, choices: list[CompletionChoice]) -> CompletionReply:
        chunk = CompletionReply(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )
        if self._with_ids and self._prompt_tokens is not None:
            chunk.prompt_token_ids = self._prompt_tokens
            self._prompt_tokens = None
        if self._with_usage:
            chunk.usage = None  # every chunk names it, the last one gives it
        return chunk
