"""A small server that speaks vLLM's HTTP: OpenAI's forms, vLLM's errors, replies that follow from the prompt. It keeps
no pages; a prefill half is answered with `kv_transfer_params`, as by the connector. A thread of its own serves it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.front.chat import ByteTokenizer, ChatMessage
from kvferry.front.server import QuietServer, listen
from tests.support.front_stack import MODEL, echo_reply

VECTOR = [0.25, -0.5, 1.0]
MAX_TOKENS = 4096
_TOOL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
_RANGES = {"temperature": (0, 2), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "top_p": (0, 1)}
Fields = dict[str, Any]


class Wrong(Exception):
    """A request that vLLM refuses."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def error_of(error: Wrong) -> Response:
    kind = "NotFoundError" if error.status == 404 else "BadRequestError"
    told = {"message": str(error), "type": kind, "param": None, "code": error.status}
    return JSONResponse({"error": told}, error.status)


def prompt_of(body: Fields) -> list[int]:
    """The token ids of a chat's or a completion's prompt."""
    tokenizer = ByteTokenizer()
    if "messages" in body:
        if not body["messages"]:
            raise Wrong("messages: must not be empty")
        chat = [ChatMessage(message["role"], str(message["content"])) for message in body["messages"]]
        return tokenizer.encode_piece(tokenizer.render_chat(chat))
    prompt = body["prompt"][0] if isinstance(body["prompt"], list) and body["prompt"] else body["prompt"]
    return list(prompt.encode()) if isinstance(prompt, str) else list(body["prompt"])


def checked(body: Fields) -> None:
    if body.get("model") not in (None, MODEL):
        raise Wrong(f"The model `{body['model']}` does not exist.", 404)
    for name, (least, most) in _RANGES.items():
        if not least <= float(body.get(name) or 0) <= most:
            raise Wrong(f"{name} must be in [{least}, {most}], got {body[name]}.")
    if body.get("max_tokens") is not None and not 1 <= body["max_tokens"] <= MAX_TOKENS:
        raise Wrong(f"max_tokens must be 1 to {MAX_TOKENS}, got {body['max_tokens']}.")


