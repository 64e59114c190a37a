"""Which target the nodes of a test run have: Forebay's own, or with ``FOREBAY_TEST_TARGET=spdk`` SPDK's.

Nodes are processes, so it goes by their environment; those that are told everything by flags get `flags`.
"""

from __future__ import annotations

import os

import pytest

from forebay.appliance.dataplane.interface import Capabilities
from forebay.appliance.dataplane.spdk import CAPABILITIES

__all__ = ["EACH", "KIND", "able", "environment", "flags", "use"]

KIND = os.environ.get("FOREBAY_TEST_TARGET", "embedded")
_EMBEDDED = Capabilities(fencing=True, barrier=True, per_host_visibility=True, seal=True, ordered=True)


EACH = [KIND] if KIND != "embedded" else [KIND, pytest.param("spdk", marks=pytest.mark.spdk)]
"""Parameters of a fixture whose tests are for either target."""


def flags(kind: str = KIND) -> dict[str, str]:
    """Configuration of a node."""
    if kind == "embedded":
        return {}
    return {"target.kind": kind, "nvmf_tgt.binary": os.environ["FOREBAY_SPDK_TGT"]}


def environment(kind: str = KIND) -> dict[str, str]:
    """`flags` as environment variables."""
    return {"FOREBAY_" + name.upper().replace(".", "_"): value for name, value in flags(kind).items()}


def use() -> None:
    """Have every node that is started from here on the target of this run."""
    os.environ.update(environment())


def able(kind: str = KIND) -> Capabilities:
    """What a target can do."""
    return _EMBEDDED if kind == "embedded" else CAPABILITIES
