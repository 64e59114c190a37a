"""Coroutine tests run as those of the other drivers do."""

from tests.appliance.dataplane.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
