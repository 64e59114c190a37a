"""What a request's orchestrator says of its blocks, as hints for the node.

Two ways lead through vLLM to a tier: ``kv_transfer_params`` of a request, which its HTTP endpoints take, with the hints
under ``forebay_hints``; and an action of ``kv_hints`` of type ``forebay.hints`` in version 1, whose payload they are.
Both are advice of a stranger: what is no hint is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from forebay.client import Hints
from forebay.client.advice import hints_to_proto
from forebay.errors import InvalidArgument

__all__ = ["ACTION_TYPE", "ACTION_VERSION", "PARAMETER", "hints_of"]

ACTION_TYPE = "forebay.hints"
ACTION_VERSION = "1"
PARAMETER = "forebay_hints"

_LONGEST = 256
"""Characters of a text."""
_TYPES = {field.name: type(field.default) for field in fields(Hints)}


def hints_of(parameters: Mapping[str, Any] | None, envelope: Any) -> Hints | None:
    """Of a request's ``kv_transfer_params`` and ``kv_hints``, where both say something by the latter."""
    found: dict[str, Any] = {}
    given = (parameters or {}).get(PARAMETER)
    payloads = [given] if isinstance(given, Mapping) else []
    for action in getattr(envelope, "actions", None) or ():
        if action.action_type == ACTION_TYPE and action.action_version == ACTION_VERSION:
            payloads.append(action.payload)
    for payload in payloads:
        for name, value in payload.items():
            fits = type(value) is _TYPES.get(name)
            if fits and not (isinstance(value, str) and len(value) > _LONGEST):
                found[name] = value
    if not found:
        return None
    hints = Hints(**found)
    try:
        hints_to_proto(hints)
    except InvalidArgument:  # a number that the protocol has no room for
        return None
    return hints
