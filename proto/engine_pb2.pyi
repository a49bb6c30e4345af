from kvferry.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AbortRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("role", "model", "daemon", "daemon_address", "facts", "namespace_id", "max_tokens", "local_prefill_max_tokens", "chunk_tokens", "tokenizer")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    DAEMON_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    model: str
    daemon: str
    daemon_address: str
    facts: _common_pb2.NamespaceFacts
    namespace_id: bytes
    max_tokens: int
    local_prefill_max_tokens: int
    chunk_tokens: int
    tokenizer: str
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., model: _Optional[str] = ..., daemon: _Optional[str] = ..., daemon_address: _Optional[str] = ..., facts: _Optional[_Union[_common_pb2.NamespaceFacts, _Mapping]] = ..., namespace_id: _Optional[bytes] = ..., max_tokens: _Optional[int] = ..., local_prefill_max_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., tokenizer: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("name", "tokens", "sampling", "deadline_ms", "priority", "warmup")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    deadline_ms: int
    priority: int
    warmup: bool
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ..., warmup: bool = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("matched_tokens", "chunk_ends")
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ENDS_FIELD_NUMBER: _ClassVar[int]
    matched_tokens: int
    chunk_ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, matched_tokens: _Optional[int] = ..., chunk_ends: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("name", "tokens", "sampling", "max_new_tokens", "stop_tokens", "prefill", "deadline_ms", "priority", "warmup")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    max_new_tokens: int
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    prefill: str
    deadline_ms: int
    priority: int
    warmup: bool
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., prefill: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ..., warmup: bool = ...) -> None: ...

class DecodeReply(_message.Message):
    __slots__ = ("started", "generated", "ending", "paused")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    generated: Generated
    ending: Ending
    paused: Paused
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., generated: _Optional[_Union[Generated, _Mapping]] = ..., ending: _Optional[_Union[Ending, _Mapping]] = ..., paused: _Optional[_Union[Paused, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("matched_tokens", "delta_pages", "delta_bytes", "admit_to_ready_us", "host_tokens")
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DELTA_PAGES_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADMIT_TO_READY_US_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    matched_tokens: int
    delta_pages: int
    delta_bytes: int
    admit_to_ready_us: int
    host_tokens: int
    def __init__(self, matched_tokens: _Optional[int] = ..., delta_pages: _Optional[int] = ..., delta_bytes: _Optional[int] = ..., admit_to_ready_us: _Optional[int] = ..., host_tokens: _Optional[int] = ...) -> None: ...

class Generated(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Paused(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ending(_message.Message):
    __slots__ = ("reason", "output_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    output_tokens: int
    def __init__(self, reason: _Optional[str] = ..., output_tokens: _Optional[int] = ...) -> None: ...
