"""NVMe status codes to errors, in one place."""

from __future__ import annotations

from forebay.errors import Busy, ForebayError, NoSpace, TargetFailed, TargetRefused, Unavailable, WriteFenced
from forebay.nvmetcp.spec import Status

__all__ = ["error_of"]

_BUSY_RETRY_MS = 500
_ERRORS: dict[int, type[ForebayError]] = {
    Status.ACCESS_DENIED: WriteFenced,
    Status.CONNECT_INVALID_HOST: TargetRefused,
    Status.AUTHENTICATION_REQUIRED: TargetRefused,
    Status.CONNECT_INVALID_PARAMETERS: TargetRefused,
    Status.CONNECT_INCOMPATIBLE_FORMAT: TargetRefused,
    Status.CAPACITY_EXCEEDED: NoSpace,
    Status.INVALID_NAMESPACE: TargetRefused,
    Status.INVALID_FIELD: TargetRefused,
    Status.INVALID_OPCODE: TargetRefused,
    Status.INVALID_QUEUE_ID: TargetRefused,
    Status.HOST_ID_INCONSISTENT: TargetRefused,
    Status.LBA_OUT_OF_RANGE: TargetRefused,
    Status.NAMESPACE_NOT_READY: Unavailable,
    Status.ABORTED_SQ_DELETION: Unavailable,
    Status.TRANSIENT_TRANSPORT_ERROR: Unavailable,
}


def error_of(status: int) -> ForebayError:
    """The error for a completion's status (SCT << 8 | SC, not 0). What is not listed is `TargetFailed`."""
    if status == Status.CONNECT_CONTROLLER_BUSY:
        return Busy(
            "the target has as many connections as it takes: allow more there (target.max_connections, and its limit "
            "of open files), or use fewer (NvmeTcpOptions.connections)",
            retry_after_ms=_BUSY_RETRY_MS,
        )
    kind = _ERRORS.get(status, TargetFailed)
    try:
        name = Status(status).name.lower().replace("_", " ")
    except ValueError:
        name = "unknown status"
    return kind(f"the target answered {name} (sct {status >> 8:x}h sc {status & 0xFF:02x}h)")
