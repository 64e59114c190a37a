"""A node for the connectors' tests."""

from tests.client.conftest import shared_node

__all__ = ["shared_node"]
