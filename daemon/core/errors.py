"""Why a request is refused or fails: one of the wire's error codes and a sentence that names field, value and bound."""

from __future__ import annotations

from kvferry.proto import common_pb2 as common

Code = common.ErrorCode

MAX_MESSAGE_CHARS = 1024


class RequestError(Exception):
    """Ends one request with `code` (kvferry.v1.ErrorCode) and a message for its worker. `of_prefill`: as Error's."""

    def __init__(self, code: Code, message: str, of_prefill: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.of_prefill = of_prefill

    @staticmethod
    def from_proto(error: common.Error) -> RequestError:
        """The error of a peer: a code that is none becomes INTERNAL, a long message is cut."""
        known = error.code in common.ErrorCode.values() and error.code != common.ERROR_UNSPECIFIED
        return RequestError(error.code if known else common.ERROR_INTERNAL, error.message[:MAX_MESSAGE_CHARS])

    def to_proto(self) -> common.Error:
        return common.Error(code=self.code, message=self.message, of_prefill=self.of_prefill)

    def marked_of_prefill(self) -> RequestError:
        return RequestError(self.code, self.message, of_prefill=True)


def invalid(message: str) -> RequestError:
    return RequestError(common.ERROR_INVALID_ARGUMENT, message)


def out_of_range(message: str) -> RequestError:
    return RequestError(common.ERROR_OUT_OF_RANGE, message)


def exhausted(message: str) -> RequestError:
    return RequestError(common.ERROR_RESOURCE_EXHAUSTED, message)


def precondition(message: str) -> RequestError:
    return RequestError(common.ERROR_FAILED_PRECONDITION, message)


def unavailable(message: str) -> RequestError:
    return RequestError(common.ERROR_UNAVAILABLE, message)


def deadline_exceeded(message: str) -> RequestError:
    return RequestError(common.ERROR_DEADLINE_EXCEEDED, message)


def aborted(message: str) -> RequestError:
    return RequestError(common.ERROR_ABORTED, message)


def not_found(message: str) -> RequestError:
    return RequestError(common.ERROR_NOT_FOUND, message)
