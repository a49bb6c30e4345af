from kvferry.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Patience(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PATIENCE_PAGES: _ClassVar[Patience]
    PATIENCE_NONE: _ClassVar[Patience]
    PATIENCE_FETCH: _ClassVar[Patience]
PATIENCE_PAGES: Patience
PATIENCE_NONE: Patience
PATIENCE_FETCH: Patience

class HeldRequest(_message.Message):
    __slots__ = ("role", "namespace_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    namespace_id: bytes
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., namespace_id: _Optional[bytes] = ...) -> None: ...

class HeldReply(_message.Message):
    __slots__ = ("daemon", "pages", "file", "nbytes", "drops", "fetch_tokens")
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    daemon: str
    pages: int
    file: str
    nbytes: int
    drops: bool
    fetch_tokens: int
    def __init__(self, daemon: _Optional[str] = ..., pages: _Optional[int] = ..., file: _Optional[str] = ..., nbytes: _Optional[int] = ..., drops: bool = ..., fetch_tokens: _Optional[int] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "attached", "admit", "begin", "progress", "aux", "grow", "finish", "abort", "quiesced", "page_tokens", "fetch", "stow")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    AUX_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    STOW_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    attached: Attached
    admit: Admit
    begin: Begin
    progress: Progress
    aux: Aux
    grow: Grow
    finish: Finish
    abort: Abort
    quiesced: Quiesced
    page_tokens: PageTokens
    fetch: Fetch
    stow: Stow
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., aux: _Optional[_Union[Aux, _Mapping]] = ..., grow: _Optional[_Union[Grow, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., quiesced: _Optional[_Union[Quiesced, _Mapping]] = ..., page_tokens: _Optional[_Union[PageTokens, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., stow: _Optional[_Union[Stow, _Mapping]] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("welcome", "admitted", "begun", "ready", "grown", "ended", "failed", "retract", "end", "proceed", "stowed")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    GROWN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RETRACT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROCEED_FIELD_NUMBER: _ClassVar[int]
    STOWED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    admitted: Admitted
    begun: Begun
    ready: Ready
    grown: Grown
    ended: Ended
    failed: Failed
    retract: Retract
    end: SessionEnd
    proceed: Proceed
    stowed: Stowed
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., grown: _Optional[_Union[Grown, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., retract: _Optional[_Union[Retract, _Mapping]] = ..., end: _Optional[_Union[SessionEnd, _Mapping]] = ..., proceed: _Optional[_Union[Proceed, _Mapping]] = ..., stowed: _Optional[_Union[Stowed, _Mapping]] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ("code", "details", "daemon_ended")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    DAEMON_ENDED_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    daemon_ended: bool
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ..., daemon_ended: bool = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol", "role", "worker", "facts", "pool", "late_ms", "rank")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LATE_MS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    role: _common_pb2.Role
    worker: str
    facts: _common_pb2.NamespaceFacts
    pool: EnginePool
    late_ms: int
    rank: OneRank
    def __init__(self, protocol: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., worker: _Optional[str] = ..., facts: _Optional[_Union[_common_pb2.NamespaceFacts, _Mapping]] = ..., pool: _Optional[_Union[EnginePool, _Mapping]] = ..., late_ms: _Optional[int] = ..., rank: _Optional[_Union[OneRank, _Mapping]] = ...) -> None: ...

class OneRank(_message.Message):
    __slots__ = ("rank", "ranks", "engine")
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    ranks: int
    engine: str
    def __init__(self, rank: _Optional[int] = ..., ranks: _Optional[int] = ..., engine: _Optional[str] = ...) -> None: ...

class EnginePool(_message.Message):
    __slots__ = ("pages", "storage", "ranks", "block_tokens", "stows")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOWS_FIELD_NUMBER: _ClassVar[int]
    pages: int
    storage: _common_pb2.Storage
    ranks: _containers.RepeatedCompositeFieldContainer[EngineRank]
    block_tokens: int
    stows: bool
    def __init__(self, pages: _Optional[int] = ..., storage: _Optional[_Union[_common_pb2.Storage, str]] = ..., ranks: _Optional[_Iterable[_Union[EngineRank, _Mapping]]] = ..., block_tokens: _Optional[int] = ..., stows: bool = ...) -> None: ...

class EngineRank(_message.Message):
    __slots__ = ("memories", "tensors")
    MEMORIES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    memories: _containers.RepeatedCompositeFieldContainer[EngineMemory]
    tensors: _containers.RepeatedCompositeFieldContainer[EngineTensor]
    def __init__(self, memories: _Optional[_Iterable[_Union[EngineMemory, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[EngineTensor, _Mapping]]] = ...) -> None: ...

class EngineMemory(_message.Message):
    __slots__ = ("file", "gpu", "nbytes")
    FILE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    file: SharedFile
    gpu: GpuAllocation
    nbytes: int
    def __init__(self, file: _Optional[_Union[SharedFile, _Mapping]] = ..., gpu: _Optional[_Union[GpuAllocation, _Mapping]] = ..., nbytes: _Optional[int] = ...) -> None: ...

class SharedFile(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GpuAllocation(_message.Message):
    __slots__ = ("ipc_handle", "device_uuid")
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    ipc_handle: bytes
    device_uuid: bytes
    def __init__(self, ipc_handle: _Optional[bytes] = ..., device_uuid: _Optional[bytes] = ...) -> None: ...

class EngineTensor(_message.Message):
    __slots__ = ("memory", "offset", "page_stride", "page_bytes", "cache")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAGE_STRIDE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    memory: int
    offset: int
    page_stride: int
    page_bytes: int
    cache: int
    def __init__(self, memory: _Optional[int] = ..., offset: _Optional[int] = ..., page_stride: _Optional[int] = ..., page_bytes: _Optional[int] = ..., cache: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "daemon", "incarnation", "namespace_id", "geometry", "epoch", "pages", "segment", "session_file", "peer_address", "max_tokens", "rank_pools", "storage", "page_tokens", "block_tokens", "stows", "way_back", "ends_itself")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FILE_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_POOLS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOWS_FIELD_NUMBER: _ClassVar[int]
    WAY_BACK_FIELD_NUMBER: _ClassVar[int]
    ENDS_ITSELF_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    daemon: str
    incarnation: bytes
    namespace_id: bytes
    geometry: _common_pb2.Geometry
    epoch: int
    pages: int
    segment: str
    session_file: str
    peer_address: str
    max_tokens: int
    rank_pools: _containers.RepeatedCompositeFieldContainer[RankPool]
    storage: _common_pb2.Storage
    page_tokens: bool
    block_tokens: int
    stows: bool
    way_back: bool
    ends_itself: bool
    def __init__(self, protocol: _Optional[int] = ..., daemon: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., geometry: _Optional[_Union[_common_pb2.Geometry, _Mapping]] = ..., epoch: _Optional[int] = ..., pages: _Optional[int] = ..., segment: _Optional[str] = ..., session_file: _Optional[str] = ..., peer_address: _Optional[str] = ..., max_tokens: _Optional[int] = ..., rank_pools: _Optional[_Iterable[_Union[RankPool, _Mapping]]] = ..., storage: _Optional[_Union[_common_pb2.Storage, str]] = ..., page_tokens: bool = ..., block_tokens: _Optional[int] = ..., stows: bool = ..., way_back: bool = ..., ends_itself: bool = ...) -> None: ...

class RankPool(_message.Message):
    __slots__ = ("segment", "ipc_handle", "device", "device_uuid", "nbytes", "offset")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    segment: str
    ipc_handle: bytes
    device: int
    device_uuid: bytes
    nbytes: int
    offset: int
    def __init__(self, segment: _Optional[str] = ..., ipc_handle: _Optional[bytes] = ..., device: _Optional[int] = ..., device_uuid: _Optional[bytes] = ..., nbytes: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Quiesced(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Admit(_message.Message):
    __slots__ = ("name", "digests", "tokens", "tail_digest", "prefill", "max_new_tokens", "deadline_ms", "priority", "warmup", "held_tokens", "traceparent", "blocks", "blocks_from", "held_blocks", "ends_itself")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAIL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FROM_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDS_ITSELF_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    digests: bytes
    tokens: int
    tail_digest: bytes
    prefill: str
    max_new_tokens: int
    deadline_ms: int
    priority: int
    warmup: bool
    held_tokens: int
    traceparent: str
    blocks: _containers.RepeatedScalarFieldContainer[int]
    blocks_from: int
    held_blocks: _containers.RepeatedScalarFieldContainer[int]
    ends_itself: bool
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., digests: _Optional[bytes] = ..., tokens: _Optional[int] = ..., tail_digest: _Optional[bytes] = ..., prefill: _Optional[str] = ..., max_new_tokens: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ..., warmup: bool = ..., held_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., blocks: _Optional[_Iterable[int]] = ..., blocks_from: _Optional[int] = ..., held_blocks: _Optional[_Iterable[int]] = ..., ends_itself: bool = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("name", "matched_tokens", "pages", "local_tokens", "host_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    matched_tokens: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    local_tokens: int
    host_tokens: int
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., matched_tokens: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., local_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("name", "aux", "delta_pages", "delta_bytes", "elapsed_us", "page_tokens_from")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AUX_FIELD_NUMBER: _ClassVar[int]
    DELTA_PAGES_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_US_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FROM_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    aux: bytes
    delta_pages: int
    delta_bytes: int
    elapsed_us: int
    page_tokens_from: int
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., aux: _Optional[bytes] = ..., delta_pages: _Optional[int] = ..., delta_bytes: _Optional[int] = ..., elapsed_us: _Optional[int] = ..., page_tokens_from: _Optional[int] = ...) -> None: ...

class PageTokens(_message.Message):
    __slots__ = ("name", "first_token", "tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    first_token: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., first_token: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Retract(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ...) -> None: ...

class Grow(_message.Message):
    __slots__ = ("name", "tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    tokens: int
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Grown(_message.Message):
    __slots__ = ("name", "first_page", "pages")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    first_page: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., first_page: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("name", "tokens", "digests", "continues", "page_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    tokens: int
    digests: bytes
    continues: bool
    page_tokens: PageTokens
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., tokens: _Optional[int] = ..., digests: _Optional[bytes] = ..., continues: bool = ..., page_tokens: _Optional[_Union[PageTokens, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    reason: str
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("name", "digests", "tokens", "tail_digest", "deadline_ms", "priority", "warmup", "traceparent", "blocks", "patience", "held_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAIL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    digests: bytes
    tokens: int
    tail_digest: bytes
    deadline_ms: int
    priority: int
    warmup: bool
    traceparent: str
    blocks: _containers.RepeatedScalarFieldContainer[int]
    patience: Patience
    held_tokens: int
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., digests: _Optional[bytes] = ..., tokens: _Optional[int] = ..., tail_digest: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ..., warmup: bool = ..., traceparent: _Optional[str] = ..., blocks: _Optional[_Iterable[int]] = ..., patience: _Optional[_Union[Patience, str]] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class Proceed(_message.Message):
    __slots__ = ("name", "fetch_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    fetch_tokens: int
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., fetch_tokens: _Optional[int] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("name", "blocks", "held_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    blocks: _containers.RepeatedScalarFieldContainer[int]
    held_tokens: int
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., blocks: _Optional[_Iterable[int]] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("name", "matched_tokens", "pages", "fetched_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    matched_tokens: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    fetched_tokens: int
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., matched_tokens: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., fetched_tokens: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("name", "tokens", "blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    tokens: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Aux(_message.Message):
    __slots__ = ("name", "blob")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    blob: bytes
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., blob: _Optional[bytes] = ...) -> None: ...

class Stow(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ...) -> None: ...

class Stowed(_message.Message):
    __slots__ = ("name", "stored", "asked")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    stored: bool
    asked: bool
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., stored: bool = ..., asked: bool = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("name", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: _common_pb2.RequestName
    error: _common_pb2.Error
    def __init__(self, name: _Optional[_Union[_common_pb2.RequestName, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...