def texts(body: Fields) -> list[str]:
    """Each choice's text."""
    tokens = echo_reply(prompt_of(body))
    most = body.get("max_completion_tokens") or body.get("max_tokens") or len(tokens)
    text = bytes(tokens[:most]).decode()
    if (body.get("response_format") or {}).get("type") in ("json_object", "json_schema"):
        text = json.dumps({"reply": text})
    for stop in [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []:
        text = text.split(stop)[0]
    return [text if i == 0 else text[::-1] + str(i) for i in range(body.get("n") or 1)]


def usage_of(body: Fields) -> Fields:
    prompt, output = len(prompt_of(body)), sum(map(len, texts(body)))
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


@dataclass
class SmallVllm:
    """Use as a context manager; `url` is its own. `heard` has the headers and the body of each request."""

    token: str = ""  # that it requires
    status: int = 200  # of /health
    delay_s: float = 0.0  # before each answer
    heard: list[tuple[str, dict[str, str], Fields]] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0

    def __enter__(self) -> SmallVllm:
        started: Future[asyncio.Event] = Future()
        self._listener = listen(self.host, self.port)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://{self.host}:{self.port}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        self._loop, self._stop = started.result(20)  # type: ignore[misc]
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._listener.close()

    async def _serve(self, started: Future[Any]) -> None:
        stop = asyncio.Event()
        server = QuietServer(uvicorn.Config(self.app(), lifespan="off", log_level="error", timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[self._listener]))
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        server.should_exit = True
        await task

    def app(self) -> Starlette:
        answers = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completion,
            "/v1/embeddings": self.embeddings,
            "/v1/responses": self.responses,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }

        def route(path: str) -> Route:
            async def answer(request: Request) -> Response:
                body = json.loads(await request.body())
                self.heard.append((path, dict(request.headers), body))
                if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
                    return JSONResponse({"error": "Unauthorized"}, 401)
                try:
                    checked(body)
                    await asyncio.sleep(self.delay_s)
                    return answers[path](body)
                except Wrong as error:
                    return error_of(error)

            return Route(path, answer, methods=["POST"])

        async def models(request: Request) -> Response:
            card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm"}
            return JSONResponse({"object": "list", "data": [card]})

        async def health(request: Request) -> Response:
            return Response(status_code=self.status)

        return Starlette(routes=[Route("/health", health), Route("/v1/models", models), *map(route, answers)])

    def chat(self, body: Fields) -> Response:
        if body.get("stream"):
            return self._stream(body, "chat.completion.chunk", lambda text: {"delta": {"content": text}})
        choices = [self._chat_choice(body, i, text) for i, text in enumerate(texts(body))]
        return self._whole(body, "chat.completion", choices)

    def completion(self, body: Fields) -> Response:
        if body.get("stream"):
            return self._stream(body, "text_completion", lambda text: {"text": text})
        several = isinstance(body["prompt"], list) and body["prompt"] and isinstance(body["prompt"][0], str)
        prompts = [{**body, "prompt": each} for each in body["prompt"]] if several else [body]
        echoed = [bytes(prompt_of(each)).decode() if body.get("echo") else "" for each in prompts]
        found = [begin + text for each, begin in zip(prompts, echoed, strict=True) for text in texts(each)]
        choices: list[Fields] = [{"index": i, "text": text, "finish_reason": "length"} for i, text in enumerate(found)]
        for choice in choices if body.get("logprobs") is not None else ():
            tokens = list(choice["text"])
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens)}
        return self._whole(body, "text_completion", choices)

    def embeddings(self, body: Fields) -> Response:
        given = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [{"object": "embedding", "index": i, "embedding": VECTOR} for i in range(len(given))]
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        return JSONResponse({"object": "list", "data": data, "model": MODEL, "usage": usage})

    def responses(self, body: Fields) -> Response:
        text = bytes(echo_reply(list(str(body["input"]).encode()))).decode()
        content = [{"type": "output_text", "text": text, "annotations": []}]
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
        told = {"id": "resp-1", "object": "response", "created_at": 1, "model": MODEL, "status": "completed"}
        whole = {**told, "output": [message], "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        if not body.get("stream"):
            return JSONResponse(whole)
        delta = {"item_id": "m", "output_index": 0, "content_index": 0, "logprobs": []}
        events: list[Fields] = [
            {"type": "response.output_text.delta", "delta": letter, "sequence_number": i, **delta}
            for i, letter in enumerate(text)
        ]
        events.append({"type": "response.completed", "response": whole, "sequence_number": len(text)})

        async def chunks() -> AsyncIterator[str]:
            for event in events:
                yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    def tokenize(self, body: Fields) -> Response:
        tokens = prompt_of(body)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": MAX_TOKENS})

    def detokenize(self, body: Fields) -> Response:
        return JSONResponse({"prompt": bytes(body["tokens"]).decode()})

    def _chat_choice(self, body: Fields, index: int, text: str) -> Fields:
        message: Fields = {"role": "assistant", "content": text}
        reason = "stop" if body.get("stop") else "length"
        if body.get("tools") and body.get("tool_choice") != "none":
            message, reason = {"role": "assistant", "content": None, "tool_calls": [_TOOL]}, "tool_calls"
        choice: Fields = {"index": index, "message": message, "finish_reason": reason}
        if body.get("logprobs"):
            top = [{"token": "a", "logprob": -0.5, "bytes": [97]}] * (body.get("top_logprobs") or 0)
            entries = [{"token": c, "logprob": -0.5, "bytes": [ord(c)], "top_logprobs": top} for c in text]
            choice["logprobs"] = {"content": entries}
        return choice

    def _whole(self, body: Fields, kind: str, choices: list[Fields]) -> Response:
        told = {"id": "cmpl-1", "object": kind, "created": 1, "model": MODEL, "choices": choices}
        sent = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        params = {"kv_transfer_params": {"do_remote_prefill": True}} if sent else {}
        return JSONResponse({**told, "usage": usage_of(body), **params})

    def _stream(self, body: Fields, kind: str, choice: Any) -> Response:
        told = {"id": "cmpl-1", "object": kind, "created": 1, "model": MODEL}
        chunks = [
            {**told, "choices": [{"index": i, **choice(letter), "finish_reason": None}]}
            for i, text in enumerate(texts(body))
            for letter in text
        ]
        chunks.append({**told, "choices": [{"index": 0, **choice(""), "finish_reason": "length"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**told, "choices": [], "usage": usage_of(body)})

        async def events() -> AsyncIterator[str]:
            for chunk in chunks:
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")
