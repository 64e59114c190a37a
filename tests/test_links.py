"""What the documentation, the help and the code refer to is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cli.topics import TOPICS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CODE = sorted(
    path
    for name in ("appliance", "client", "connectors", "src/forebay", "perf", "tests")
    for path in (ROOT / name).rglob("*.py")
)


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def missing(text: str) -> set[str]:
    """Pages that a text names by their path and that are not there; those of other repositories are none of ours."""
    ours = re.sub(r"\bgithub\.com/\S+", "", text)
    named = set(re.findall(r"\bdocs/[\w./-]*\.md\b", ours))
    return {name for name in named if not (ROOT / name).exists()}


def test_pages_that_are_named_exist() -> None:
    found = {str(path.relative_to(ROOT)): missing(path.read_text()) for path in (*PAGES, *CODE)}
    found |= {f"forebay help {name}": missing(topic.text()) for name, topic in TOPICS.items()}
    assert {where: names for where, names in found.items() if names} == {}
