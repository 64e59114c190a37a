"""Exit codes of the command line, and which error leads to which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from forebay.errors import (
    BY_CODE,
    Absent,
    AlreadyExists,
    CapacityShort,
    ChecksumMismatch,
    DataDirInUse,
    DataDirNewer,
    DeadlineExceeded,
    ForebayError,
    InvalidArgument,
    MetadataCorrupt,
    NamespaceNotFound,
    NoSpace,
    NotFound,
    Pending,
    PermissionDenied,
    QuotaExceeded,
    StaleGeneration,
    TargetRefused,
    Unauthenticated,
    Unavailable,
    VolumeMismatch,
    reason,
)

__all__ = [
    "ABSENT",
    "INTERRUPTED",
    "MEANINGS",
    "OK",
    "REFUSED",
    "UNAVAILABLE",
    "USAGE",
    "WRONG_BYTES",
    "advice",
    "error_of",
    "exit_code",
    "worst",
]

OK = 0
ABSENT = 1
"""Something asked for is not there: a miss."""
USAGE = 2
"""The command line or an argument is wrong."""
REFUSED = 3
"""Authentication, permission, quota, space, a name or a directory already taken."""
UNAVAILABLE = 4
"""The node does not answer, is busy, or failed; asking again may help."""
WRONG_BYTES = 5
"""Bytes or metadata were not what was stored."""
INTERRUPTED = 130
"""Ctrl-C, as shells report it."""

MEANINGS = {
    OK: "done",
    ABSENT: "something asked for is not there (a miss)",
    USAGE: "the command line or an argument is wrong",
    REFUSED: "refused: token, permission, quota, space, name or directory taken",
    UNAVAILABLE: "the node is unavailable, busy or failed",
    WRONG_BYTES: "bytes or metadata are not what was stored",
    INTERRUPTED: "interrupted with Ctrl-C",
}
"""What each code says, for help and documentation."""

_T = TypeVar("_T")

# By the nearest class in the tree; everything else is the node's state: UNAVAILABLE.
_EXIT: dict[type[ForebayError], int] = {
    Absent: ABSENT,
    Pending: ABSENT,
    NotFound: ABSENT,
    InvalidArgument: USAGE,
    Unauthenticated: REFUSED,
    PermissionDenied: REFUSED,
    AlreadyExists: REFUSED,
    StaleGeneration: REFUSED,
    NoSpace: REFUSED,
    QuotaExceeded: REFUSED,
    DataDirInUse: REFUSED,
    DataDirNewer: REFUSED,
    CapacityShort: REFUSED,
    TargetRefused: REFUSED,
    ChecksumMismatch: WRONG_BYTES,
    MetadataCorrupt: WRONG_BYTES,
    VolumeMismatch: WRONG_BYTES,
    ForebayError: UNAVAILABLE,
}

# What to do about an error, where its message cannot know.
_ADVICE: dict[type[ForebayError], str] = {
    Absent: "`forebay ls` shows what is stored here",
    Pending: "a writer holds this key; ask again when it is done",
    NamespaceNotFound: "it does not exist, or this token has no right in it; `forebay namespace ls` shows an "
    "administrator those that exist; --namespace names one",
    Unauthenticated: "give a token with --token or FOREBAY_TOKEN, or --data of a node on this host",
    PermissionDenied: "an administrator can allow it: `forebay principal grant`",
    StaleGeneration: "give --generation of the weights in use; `forebay namespace show` names the minimum",
    ChecksumMismatch: "the node verifies the block, and drops it if it is bad: put it again",
    DeadlineExceeded: "is the node running, and not overloaded? --timeout waits longer",
    NoSpace: "if `forebay status` names no full file system, remove or unpin blocks, or give the node more capacity",
    QuotaExceeded: "raise the quota (`forebay namespace set NAME --quota SIZE`), or remove or unpin blocks",
    DataDirNewer: "start a version at least as new as the one that wrote it",
    Unavailable: "is the node running? --url or --data names another one; --timeout waits longer",
    ForebayError: "",
}


# The same for a field, whatever the error.
_FIELD_ADVICE = {
    "grpc.listen": "--listen or FOREBAY_GRPC_LISTEN sets it",
    "http.listen": "FOREBAY_HTTP_LISTEN sets it",
    "target.listen": "--target-listen or FOREBAY_TARGET_LISTEN sets it",
}
_NO_ADMINISTRATOR = "ask an administrator, or for a token that is one: `forebay principal create NAME --admin`"


def _nearest(error: type[ForebayError], table: Mapping[type[ForebayError], _T]) -> _T:
    return next(table[cls] for cls in error.__mro__ if cls in table)


def exit_code(error: ForebayError) -> int:
    """The exit code of a command that failed with this error."""
    return _nearest(type(error), _EXIT)


def advice(error: ForebayError) -> str:
    """What the person at the keyboard can do about it; may be empty, as where a field says what did not answer."""
    if isinstance(error, Unavailable) and error.field:
        return ""
    if error.field in _FIELD_ADVICE:
        return _FIELD_ADVICE[error.field]
    if isinstance(error, PermissionDenied) and "administrator" in error.message:
        return _NO_ADMINISTRATOR
    return _nearest(type(error), _ADVICE)


_BY_REASON = {reason(code): cls for code, cls in BY_CODE.items()}


def error_of(word: str, message: str = "") -> ForebayError:
    """The error that a per-key reason (`forebay.errors.reason`) stands for."""
    cls = _BY_REASON.get(word)
    if cls is Unavailable:  # the node answered: what it would have served from did not
        return Unavailable(f"{message} (`forebay status` says which drive or target is away)", field="drive")
    return cls(message) if cls is not None else ForebayError(message or word)


def worst(reasons: Iterable[str]) -> int:
    """Exit code of a batch: that of the most serious per-key reason, 0 when all are ``ok``.

    Wrong bytes weigh more than an unavailable node, that more than a refusal, that more than a miss.
    """
    return max((exit_code(error_of(word)) for word in reasons if word != "ok"), default=OK)
