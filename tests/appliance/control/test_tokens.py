"""The administrator's token: a file that follows it, and the way back when it is lost. Rights end with a namespace."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import forebay
from forebay.client import Admin
from forebay.errors import NamespaceNotFound, Unauthenticated
from tests.appliance.control.peer import Daemon
from tests.client.conftest import patient

Make = Callable[..., Daemon]


def test_the_file_follows_a_rotated_token(make: Make) -> None:
    daemon = make().start()
    old = daemon.token
    with Admin(f"forebay://{daemon.address}", token=old) as admin:
        fresh = admin.rotate_token("admin").token
    file = daemon.data / "admin.token"
    assert file.read_text().strip() == fresh != old
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Unauthenticated), Admin(f"forebay://{daemon.address}", token=old) as admin:
        admin.status()


def test_a_lost_token_is_made_anew_by_a_start_without_the_file(make: Make) -> None:
    daemon = make().start()
    old, file = daemon.token, daemon.data / "admin.token"
    daemon.stop()
    file.unlink()
    daemon.start()
    fresh = file.read_text().strip()
    assert fresh != old
    with Admin(f"forebay://{daemon.address}", token=fresh) as admin:
        assert admin.status().node
        assert [p.name for p in admin.list_principals()] == ["admin"]


def test_rights_end_with_their_namespace(make: Make) -> None:
    daemon = make().start()
    url = f"forebay://{daemon.address}"
    with Admin(url, token=daemon.token) as admin:
        admin.create_namespace("acme/chat")
        token = admin.create_principal("vllm").token
        admin.set_grant("vllm", "acme/chat", ["read", "write"])
        with forebay.connect(url, namespace="acme/chat", token=token, options=patient()) as client:
            assert client.put([b"k"], [b"v"])[0].stored
        admin.delete_namespace("acme/chat", force=True)
        admin.create_namespace("acme/chat")
        with pytest.raises(NamespaceNotFound):
            forebay.connect(url, namespace="acme/chat", token=token, options=patient())
        assert all(not p.grants for p in admin.list_principals())
