from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Handshake(_message.Message):
    __slots__ = ("replica", "version", "fingerprint", "snapshot_ready", "metrics_port")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_READY_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    replica: str
    version: int
    fingerprint: bytes
    snapshot_ready: bool
    metrics_port: int
    def __init__(self, replica: _Optional[str] = ..., version: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., snapshot_ready: bool = ..., metrics_port: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("handshake", "seq")
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    handshake: Handshake
    seq: int
    def __init__(self, handshake: _Optional[_Union[Handshake, _Mapping]] = ..., seq: _Optional[int] = ...) -> None: ...

class LoadUpdate(_message.Message):
    __slots__ = ("handshake", "seq", "full_begins", "full_ends", "requests", "ended_numbers", "log_entries", "leaving")
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FULL_BEGINS_FIELD_NUMBER: _ClassVar[int]
    FULL_ENDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    LOG_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    handshake: Handshake
    seq: int
    full_begins: bool
    full_ends: bool
    requests: RequestColumns
    ended_numbers: _containers.RepeatedScalarFieldContainer[int]
    log_entries: _containers.RepeatedCompositeFieldContainer[LogEntry]
    leaving: bool
    def __init__(self, handshake: _Optional[_Union[Handshake, _Mapping]] = ..., seq: _Optional[int] = ..., full_begins: bool = ..., full_ends: bool = ..., requests: _Optional[_Union[RequestColumns, _Mapping]] = ..., ended_numbers: _Optional[_Iterable[int]] = ..., log_entries: _Optional[_Iterable[_Union[LogEntry, _Mapping]]] = ..., leaving: bool = ...) -> None: ...

class RequestColumns(_message.Message):
    __slots__ = ("number", "session", "endpoint_keys", "endpoint", "uncached", "remaining", "total", "age_ms", "idle_ms", "progressed", "digests")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_KEYS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    PROGRESSED_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    number: _containers.RepeatedScalarFieldContainer[int]
    session: _containers.RepeatedScalarFieldContainer[str]
    endpoint_keys: _containers.RepeatedScalarFieldContainer[str]
    endpoint: _containers.RepeatedScalarFieldContainer[int]
    uncached: _containers.RepeatedScalarFieldContainer[int]
    remaining: _containers.RepeatedScalarFieldContainer[int]
    total: _containers.RepeatedScalarFieldContainer[int]
    age_ms: _containers.RepeatedScalarFieldContainer[int]
    idle_ms: _containers.RepeatedScalarFieldContainer[int]
    progressed: _containers.RepeatedScalarFieldContainer[bool]
    digests: _containers.RepeatedCompositeFieldContainer[PromptDigests]
    def __init__(self, number: _Optional[_Iterable[int]] = ..., session: _Optional[_Iterable[str]] = ..., endpoint_keys: _Optional[_Iterable[str]] = ..., endpoint: _Optional[_Iterable[int]] = ..., uncached: _Optional[_Iterable[int]] = ..., remaining: _Optional[_Iterable[int]] = ..., total: _Optional[_Iterable[int]] = ..., age_ms: _Optional[_Iterable[int]] = ..., idle_ms: _Optional[_Iterable[int]] = ..., progressed: _Optional[_Iterable[bool]] = ..., digests: _Optional[_Iterable[_Union[PromptDigests, _Mapping]]] = ...) -> None: ...

class PromptDigests(_message.Message):
    __slots__ = ("row", "root", "prefixes", "whole")
    ROW_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    row: int
    root: Root
    prefixes: _containers.RepeatedScalarFieldContainer[int]
    whole: int
    def __init__(self, row: _Optional[int] = ..., root: _Optional[_Union[Root, _Mapping]] = ..., prefixes: _Optional[_Iterable[int]] = ..., whole: _Optional[int] = ...) -> None: ...

class LogEntry(_message.Message):
    __slots__ = ("session", "request_id", "upstream", "status", "seconds")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    session: str
    request_id: str
    upstream: str
    status: int
    seconds: float
    def __init__(self, session: _Optional[str] = ..., request_id: _Optional[str] = ..., upstream: _Optional[str] = ..., status: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("handshake", "publishers", "chunks")
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHERS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    handshake: Handshake
    publishers: _containers.RepeatedScalarFieldContainer[str]
    chunks: int
    def __init__(self, handshake: _Optional[_Union[Handshake, _Mapping]] = ..., publishers: _Optional[_Iterable[str]] = ..., chunks: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("crc", "body")
    CRC_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    crc: int
    body: bytes
    def __init__(self, crc: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class Parts(_message.Message):
    __slots__ = ("number", "part", "last")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    number: int
    part: _containers.RepeatedCompositeFieldContainer[Part]
    last: bool
    def __init__(self, number: _Optional[int] = ..., part: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., last: bool = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("begin", "content", "holding", "extra", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    content: Content
    holding: Holding
    extra: Extra
    end: End
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., content: _Optional[_Union[Content, _Mapping]] = ..., holding: _Optional[_Union[Holding, _Mapping]] = ..., extra: _Optional[_Union[Extra, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("publisher", "next", "mark", "group")
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    publisher: str
    next: int
    mark: bytes
    group: int
    def __init__(self, publisher: _Optional[str] = ..., next: _Optional[int] = ..., mark: _Optional[bytes] = ..., group: _Optional[int] = ...) -> None: ...

class Root(_message.Message):
    __slots__ = ("adapter", "salt")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    salt: str
    def __init__(self, adapter: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class Content(_message.Message):
    __slots__ = ("number", "parent", "at", "root", "block_size", "hashes", "sizes", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    parent: int
    at: int
    root: Root
    block_size: int
    hashes: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    text: bytes
    def __init__(self, number: _Optional[int] = ..., parent: _Optional[int] = ..., at: _Optional[int] = ..., root: _Optional[_Union[Root, _Mapping]] = ..., block_size: _Optional[int] = ..., hashes: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., text: _Optional[bytes] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("medium", "mask")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    medium: str
    mask: int
    def __init__(self, medium: _Optional[str] = ..., mask: _Optional[int] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("content", "reach", "whole", "tiers", "names")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    content: int
    reach: int
    whole: bool
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    names: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, content: _Optional[int] = ..., reach: _Optional[int] = ..., whole: bool = ..., tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ..., names: _Optional[_Iterable[int]] = ...) -> None: ...

class Counted(_message.Message):
    __slots__ = ("medium", "name", "copies")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    medium: str
    name: int
    copies: int
    def __init__(self, medium: _Optional[str] = ..., name: _Optional[int] = ..., copies: _Optional[int] = ...) -> None: ...

class DecodeBlock(_message.Message):
    __slots__ = ("name", "parent", "root", "ids", "data", "block_size", "depth", "session", "state", "copies", "media")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    name: int
    parent: int
    root: Root
    ids: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    block_size: int
    depth: int
    session: str
    state: int
    copies: int
    media: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[int] = ..., parent: _Optional[int] = ..., root: _Optional[_Union[Root, _Mapping]] = ..., ids: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., block_size: _Optional[int] = ..., depth: _Optional[int] = ..., session: _Optional[str] = ..., state: _Optional[int] = ..., copies: _Optional[int] = ..., media: _Optional[_Iterable[str]] = ...) -> None: ...

class WindowBlocks(_message.Message):
    __slots__ = ("group", "needed", "block_size", "names")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    group: int
    needed: int
    block_size: int
    names: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., needed: _Optional[int] = ..., block_size: _Optional[int] = ..., names: _Optional[_Iterable[int]] = ...) -> None: ...

class Extra(_message.Message):
    __slots__ = ("copies", "opaque", "pending", "windows")
    COPIES_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    copies: _containers.RepeatedCompositeFieldContainer[Counted]
    opaque: _containers.RepeatedCompositeFieldContainer[Counted]
    pending: _containers.RepeatedCompositeFieldContainer[DecodeBlock]
    windows: _containers.RepeatedCompositeFieldContainer[WindowBlocks]
    def __init__(self, copies: _Optional[_Iterable[_Union[Counted, _Mapping]]] = ..., opaque: _Optional[_Iterable[_Union[Counted, _Mapping]]] = ..., pending: _Optional[_Iterable[_Union[DecodeBlock, _Mapping]]] = ..., windows: _Optional[_Iterable[_Union[WindowBlocks, _Mapping]]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("blocks", "extras")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    extras: int
    def __init__(self, blocks: _Optional[int] = ..., extras: _Optional[int] = ...) -> None: ...
