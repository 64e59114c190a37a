"""Control methods with SPDK's names for in-band authentication: keys, who has which, and what is agreed on."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from forebay.appliance.dataplane.target.keyring import HostKeys, Keyring
from forebay.appliance.dataplane.target.rpc import Method, Params, RpcError
from forebay.appliance.dataplane.target.server import Server
from forebay.nvmetcp.spec import DhchapHash, DhGroup

__all__ = ["AuthenticationMethods", "host_keys"]

Choice = TypeVar("Choice", DhchapHash, DhGroup)


def host_keys(keyring: Keyring, params: Params) -> HostKeys | None:
    """The keys that `dhchap_key` and `dhchap_ctrlr_key` name, if they do."""
    name, controller_name = params.optional_text("dhchap_key"), params.optional_text("dhchap_ctrlr_key")
    if name is None:
        if controller_name is not None:
            raise RpcError.invalid_params()  # a controller proves itself only to who proves itself first
        return None
    try:
        return keyring.host_keys(name, controller_name)
    except OSError:
        raise RpcError.invalid_params() from None


class AuthenticationMethods:
    """The methods, bound to a server; `table` lists them."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def table(self) -> dict[str, Method]:
        """Every method by name."""
        methods = (
            self.keyring_file_add_key,
            self.keyring_file_remove_key,
            self.keyring_get_keys,
            self.nvmf_subsystem_set_keys,
            self.nvmf_set_config,
        )
        return {run.__name__: Method(run) for run in methods}

    def keyring_file_add_key(self, params: Params) -> bool:
        """Read a secret from a file that only its owner can read; it is read once."""
        name, path = params.text("name"), params.text("path")
        params.finish()
        try:
            self._server.keyring.add_file(name, Path(path))
        except OSError as error:
            raise RpcError.of_errno(error.errno or errno.EIO) from None
        return True

    def keyring_file_remove_key(self, params: Params) -> bool:
        """Forget a key's name; hosts that were given it keep it."""
        name = params.text("name")
        params.finish()
        try:
            self._server.keyring.remove(name)
        except OSError as error:
            raise RpcError.of_errno(error.errno or errno.EIO) from None
        return True

    def keyring_get_keys(self, params: Params) -> Any:
        """Names of keys and their files."""
        params.finish()
        return [{"name": name, "path": str(path)} for name, path in sorted(self._server.keyring.paths().items())]

    def nvmf_subsystem_set_keys(self, params: Params) -> bool:
        """Give an allowed host other keys, or none, for connections to come."""
        params.ignore("tgt_name")
        subsystem, host = self._server.subsystem(params.text("nqn")), params.text("host")
        keys = host_keys(self._server.keyring, params)
        params.finish()
        if subsystem is None:
            raise RpcError.invalid_params()
        with self._server.lock:
            if host not in subsystem.hosts:
                raise RpcError.invalid_params()
            subsystem.hosts[host] = keys
        return True

    def nvmf_set_config(self, params: Params) -> bool:
        """Hashes and groups that may be agreed on from now on, the first choice first."""
        terms = self._server.proof_terms
        if (names := params.texts("dhchap_digests")) is not None:
            terms = replace(terms, hashes=tuple(_named(DhchapHash, name) for name in names))
        if (names := params.texts("dhchap_dhgroups")) is not None:
            terms = replace(terms, groups=tuple(_named(DhGroup, name) for name in names))
        # Other parameters have no meaning here.
        if not terms.hashes or not terms.groups:
            raise RpcError.invalid_params()
        self._server.proof_terms = terms
        return True


def _named(kind: type[Choice], name: str) -> Choice:
    try:
        return kind[name.upper()]
    except KeyError:
        raise RpcError.invalid_params() from None
