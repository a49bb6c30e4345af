from kvferry.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("daemon", "uptime_seconds", "sides", "build", "loop_lag", "rpcs", "metrics", "tls", "stalled", "lacks")
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SIDES_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_FIELD_NUMBER: _ClassVar[int]
    RPCS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    LACKS_FIELD_NUMBER: _ClassVar[int]
    daemon: str
    uptime_seconds: float
    sides: _containers.RepeatedCompositeFieldContainer[SideStats]
    build: BuildInfo
    loop_lag: Histogram
    rpcs: _containers.RepeatedCompositeFieldContainer[RpcStats]
    metrics: str
    tls: TlsStats
    stalled: _containers.RepeatedScalarFieldContainer[str]
    lacks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, daemon: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., sides: _Optional[_Iterable[_Union[SideStats, _Mapping]]] = ..., build: _Optional[_Union[BuildInfo, _Mapping]] = ..., loop_lag: _Optional[_Union[Histogram, _Mapping]] = ..., rpcs: _Optional[_Iterable[_Union[RpcStats, _Mapping]]] = ..., metrics: _Optional[str] = ..., tls: _Optional[_Union[TlsStats, _Mapping]] = ..., stalled: _Optional[_Iterable[str]] = ..., lacks: _Optional[_Iterable[str]] = ...) -> None: ...

class TlsStats(_message.Message):
    __slots__ = ("expires", "broken")
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    expires: float
    broken: str
    def __init__(self, expires: _Optional[float] = ..., broken: _Optional[str] = ...) -> None: ...

class BuildInfo(_message.Message):
    __slots__ = ("version", "protocol", "nixl", "python")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    nixl: str
    python: str
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ..., nixl: _Optional[str] = ..., python: _Optional[str] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class RpcStats(_message.Message):
    __slots__ = ("method", "code", "seconds")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    method: str
    code: str
    seconds: Histogram
    def __init__(self, method: _Optional[str] = ..., code: _Optional[str] = ..., seconds: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class ReasonCount(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class SideStats(_message.Message):
    __slots__ = ("role", "requests", "pool", "transfers", "admit_to_ready", "peers", "host", "tiers", "namespaces", "policy", "workers", "quarantine", "events", "digests", "copies", "way_back")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_TO_READY_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    WAY_BACK_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    requests: RequestStats
    pool: PoolStats
    transfers: TransferStats
    admit_to_ready: LatencyStats
    peers: _containers.RepeatedCompositeFieldContainer[PeerStats]
    host: PoolStats
    tiers: TierStats
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    policy: str
    workers: int
    quarantine: QuarantineStats
    events: KvEventStats
    digests: DigestFacts
    copies: CopyStats
    way_back: WayBackStats
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., requests: _Optional[_Union[RequestStats, _Mapping]] = ..., pool: _Optional[_Union[PoolStats, _Mapping]] = ..., transfers: _Optional[_Union[TransferStats, _Mapping]] = ..., admit_to_ready: _Optional[_Union[LatencyStats, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerStats, _Mapping]]] = ..., host: _Optional[_Union[PoolStats, _Mapping]] = ..., tiers: _Optional[_Union[TierStats, _Mapping]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., policy: _Optional[str] = ..., workers: _Optional[int] = ..., quarantine: _Optional[_Union[QuarantineStats, _Mapping]] = ..., events: _Optional[_Union[KvEventStats, _Mapping]] = ..., digests: _Optional[_Union[DigestFacts, _Mapping]] = ..., copies: _Optional[_Union[CopyStats, _Mapping]] = ..., way_back: _Optional[_Union[WayBackStats, _Mapping]] = ...) -> None: ...

class WayBackStats(_message.Message):
    __slots__ = ("setting", "off_because", "choices", "transfers", "fetched_tokens", "tokens_per_second", "compute_seconds", "fetch_seconds", "look_ups", "elsewhere_tokens", "followed_tokens")
    SETTING_FIELD_NUMBER: _ClassVar[int]
    OFF_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOOK_UPS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    setting: str
    off_because: str
    choices: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    transfers: TransferStats
    fetched_tokens: int
    tokens_per_second: float
    compute_seconds: float
    fetch_seconds: float
    look_ups: LookUpStats
    elsewhere_tokens: int
    followed_tokens: int
    def __init__(self, setting: _Optional[str] = ..., off_because: _Optional[str] = ..., choices: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., transfers: _Optional[_Union[TransferStats, _Mapping]] = ..., fetched_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., fetch_seconds: _Optional[float] = ..., look_ups: _Optional[_Union[LookUpStats, _Mapping]] = ..., elsewhere_tokens: _Optional[int] = ..., followed_tokens: _Optional[int] = ...) -> None: ...

class LookUpStats(_message.Message):
    __slots__ = ("found", "nothing", "late", "pages")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    NOTHING_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    found: int
    nothing: int
    late: int
    pages: int
    def __init__(self, found: _Optional[int] = ..., nothing: _Optional[int] = ..., late: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class DigestFacts(_message.Message):
    __slots__ = ("page_size", "algorithm", "root_digest", "digest_tokens")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    algorithm: str
    root_digest: bytes
    digest_tokens: int
    def __init__(self, page_size: _Optional[int] = ..., algorithm: _Optional[str] = ..., root_digest: _Optional[bytes] = ..., digest_tokens: _Optional[int] = ...) -> None: ...

class KvEventStats(_message.Message):
    __slots__ = ("endpoint", "replay", "blocks", "batches", "queue_dropped", "subscriber_dropped", "cut_off_replays")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DROPPED_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_DROPPED_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_REPLAYS_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    replay: str
    blocks: _containers.RepeatedCompositeFieldContainer[KvEventCount]
    batches: int
    queue_dropped: int
    subscriber_dropped: int
    cut_off_replays: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    def __init__(self, endpoint: _Optional[str] = ..., replay: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[KvEventCount, _Mapping]]] = ..., batches: _Optional[int] = ..., queue_dropped: _Optional[int] = ..., subscriber_dropped: _Optional[int] = ..., cut_off_replays: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ...) -> None: ...

