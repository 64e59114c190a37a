"""The API against its own description: requests made from it, right ones and wrong ones, and what comes back."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

from forebay.appliance.control.calls import MAX_DEADLINE_MS
from tests.appliance.http.conftest import Served
from tests.conftest import LONG

PROFILE = settings(
    max_examples=60 if LONG else 8, deadline=None, derandomize=not LONG, suppress_health_check=list(HealthCheck)
)


def patient(case: Any) -> Any:
    """A right deadline that is short would make an answer in time a matter of luck."""
    asked = str((case.headers or {}).get("x-deadline-ms", ""))
    if asked.isdecimal() and 1 <= int(asked) <= MAX_DEADLINE_MS:
        case.headers["x-deadline-ms"] = str(MAX_DEADLINE_MS)
    return case


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_requests_made_from_the_document_are_answered_as_it_says(node: Served, mode: GenerationMode) -> None:
    headers = {"Authorization": f"Bearer {node.token}"}
    described: Any = schemathesis.openapi.from_url(f"{node.url}/openapi.json")
    asked = set()
    for found in described.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not operation.path.startswith("/v1"):
            continue  # nothing to get wrong

        @PROFILE
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            patient(case).call_and_validate(headers=headers)

        ask()
        asked.add(operation.label)
    assert len(asked) >= 14


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, one) for path, found in document["paths"].items() for method, one in found.items()]


def test_the_document_says_what_everything_means(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, method, operation in operations(document):
        assert operation["description"], (path, method)
        assert all(one.get("description") for one in operation.get("parameters", ())), (path, method)
    for name, schema in document["components"]["schemas"].items():
        assert schema.get("description"), name


def test_the_document_has_the_errors_in_our_own_form(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, _, operation in operations(document):
        if path.startswith("/v1"):
            assert {"400", "401", "403", "429", "500", "503", "504"} <= operation["responses"].keys()
            assert operation["security"]
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/Error"), path
        assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_the_page_lists_every_request(http: httpx.Client) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "administration.md").read_text()
    listed = set(re.findall(r"^\| `(GET|POST|PUT|PATCH|DELETE) ([^`?]+)[^`]*` \|", page, re.MULTILINE))
    described = {(method.upper(), path) for path, method, _ in operations(http.get("/openapi.json").json())}
    assert listed == described
