"""Settings of the vLLM connector: what `kv_connector_extra_config` may hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, get_args

from forebay.client import Client, ClientOptions, connect
from forebay.client.rpc import NodeAddress
from forebay.errors import ConfigInvalid, InvalidArgument
from forebay.ids import BlockKey
from forebay.schema import Schema

__all__ = ["LoadWay", "Mode", "SavePolicy", "Settings"]

Mode = Literal["on", "observe", "off"]
SavePolicy = Literal["all", "prompt", "second_touch", "none"]
LoadWay = Literal["async", "layers"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings, each with a good default.

    Attributes:
        url: of the node.
        namespace: the KV namespace, ``tenant/name``.
        token_file: a file with the principal's token; without, FOREBAY_TOKEN or the node's own on this host. (Not the
            token itself: vLLM logs its arguments.)
        generation: of the weights, where they change under one name (RL, rolling updates).
        scope: the end tenant that this engine acts for; empty for none.
        revision: a name for the model's weights that its user vouches for, instead of reading them all at start.
        draft_revision: the same for the model of drafts, where there is one.
        multimodal: requests with images, sounds or videos are loaded and stored too, by identifiers that vLLM believes.
        max_tensor_parallel: blocks are cut so that every TP size up to this one can read and write them.
        mode: ``on``; ``observe`` asks, decides and counts but neither loads nor stores; ``off``.
        mode_file: a file with one of these words, which takes the place of ``mode`` while the engine runs.
        guard: load only what is expected to come faster than the engine computes it.
        prefill_tokens_per_s: how fast that is; 0 to learn it from the engine's steps.
        load: ``async``, before the step that computes the rest, or ``layers``, while it is computed.
        layer_groups: into how many parts, by layers, blocks are cut; part of the identity.
        save: ``all`` whole blocks, those of the ``prompt``, those that came by before (``second_touch``), or ``none``.
        save_min_tokens: nothing is saved of shorter prompts.
        probe_timeout_ms: how long a request waits at most to hear what is stored of it.
        load_timeout_ms: how long one request's load may take; what is late is computed.
        save_timeout_ms: how long one save may take.
        staging_bytes: host memory of one rank for blocks on their way; saves that find none are left out.
        untested_engine: go on with a vLLM version that this release was not tested with.
    """

    url: str = "forebay://127.0.0.1:7470"
    namespace: str = "default/default"
    token_file: str = ""
    generation: int = 0
    scope: str = ""
    revision: str = ""
    draft_revision: str = ""
    multimodal: bool = False
    max_tensor_parallel: int = 8
    mode: Mode = "on"
    mode_file: str = ""
    guard: bool = True
    prefill_tokens_per_s: int = 0
    load: LoadWay = "async"
    layer_groups: int = 1
    save: SavePolicy = "all"
    save_min_tokens: int = 0
    probe_timeout_ms: int = 500
    load_timeout_ms: int = 10_000
    save_timeout_ms: int = 30_000
    staging_bytes: int = 256 << 20
    untested_engine: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Check what a user wrote. Raises `ConfigInvalid` naming the setting."""
        known = {field.name: field.default for field in fields(cls)}
        for name, value in config.items():
            if name not in known:
                raise ConfigInvalid(
                    f"{name!r} is no setting of this connector", field=name, limit=", ".join(sorted(known))
                )
            if type(value) is not type(known[name]):
                raise ConfigInvalid(f"{name} is {value!r}", field=name, limit=type(known[name]).__name__)
        settings = cls(**config)
        for name, low, high in (
            ("generation", 0, (1 << 64) - 1),
            ("max_tensor_parallel", 1, 1024),
            ("layer_groups", 1, 1024),
            ("prefill_tokens_per_s", 0, 1 << 40),
            ("save_min_tokens", 0, 1 << 40),
            ("probe_timeout_ms", 1, 600_000),
            ("load_timeout_ms", 1, 600_000),
            ("save_timeout_ms", 1, 600_000),
            ("staging_bytes", 1 << 20, 1 << 40),
        ):
            number = getattr(settings, name)
            if not low <= number <= high:
                raise ConfigInvalid(f"{name} is {number}", field=name, limit=f"{low} to {high}")
        try:
            NodeAddress(settings.url)
        except InvalidArgument as e:  # which no node that comes up later would mend
            raise ConfigInvalid(e.message, field="url") from e
        for name, words in (("mode", get_args(Mode)), ("save", get_args(SavePolicy)), ("load", get_args(LoadWay))):
            if getattr(settings, name) not in words:
                raise ConfigInvalid(f"{name} is {getattr(settings, name)!r}", field=name, limit=", ".join(words))
        return settings

    def token(self) -> str | None:
        """The token in `token_file`; None without one. Raises `ConfigInvalid`."""
        if not self.token_file:
            return None
        try:
            return Path(self.token_file).expanduser().read_text().strip()
        except OSError as e:
            raise ConfigInvalid(f"{self.token_file} cannot be read: {e.strerror}", field="token_file") from e

    def connect(self, schema: Schema, options: ClientOptions, *, session_token: bytes = b"") -> Client:
        """A client in a session of its own, or, with its token, in that of another process. Raises `ForebayError`."""
        reach = partial(Client.join, session_token=session_token) if session_token else connect
        return reach(
            self.url,
            namespace=self.namespace,
            schema=schema,
            generation=self.generation,
            token=self.token(),
            scopes=(self.scope,) if self.scope else (),
            options=options,
        )

    def scope_id(self, client: Client) -> int:
        """The number of `scope` in the client's session."""
        return client.scope_ids.get(self.scope, 0)

    def named(self, client: Client, keys: Iterable[bytes], group: int = 0) -> list[BlockKey]:
        """Keys of a group as the client takes them, in `scope`."""
        scope = self.scope_id(client)
        return [BlockKey(key, group, scope) for key in keys]