class KvEventCount(_message.Message):
    __slots__ = ("event", "medium", "count")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    event: str
    medium: str
    count: int
    def __init__(self, event: _Optional[str] = ..., medium: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class QuarantineStats(_message.Message):
    __slots__ = ("orphaned_pages", "orphaned_bound", "lost_workers", "workers_bound", "draining_transfers")
    ORPHANED_PAGES_FIELD_NUMBER: _ClassVar[int]
    ORPHANED_BOUND_FIELD_NUMBER: _ClassVar[int]
    LOST_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_BOUND_FIELD_NUMBER: _ClassVar[int]
    DRAINING_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    orphaned_pages: int
    orphaned_bound: int
    lost_workers: int
    workers_bound: int
    draining_transfers: int
    def __init__(self, orphaned_pages: _Optional[int] = ..., orphaned_bound: _Optional[int] = ..., lost_workers: _Optional[int] = ..., workers_bound: _Optional[int] = ..., draining_transfers: _Optional[int] = ...) -> None: ...

class RequestStats(_message.Message):
    __slots__ = ("admitted", "waiting", "running", "finished", "aborted", "failed", "refused", "queried_tokens", "hit_tokens", "hit_rate", "recent_hit_rate", "recent_requests", "host_hit_tokens", "retracted", "overtaken", "reserved", "failures", "oldest_seconds")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    RECENT_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    RECENT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_FIELD_NUMBER: _ClassVar[int]
    OVERTAKEN_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    admitted: int
    waiting: int
    running: int
    finished: int
    aborted: int
    failed: int
    refused: int
    queried_tokens: int
    hit_tokens: int
    hit_rate: float
    recent_hit_rate: float
    recent_requests: int
    host_hit_tokens: int
    retracted: int
    overtaken: int
    reserved: int
    failures: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    oldest_seconds: float
    def __init__(self, admitted: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., finished: _Optional[int] = ..., aborted: _Optional[int] = ..., failed: _Optional[int] = ..., refused: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., hit_rate: _Optional[float] = ..., recent_hit_rate: _Optional[float] = ..., recent_requests: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ..., retracted: _Optional[int] = ..., overtaken: _Optional[int] = ..., reserved: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., oldest_seconds: _Optional[float] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("spilled_pages", "restored_pages", "backup_pages", "spill_failed_pages", "restore_failed_pages", "mismatched_pages", "dropped_pages", "host_evicted_pages", "spill_seconds", "restore_seconds", "copies", "recovered_pages", "orphan_pages", "discarded_entries", "unverified_pages", "unstored", "host_stays")
    SPILLED_PAGES_FIELD_NUMBER: _ClassVar[int]
    RESTORED_PAGES_FIELD_NUMBER: _ClassVar[int]
    BACKUP_PAGES_FIELD_NUMBER: _ClassVar[int]
    SPILL_FAILED_PAGES_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FAILED_PAGES_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    SPILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_PAGES_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_PAGES_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_PAGES_FIELD_NUMBER: _ClassVar[int]
    UNSTORED_FIELD_NUMBER: _ClassVar[int]
    HOST_STAYS_FIELD_NUMBER: _ClassVar[int]
    spilled_pages: int
    restored_pages: int
    backup_pages: int
    spill_failed_pages: int
    restore_failed_pages: int
    mismatched_pages: int
    dropped_pages: int
    host_evicted_pages: int
    spill_seconds: float
    restore_seconds: float
    copies: int
    recovered_pages: int
    orphan_pages: int
    discarded_entries: int
    unverified_pages: int
    unstored: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    host_stays: str
    def __init__(self, spilled_pages: _Optional[int] = ..., restored_pages: _Optional[int] = ..., backup_pages: _Optional[int] = ..., spill_failed_pages: _Optional[int] = ..., restore_failed_pages: _Optional[int] = ..., mismatched_pages: _Optional[int] = ..., dropped_pages: _Optional[int] = ..., host_evicted_pages: _Optional[int] = ..., spill_seconds: _Optional[float] = ..., restore_seconds: _Optional[float] = ..., copies: _Optional[int] = ..., recovered_pages: _Optional[int] = ..., orphan_pages: _Optional[int] = ..., discarded_entries: _Optional[int] = ..., unverified_pages: _Optional[int] = ..., unstored: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., host_stays: _Optional[str] = ...) -> None: ...

class CopyStats(_message.Message):
    __slots__ = ("strategies", "fallbacks", "forced")
    STRATEGIES_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    strategies: _containers.RepeatedCompositeFieldContainer[StrategyStats]
    fallbacks: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    forced: str
    def __init__(self, strategies: _Optional[_Iterable[_Union[StrategyStats, _Mapping]]] = ..., fallbacks: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., forced: _Optional[str] = ...) -> None: ...

class StrategyStats(_message.Message):
    __slots__ = ("strategy", "copies", "descriptors", "bytes")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    copies: int
    descriptors: int
    bytes: int
    def __init__(self, strategy: _Optional[str] = ..., copies: _Optional[int] = ..., descriptors: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("namespace_id", "device_pages", "host_pages", "evictable", "promised", "soft_quota", "hard_quota", "queried_tokens", "hit_tokens", "host_hit_tokens", "evicted", "pinned_pages")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    SOFT_QUOTA_FIELD_NUMBER: _ClassVar[int]
    HARD_QUOTA_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    device_pages: int
    host_pages: int
    evictable: int
    promised: int
    soft_quota: int
    hard_quota: int
    queried_tokens: int
    hit_tokens: int
    host_hit_tokens: int
    evicted: int
    pinned_pages: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., device_pages: _Optional[int] = ..., host_pages: _Optional[int] = ..., evictable: _Optional[int] = ..., promised: _Optional[int] = ..., soft_quota: _Optional[int] = ..., hard_quota: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ..., evicted: _Optional[int] = ..., pinned_pages: _Optional[int] = ...) -> None: ...

class PoolStats(_message.Message):
    __slots__ = ("pages", "page_bytes", "free", "leased", "arriving", "cached", "spilling", "restoring", "orphaned", "evictable", "promised", "locks", "evicted", "tree_nodes", "zeroed", "block_tokens", "asked_pages")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    SPILLING_FIELD_NUMBER: _ClassVar[int]
    RESTORING_FIELD_NUMBER: _ClassVar[int]
    ORPHANED_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    ZEROED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ASKED_PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    page_bytes: int
    free: int
    leased: int
    arriving: int
    cached: int
    spilling: int
    restoring: int
    orphaned: int
    evictable: int
    promised: int
    locks: int
    evicted: int
    tree_nodes: int
    zeroed: int
    block_tokens: int
    asked_pages: int
    def __init__(self, pages: _Optional[int] = ..., page_bytes: _Optional[int] = ..., free: _Optional[int] = ..., leased: _Optional[int] = ..., arriving: _Optional[int] = ..., cached: _Optional[int] = ..., spilling: _Optional[int] = ..., restoring: _Optional[int] = ..., orphaned: _Optional[int] = ..., evictable: _Optional[int] = ..., promised: _Optional[int] = ..., locks: _Optional[int] = ..., evicted: _Optional[int] = ..., tree_nodes: _Optional[int] = ..., zeroed: _Optional[int] = ..., block_tokens: _Optional[int] = ..., asked_pages: _Optional[int] = ...) -> None: ...

class TransferStats(_message.Message):
    __slots__ = ("active", "completed", "failed", "aborted", "delta_pages", "delta_bytes", "wire_bytes", "parts", "saved_bytes", "saved_pages", "asked_again", "dropped_parts", "stale_notifications", "failures", "aborts", "mismatched_parts", "copied_bytes")
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_PAGES_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_PAGES_FIELD_NUMBER: _ClassVar[int]
    ASKED_AGAIN_FIELD_NUMBER: _ClassVar[int]
    DROPPED_PARTS_FIELD_NUMBER: _ClassVar[int]
    STALE_NOTIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_PARTS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    active: int
    completed: int
    failed: int
    aborted: int
    delta_pages: int
    delta_bytes: int
    wire_bytes: int
    parts: int
    saved_bytes: int
    saved_pages: int
    asked_again: int
    dropped_parts: int
    stale_notifications: int
    failures: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    aborts: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    mismatched_parts: int
    copied_bytes: int
    def __init__(self, active: _Optional[int] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., aborted: _Optional[int] = ..., delta_pages: _Optional[int] = ..., delta_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., parts: _Optional[int] = ..., saved_bytes: _Optional[int] = ..., saved_pages: _Optional[int] = ..., asked_again: _Optional[int] = ..., dropped_parts: _Optional[int] = ..., stale_notifications: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., aborts: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., mismatched_parts: _Optional[int] = ..., copied_bytes: _Optional[int] = ...) -> None: ...

class LatencyStats(_message.Message):
    __slots__ = ("count", "p50_ms", "p99_ms", "stages", "seconds")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50_ms: float
    p99_ms: float
    stages: _containers.RepeatedCompositeFieldContainer[StageStats]
    seconds: Histogram
    def __init__(self, count: _Optional[int] = ..., p50_ms: _Optional[float] = ..., p99_ms: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[StageStats, _Mapping]]] = ..., seconds: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class StageStats(_message.Message):
    __slots__ = ("stage", "mean_ms", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MEAN_MS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    mean_ms: float
    seconds: Histogram
    def __init__(self, stage: _Optional[str] = ..., mean_ms: _Optional[float] = ..., seconds: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class PeerStats(_message.Message):
    __slots__ = ("name", "address", "state", "free_credits", "slots", "error", "busy_slots", "withheld_slots", "moved_bytes", "checksums")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FREE_CREDITS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BUSY_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    state: str
    free_credits: int
    slots: int
    error: str
    busy_slots: int
    withheld_slots: int
    moved_bytes: int
    checksums: bool
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., free_credits: _Optional[int] = ..., slots: _Optional[int] = ..., error: _Optional[str] = ..., busy_slots: _Optional[int] = ..., withheld_slots: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., checksums: bool = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace_id", "digests")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    digests: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., digests: _Optional[bytes] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("matched_tokens", "running", "waiting", "free_pages", "pages")
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    matched_tokens: int
    running: int
    waiting: int
    free_pages: int
    pages: int
    def __init__(self, matched_tokens: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_pages: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...
