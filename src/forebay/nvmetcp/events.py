"""What `Connection.receive_data` reports. Tuples, because several are made for every command."""

from __future__ import annotations

from typing import NamedTuple

from forebay.nvmetcp.command import Command, Completion

__all__ = [
    "CommandReceived",
    "DataChunk",
    "DataEnd",
    "DataStart",
    "Event",
    "ICReqReceived",
    "ICRespReceived",
    "R2TReceived",
    "ResponseReceived",
    "TermReceived",
]


class ICReqReceived(NamedTuple):
    """A host opened the transport connection (controller role); answer with `send_ic_resp`. TCP §3.6.2.2."""

    hpda: int
    header_digest: bool
    data_digest: bool
    max_r2t: int
    """Commands' R2Ts that may be outstanding, counted from 1."""


class ICRespReceived(NamedTuple):
    """The controller accepted (host role). TCP §3.6.2.3."""

    cpda: int
    max_h2c_data_bytes: int
    header_digest: bool = False
    data_digest: bool = False
    """Digests that were asked for and are in use from here on."""


class CommandReceived(NamedTuple):
    """A command capsule. If `in_capsule_bytes`, a `DataStart` of the same cid follows. TCP §3.6.2.6."""

    command: Command
    in_capsule_bytes: int


class ResponseReceived(NamedTuple):
    """A response capsule: the command is over. TCP §3.6.2.7."""

    completion: Completion


class R2TReceived(NamedTuple):
    """The controller is ready for a range of a command's data; answer with `send_h2c_data`. TCP §3.6.2.10."""

    cid: int
    tag: int
    offset_bytes: int
    length_bytes: int


class DataStart(NamedTuple):
    """The header of a PDU with data was read; the next `length_bytes` of the stream belong at `offset_bytes`.

    `tag` is the R2T's (controller role), or None for C2HData and in-capsule data. `last` says that nothing follows of
    this R2T (of this command, in the host role). `success` (host role): with this PDU's last byte the command has
    completed successfully and no response capsule will follow.
    """

    cid: int
    tag: int | None
    offset_bytes: int
    length_bytes: int
    last: bool
    success: bool


class DataChunk(NamedTuple):
    """A piece of the payload, if payload bytes were handed to `receive_data`. `data` is valid as long as that is."""

    cid: int
    offset_bytes: int
    data: memoryview


class DataEnd(NamedTuple):
    """The payload announced by a `DataStart` is complete, with its digest if there is one; the fields are that event's.

    With `digest_ok` False the data is damaged and the command failed: with Transient Transport Error, which a
    controller answers and a host takes for granted. The connection goes on. TCP §3.3.1.1.
    """

    cid: int
    tag: int | None
    last: bool
    success: bool
    digest_ok: bool = True


class TermReceived(NamedTuple):
    """The peer ended the connection because of an error of ours. TCP §3.6.2.4, §3.6.2.5."""

    fatal_error: int
    fatal_info: int
    header: bytes


Event = (
    CommandReceived
    | ResponseReceived
    | DataStart
    | DataChunk
    | DataEnd
    | R2TReceived
    | ICReqReceived
    | ICRespReceived
    | TermReceived
)
