from pathlib import Path

import pytest

from forebay.appliance.config import load
from forebay.appliance.targets import supervise_target
from forebay.errors import ConfigInvalid


@pytest.mark.parametrize("binary", ["none", "forebay.toml"])
def test_a_program_that_cannot_be_run_is_named_before_anything_is_started(tmp_path: Path, binary: str) -> None:
    async def nothing() -> None: ...

    file = tmp_path / "forebay.toml"
    file.write_text(f"data = 'd'\n[target]\nkind = 'spdk'\n[nvmf_tgt]\nbinary = '{binary}'")
    with pytest.raises(ConfigInvalid, match=f"{tmp_path}/{binary} is no program") as refused:
        supervise_target(load(file, environ={}), bytes(16), nothing)
    assert refused.value.field == "nvmf_tgt.binary"
