"""Commands run in this process, as a user of the node's host would."""

import json
from typing import Any

import pytest

from forebay.cli.exits import OK, USAGE
from forebay.cli.main import run


class Shell:
    """Runs commands in this process as a user of the node's host would."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str, code: int = OK) -> str:
        """Run, expect an exit code, and return standard output, or the one line of an error."""
        found = run(argv)
        captured = self._capsys.readouterr()
        assert found == code, captured.err
        if code >= USAGE:
            assert captured.out == "" and len(captured.err.splitlines()) == 1
            return captured.err
        return captured.out

    def json(self, *argv: str, code: int = OK) -> Any:
        return json.loads(self(*argv, "--json", code=code))
