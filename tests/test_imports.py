"""Imports go one way (docs/design.md §4)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = "core"
# Who may import whom. The command line may import everything.
ALLOWED = {
    CORE: {CORE},
    "client": {CORE, "client"},
    "appliance": {CORE, "appliance"},
    "appliance.s3": {CORE, "appliance", "appliance.s3", "client"},
    "dpu": {CORE, "client", "dpu"},
    "connectors": {CORE, "client", "connectors"},
    "testing": {CORE, "client", "appliance", "testing"},  # suites that every transport and target must pass
    "forebay": {CORE, "client"},  # the package itself: re-exports `connect`, when it is first used
    "cli": {CORE, "client", "appliance", "appliance.s3", "dpu", "connectors", "cli"},
}


def package_of(module: str) -> str:
    """The key of `ALLOWED` that an absolute module name below `forebay` belongs to."""
    if module == "forebay":
        return module
    parts = module.split(".")[1:]
    if parts[:2] == ["appliance", "s3"]:
        return "appliance.s3"
    return parts[0] if parts and parts[0] in ALLOWED else CORE


def imports_of(module: str, is_package: bool, source: str) -> set[str]:
    """Absolute names below `forebay` that the source of a module imports, at its top or anywhere inside it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parent, *([base] if base else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] in {"forebay", "appliance", "client", "dpu", "connectors"}}


def offences(module: str, is_package: bool, source: str) -> list[str]:
    """What a module imports and may not."""
    bad = []
    for name in sorted(imports_of(module, is_package, source)):
        if not name.startswith("forebay"):
            bad.append(f"{module} imports {name}, which is forebay.{name}: two names would make two modules")
        elif name != "forebay" and package_of(name) not in ALLOWED[package_of(module)]:
            bad.append(f"{module} imports {name}")
    return bad


def sources() -> list[tuple[str, Path]]:
    """Every module of the product with its real path."""
    package = ROOT / "src" / "forebay"
    tops = [package, *(child for child in package.iterdir() if child.is_symlink())]
    modules = []
    for top in tops:  # a linked folder is not followed by rglob, so each is a start of its own
        for path in sorted(top.rglob("*.py")):
            dotted = ".".join(("forebay", *path.relative_to(package).with_suffix("").parts))
            modules.append((dotted, path))
    return sorted(set(modules))


def test_every_package_is_seen() -> None:
    names = {name for name, _ in sources()}
    assert {"forebay.__init__", "forebay.appliance.__init__", "forebay.client.__init__"} <= names


def test_imports_go_one_way() -> None:
    found = []
    for name, path in sources():
        is_package = path.name == "__init__.py"
        found += offences(name.removesuffix(".__init__"), is_package, path.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("forebay.client.session", "import forebay.appliance.daemon", False),
        ("forebay.client.session", "from forebay import appliance", False),
        ("forebay.client.session", "from ..appliance import daemon", False),
        ("forebay.client.session", "def f():\n    from forebay.appliance import daemon", False),
        ("forebay.client.session", "from .buffers import Buffer\nfrom forebay.errors import Busy", True),
        ("forebay.appliance.control.grpc", "from forebay.client import connect", False),
        ("forebay.appliance.control.grpc", "from client import connect", False),
        ("forebay.appliance.s3.gateway", "from forebay.client import connect", True),
        ("forebay.errors", "from forebay.client import connect", False),
        ("forebay", "def f():\n    from forebay.client import connect", True),
        ("forebay", "from forebay.appliance import daemon", False),
        ("forebay.testing.transport_suite", "from forebay.client.transports.base import Transport", True),
        ("forebay.client.client", "import forebay.testing.faults", False),
        ("forebay.cli.main", "from forebay.appliance import daemon\nfrom forebay.client import connect", True),
    ],
)
def test_the_rule_itself(module: str, source: str, allowed: bool) -> None:
    assert (offences(module, False, source) == []) is allowed


def test_importing_forebay_loads_nothing_heavy() -> None:
    heavy = "{'numpy', 'grpc', 'rocksdict', 'rich', 'click', 'cbor2'}"
    code = f"import sys, forebay; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
