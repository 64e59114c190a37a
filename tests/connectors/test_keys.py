"""Digests, grids and keys: golden vectors, which every engine's blocks rest on, and what is refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.connectors.keys import (
    STABLE_HASH,
    block_key,
    check_hash,
    files_digest,
    model_digest,
    revision_digest,
    tiled,
    variant,
    weights_digest,
)
from forebay.errors import ConfigInvalid, GridInvalid, InvalidArgument
from forebay.ranks import held_tiles
from forebay.schema import Group, HashAlgorithm, Schema

GROUP = Group("full", tuple(range(32)), 16, 8, 512, "bfloat16", "vllm/flash_attn")
HASH = bytes(range(32))


def test_golden_vectors() -> None:
    """A change here makes every stored block of every engine a miss."""
    assert variant().hex() == ""
    assert variant(salt="tenant").hex() == "6c745c0a2fbe957534701c3d2225a9a5a0c9db141394df2fcd4b94c62ea6f24d"
    assert variant(adapter=HASH).hex() == "c53a31ece48976c25571b6f76c29d7b650f9fdd7116e3b0875126a70b1bed90c"
    assert (
        variant(adapter=HASH, salt="tenant").hex() == "a96fe0064087559454dc6717cf9a0c257707f4e0a64fcf3f78b34f2854b78cc7"
    )
    assert revision_digest("acme/model@1").hex() == "55a56d187c3176f9720c03440b14f4d644e5be45ca5dff336e7a6f1b619dfaed"
    facts = {"config": "{}", "dtype": "bfloat16", "quantization": "", "kv_cache_dtype": "auto"}
    model = model_digest(HASH, facts)
    assert model.hex() == "6a39f41313aa1ee7e444ecbad8c9a9fec932a4b046e7ba00bb125a443f725167"
    schema = Schema("vllm", model, HashAlgorithm(STABLE_HASH, 16), (tiled(GROUP, max_ranks=8),), probe=HASH)
    assert schema.keyspace.hex() == "d6271ee2bd6ac840dcb63bdff7b84c65e5614d23d3ef4363dc11af364b761bd1"
    drafting = replace(schema, draft=model_digest(HASH, {"method": "eagle"}))
    assert drafting.keyspace.hex() == "cc2e04e09a52dc071448a33ae0862668b21ff98548f594104fb4eb9673dc1515"
    seeing = replace(schema, processor=files_digest(Path("/"), []))
    assert seeing.keyspace.hex() == "86a222acd4b09b669b92aebc330727c451b7ef50da259e65a7fc35736e0e179d"


def test_files_by_name_and_content(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.bin").write_bytes(b"1")
    (tmp_path / "b" / "c.bin").write_bytes(b"2")
    digest = files_digest(tmp_path, [tmp_path / "b" / "c.bin", tmp_path / "a.bin"])
    assert digest.hex() == "273f68d8a42e801f11e4783000df0f0e5cf2443ba16f321a1f0e4b75ae86fb40"
    (tmp_path / "b" / "c.bin").write_bytes(b"3")
    assert files_digest(tmp_path, [tmp_path / "a.bin", tmp_path / "b" / "c.bin"]) != digest


def test_a_key_is_the_hash_after_its_variant() -> None:
    assert block_key(HASH) == HASH
    prefix = variant(salt="x")
    assert block_key(HASH, prefix) == prefix + HASH and len(prefix) == 32
    assert len({variant(salt="ab"), variant(adapter=b"ab"), variant(salt="a", adapter=b"b")}) == 3


def model_directory(path: Path) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    return path


def test_weights_are_told_apart_by_content(tmp_path: Path) -> None:
    one, two = model_directory(tmp_path / "one"), model_directory(tmp_path / "two")
    digest = weights_digest(one)
    assert weights_digest(two) == digest, "a path is no identity"
    (two / "tokenizer.json").write_text("{...}")
    assert weights_digest(two) == digest, "token ids are in the blocks' hashes already"
    (two / "model.safetensors").write_bytes(b"weighty")
    assert weights_digest(two) != digest
    (one / "modeling.py").write_text("pass")
    assert weights_digest(one) != digest, "code that comes with a model is part of it"


def test_an_adapter_trained_anew_has_another_digest(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"a")
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 16}')
    before = weights_digest(adapter)
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert weights_digest(adapter) != before


def test_a_hub_cache_names_its_blobs_by_their_digest(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "plain")
    blob = tmp_path / "blobs" / hashlib.sha256(b"weights").hexdigest()
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    hub = tmp_path / "snapshot"
    hub.mkdir()
    (hub / "model.safetensors").symlink_to(blob)
    assert weights_digest(hub) == weights_digest(plain)
    blob.write_bytes(b"taken from its name")
    assert weights_digest(hub) == weights_digest(plain)


def test_no_weights_no_digest(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="name the model's revision") as caught:
        weights_digest(tmp_path)
    assert caught.value.field == "revision"
    with pytest.raises(InvalidArgument):
        revision_digest("")


@pytest.mark.parametrize("algorithm", ["sha256", "builtin", "xxhash", "xxhash_cbor", "md5"])
def test_hashes_that_others_would_not_compute_are_refused(algorithm: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        check_hash(algorithm, setting="--prefix-caching-hash-algo")
    assert "--prefix-caching-hash-algo=sha256_cbor" in str(caught.value), "it says what to change"


def test_a_seed_is_told() -> None:
    assert check_hash(STABLE_HASH, setting="x") is None
    assert "PYTHONHASHSEED" in str(check_hash(STABLE_HASH, setting="x", seed="0"))


@given(heads=st.integers(0, 64), most=st.integers(1, 128), layers=st.integers(1, 40), cuts=st.integers(1, 12))
def test_every_number_of_ranks_up_to_the_largest_shares_a_grid(heads: int, most: int, layers: int, cuts: int) -> None:
    plain = Group("full", tuple(range(layers)), 16, heads, 64, "bfloat16", "f")
    group = tiled(plain, max_ranks=most, layer_groups=cuts)
    assert replace(group, head_groups=1, layer_groups=1) == plain
    assert group.layer_groups == min(cuts, layers)
    for ranks in range(1, most + 1):
        if heads and heads % ranks and ranks % heads:
            with pytest.raises(GridInvalid):
                held_tiles(group, 0, ranks)
            continue
        held = {tile for rank in range(ranks) for tile in held_tiles(group, rank, ranks)}
        assert held == set(range(group.tiles))


def test_a_grid_is_no_finer_than_it_must_be() -> None:
    assert [tiled(GROUP, max_ranks=most).head_groups for most in (1, 2, 3, 4, 7, 8, 64)] == [1, 2, 2, 4, 4, 8, 8]
    twelve = replace(GROUP, kv_heads=12)
    assert [tiled(twelve, max_ranks=most).head_groups for most in (2, 3, 4, 6)] == [2, 6, 12, 12]
    assert tiled(replace(GROUP, kind="mla", kv_heads=0), max_ranks=8).head_groups == 1
    with pytest.raises(InvalidArgument):
        tiled(replace(GROUP, kv_heads=64), max_ranks=64, layer_groups=32)
    with pytest.raises(InvalidArgument):
        tiled(GROUP, max_ranks=0)
