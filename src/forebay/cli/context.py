"""What every command shares: where the node is, who asks, how to print."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from forebay.cli.sizes import duration
from forebay.errors import ForebayError, InvalidArgument, Unauthenticated, Unavailable
from forebay.ids import BlockKey

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.client import Admin, Client, KeyspaceInfo
    from forebay.schema import Schema

__all__ = [
    "Session",
    "chosen",
    "complete_namespace",
    "connection_options",
    "console",
    "json_option",
    "keyspace_options",
    "pass_session",
    "session_of",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_CONNECT_MS = 5_000
"""How long an attempt to reach a node may take, without --timeout."""
_CALL_MS = 10_000
_COMPLETION_MS = 200
"""How long a node may take to tell names for completion: a person waits at the Tab key."""

DEFAULT_NAMESPACE = "default/default"
DEFAULT_DATA = "~/.local/share/forebay"


@dataclass(slots=True)
class Session:
    """Options of one invocation. Options given after the command's name win over those before it and the environment.

    Attributes:
        url: ``forebay://host:port``, or None to find the node of ``data``.
        token: the caller's token, or None to read the admin token of ``data``.
        data: the data directory of a node on this host; ``data_source`` says so if the environment names it.
        transport: the kind of transport to read by, or None for the best.
        timeout_ms: how long the node may take to be reached and to answer, or None for the usual.
        keyspace: of an engine, in hexadecimal or its beginning, or None for values of `forebay put`; ``group`` and
            ``scope`` are of its blocks.
    """

    url: str | None = None
    token: str | None = None
    data: str | None = None
    data_source: str = ""
    timeout_ms: int | None = None
    namespace: str = DEFAULT_NAMESPACE
    generation: int | None = None
    transport: str | None = None
    keyspace: str | None = None
    group: int = 0
    scope: str = ""
    json: bool = False
    debug: bool = False

    @property
    def data_dir(self) -> Path:
        """The local node's data directory."""
        return Path(self.data or DEFAULT_DATA).expanduser()

    def locate(self) -> tuple[str, str]:
        """Address and token of the node to ask.

        Raises `Unavailable` when no address was given and no node runs here, `Unauthenticated` without any token.
        """
        return self._find_url(), self._find_token()

    def _find_url(self) -> str:
        if self.url:
            return self.url if "://" in self.url else f"forebay://{self.url}"
        path = self.data_dir / "node.json"
        try:
            return "forebay://" + str(json.loads(path.read_text())["grpc"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            message = f"no --url was given, and {path} names no node on this host: start one with `forebay serve`"
            raise Unavailable(message, field="url") from e

    def _find_token(self) -> str:
        if self.token:
            return self.token
        path = self.data_dir / "admin.token"
        try:
            return path.read_text().strip()
        except PermissionError as e:
            raise Unauthenticated(f"{path} is not readable by this user", field="token") from e
        except OSError as e:
            raise Unauthenticated(f"no token was given, and there is no {path}", field="token") from e

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A connected client of the namespace: for whole values of any bytes, or for blocks of `keyspace`.

        Raises `InvalidArgument` where the namespace has no such keyspace, or several that begin so.
        """
        schema, generation = None, self.generation
        if self.keyspace is not None:
            with self._connected(None, generation or 0) as client:
                found = chosen(client.keyspaces(), self.keyspace, generation)
            schema, generation = found.schema, found.generation
        with self._connected(schema, generation or 0) as client:
            yield client

    def _connected(self, schema: Schema | None, generation: int) -> Client:
        url, token = self.locate()
        from forebay.client import ClientOptions, connect

        if not (log := logging.getLogger("forebay.client")).handlers:
            log.addHandler(
                logging.NullHandler()
            )  # what it says is in the command's own answer, or its one line of error
        connect_ms = self.timeout_ms or _CONNECT_MS
        options = ClientOptions(deadline_ms=self.timeout_ms or _CALL_MS, connect_ms=connect_ms, attempt_ms=connect_ms)
        if self.transport is not None:
            options = replace(options, transport=self.transport)
        return connect(
            url,
            namespace=self.namespace,
            schema=schema,
            generation=generation,
            token=token,
            scopes=(self.scope,) if self.scope else (),
            options=options,
        )

    def scope_id(self, client: Client) -> int:
        """The number of `scope` in the client's session."""
        return client.scope_ids.get(self.scope, 0)

    def named(self, client: Client, keys: Sequence[bytes]) -> list[BlockKey]:
        """Keys with their `group` and `scope`."""
        scope = self.scope_id(client)
        return [BlockKey(key, self.group, scope) for key in keys]

    @contextmanager
    def admin(self, deadline_ms: int = _CALL_MS) -> Iterator[Admin]:
        """A connected administrator."""
        url, token = self.locate()
        from forebay.client import Admin

        deadline_ms, attempt_ms = self.timeout_ms or deadline_ms, self.timeout_ms or _CONNECT_MS
        with Admin(url, token=token, deadline_ms=deadline_ms, attempt_ms=attempt_ms) as admin:
            yield admin

    def emit(self, document: object, human: Callable[[Console], None]) -> None:
        """Print the answer: as JSON on standard output if asked for, else as ``human`` draws it."""
        if self.json:
            click.echo(json.dumps(document, indent=2))
        else:
            human(console())


def console(*, stderr: bool = False) -> Console:
    """A console that neither guesses markup in users' keys nor folds their lines when output is piped."""
    from rich.console import Console

    shown = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not shown.is_terminal:
        shown = Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=max(shown.width, 200))
    return shown


def session_of(ctx: click.Context) -> Session:
    """The invocation's `Session`, made on first use."""
    session: Session = ctx.ensure_object(Session)
    return session


def complete_namespace(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of namespaces, when a node answers at once; else none."""
    try:
        url, token = session_of(ctx).locate()
        from forebay.client import Admin

        with Admin(url, token=token, deadline_ms=_COMPLETION_MS) as admin:
            return [info.name for info in admin.list_namespaces() if info.name.startswith(incomplete)]
    except ForebayError:
        return []


pass_session = click.make_pass_decorator(Session, ensure=True)


def _into(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    # A default never overwrites: the same option may have been given before the command's name.
    if value is not None and value is not False:
        setattr(session_of(ctx), str(param.name), value)
        if param.name == "data":
            named = ctx.get_parameter_source("data") is ParameterSource.ENVIRONMENT
            session_of(ctx).data_source = "FOREBAY_DATA" if named else ""


def _option(*names: str, **settings: Any) -> Callable[[_F], _F]:
    return click.option(*names, callback=_into, expose_value=False, is_eager=True, **settings)


def _apply(function: _F, options: list[Callable[[_F], _F]]) -> _F:
    for option in reversed(options):
        function = option(function)
    return function


_NODE: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("--url",), {"metavar": "URL", "help": "The node, forebay://HOST:PORT. Default: the node of --data."}),
    (("--token",), {"metavar": "TOKEN", "help": "Who asks. Default: the admin token in --data."}),
    (("--data",), {"metavar": "DIR", "help": f"Data directory of a node on this host. [default: {DEFAULT_DATA}]"}),
    (
        ("--timeout", "timeout_ms"),
        {
            "metavar": "TIME",
            "type": duration,
            "help": "How long the node may take to answer. [default: 5s to connect, 10s a call]",
        },
    ),
]
_DATA: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (
        ("-n", "--namespace"),
        {
            "metavar": "TENANT/NAME",
            "help": f"KV namespace. [default: {DEFAULT_NAMESPACE}]",
            "shell_complete": complete_namespace,
        },
    ),
    (
        ("--transport",),
        {
            "type": click.Choice(["auto", "block", "rdma", "tcp"]),
            "help": "How blocks are read: docs/transports.md. [default: auto]",
        },
    ),
    (("--generation",), {"type": click.IntRange(0, (1 << 64) - 1), "help": "Generation of the weights. [default: 0]"}),
]
_KEYSPACE: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (
        ("--keyspace",),
        {
            "metavar": "HEX",
            "help": "Of an engine: what its log or `forebay keyspaces` shows, or how it begins. "
            "[default: what `forebay put` stores]",
        },
    ),
    (("--group",), {"type": click.IntRange(0, (1 << 16) - 1), "help": "KV group of an engine's blocks. [default: 0]"}),
    (("--scope",), {"metavar": "NAME", "help": "End tenant of an engine's blocks. [default: none]"}),
]


_VARIABLES = ("url", "token", "data", "namespace", "transport")


def connection_options(*, data: bool = False, environment: bool = False) -> Callable[[_F], _F]:
    """Options that name the node and the caller and, with ``data``, the namespace and generation.

    ``environment`` also reads FOREBAY_URL, FOREBAY_TOKEN, FOREBAY_DATA, FOREBAY_NAMESPACE and FOREBAY_TRANSPORT;
    only the top-level command does, so that the environment never overrides an option.
    """

    def decorate(function: _F) -> _F:
        options: list[Callable[[_F], _F]] = []
        for names, settings in _NODE + (_DATA if data else []):
            name = names[-1].removeprefix("--")
            variable = f"FOREBAY_{name.upper()}"
            extra = {"envvar": variable, "show_envvar": True} if environment and name in _VARIABLES else {}
            options.append(_option(*names, **settings, **extra))
        return _apply(function, options)

    return decorate


def keyspace_options(function: _F) -> _F:
    """Options that name an engine's blocks instead of those of `forebay put`."""
    return _apply(function, [_option(*names, **settings) for names, settings in _KEYSPACE])


def chosen(known: Sequence[KeyspaceInfo], text: str, generation: int | None) -> KeyspaceInfo:
    """The keyspace that begins so, in the generation or the one used last. Raises `InvalidArgument`."""
    begin = text.lower().removeprefix("0x")
    found = [info for info in known if info.keyspace.hex().startswith(begin)]
    if generation is not None:
        found = [info for info in found if info.generation == generation]
    if len({info.keyspace for info in found}) != 1:
        what = "several keyspaces begin" if found else "no keyspace of the namespace begins"
        message = f"{what} with {text!r}: `forebay keyspaces` lists those in use"
        raise InvalidArgument(message, field="keyspace", limit="one")
    return found[0]


def json_option(function: _F) -> _F:
    """``--json``."""
    return _option("--json", is_flag=True, help="Print one JSON document on standard output.")(function)
