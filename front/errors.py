"""Errors of the front end in OpenAI's form, and what becomes of a server's gRPC error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvferry.proto import common_pb2
from kvferry.proto.limits import ERROR_METADATA

_MAX_VALUE_CHARS = 80


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorBody


@dataclass(frozen=True, slots=True)
class _Kind:
    status: int
    type: str
    code: str


_INVALID = _Kind(400, "invalid_request_error", "invalid_value")
_OVERLOADED = _Kind(429, "rate_limit_error", "resource_exhausted")
_UNAVAILABLE = _Kind(503, "service_unavailable_error", "unavailable")
_TIMEOUT = _Kind(504, "timeout_error", "deadline_exceeded")
_INTERNAL = _Kind(500, "server_error", "internal")

_BY_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: _INVALID,
    grpc.StatusCode.OUT_OF_RANGE: _INVALID,
    grpc.StatusCode.RESOURCE_EXHAUSTED: _OVERLOADED,
    grpc.StatusCode.UNAVAILABLE: _UNAVAILABLE,
    grpc.StatusCode.ABORTED: _UNAVAILABLE,
    grpc.StatusCode.CANCELLED: _UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: _TIMEOUT,
}


class ApiError(Exception):
    """A request's failure, as the client is told of it. `of_prefill`: a decode server's that came from the prefill
    side."""

    of_prefill = False

    def __init__(self, status: int, message: str, *, type: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.response = ErrorResponse(error=ErrorBody(message=message, type=type, param=param, code=code))

    def json(self) -> str:
        return self.response.model_dump_json()


def _error(kind: _Kind, message: str) -> ApiError:
    return ApiError(kind.status, message, type=kind.type, code=kind.code)


def invalid(param: str | None, message: str, *, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, type=_INVALID.type, param=param, code=code)


def model_not_found(asked: str, served: str) -> ApiError:
    message = f"model: {asked!r} is not served here, only {served!r}"
    return ApiError(404, message, type="invalid_request_error", param="model", code="model_not_found")


def unavailable(message: str) -> ApiError:
    return _error(_UNAVAILABLE, message)


def overloaded(message: str) -> ApiError:
    return _error(_OVERLOADED, message)


def timed_out(message: str) -> ApiError:
    return _error(_TIMEOUT, message)


def internal(message: str) -> ApiError:
    return _error(_INTERNAL, message)


def from_grpc(who: str, error: grpc.aio.AioRpcError) -> ApiError:
    """The error that the client is told when the call of the server `who` ended with `error`."""
    details = error.details() or "no details"
    told = _error(_BY_STATUS.get(error.code(), _INTERNAL), f"{who}: {error.code().name}: {details}")
    told.of_prefill = _of_prefill(error)
    return told


def _of_prefill(error: grpc.aio.AioRpcError) -> bool:
    metadata = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())  # the stubs have one entry
    for key, value in metadata:
        if key == ERROR_METADATA and isinstance(value, bytes):
            try:
                return common_pb2.Error.FromString(value).of_prefill
            except DecodeError:
                return False
    return False


def from_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a request's body: field, bound, value."""
    first = error.errors(include_url=False)[0]
    # Validators name the type that they tried of a union ("str", "list[...]"): no part of the field's name.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or "[" not in part]
    field = ".".join(path) or None
    return invalid(field, f"{field or 'body'}: {_complaint(first)}", code=_code(first))


def _complaint(details: ErrorDetails) -> str:
    kind = details["type"]
    if kind == "missing":
        return "is required"
    if kind == "json_invalid":
        return f"is not JSON: {details.get('ctx', {}).get('error', details['msg'])}"
    value = repr(details["input"])
    if len(value) > _MAX_VALUE_CHARS:
        value = value[:_MAX_VALUE_CHARS] + "..."
    if kind == "extra_forbidden":
        return f"is not supported, got {value}"
    message = details["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
    return message if kind == "value_error" else f"{message}, got {value}"


def _code(details: ErrorDetails) -> str:
    return {"missing": "missing_required_parameter", "extra_forbidden": "unsupported_parameter"}.get(
        details["type"], "invalid_value"
    )
