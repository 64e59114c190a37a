"""The configuration of a node: one TOML file, overridden by the environment, overridden by flags.

Each key is described where it is declared; ``forebay serve --print-config`` and ``docs/config.md`` are made from that
(``python -m forebay.appliance.config`` prints the page).
"""
# ruff: noqa: RUF009 (`setting` is `dataclasses.field` with metadata)

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import socket
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.appliance.dataplane.labels import MIN_REGION_BYTES, REGION_UNIT_BYTES
from forebay.appliance.settings import (
    AttachedHost,
    AttachedHosts,
    BdevAddress,
    Boolean,
    Choice,
    CoreMask,
    Duration,
    Endpoint,
    FilePath,
    Folder,
    Fraction,
    Integer,
    ListenAddress,
    Setting,
    Size,
    Text,
    WebAddress,
    format_size,
    setting,
)
from forebay.errors import ConfigInvalid
from forebay.ids import MAX_VALUE_BYTES

__all__ = [
    "Config",
    "DriveConfig",
    "GrpcConfig",
    "HttpConfig",
    "LogConfig",
    "NvmfTgtConfig",
    "ScrubConfig",
    "SessionsConfig",
    "SpaceConfig",
    "TargetConfig",
    "TraceConfig",
    "load",
    "overruled",
    "render_markdown",
    "render_toml",
]

ENVIRONMENT_PREFIX = "FOREBAY_"
DEFAULT_DATA = "~/.local/share/forebay"
MAX_CAPACITY_BYTES = 1 << 50
MAX_PORT = 65_535
COMMENT_COLUMNS = 110
CAPACITY = Size(MIN_REGION_BYTES, MAX_CAPACITY_BYTES)
CAPACITY_DEFAULT = "80 % of what the drive has free, at most 64GiB"


