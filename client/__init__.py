"""The client library: sessions, transports and buffers, for engines and for the command line.

Imports go one way: this package uses the shared vocabulary in ``forebay`` and nothing of ``forebay.appliance``.
"""

from forebay.client.admin import (
    Admin,
    CreatedPrincipal,
    DeletedNamespace,
    DriveStatus,
    GrantInfo,
    NamespaceInfo,
    NodeProblem,
    NodeStatus,
    PrincipalInfo,
    QuarantinedExtent,
    ScopeInfo,
    ScrubStatus,
    SessionInfo,
)
from forebay.client.client import Client, Key, connect
from forebay.client.options import ClientOptions
from forebay.client.plans import PlannedWrite, WritePlan
from forebay.client.registered import RegisteredBuffer, register
from forebay.client.results import (
    BlockStat,
    ClientStats,
    Describe,
    GetResult,
    Hints,
    KeyspaceInfo,
    ListedBlock,
    MatchResult,
    PutResult,
    StatResult,
    TilesResult,
    VolumeTransport,
    WatchEvent,
)
from forebay.client.transports.block_device import BlockDeviceOptions
from forebay.client.transports.options import NvmeTcpOptions

__all__ = [
    "Admin",
    "BlockDeviceOptions",
    "BlockStat",
    "Client",
    "ClientOptions",
    "ClientStats",
    "CreatedPrincipal",
    "DeletedNamespace",
    "Describe",
    "DriveStatus",
    "GetResult",
    "GrantInfo",
    "Hints",
    "Key",
    "KeyspaceInfo",
    "ListedBlock",
    "MatchResult",
    "NamespaceInfo",
    "NodeProblem",
    "NodeStatus",
    "NvmeTcpOptions",
    "PlannedWrite",
    "PrincipalInfo",
    "PutResult",
    "QuarantinedExtent",
    "RegisteredBuffer",
    "ScopeInfo",
    "ScrubStatus",
    "SessionInfo",
    "StatResult",
    "TilesResult",
    "VolumeTransport",
    "WatchEvent",
    "WritePlan",
    "connect",
    "register",
]
