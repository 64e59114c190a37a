"""A node for the connectors' tests, and halves at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.conftest import NodeProcess, shared_node
from tests.connectors.bench import Bench, Make

__all__ = ["make", "shared_node"]


@pytest.fixture
def make(shared_node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Bench] = []

    def bench(**settings: Any) -> Bench:
        made.append(Bench(shared_node, request.node.name, **settings))
        return made[-1]

    yield bench
    for each in made:
        each.half.close()
