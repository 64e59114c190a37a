"""Which target the nodes of a test run have: Forebay's own, or with ``FOREBAY_TEST_TARGET=spdk`` SPDK's.

Nodes are processes, so it goes by their environment; those that are told everything by flags get `flags`.
"""

from __future__ import annotations

import os

from forebay.appliance.dataplane.interface import Capabilities
from forebay.appliance.dataplane.spdk import CAPABILITIES

__all__ = ["KIND", "able", "flags", "use"]

KIND = os.environ.get("FOREBAY_TEST_TARGET", "embedded")
_EMBEDDED = Capabilities(fencing=True, barrier=True, per_host_visibility=True, seal=True, ordered=True)


def flags() -> dict[str, str]:
    """Configuration of a node."""
    if KIND == "embedded":
        return {}
    return {"target.kind": KIND, "nvmf_tgt.binary": os.environ["FOREBAY_SPDK_TGT"]}


def use() -> None:
    """Have every node that is started from here on the target of this run."""
    for name, value in flags().items():
        os.environ["FOREBAY_" + name.upper().replace(".", "_")] = value


def able() -> Capabilities:
    """What the target of this run can do."""
    return _EMBEDDED if KIND == "embedded" else CAPABILITIES
