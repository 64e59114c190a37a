"""One error tree with stable codes.

A code exists because a caller could react to it; a retired number is never used again. The same numbers travel in
per-key status columns (``0`` is success), in gRPC trailers, HTTP bodies and metrics, and one table for each protocol
(`GRPC_STATUS`, `HTTP_STATUS`) says which status a failed call carries. Ranges: 1xxx the request is wrong, 2xxx who
asks, 3xxx state that moved on, 4xxx capacity, 5xxx a block that cannot be had (a miss), 6xxx the node, 7xxx the data
path.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

__all__ = [
    "BY_CODE",
    "ERROR_TRAILER",
    "GRPC_STATUS",
    "HTTP_STATUS",
    "OK",
    "Absent",
    "AlreadyExists",
    "Busy",
    "CapacityShort",
    "ChecksumMismatch",
    "ConfigInvalid",
    "ConnectionLost",
    "DataDirInUse",
    "DataDirNewer",
    "DeadlineExceeded",
    "DuplicateKey",
    "Evicted",
    "ForebayError",
    "GridInvalid",
    "InvalidArgument",
    "KeySize",
    "LeaseExpired",
    "MetadataCorrupt",
    "NamespaceNotFound",
    "NoSpace",
    "NotFound",
    "OtherGeneration",
    "OtherKeyspace",
    "Pending",
    "PermissionDenied",
    "ProtocolError",
    "QuotaExceeded",
    "SchemaInvalid",
    "SessionExpired",
    "StaleGeneration",
    "StaleIncarnation",
    "StaleMap",
    "TargetFailed",
    "TargetRefused",
    "Unauthenticated",
    "Unavailable",
    "ValueSize",
    "VolumeMismatch",
    "WriteExpired",
    "WriteFenced",
    "from_code",
    "http_status",
    "reason",
]

OK = 0
ERROR_TRAILER = "forebay-error-bin"
"""The gRPC trailer that carries `ForebayError.to_json`."""


class ForebayError(Exception):
    """Root of the tree.

    ``field`` names the part of the input that is at fault, ``limit`` the bound it broke, ``retry_after_ms`` when
    asking again can help (0: the caller may retry as its own policy says, if `retriable`).
    """

    code: ClassVar[int] = 1
    retriable: ClassVar[bool] = False

    def __init__(
        self, message: str = "", *, field: str = "", limit: int | str | None = None, retry_after_ms: int = 0
    ) -> None:
        self.message = message or (type(self).__doc__ or "").strip().splitlines()[0]
        self.field = field
        self.limit = limit
        self.retry_after_ms = retry_after_ms
        super().__init__(self.message)

    def __str__(self) -> str:
        parts = [self.message]
        if self.field and self.field not in self.message:
            parts.append(f"field={self.field}")
        if self.limit is not None:
            parts.append(f"limit={self.limit}")
        return f"{' '.join(parts)} [{type(self).__name__} {self.code}]"

    def to_dict(self) -> dict[str, Any]:
        """The error as plain values: what a gRPC trailer or ``--json`` carries."""
        return {
            "code": self.code,
            "error": type(self).__name__,
            "message": self.message,
            "field": self.field,
            "limit": self.limit,
            "retry_after_ms": self.retry_after_ms,
        }

    def to_json(self) -> bytes:
        """`to_dict` as it goes from node to client, in a trailer or in a message of the stream of calls."""
        return json.dumps(self.to_dict()).encode()


class InvalidArgument(ForebayError):
    """An argument is out of its range."""

    code = 1000


class KeySize(InvalidArgument):
    """A key must have 1 to 1,024 bytes."""

    code = 1001


class ValueSize(InvalidArgument):
    """A value's length is not what the schema or the node allows."""

    code = 1002


class DuplicateKey(InvalidArgument):
    """The same key stands twice in one batch."""

    code = 1003


class SchemaInvalid(InvalidArgument):
    """The schema does not parse or names something that is not known."""

    code = 1004


class GridInvalid(InvalidArgument):
    """Tiles do not cover the grid of the schema, or are not part of it."""

    code = 1005


class ConfigInvalid(InvalidArgument):
    """The configuration has an unknown key or a value out of range."""

    code = 1006


class Unauthenticated(ForebayError):
    """The token is missing or not known."""

    code = 2001


class PermissionDenied(ForebayError):
    """The principal's ACL does not allow this."""

    code = 2002


class NotFound(ForebayError):
    """The thing named does not exist."""

    code = 2003


class NamespaceNotFound(NotFound):
    """The namespace does not exist, or the principal may not know that it does."""

    code = 2004


class AlreadyExists(ForebayError):
    """A thing of that name exists."""

    code = 2005


class SessionExpired(ForebayError):
    """The session is unknown or ended; open a new one."""

    code = 3101
    retriable = True


class LeaseExpired(ForebayError):
    """The lease ran out before the bytes could be used."""

    code = 3102
    retriable = True


class StaleIncarnation(ForebayError):
    """The node restarted since the session began; open a new one."""

    code = 3103
    retriable = True


class StaleGeneration(ForebayError):
    """The generation is below the namespace's minimum."""

    code = 3104


class StaleMap(ForebayError):
    """The cluster map moved on; fetch it again."""

    code = 3105
    retriable = True


class WriteExpired(ForebayError):
    """The write id is not pending: it was committed, aborted, or its deadline passed."""

    code = 3106


class NoSpace(ForebayError):
    """The node has no room that could be freed."""

    code = 4001


class QuotaExceeded(ForebayError):
    """The namespace's quota is used up by blocks that may not be evicted."""

    code = 4002


