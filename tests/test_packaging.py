"""What is shipped: a wheel holds the linked packages; committed text holds nothing of one machine."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "forebay"
LINKED = [child for child in PACKAGE.iterdir() if child.is_symlink()]
SHIPPED = {".py", ".pyi", ".proto", ".typed"}
# Indexes are chosen by whoever installs, homes belong to whoever wrote.
FORBIDDEN = re.compile(
    rb"pythonhosted\.org|pypi\.org|--(extra-)?index-url [^<]|(?<![\w.])/(home|Users)/\w|(?<![\w.])/root/"
)


def test_links_are_relative_and_point_into_the_repository() -> None:
    assert {link.name for link in LINKED} >= {"appliance", "client"}
    for link in LINKED:
        assert link.readlink() == Path("../..") / link.name


def test_a_wheel_holds_every_module(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", *(link.name for link in LINKED)):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(tree)], check=True, capture_output=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("forebay/")}
    package = tree / "src" / "forebay"
    expected = {
        f"forebay/{path.relative_to(package)}"
        for top in (package, *(package / link.name for link in LINKED))
        for path in top.rglob("*")
        if path.suffix in SHIPPED
    }
    assert expected | {"forebay/py.typed", "forebay/appliance/__init__.py", "forebay/client/__init__.py"} <= held


def test_committed_text_names_no_index_and_no_home() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=False, timeout=60)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: what is committed is not known")
    found = []
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        path = ROOT / name
        if path != Path(__file__).resolve() and path.is_file() and (match := FORBIDDEN.search(path.read_bytes())):
            found.append(f"{name}: {match[0].decode()}")
    assert not found, "\n".join(found)
