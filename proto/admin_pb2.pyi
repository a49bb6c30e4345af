from kvferry.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FlushRequest(_message.Message):
    __slots__ = ("role", "namespace_id", "strict")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    namespace_id: bytes
    strict: bool
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., namespace_id: _Optional[bytes] = ..., strict: bool = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("device_pages", "host_pages", "skipped_pages")
    DEVICE_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_PAGES_FIELD_NUMBER: _ClassVar[int]
    device_pages: int
    host_pages: int
    skipped_pages: int
    def __init__(self, device_pages: _Optional[int] = ..., host_pages: _Optional[int] = ..., skipped_pages: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("role", "namespace_id", "digests", "seconds")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    namespace_id: bytes
    digests: bytes
    seconds: int
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., namespace_id: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., seconds: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pin", "pinned_tokens")
    PIN_FIELD_NUMBER: _ClassVar[int]
    PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pin: int
    pinned_tokens: int
    def __init__(self, pin: _Optional[int] = ..., pinned_tokens: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("role", "pin")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    pin: int
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., pin: _Optional[int] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: int
    def __init__(self, unpinned: _Optional[int] = ...) -> None: ...

class DumpRequest(_message.Message):
    __slots__ = ("role", "namespace_id", "limit")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    namespace_id: bytes
    limit: int
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., namespace_id: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class DumpReply(_message.Message):
    __slots__ = ("nodes", "total_nodes", "pins")
    NODES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NODES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeView]
    total_nodes: int
    pins: _containers.RepeatedCompositeFieldContainer[PinView]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeView, _Mapping]]] = ..., total_nodes: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[PinView, _Mapping]]] = ...) -> None: ...

class NodeView(_message.Message):
    __slots__ = ("namespace_id", "depth", "pages", "first_digest", "last_digest", "device", "host", "locks", "hits", "priority", "output", "orphan", "copying", "idle_seconds")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_FIELD_NUMBER: _ClassVar[int]
    COPYING_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    depth: int
    pages: int
    first_digest: bytes
    last_digest: bytes
    device: bool
    host: bool
    locks: int
    hits: int
    priority: int
    output: bool
    orphan: bool
    copying: bool
    idle_seconds: float
    def __init__(self, namespace_id: _Optional[bytes] = ..., depth: _Optional[int] = ..., pages: _Optional[int] = ..., first_digest: _Optional[bytes] = ..., last_digest: _Optional[bytes] = ..., device: bool = ..., host: bool = ..., locks: _Optional[int] = ..., hits: _Optional[int] = ..., priority: _Optional[int] = ..., output: bool = ..., orphan: bool = ..., copying: bool = ..., idle_seconds: _Optional[float] = ...) -> None: ...

class PinView(_message.Message):
    __slots__ = ("pin", "namespace_id", "tokens", "seconds_left")
    PIN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    pin: int
    namespace_id: bytes
    tokens: int
    seconds_left: float
    def __init__(self, pin: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., tokens: _Optional[int] = ..., seconds_left: _Optional[float] = ...) -> None: ...
