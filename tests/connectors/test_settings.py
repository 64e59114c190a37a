"""What a user may write into `kv_connector_extra_config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.connectors.vllm.settings import Settings
from forebay.errors import ConfigInvalid


def test_defaults() -> None:
    settings = Settings.from_config({})
    assert settings == Settings() and settings.token() is None


def test_the_token_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert Settings.from_config({"token_file": str(tmp_path / "token")}).token() == "secret"
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        Settings.from_config({"token_file": str(tmp_path / "none")}).token()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"token": "secret"}, "token"),
        ({"mode": "maybe"}, "mode"),
        ({"save": "some"}, "save"),
        ({"generation": -1}, "generation"),
        ({"generation": True}, "generation"),
        ({"max_tensor_parallel": 0}, "max_tensor_parallel"),
        ({"load_timeout_ms": "10"}, "load_timeout_ms"),
        ({"staging_bytes": 1}, "staging_bytes"),
    ],
)
def test_mistakes_are_named(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        Settings.from_config(config)
    assert caught.value.field == field and "secret" not in str(caught.value)