@dataclass(frozen=True, slots=True)
class DriveConfig:
    """One drive: a directory on a file system of its own, or at least on one with room for it, or a block device."""

    path: Path = setting(
        "path",
        Folder(),
        Path(),
        "The drive's directory, or a device such as `/dev/disk/by-id/…`; it must be named. A device is taken only if "
        "it is empty, and belongs wholly to one KV namespace: a node that has such a drive has one namespace.",
        "none: this or `bdev` is needed",
    )
    bdev: str | None = setting(
        "bdev",
        BdevAddress(),
        None,
        "Instead of a path, what SPDK's target drives itself (docs/target.md): taken only if it is empty, and divided "
        "among all KV namespaces. `malloc` is memory that goes with the target: for tests.",
        "none",
    )
    capacity_bytes: int | None = setting(
        "capacity", CAPACITY, None, "Bytes of blocks that the drive holds at most.", "the top-level capacity"
    )


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The control service: everything but the blocks' bytes."""

    listen: Endpoint = setting(
        "listen",
        ListenAddress(),
        Endpoint("127.0.0.1", 7470),
        "Where clients connect. An address that other machines can reach needs `allow_plaintext`.",
    )
    allow_plaintext: bool = setting(
        "allow_plaintext",
        Boolean(),
        False,
        "Serve other machines although tokens and metadata cross the network unencrypted: for networks that are "
        "protected in another way.",
    )
    max_message_bytes: int = setting(
        "max_message", Size(1 << 20, 1 << 30), 32 << 20, "The longest message taken or sent."
    )


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Administration over HTTP, with metrics and health: docs/administration.md."""

    enabled: bool = setting("enabled", Boolean(), True, "Serve it.")
    listen: Endpoint = setting(
        "listen",
        ListenAddress(),
        Endpoint("127.0.0.1", 0),
        "Where it is served. An address that other machines can reach needs `allow_plaintext`.",
        "127.0.0.1 and the port above that of `grpc.listen`, 7471 unless that is set (a free one if that is 0)",
    )
    allow_plaintext: bool = setting(
        "allow_plaintext",
        Boolean(),
        False,
        "Serve other machines although tokens cross the network unencrypted: for networks that are protected in "
        "another way.",
    )
    open_metrics: bool = setting(
        "open_metrics",
        Boolean(),
        True,
        "Answer `/metrics` without a token. It names the KV namespaces; `false` leaves it to administrators.",
    )


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The data path: the NVMe-oF target that clients read from and write to."""

    kind: str = setting(
        "kind",
        Choice(("embedded", "spdk")),
        "embedded",
        "Which target serves the volumes: Forebay's own, or SPDK's `nvmf_tgt` (docs/target.md), on the same volumes.",
    )
    listen: Endpoint = setting(
        "listen",
        ListenAddress(),
        Endpoint("127.0.0.1", 4420),
        "Where NVMe/TCP hosts connect: the address is told to clients, so it must be one that they can reach. "
        "Block data crosses it unencrypted.",
    )
    attached_hosts: tuple[AttachedHost, ...] = setting(
        "attached_hosts",
        AttachedHosts(),
        (),
        "NVMe hosts that may attach a tenant's volumes as block devices (`nvme connect`): machines on which clients "
        "read that way (docs/transports.md). Such a host reads every byte of the tenant's volumes, whatever the rights "
        "of who uses it; it never has a grant to write, which SPDK's target asks nobody for.",
    )
    authentication: str = setting(
        "authentication",
        Choice(("none", "dhchap")),
        "none",
        "Whether a client process has to prove to the target that it is the host that its session was given, and the "
        "target to it (DH-HMAC-CHAP): by secrets that the session brings over gRPC, on which nobody should listen. "
        "Clients from before there was this are refused then (ADR 13).",
    )
    on_stop: str = setting(
        "on_stop",
        Choice(("stop", "keep")),
        "stop",
        "What happens to the target when the node stops: `keep` leaves it running for the next start to find.",
    )
    max_connections: int = setting(
        "max_connections",
        Integer(2, 65_535),
        1024,
        "NVMe/TCP connections (queues) at the same time, as far as the limit of open files allows. A client process "
        "takes one, and up to `NvmeTcpOptions.connections` (4) for data; one too many is told so, and asks again.",
    )
    buffer_bytes: int = setting(
        "buffers",
        Size(1 << 20, 1 << 40),
        256 << 20,
        "Memory for data between sockets and drives. A connection that works has up to 2 MiB whatever this says, and "
        "more only while all together have less.",
    )
    max_command_bytes: int = setting(
        "max_command",
        Size(128 << 10, MAX_VALUE_BYTES, power_of_two=True),
        MAX_VALUE_BYTES,
        "The longest transfer of one NVMe command (MDTS). As it is, a block of any size is one command.",
    )
    in_capsule_bytes: int = setting(
        "in_capsule",
        Size(4 << 10, 1 << 20, multiple=4096),
        8 << 10,
        "The longest write whose data travels with its command, without a round trip.",
    )
    rpc_timeout_ms: int = setting(
        "rpc_timeout", Duration(100, 600_000), 10_000, "How long the target may take to answer a control request."
    )


RATE = Size(0, 1 << 44, multiple=1 << 20)


@dataclass(frozen=True, slots=True)
class NvmfTgtConfig:
    """SPDK's target, where `target.kind` is `spdk`: docs/target.md."""

    binary: Path | None = setting(
        "binary",
        FilePath(),
        None,
        "The program, which the node starts and watches.",
        "none: this or `socket` is needed",
    )
    socket: Path | None = setting(
        "socket",
        FilePath(),
        None,
        "The RPC socket of a target that somebody else runs; it may serve others besides. Where it is named the node "
        "starts none.",
        "none: the node starts `binary`",
    )
    core_mask: str = setting("core_mask", CoreMask(), "0x1", "The cores that it uses.")
    memory_bytes: int = setting(
        "memory", Size(512 << 20, 1 << 40, multiple=1 << 20), 1 << 30, "Memory that it takes at its start."
    )
    interrupt_mode: bool = setting(
        "interrupt_mode",
        Boolean(),
        True,
        "Let it sleep while there is nothing to do, so that its cores serve others too. `false` makes each of them "
        "poll all the time, which halves the time that a small read takes.",
    )
    hugepages: bool = setting(
        "hugepages",
        Boolean(),
        False,
        "Use huge pages: they must be reserved, and NVMe drives that it drives need them.",
    )
    rdma_listen: Endpoint | None = setting(
        "rdma_listen", ListenAddress(), None, "Where it listens for NVMe/RDMA as well.", "none"
    )
    volume_ios_per_s: int = setting(
        "volume_ios_limit", Integer(0, 100_000_000), 0, "Commands a second on each volume; 0 sets no limit."
    )
    volume_read_bytes_per_s: int = setting(
        "volume_read_limit", RATE, 0, "Bytes a second read from each volume; 0 sets no limit."
    )
    volume_write_bytes_per_s: int = setting(
        "volume_write_limit", RATE, 0, "Bytes a second written to each volume; 0 sets no limit."
    )


