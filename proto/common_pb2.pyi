from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYOUT_UNSPECIFIED: _ClassVar[Layout]
    LAYOUT_PAGE_NHD: _ClassVar[Layout]
    LAYOUT_PAGE_HND: _ClassVar[Layout]
    LAYOUT_ENGINE: _ClassVar[Layout]

class Storage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORAGE_UNSPECIFIED: _ClassVar[Storage]
    STORAGE_PAGE_MAJOR: _ClassVar[Storage]
    STORAGE_LAYER_MAJOR: _ClassVar[Storage]
    STORAGE_LAYER_BLOCKS: _ClassVar[Storage]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_INVALID_ARGUMENT: _ClassVar[ErrorCode]
    ERROR_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_NOT_FOUND: _ClassVar[ErrorCode]
    ERROR_RESOURCE_EXHAUSTED: _ClassVar[ErrorCode]
    ERROR_FAILED_PRECONDITION: _ClassVar[ErrorCode]
    ERROR_ABORTED: _ClassVar[ErrorCode]
    ERROR_OUT_OF_RANGE: _ClassVar[ErrorCode]
    ERROR_INTERNAL: _ClassVar[ErrorCode]
    ERROR_UNAVAILABLE: _ClassVar[ErrorCode]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
LAYOUT_UNSPECIFIED: Layout
LAYOUT_PAGE_NHD: Layout
LAYOUT_PAGE_HND: Layout
LAYOUT_ENGINE: Layout
STORAGE_UNSPECIFIED: Storage
STORAGE_PAGE_MAJOR: Storage
STORAGE_LAYER_MAJOR: Storage
STORAGE_LAYER_BLOCKS: Storage
ERROR_UNSPECIFIED: ErrorCode
ERROR_INVALID_ARGUMENT: ErrorCode
ERROR_DEADLINE_EXCEEDED: ErrorCode
ERROR_NOT_FOUND: ErrorCode
ERROR_RESOURCE_EXHAUSTED: ErrorCode
ERROR_FAILED_PRECONDITION: ErrorCode
ERROR_ABORTED: ErrorCode
ERROR_OUT_OF_RANGE: ErrorCode
ERROR_INTERNAL: ErrorCode
ERROR_UNAVAILABLE: ErrorCode

class Geometry(_message.Message):
    __slots__ = ("layers", "kv_heads", "head_dim", "dtype", "page_size", "layout", "tensors", "head_runs", "further")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    HEAD_RUNS_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    layout: Layout
    tensors: int
    head_runs: int
    further: _containers.RepeatedCompositeFieldContainer[CacheShape]
    def __init__(self, layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., layout: _Optional[_Union[Layout, str]] = ..., tensors: _Optional[int] = ..., head_runs: _Optional[int] = ..., further: _Optional[_Iterable[_Union[CacheShape, _Mapping]]] = ...) -> None: ...

class CacheShape(_message.Message):
    __slots__ = ("layers", "kv_heads", "head_dim", "dtype", "tensors")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    tensors: int
    def __init__(self, layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., tensors: _Optional[int] = ...) -> None: ...

class NamespaceFacts(_message.Message):
    __slots__ = ("model", "revision", "geometry", "digest_algorithm", "root_digest", "tenant_salt_digest", "engine_layout", "digest_tokens", "kv_scales", "speculative")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_SCALES_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    geometry: Geometry
    digest_algorithm: str
    root_digest: bytes
    tenant_salt_digest: bytes
    engine_layout: str
    digest_tokens: int
    kv_scales: str
    speculative: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., digest_algorithm: _Optional[str] = ..., root_digest: _Optional[bytes] = ..., tenant_salt_digest: _Optional[bytes] = ..., engine_layout: _Optional[str] = ..., digest_tokens: _Optional[int] = ..., kv_scales: _Optional[str] = ..., speculative: _Optional[str] = ...) -> None: ...

class RequestName(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    attempt: int
    def __init__(self, request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "of_prefill")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OF_PREFILL_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    of_prefill: bool
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., of_prefill: bool = ...) -> None: ...
