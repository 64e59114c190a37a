"""Checks of what names blocks: a schema, or an engine's settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cbor2

from forebay.cli.doctor.finding import Finding, fail, ok, warn
from forebay.errors import SchemaInvalid
from forebay.schema import Schema

__all__ = ["check_schema"]

_SETTING = "prefix_caching_hash_algo"
_NAMES = (_SETTING, "prefix-caching-hash-algo", "hash_algorithm", "hash_algo", "pre_caching_hash_algorithm")
_SEED = "PYTHONHASHSEED"
_STABLE = "prefix_caching_hash_algo = sha256_cbor"


def check_schema(file: Path) -> Iterator[Finding]:
    """A schema (CBOR, or JSON with digests in hexadecimal) or settings of an engine (JSON)."""
    try:
        data = file.read_bytes()
    except OSError as e:
        yield fail("schema", f"cannot read {file}: {e.strerror}", "name another file")
        return
    raw = _decoded(data)
    if not isinstance(raw, Mapping):
        yield fail(
            "schema", f"{file} is neither a JSON object nor CBOR of a map", "give a schema, or an engine's settings"
        )
        return
    if {"engine", "hash", "groups"} <= raw.keys():
        yield from _schema(raw, data)
    elif not (found := dict(_algorithms(raw))):
        yield warn("hash", f"no {_SETTING} in {file.name}: vLLM's default is sha256, a hash of a pickle", _STABLE)
    else:
        for where, algorithm in found.items():
            yield from _algorithm(where, algorithm, _seed(raw))


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        pass
    try:
        return cbor2.loads(data)
    except Exception:  # cbor2 raises many kinds on what is no CBOR
        return None


def _algorithms(raw: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(raw, Mapping):
        for name, value in raw.items():
            where = f"{path}.{name}" if path else str(name)
            if name in _NAMES and isinstance(value, str):
                yield where, value
            else:
                yield from _algorithms(value, where)
    elif isinstance(raw, list):
        for i, value in enumerate(raw):
            yield from _algorithms(value, f"{path}[{i}]")


def _seed(raw: Mapping[str, Any]) -> str | None:
    """PYTHONHASHSEED: of the settings' own environment, else of this one; None where it is random."""
    for name in ("env", "environment"):
        given = raw.get(name)
        if isinstance(given, Mapping) and _SEED in given:
            return None if str(given[_SEED]) == "random" else str(given[_SEED])
    found = os.environ.get(_SEED)
    return None if found in (None, "", "random") else found


def _algorithm(where: str, algorithm: str, seed: str | None) -> Iterator[Finding]:
    """Whether two processes get the same hash of the same tokens."""
    word = algorithm.lower()
    fixed = f"set {_SEED}=0 for every replica"
    if word == "sha256":
        yield warn(
            "hash",
            f"{where} is sha256, a hash of a pickle: other versions of Python or the engine get other keys, and miss",
            _STABLE,
        )
    elif word == "builtin" or (word.startswith("xx") and seed is None):
        yield fail(
            "hash",
            f"{where} is {algorithm}, seeded for each process: no replica finds another's blocks",
            f"{_STABLE}, or {fixed}",
        )
    elif word.startswith("xx"):
        yield warn(
            "hash", f"{where} is {algorithm} with {_SEED}={seed}: not cryptographic, two prompts can collide", _STABLE
        )
    else:
        yield ok("hash", f"{where} is {algorithm}")
    if seed is None and word.startswith("sha256"):
        yield warn("hash", f"{_SEED} is not set: vLLM's first block hash then begins with random bytes", fixed)


def _schema(raw: Mapping[str, Any], data: bytes) -> Iterator[Finding]:
    try:
        schema = Schema.from_cbor(data if data[:1] != b"{" else _canonical(raw))
    except SchemaInvalid as e:
        yield fail("schema", e.message, f"correct {e.field}")
        return
    yield ok("schema", f"{schema.engine}, keyspace {schema.keyspace.hex()}")
    if schema.engine == "opaque":
        return
    yield from _algorithm(
        "schema.hash.algorithm", schema.hash.algorithm, _seed(raw) if schema.probe == b"" else "in the probe"
    )
    if not schema.probe:
        yield warn(
            "schema",
            "no probe: replicas whose hashes differ (seed, version) would not notice",
            "hash a fixed token list into schema.probe",
        )
    if not schema.model:
        yield fail(
            "schema",
            "no model digest: KV of other weights would pass for this model's",
            "digest weights and config into schema.model",
        )
    for i, group in enumerate(schema.groups):
        if group.dtype in ("fp8", "float8"):
            yield warn("schema", f"groups[{i}].dtype is {group.dtype}: e4m3 and e5m2 differ", "name e4m3 or e5m2")
        if group.kv_heads > 1 and group.head_groups == 1:
            yield warn(
                "schema",
                f"groups[{i}] has one tile for {group.kv_heads} KV heads: a rank of TP > 1 cannot read its part alone",
                f"head_groups up to {group.kv_heads}, as many as the largest TP size",
            )


def _canonical(raw: Mapping[str, Any]) -> bytes:
    """JSON has no bytes: digests stand there in hexadecimal."""
    values = dict(raw)
    for name in ("model", "probe", "draft", "processor"):
        try:
            values[name] = bytes.fromhex(values.get(name) or "")
        except (ValueError, TypeError) as e:
            raise SchemaInvalid(f"schema.{name} is not hexadecimal", field=f"schema.{name}") from e
    return cbor2.dumps(values, canonical=True)
