"""What a user may write into `kv_connector_extra_config`."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from forebay.connectors.vllm.settings import Settings
from forebay.errors import ConfigInvalid

ROOT = Path(__file__).resolve().parents[2]


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
        ({"url": "http://node:7470"}, "url"),
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


def test_the_page_has_every_setting_with_its_default_and_every_counter() -> None:
    page = (ROOT / "docs" / "engines" / "vllm.md").read_text()
    for field in fields(Settings):
        shown = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        assert re.search(rf"^\| `{field.name}` \| `?{re.escape(shown)}`? ?\| ", page, re.MULTILINE), field.name
    module = ast.parse((ROOT / "connectors" / "vllm" / "counters.py").read_text())
    (counters,) = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "METRICS"
    ]
    for name in ast.literal_eval(counters):
        assert f"`{name}`" in page, name
