from kvferry.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerMessage(_message.Message):
    __slots__ = ("hello", "courier_up", "courier_connected", "credits", "ask", "ask_failed", "ask_end", "ask_ended", "aux", "done", "heartbeat", "lookup", "found")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    COURIER_UP_FIELD_NUMBER: _ClassVar[int]
    COURIER_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    ASK_FAILED_FIELD_NUMBER: _ClassVar[int]
    ASK_END_FIELD_NUMBER: _ClassVar[int]
    ASK_ENDED_FIELD_NUMBER: _ClassVar[int]
    AUX_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    courier_up: CourierUp
    courier_connected: CourierConnected
    credits: Credits
    ask: Ask
    ask_failed: AskFailed
    ask_end: AskEnd
    ask_ended: AskEnded
    aux: PeerAux
    done: Done
    heartbeat: Heartbeat
    lookup: Lookup
    found: Found
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., courier_up: _Optional[_Union[CourierUp, _Mapping]] = ..., courier_connected: _Optional[_Union[CourierConnected, _Mapping]] = ..., credits: _Optional[_Union[Credits, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., ask_failed: _Optional[_Union[AskFailed, _Mapping]] = ..., ask_end: _Optional[_Union[AskEnd, _Mapping]] = ..., ask_ended: _Optional[_Union[AskEnded, _Mapping]] = ..., aux: _Optional[_Union[PeerAux, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., lookup: _Optional[_Union[Lookup, _Mapping]] = ..., found: _Optional[_Union[Found, _Mapping]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("protocol", "protocol_min", "daemon", "incarnation", "role", "facts", "epoch", "page_bytes", "capabilities", "ranks", "checksums")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    protocol_min: int
    daemon: str
    incarnation: bytes
    role: _common_pb2.Role
    facts: _common_pb2.NamespaceFacts
    epoch: int
    page_bytes: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    ranks: int
    checksums: bool
    def __init__(self, protocol: _Optional[int] = ..., protocol_min: _Optional[int] = ..., daemon: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., facts: _Optional[_Union[_common_pb2.NamespaceFacts, _Mapping]] = ..., epoch: _Optional[int] = ..., page_bytes: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., ranks: _Optional[int] = ..., checksums: bool = ...) -> None: ...

class CourierUp(_message.Message):
    __slots__ = ("metadata", "receive_address", "receive_slots", "slot_bytes", "ranks")
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    metadata: bytes
    receive_address: int
    receive_slots: int
    slot_bytes: int
    ranks: _containers.RepeatedCompositeFieldContainer[CourierRank]
    def __init__(self, metadata: _Optional[bytes] = ..., receive_address: _Optional[int] = ..., receive_slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[CourierRank, _Mapping]]] = ...) -> None: ...

class CourierRank(_message.Message):
    __slots__ = ("receive_address", "device")
    RECEIVE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    receive_address: int
    device: int
    def __init__(self, receive_address: _Optional[int] = ..., device: _Optional[int] = ...) -> None: ...

class CourierConnected(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Credit(_message.Message):
    __slots__ = ("slot", "generation")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Credits(_message.Message):
    __slots__ = ("credits",)
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    def __init__(self, credits: _Optional[_Iterable[_Union[Credit, _Mapping]]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("transfer", "name", "namespace_id", "first_page", "pages", "promised_tokens", "tokens", "last_full_digest", "tail_digest", "remaining_ms", "traceparent", "held_tokens", "digests")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PROMISED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_FULL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TAIL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    name: _common_pb2.RequestName
    namespace_id: bytes
    first_page: int
    pages: int
    promised_tokens: int
    tokens: int
    last_full_digest: bytes
    tail_digest: bytes
    remaining_ms: int
    traceparent: str
    held_tokens: int
    digests: bytes
    def __init__(self, transfer: _Optional[int] = ..., name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., namespace_id: _Optional[bytes] = ..., first_page: _Optional[int] = ..., pages: _Optional[int] = ..., promised_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., last_full_digest: _Optional[bytes] = ..., tail_digest: _Optional[bytes] = ..., remaining_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., held_tokens: _Optional[int] = ..., digests: _Optional[bytes] = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("lookup", "namespace_id", "digests")
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    lookup: int
    namespace_id: bytes
    digests: bytes
    def __init__(self, lookup: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., digests: _Optional[bytes] = ...) -> None: ...

class Found(_message.Message):
    __slots__ = ("lookup", "pages")
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    lookup: int
    pages: int
    def __init__(self, lookup: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class AskFailed(_message.Message):
    __slots__ = ("transfer", "error")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    error: _common_pb2.Error
    def __init__(self, transfer: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class AskEnd(_message.Message):
    __slots__ = ("transfer", "reason")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    reason: str
    def __init__(self, transfer: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AskEnded(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    def __init__(self, transfer: _Optional[int] = ...) -> None: ...

class PeerAux(_message.Message):
    __slots__ = ("name", "blob")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    blob: bytes
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., blob: _Optional[bytes] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...