@dataclass(frozen=True, slots=True)
class SessionsConfig:
    """Sessions of engines, with the leases and grants that belong to them."""

    heartbeat_ms: int = setting(
        "heartbeat", Duration(100, 60_000), 2_000, "How often clients are told to send a heartbeat."
    )
    expiry_ms: int = setting(
        "expiry",
        Duration(200, 3_600_000),
        10_000,
        "A session ends when nothing was heard of it for so long; at least twice `heartbeat`.",
    )
    lease_ttl_ms: int = setting(
        "lease_ttl", Duration(100, 600_000), 10_000, "How long a read lease lasts, and the most a client may ask for."
    )
    write_ttl_ms: int = setting(
        "write_ttl", Duration(100, 3_600_000), 30_000, "How long a writer has from Allocate to Commit."
    )
    max_sessions: int = setting("max_sessions", Integer(1, 1_000_000), 4096, "Sessions at the same time.")


@dataclass(frozen=True, slots=True)
class SpaceConfig:
    """How a drive's space is divided and freed."""

    region_bytes: int = setting(
        "region",
        Size(MIN_REGION_BYTES, 4 << 30, multiple=REGION_UNIT_BYTES, power_of_two=True),
        MIN_REGION_BYTES,
        "The unit in which space moves between KV namespaces. Volumes keep the one they were made with.",
    )
    high_watermark: float = setting(
        "high_watermark", Fraction(0.5, 1.0), 0.97, "Eviction in the background begins when so much is in use."
    )
    reclaim_bytes_per_s: int = setting(
        "reclaim_rate",
        Size(1 << 20, 1 << 40),
        1 << 30,
        "Bytes a second, at most, of expired and outdated blocks that are given back in the background.",
    )
    low_watermark: float = setting("low_watermark", Fraction(0.1, 1.0), 0.95, "It ends when so much is left in use.")
    metadata_reserve_bytes: int = setting(
        "metadata_reserve",
        Size(0, 1 << 40),
        256 << 20,
        "What is kept free where metadata lie, but never more than a tenth of that file system: with less, blocks are "
        "read and deleted, but not stored.",
    )


@dataclass(frozen=True, slots=True)
class ScrubConfig:
    """Scrubbing: every block is read and its checksums compared from time to time (docs/integrity.md)."""

    rate_bytes_per_s: int = setting(
        "rate",
        Size(4096, 1 << 40),
        64 << 20,
        "Bytes a second, at most; also of a `forebay scrub` that names no rate of its own.",
    )
    interval_ms: int = setting(
        "interval",
        Duration(0, 366 * 86_400_000),
        7 * 86_400_000,
        "What one pass over all blocks takes at least: its reads are spread over that time. `0ms` switches the node's "
        "own passes off; `forebay scrub` works all the same.",
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The daemon's log, written to standard error."""

    level: str = setting(
        "level", Choice(("debug", "info", "warning", "error")), "info", "The least important lines that are written."
    )
    format: str = setting("format", Choice(("text", "json")), "text", "Lines for people, or one JSON object a line.")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Traces of calls and of what they ask of the target, sent to an OpenTelemetry collector."""

    otlp_endpoint: str = setting(
        "otlp_endpoint",
        WebAddress(),
        "",
        "The collector's OTLP/HTTP address for traces, such as `http://127.0.0.1:4318/v1/traces`; needs "
        "the extra `otel` (docs/administration.md). Empty: no traces.",
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that a node is told."""

    data: Path = setting(
        "data", Folder(), Path(), "The node's data directory, made when it is not there.", DEFAULT_DATA
    )
    capacity_bytes: int | None = setting(
        "capacity",
        CAPACITY,
        None,
        "Bytes of blocks that a drive holds at most, for each drive that names no capacity of its own.",
        CAPACITY_DEFAULT,
    )
    metadata_dir: Path = setting(
        "metadata_dir",
        Folder(),
        Path(),
        "Where RocksDB lies: a fast and durable disk.",
        "metadata in the data directory",
    )
    name: str = setting("name", Text(), "", "The node's name in logs and answers.", "the host's name")
    drives: tuple[DriveConfig, ...] = ()
    grpc: GrpcConfig = GrpcConfig()
    http: HttpConfig = HttpConfig()
    target: TargetConfig = TargetConfig()
    nvmf_tgt: NvmfTgtConfig = NvmfTgtConfig()
    sessions: SessionsConfig = SessionsConfig()
    space: SpaceConfig = SpaceConfig()
    scrub: ScrubConfig = ScrubConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()


SECTIONS: dict[str, type[Any]] = {
    "grpc": GrpcConfig,
    "http": HttpConfig,
    "target": TargetConfig,
    "nvmf_tgt": NvmfTgtConfig,
    "sessions": SessionsConfig,
    "space": SpaceConfig,
    "scrub": ScrubConfig,
    "log": LogConfig,
    "trace": TraceConfig,
}


def _settings(section: type[Any]) -> Iterator[tuple[str, Setting, Any]]:
    """Attribute, setting and default of each key of a section."""
    for field in dataclasses.fields(section):
        if "setting" in field.metadata:
            yield field.name, field.metadata["setting"], field.default


def _keys(section: type[Any]) -> dict[str, tuple[str, Setting]]:
    return {found.key: (attribute, found) for attribute, found, _ in _settings(section)}


def _unknown(name: str, known: list[str], source: str) -> ConfigInvalid:
    section, _, key = name.rpartition(".")
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}?" if near else f"known there: {', '.join(sorted(known))}"
    where = f" in [{section}]" if section else ""
    return ConfigInvalid(f"unknown key {key!r}{where} of {source}; {advice}", field=name)


