"""Checks of a node's addresses, and of a node that runs."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import forebay
from forebay.appliance.config import Config
from forebay.appliance.settings import Endpoint
from forebay.cli.context import Session
from forebay.cli.doctor.finding import Finding, fail, ok, warn
from forebay.cli.exits import advice
from forebay.cli.sizes import format_duration
from forebay.client.results import VolumeTransport
from forebay.errors import ForebayError, PermissionDenied, Unauthenticated, Unavailable

__all__ = ["check_node", "check_ports", "check_transports", "drives_in_use", "running_node"]

_PROBE_BYTES = 4096
_PROBE_MS = 5_000
_CONNECT_S = 2.0


def running_node(session: Session) -> dict[str, Any] | None:
    """What the node of the data directory says of itself, if it runs."""
    try:
        about = json.loads((session.data_dir / "node.json").read_text())
        os.kill(int(about["pid"]), 0)
        return dict(about)
    except PermissionError:  # it runs, under another user
        return dict(about)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def drives_in_use(session: Session) -> list[tuple[str, Path, int | None]] | None:
    """Name, directory and capacity of the drives of the node that runs here, if this caller may know."""
    try:
        with replace(session, url=None).admin() as admin:
            return [(drive.name, Path(drive.path), drive.capacity_bytes) for drive in admin.status().drives]
    except ForebayError:
        return None


def check_ports(config: Config, about: dict[str, Any] | None) -> Iterator[Finding]:
    """Whether the node that runs is heard at its addresses; without one, whether the configured ones are free."""
    if about is not None:
        target = about.get("target", {})
        addresses: dict[str, object] = {name: about[name] for name in ("grpc", "http") if name in about}
        if "address" in target:
            addresses["target"] = str(Endpoint(str(target["address"]), int(target["port"])))
        for name, address in addresses.items():
            yield _heard(f"{name}.listen", str(address), int(about["pid"]))
        return
    wanted: list[tuple[str, Endpoint]] = [("grpc.listen", config.grpc.listen), ("target.listen", config.target.listen)]
    if config.http.enabled:
        wanted.append(("http.listen", config.http.listen))
    for name, endpoint in wanted:
        if endpoint.port == 0:
            yield ok(name, f"{endpoint.host}, any free port")
        else:
            yield _bind(name, endpoint)


def _heard(name: str, address: str, pid: int) -> Finding:
    where = urlsplit(f"//{address}")
    try:
        socket.create_connection((where.hostname, where.port), _CONNECT_S).close()
    except OSError as e:
        return fail(name, f"this node, pid {pid}, is not heard at {address}: {e.strerror or e}", "its log, a firewall")
    return ok(name, f"{address} is answered by this node, pid {pid}")


def _bind(name: str, endpoint: Endpoint) -> Finding:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
        return ok(name, f"{endpoint} is free")
    except socket.gaierror as e:
        return fail(name, f"{endpoint.host} is no address: {e.strerror}", f"correct {name}")
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            return fail(
                name,
                f"{endpoint} is taken by another process",
                f"another {name}, or stop what `ss -ltnp sport = :{endpoint.port}` names",
            )
        if e.errno == errno.EADDRNOTAVAIL:
            return fail(
                name, f"this machine has no address {endpoint.host}", f"correct {name}, or bring the interface up"
            )
        return fail(name, f"{endpoint} cannot be listened on: {e.strerror}", f"another {name}")


def check_node(session: Session) -> Iterator[Finding]:
    """A node that runs: its version, and one block written, read and removed."""
    try:
        url, _ = session.locate()
    except Unavailable:
        yield ok("node", "none runs from this data directory, and no --url was given")
        return
    except Unauthenticated as e:
        yield fail("node", e.message, advice(e))
        return
    try:
        with session.admin() as admin:
            status = admin.status()
        yield ok("node", f"{status.node} at {url}, up {format_duration(status.uptime_ms)}")
        yield _skew(status.version)
        for problem in status.problems:
            yield (warn if problem.affects == "some" else fail)(
                problem.part, problem.reason, "docs/administration.md, Full disks and failing drives"
            )
        if status.target_restarts:
            yield warn(
                "target",
                f"was replaced {status.target_restarts} times since the daemon started",
                "the log says why it ended",
            )
    except PermissionDenied:
        yield ok("node", f"{url} answers; its state is for administrators")
    except ForebayError as e:
        yield fail("node", f"{url}: {e.message or type(e).__name__}", advice(e) or "the node's log, a firewall")
        return
    yield from _block(session)


def _skew(theirs: str) -> Finding:
    if theirs == forebay.__version__:
        return ok("versions", f"client and node are both {theirs}")
    return warn(
        "versions",
        f"the node is {theirs}, this client {forebay.__version__}",
        "the protocol only grows, so they work together; upgrade the older one for what is new",
    )


def _block(session: Session) -> Iterator[Finding]:
    key, value = b"forebay-doctor/" + secrets.token_hex(8).encode(), secrets.token_bytes(_PROBE_BYTES)
    check = "block data"
    try:
        with session.client() as client:
            began = time.perf_counter()
            stored = client.put([key], [value], deadline_ms=_PROBE_MS)[0]
            wrote_ms = (time.perf_counter() - began) * 1e3
            if not stored.stored:
                if stored.reason == "permission_denied":
                    yield warn(
                        check, f"not tried: no right to write in {session.namespace}", "`forebay principal grant`"
                    )
                else:
                    yield fail(
                        check, f"a block was not stored: {stored.reason}", "`forebay help misses` says what to do"
                    )
                    yield from check_transports(client.transports(deadline_ms=_PROBE_MS))
                return
            began = time.perf_counter()
            found = client.get([key], deadline_ms=_PROBE_MS)[0]
            read_ms = (time.perf_counter() - began) * 1e3
            client.delete([key])
            ways = client.transports(deadline_ms=_PROBE_MS)
    except ForebayError as e:
        yield fail(check, f"no session in {session.namespace}: {e.message or type(e).__name__}", advice(e))
        return
    if found.hit and found.value is not None and bytes(found.value) == value:
        yield ok(check, f"4 KiB written in {wrote_ms:.1f} ms, read in {read_ms:.1f} ms, removed")
    else:
        yield fail(
            check,
            f"a block was stored and not read: {found.reason}",
            "is target.listen an address that this machine reaches? `forebay help misses`",
        )
    yield from check_transports(ways)


def check_transports(ways: Sequence[VolumeTransport]) -> Iterator[Finding]:
    """How this machine reads each volume, and why not by what would be better."""
    for way in ways:
        instead = "".join(f"; not by {name}: {reason}" for name, reason in way.instead_of.items())
        if way.transport == "none":
            yield fail(
                "transport",
                f"volume {way.volume} is not reached{instead}",
                "FOREBAY_TRANSPORT allows one kind alone: unset it, or docs/transports.md",
            )
        else:
            yield ok("transport", f"volume {way.volume} is read by {way.transport} ({way.place}){instead}")
