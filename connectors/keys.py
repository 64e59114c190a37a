"""What engines' blocks are called: model digests, grids and keys, the same for every engine.

A schema says what makes two blocks interchangeable, and everything an engine's own block hash leaves out belongs in it:
the weights, the numbers' type, the order of bytes. What differs from request to request (an adapter, a salt) goes into
the key's variant, which stands before the engine's chained hash. Neither ever holds a rank.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import cbor2

from forebay.errors import ConfigInvalid, InvalidArgument
from forebay.ids import MAX_TILES
from forebay.schema import Group

__all__ = [
    "STABLE_HASH",
    "block_key",
    "check_hash",
    "files_digest",
    "model_digest",
    "revision_digest",
    "tiled",
    "variant",
    "weights_digest",
]

STABLE_HASH = "sha256_cbor"
"""The one block hash that is the same in every process, Python version and language."""

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
_CHUNK_BYTES = 8 << 20
_HUB_BLOB = re.compile(r"[0-9a-f]{64}")
_PICKLED = "hashes Python's pickle of a block, whose bytes may differ between processes and Python versions"
_SEEDED = "is seeded anew in every process, and is no cryptographic hash: others' blocks could be forged"
_UNSTABLE = {"sha256": _PICKLED, "builtin": _SEEDED, "xxhash": _SEEDED, "xxhash_cbor": _SEEDED}


def check_hash(algorithm: str, *, setting: str, seed: str | None = None) -> str | None:
    """Refuse a block hash that other processes would not compute alike; ``setting`` is where the engine takes it from.

    Returns what a user should know, or None: with a ``seed`` (PYTHONHASHSEED) only engines of the same seed share.
    Raises `ConfigInvalid`, saying what to change.
    """
    if algorithm != STABLE_HASH:
        why = _UNSTABLE.get(algorithm, "is not known to be the same in every process")
        raise ConfigInvalid(
            f"the block hash {algorithm!r} {why}: start the engine with {setting}={STABLE_HASH}",
            field=setting,
            limit=STABLE_HASH,
        )
    if seed is not None:
        return f"PYTHONHASHSEED is {seed!r}: only engines started with the same one find each other's blocks"
    return None


# --- digests ----------------------------------------------------------------------------------------------------------


def _file_digest(path: Path) -> bytes:
    """SHA-256 of a file. A large file in a Hugging Face cache is a link to a blob that is named by just that."""
    if path.is_symlink():
        target = path.resolve()
        if target.parent.name == "blobs" and _HUB_BLOB.fullmatch(target.name):
            return bytes.fromhex(target.name)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def files_digest(directory: Path, paths: Iterable[Path]) -> bytes:
    """SHA-256 over the names (inside ``directory``) and contents of files, in the order of their names.

    Raises `ConfigInvalid` for a file that cannot be read.
    """
    try:
        rows = sorted((path.relative_to(directory).as_posix(), _file_digest(path)) for path in paths)
    except OSError as e:
        raise ConfigInvalid(f"{e.filename} cannot be read: {e.strerror}", field="model") from e
    return hashlib.sha256(cbor2.dumps(rows, canonical=True)).digest()


def weights_digest(directory: Path) -> bytes:
    """Of the weights of a model or an adapter: every weights file below ``directory``, and code and adapter settings.

    The model's configuration is not in it: engines change it (`model_digest` takes it as the engine uses it). Raises
    `ConfigInvalid` where there are no weights.
    """
    files = [path for path in directory.rglob("*") if path.is_file() and ".git" not in path.parts]
    weights = [path for path in files if path.suffix in _WEIGHTS]
    if not weights:
        raise ConfigInvalid(
            f"{directory} has no weights files to tell models apart by: name the model's revision", field="revision"
        )
    about = [path for path in files if path.suffix == ".py" or path.name == "adapter_config.json"]
    return files_digest(directory, [*weights, *about])


def revision_digest(name: str) -> bytes:
    """In place of `weights_digest`: of a name that its user vouches for, which no two sets of weights may share."""
    if not name:
        raise InvalidArgument("a model's revision is not empty", field="revision")
    return hashlib.sha256(b"forebay revision\0" + name.encode()).digest()


def model_digest(weights: bytes, facts: Mapping[str, object]) -> bytes:
    """The schema's model digest: SHA-256 over the weights' digest and all that an engine does to them.

    ``facts`` are plain values (text, numbers, lists, maps): the configuration in force, quantisation, types.
    """
    return hashlib.sha256(cbor2.dumps({"weights": weights, "facts": dict(facts)}, canonical=True)).digest()


# --- grids ------------------------------------------------------------------------------------------------------------


def tiled(group: Group, *, max_ranks: int, layer_groups: int = 1) -> Group:
    """``group`` with the coarsest grid that every number of ranks up to ``max_ranks`` can share.

    That is every number that divides the KV heads, or that they divide; others hold parts of heads, and share with
    nobody. ``layer_groups`` cuts the layers, for pipeline stages and for use of first layers while later ones load.
    """
    if max_ranks < 1:
        raise InvalidArgument(f"max_ranks is {max_ranks}", field="max_ranks", limit="at least 1")
    heads = group.kv_heads
    head_groups = math.lcm(*(ranks for ranks in range(1, min(max_ranks, heads) + 1) if heads % ranks == 0))
    layer_groups = min(layer_groups, len(group.layers))
    if head_groups * layer_groups > MAX_TILES:
        raise InvalidArgument(
            f"{head_groups} head groups x {layer_groups} layer groups", field="layer_groups", limit=MAX_TILES
        )
    return replace(group, head_groups=head_groups, layer_groups=layer_groups)


# --- keys -------------------------------------------------------------------------------------------------------------


def variant(*, adapter: bytes = b"", salt: str = "") -> bytes:
    """What stands before a block hash: empty for a plain request, else 32 bytes of its adapter's content and its salt.

    ``adapter`` is the `weights_digest` of the LoRA adapter: its name and path stay the same when it is trained anew.
    """
    if not adapter and not salt:
        return b""
    return hashlib.sha256(cbor2.dumps({"adapter": adapter, "salt": salt}, canonical=True)).digest()


def block_key(block_hash: bytes, variant: bytes = b"") -> bytes:
    """The key of a block: ``variant`` and the engine's chained hash of its tokens and all before them."""
    return variant + block_hash
