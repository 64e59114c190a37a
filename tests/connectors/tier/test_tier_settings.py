"""Settings of the tier, and hints that requests bring: what is no setting is refused, what is no hint is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forebay.client import Hints
from forebay.connectors.vllm.tier.hints import hints_of
from forebay.connectors.vllm.tier.settings import TierSettings
from forebay.errors import ConfigInvalid


def test_settings_of_the_connector_mean_the_same() -> None:
    settings = TierSettings.from_config({"url": "forebay://n:1", "generation": 3, "pending_bytes": 4096})
    assert settings.connector.url == "forebay://n:1" and settings.connector.generation == 3
    assert settings.pending_bytes == 4096 and not settings.enable_kv_events


@pytest.mark.parametrize(
    "config",
    [
        {"max_tensor_parallel": 8},  # the connector's alone
        {"urll": "forebay://n:1"},
        {"enable_kv_events": "yes"},
        {"pending_bytes": -1},
        {"locality": "NEAR"},
        {"mode": "maybe"},
        {"load_timeout_ms": 0},
    ],
)
def test_what_is_no_setting_is_refused_by_name(config: dict[str, Any]) -> None:
    (name,) = config
    with pytest.raises(ConfigInvalid) as error:
        TierSettings.from_config(config)
    assert error.value.field == name


def action(kind: str, version: str, **payload: object) -> SimpleNamespace:
    return SimpleNamespace(action_type=kind, action_version=version, payload=payload)


def test_hints_come_with_a_request_or_from_its_router() -> None:
    assert hints_of(None, None) is None
    assert hints_of({"max_load_tokens": 4}, None) is None
    assert hints_of({"forebay_hints": {"session": "s", "priority_class": 2}}, None) == Hints(
        priority_class=2, session="s"
    )
    envelope = SimpleNamespace(
        actions=[
            action("forebay.hints", "1", session="r", final=True),
            action("forebay.hints", "2", origin="later"),
            action("other", "1", origin="other"),
        ]
    )
    assert hints_of(None, envelope) == Hints(session="r", final=True)
    assert hints_of({"forebay_hints": {"session": "s", "origin": "o"}}, envelope) == Hints(
        session="r", origin="o", final=True
    )


@pytest.mark.parametrize(
    "given",
    [
        "text",
        {"session": 5},
        {"final": 1},
        {"unknown": 1},
        {"session": "x" * 1000},
        {"priority_class": -(1 << 70)},
        None,
    ],
)
def test_what_is_no_hint_is_left_out(given: object) -> None:
    assert hints_of({"forebay_hints": given}, None) is None
