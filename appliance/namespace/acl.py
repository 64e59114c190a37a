"""Access control, in one place, denied by default.

A principal is who a connection's token says. Rights are per namespace; ``admin`` on the principal itself is the node's
administrator, who may do everything. A principal without any right in a namespace is told that it does not exist.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

from forebay.appliance.namespace.desired_state import DesiredState, Grant, Namespace, Principal
from forebay.errors import InvalidArgument, NamespaceNotFound, PermissionDenied, Unauthenticated
from forebay.ids import DEFAULT_SCOPE

__all__ = ["RIGHTS", "Access", "Acl", "check_rights", "hash_token", "new_token"]

RIGHTS = ("read", "write", "delete", "pin")
"""read: match, acquire, list, stat, wait, watch · write: allocate, commit · delete · pin: pins that outlive a
session. Administration is no namespace right."""
_ALL = "*"


def new_token() -> str:
    """A fresh token: 256 random bits."""
    return "fbt_" + secrets.token_urlsafe(32)


def hash_token(token: str) -> bytes:
    """What is kept of a token. It has 256 bits of its own, so a plain hash cannot be searched."""
    return hashlib.sha256(token.encode()).digest()


def check_rights(rights: tuple[str, ...]) -> None:
    """Refuse a right that is not one of `RIGHTS`."""
    for right in rights:
        if right not in RIGHTS:
            raise InvalidArgument(f"{right!r} is not a right", field="rights", limit=", ".join(RIGHTS))


@dataclass(frozen=True, slots=True)
class Access:
    """What a principal may do in one namespace."""

    namespace: Namespace
    rights: frozenset[str]
    scopes: frozenset[str]
    """Scope names; ``*`` among them means any. The default scope is called ``default``."""
    grants: tuple[Grant, ...] = ()
    """Where it comes from: a right holds in the scopes of its own grant."""

    def within(self, scopes: Iterable[str]) -> Access:
        """The same with no more rights than hold in each of these scopes."""
        held = [
            {right for g in self.grants for right in g.rights if {name or "default", _ALL} & set(_scopes(g))}
            for name in scopes
        ]
        return replace(self, rights=self.rights.intersection(*held))

    def need(self, right: str) -> None:
        """Raise `PermissionDenied` unless ``right`` is there."""
        if right not in self.rights:
            raise PermissionDenied(f"no {right!r} right in {self.namespace.full_name}", field="rights")

    def need_scope(self, name: str) -> None:
        """Raise `PermissionDenied` unless the scope may be used."""
        if _ALL not in self.scopes and (name or "default") not in self.scopes:
            raise PermissionDenied(f"scope {name or 'default'!r} is not granted in {self.namespace.full_name}")


def _scopes(grant: Grant) -> tuple[str, ...]:
    return grant.scopes or ("default",)


class Acl:
    """The check, over the desired state."""

    def __init__(self, state: DesiredState) -> None:
        self._state = state

    def authenticate(self, token: str | None) -> Principal:
        """The principal a token belongs to. Raises `Unauthenticated`."""
        if not token:
            given = "with token=..., --token or FOREBAY_TOKEN; over HTTP as `Authorization: Bearer TOKEN`"
            raise Unauthenticated(f"no token: give one {given}", field="token")
        digest = hash_token(token)
        for principal in self._state.principals:
            if secrets.compare_digest(principal.token_sha256, digest):
                return principal
        raise Unauthenticated("the token is not known to this node", field="token")

    def need_admin(self, principal: Principal) -> None:
        """Raise `PermissionDenied` unless the principal is an administrator of the node."""
        if not principal.admin:
            raise PermissionDenied(f"{principal.name!r} is not an administrator")

    def access(self, principal: Principal, full_name: str) -> Access:
        """What the principal may do there. Raises `NamespaceNotFound`, also where it may do nothing."""
        namespace = self._state.namespace(full_name)
        if namespace is not None and principal.admin:
            return Access(namespace, frozenset(RIGHTS), frozenset((_ALL,)), (Grant(_ALL, RIGHTS, (_ALL,)),))
        grants = tuple(g for g in principal.grants if g.namespace in (full_name, _ALL))
        rights = frozenset(right for g in grants for right in g.rights)
        if namespace is None or not rights:
            raise NamespaceNotFound(f"there is no namespace {full_name!r}", field="namespace")
        return Access(namespace, rights, frozenset(name for g in grants for name in _scopes(g)), grants)

    @staticmethod
    def merge(grants: tuple[Grant, ...], grant: Grant) -> tuple[Grant, ...]:
        """``grants`` with the one for this namespace replaced, or removed when it has no rights."""
        kept = tuple(g for g in grants if g.namespace != grant.namespace)
        return (*kept, grant) if grant.rights else kept


assert DEFAULT_SCOPE == 0  # stored keys of the scope called "default"