def _read_table(section: type[Any], prefix: str, table: Any, source: str, base: Path) -> dict[str, Any]:
    """The attributes that a TOML table sets."""
    if not isinstance(table, dict):
        raise ConfigInvalid(f"{prefix} of {source} must be a table", field=prefix)
    known = _keys(section)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else key
        if key not in known:
            raise _unknown(name, list(known), source)
        attribute, found = known[key]
        values[attribute] = found.kind.parse(value, name, base)
    return values


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigInvalid(f"{path}: {error.strerror}", field="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} is not TOML: {error}", field="config") from error


def load(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration of a node; flags stand above the environment, that above the file, that above the defaults.

    ``flags`` go by dotted keys (``grpc.listen``); those that are None were not given. Relative paths start from the
    file's directory in a file, from the current one elsewhere. Raises `ConfigInvalid` naming the key and its limit.
    """
    here = Path.cwd()
    values: dict[str, dict[str, Any]] = {name: {} for name in ("", *SECTIONS)}
    drives: list[DriveConfig] = []
    if path is not None:
        base = path.absolute().parent
        tables = _read_file(path)
        for index, table in enumerate(_tables(tables.pop("drives", []), str(path))):
            name = f"drives[{index}]"
            found = _read_table(DriveConfig, name, table, str(path), base)
            if ("path" in found) == ("bdev" in found):
                what = "no path" if "path" not in found else "a path and a bdev"
                raise ConfigInvalid(f"{name} of {path} has {what}: it needs one of the two", field=f"{name}.path")
            found.setdefault("path", Path(found.get("bdev", "")))
            drives.append(DriveConfig(**found))
        for section, cls in SECTIONS.items():
            values[section] = _read_table(cls, section, tables.pop(section, {}), str(path), base)
        for key in tables:
            if key not in _keys(Config):
                raise _unknown(key, [*_keys(Config), *SECTIONS, "drives"], str(path))
        values[""] = _read_table(Config, "", tables, str(path), base)
    _read_environment(os.environ if environ is None else environ, values, here)
    for name, value in (flags or {}).items():
        if value is not None:
            section, _, key = name.rpartition(".")
            attribute, found_setting = _keys(SECTIONS[section] if section else Config)[key]
            values[section][attribute] = found_setting.kind.parse(value, name, here)
    return _checked(_assemble(values, tuple(drives)))


def overruled(path: Path, *, environ: Mapping[str, str] | None = None, typed: Collection[str] = ()) -> list[str]:
    """Keys of a file that a variable of the environment goes before, in words; ``typed`` are those that flags give."""
    environ = os.environ if environ is None else environ
    tables = _read_file(path)
    found = []
    sections: dict[str, type[Any]] = {"": Config, **SECTIONS}
    for section, cls in sections.items():
        table = tables.get(section, {}) if section else tables
        for key in _keys(cls):
            name = f"{section}.{key}" if section else key
            variable = ENVIRONMENT_PREFIX + name.replace(".", "_").upper()
            if key in table and environ.get(variable) and name not in typed:
                found.append(f"{variable} is set and goes before {name} of {path}")
    return found


def _tables(value: Any, source: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigInvalid(f"drives of {source} must be [[drives]] tables", field="drives")
    return value


def _read_environment(environ: Mapping[str, str], values: dict[str, dict[str, Any]], base: Path) -> None:
    sections: dict[str, type[Any]] = {"": Config, **SECTIONS}
    for section, cls in sections.items():
        prefix = f"{ENVIRONMENT_PREFIX}{section.upper()}_" if section else ENVIRONMENT_PREFIX
        known = {prefix + key.upper(): (attribute, found) for key, (attribute, found) in _keys(cls).items()}
        for variable, text in environ.items():
            if variable in known:
                attribute, found = known[variable]
                if not text and isinstance(found.kind, Folder):
                    continue  # no directory is named so: set to nothing is not set
                values[section][attribute] = found.kind.parse(text, variable, base)
            elif section and variable.startswith(prefix):
                # Other FOREBAY_ variables belong to other programs; one with a section's name is a mistake.
                raise _unknown(variable, list(known), "the environment")


def _assemble(values: dict[str, dict[str, Any]], drives: tuple[DriveConfig, ...]) -> Config:
    top = values[""]
    data: Path = top.pop("data", None) or Path(DEFAULT_DATA).expanduser()
    capacity_bytes = top.get("capacity_bytes")
    if not drives:
        drives = (DriveConfig(data / "drive0"),)
    grpc = GrpcConfig(**values["grpc"])
    values["http"].setdefault("listen", Endpoint("127.0.0.1", _port_above(grpc.listen.port)))
    return Config(
        data=data,
        metadata_dir=top.pop("metadata_dir", data / "metadata"),
        name=top.pop("name", None) or _host_name(),
        drives=tuple(
            dataclasses.replace(drive, capacity_bytes=drive.capacity_bytes or capacity_bytes) for drive in drives
        ),
        **top,
        **{section: cls(**values[section]) for section, cls in SECTIONS.items()},
    )


def _port_above(port: int) -> int:
    """The port after ``port``, so that a second node of this machine needs one address only; a free one (0) after 0."""
    return 0 if port in (0, MAX_PORT) else port + 1


def _host_name() -> str:
    """The host's name as far as it is one that a node may have."""
    return re.sub(r"[^A-Za-z0-9._-]|^[._-]+", "", socket.gethostname())[:64] or "forebay"


def _checked(config: Config) -> Config:
    """Rules between keys. Raises `ConfigInvalid`."""
    for name, served in (("grpc", config.grpc), ("http", config.http)):
        if not served.listen.loopback and not served.allow_plaintext:
            raise ConfigInvalid(
                f"{name}.listen: other machines can reach {served.listen} and would send tokens unencrypted; "
                f"listen on 127.0.0.1, or set {name}.allow_plaintext = true on a protected network",
                field=f"{name}.listen",
            )
    if config.target.listen.unspecified:
        raise ConfigInvalid(
            f"target.listen: clients cannot be told to connect to {config.target.listen}: name one of this machine's "
            "addresses",
            field="target.listen",
        )
    spdk = config.nvmf_tgt
    if config.target.kind == "spdk" and spdk.binary is None and spdk.socket is None:
        raise ConfigInvalid(
            'target.kind = "spdk" needs nvmf_tgt.binary, a program to start, or nvmf_tgt.socket, that of one that runs',
            field="nvmf_tgt.binary",
        )
    least_ms = 2 * config.sessions.heartbeat_ms
    if config.sessions.expiry_ms < least_ms:
        raise ConfigInvalid(
            f"sessions.expiry: {config.sessions.expiry_ms} ms is less than two heartbeats",
            field="sessions.expiry",
            limit=f"at least {least_ms} ms",
        )
    if config.space.low_watermark > config.space.high_watermark:
        raise ConfigInvalid(
            f"space.low_watermark: {config.space.low_watermark} is above space.high_watermark",
            field="space.low_watermark",
            limit=str(config.space.high_watermark),
        )
    seen: set[Path] = set()
    for drive in config.drives:
        if drive.bdev is not None and config.target.kind != "spdk":
            raise ConfigInvalid(f'drives: {drive.bdev} needs target.kind = "spdk"', field="drives")
        if drive.bdev is not None and drive.bdev.startswith("malloc:") and drive.capacity_bytes is None:
            raise ConfigInvalid(f"drives: {drive.bdev} needs a capacity", field="drives")
        if drive.path in seen:
            raise ConfigInvalid(f"drives: {drive.path} stands there twice", field="drives")
        seen.add(drive.path)
        if drive.capacity_bytes is not None and drive.capacity_bytes < config.space.region_bytes:
            raise ConfigInvalid(
                f"capacity: {format_size(drive.capacity_bytes)} on {drive.path} is less than one region",
                field="capacity",
                limit=f"at least {format_size(config.space.region_bytes)}",
            )
    return config


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, COMMENT_COLUMNS))