class Busy(ForebayError):
    """The node is at a limit; retry after the time given."""

    code = 4003
    retriable = True


class Absent(ForebayError):
    """No visible block has this key."""

    code = 5001


class Pending(ForebayError):
    """A writer holds this key; the block is not visible yet."""

    code = 5002
    retriable = True


class ChecksumMismatch(ForebayError):
    """The bytes read do not match the block's checksum."""

    code = 5003


class OtherKeyspace(Absent):
    """The namespace has this key in another keyspace: model, layout or settings differ."""

    code = 5004


class OtherGeneration(Absent):
    """The namespace has this key under another generation of the same keyspace."""

    code = 5005


class Evicted(Absent):
    """This key was stored, and evicted since to make room."""

    code = 5006


class Unavailable(ForebayError):
    """The node or one of its parts does not answer."""

    code = 6001
    retriable = True


class DeadlineExceeded(ForebayError):
    """The deadline passed before the call was done."""

    code = 6002
    retriable = True


class DataDirInUse(ForebayError):
    """Another process serves this data directory."""

    code = 6003


class DataDirNewer(ForebayError):
    """The data directory was written by a newer version."""

    code = 6004


class CapacityShort(ForebayError):
    """The drive cannot hold the capacity that was asked for."""

    code = 6005


class VolumeMismatch(ForebayError):
    """A volume's label is not the one that metadata names: swapped, restored or foreign."""

    code = 6006


class MetadataCorrupt(ForebayError):
    """A record or a table of metadata does not decode."""

    code = 6007


class ProtocolError(ForebayError):
    """The peer broke the protocol; the connection was closed."""

    code = 7001


class ConnectionLost(ForebayError):
    """The connection to the target was lost."""

    code = 7002
    retriable = True


class TargetRefused(ForebayError):
    """The target refused the connection or the command."""

    code = 7003


class WriteFenced(TargetRefused):
    """The target refused a write: no live grant of this host covers it."""

    code = 7004


class TargetFailed(ForebayError):
    """The target reported a media or internal error."""

    code = 7005


def _tree(root: type[ForebayError]) -> list[type[ForebayError]]:
    return [root, *(c for sub in root.__subclasses__() for c in _tree(sub))]


BY_CODE: dict[int, type[ForebayError]] = {cls.code: cls for cls in _tree(ForebayError)}
"""Every error class by its code."""

# The gRPC status names; kept as strings so that this module needs no gRPC.
GRPC_STATUS: dict[type[ForebayError], str] = {
    InvalidArgument: "INVALID_ARGUMENT",
    Unauthenticated: "UNAUTHENTICATED",
    PermissionDenied: "PERMISSION_DENIED",
    NotFound: "NOT_FOUND",
    AlreadyExists: "ALREADY_EXISTS",
    SessionExpired: "FAILED_PRECONDITION",
    LeaseExpired: "FAILED_PRECONDITION",
    StaleIncarnation: "FAILED_PRECONDITION",
    StaleGeneration: "FAILED_PRECONDITION",
    StaleMap: "FAILED_PRECONDITION",
    WriteExpired: "FAILED_PRECONDITION",
    NoSpace: "RESOURCE_EXHAUSTED",
    QuotaExceeded: "RESOURCE_EXHAUSTED",
    Busy: "RESOURCE_EXHAUSTED",
    Absent: "NOT_FOUND",
    Pending: "UNAVAILABLE",
    ChecksumMismatch: "DATA_LOSS",
    MetadataCorrupt: "DATA_LOSS",
    Unavailable: "UNAVAILABLE",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    ForebayError: "INTERNAL",
}
"""gRPC status of a failed call, by the nearest class in the tree."""

HTTP_STATUS: dict[type[ForebayError], int] = {
    InvalidArgument: 400,
    Unauthenticated: 401,
    PermissionDenied: 403,
    NotFound: 404,
    AlreadyExists: 409,
    SessionExpired: 409,
    LeaseExpired: 409,
    StaleIncarnation: 409,
    StaleGeneration: 409,
    StaleMap: 409,
    WriteExpired: 409,
    NoSpace: 507,
    QuotaExceeded: 507,
    CapacityShort: 507,
    Busy: 429,
    Absent: 404,
    Pending: 409,
    ChecksumMismatch: 500,
    MetadataCorrupt: 500,
    Unavailable: 503,
    DeadlineExceeded: 504,
    ProtocolError: 502,
    ConnectionLost: 503,
    TargetRefused: 502,
    TargetFailed: 502,
    ForebayError: 500,
}
"""HTTP status of a failed call, by the nearest class in the tree (`http_status`)."""


def http_status(error: ForebayError) -> int:
    """The HTTP status that an error goes out with."""
    return next(HTTP_STATUS[cls] for cls in type(error).__mro__ if cls in HTTP_STATUS)


def from_code(
    code: int, message: str = "", *, field: str = "", limit: int | str | None = None, retry_after_ms: int = 0
) -> ForebayError:
    """The error of that code; an unknown code (a newer peer) becomes a plain `ForebayError` that shows it."""
    cls = BY_CODE.get(code)
    if cls is None:
        return ForebayError(message or f"error code {code} of a newer peer", field=field, limit=limit)
    return cls(message, field=field, limit=limit, retry_after_ms=retry_after_ms)


def reason(code: int) -> str:
    """A status column's code as one word: ``ok`` or the error's name in snake case, as metrics and tables show it."""
    if code == OK:
        return "ok"
    cls = BY_CODE.get(code)
    if cls is None:
        return f"code_{code}"
    name = cls.__name__
    return "".join(("_" + c.lower()) if c.isupper() and i else c.lower() for i, c in enumerate(name))