def _lines(section: type[Any], values: Any) -> Iterator[str]:
    for attribute, found, _ in _settings(section):
        value = getattr(values, attribute)
        default = f" Default: {found.default_text}." if found.default_text else ""
        shown = f"{found.key} = {found.kind.show(value)}" if value is not None else f"# {found.key} ="
        yield f"{_comment(found.doc + default)}{shown}\n"


def render_toml(config: Config) -> str:
    """A configuration as a file that `load` reads back, each key with what it means."""
    parts = list(_lines(Config, config))
    for section, cls in SECTIONS.items():
        parts.append(f"\n{_comment((cls.__doc__ or '').strip())}[{section}]\n")
        parts += _lines(cls, getattr(config, section))
    for drive in config.drives:
        parts.append(f"\n{_comment((DriveConfig.__doc__ or '').strip())}[[drives]]\n")
        parts += _lines(DriveConfig, drive)
    return "".join(parts)


PAGE = f"""# Configuration

<!-- Made from appliance/config.py by `python -m forebay.appliance.config > docs/config.md`; a test keeps it so. -->

`forebay serve --config FILE` reads a TOML file; every key has a default, so there need be none. A flag overrides an
environment variable, that overrides the file, and that the default. Keys that are not known are refused.
`forebay serve --print-config` shows what is in force, in a form that can be saved as a file. `forebay serve` and
`forebay doctor` say so where a variable, such as a `FOREBAY_DATA` of the shell, goes before a key of the file.

Sizes are written `64GiB` (2^30) or `64GB` (10^9), durations `500ms`, `10s`, `2m`, `1h`. Relative paths start from the
file's directory in a file, from the current directory elsewhere.

A drive without a capacity holds {CAPACITY_DEFAULT}. What Forebay's own volumes take
counts as free there, so that the answer stays the same from start to start as long as others leave the file system
alone. The limit is there because a node that was started to try it should not fill a disk; name the capacity on a
machine that is meant for it.
"""


def _rows(section: type[Any], prefix: str, variable: str | None) -> Iterator[str]:
    yield "| key | default | may be | |\n|---|---|---|---|\n"
    for _, found, default in _settings(section):
        shown = found.default_text or f"`{found.kind.show(default)}`"
        name = f"`{prefix}{found.key}`"
        if variable is not None:
            name += f"<br>`{variable}{found.key.upper()}`"
        yield f"| {name} | {shown} | {found.kind.allowed()} | {found.doc} |\n"


def render_markdown() -> str:
    """The reference page, ``docs/config.md``."""
    parts = [PAGE, "\n## Top level\n\n", *_rows(Config, "", ENVIRONMENT_PREFIX)]
    parts.append(
        f"\n## `[[drives]]`\n\n{DriveConfig.__doc__} Without any there is one, `drive0` in the data directory.\n\n"
    )
    parts += _rows(DriveConfig, "", None)
    for section, cls in SECTIONS.items():
        parts.append(f"\n## `[{section}]`\n\n{cls.__doc__}\n\n")
        parts += _rows(cls, "", f"{ENVIRONMENT_PREFIX}{section.upper()}_")
    return "".join(parts)


if __name__ == "__main__":
    print(render_markdown(), end="")
