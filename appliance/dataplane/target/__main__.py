"""The target process: `python -m forebay.appliance.dataplane.target --socket PATH [--log FILE]`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path

from forebay.appliance.dataplane.target.authentication_methods import AuthenticationMethods
from forebay.appliance.dataplane.target.bdev_methods import BdevMethods
from forebay.appliance.dataplane.target.limits import TargetLimits
from forebay.appliance.dataplane.target.nvmf_methods import NvmfMethods
from forebay.appliance.dataplane.target.private_methods import PrivateMethods
from forebay.appliance.dataplane.target.rpc import Method, Params, RpcServer
from forebay.appliance.dataplane.target.server import Server
from forebay.appliance.log import FORMATS, LEVELS, set_up
from forebay.appliance.open_files import raise_open_files
from forebay.errors import ConfigInvalid

__all__ = ["main"]

log = logging.getLogger("forebay.target")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m forebay.appliance.dataplane.target",
        description="Serve file volumes over NVMe/TCP. Everything is set up through the control socket, "
        "by SPDK's RPC methods and forebay_* ones. Ends on SIGTERM.",
    )
    parser.add_argument("--socket", type=Path, required=True, help="path of the control socket; made with mode 0600")
    parser.add_argument("--log", type=Path, help="append the log to this file instead of standard error")
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="(default: %(default)s)")
    parser.add_argument("--log-format", choices=FORMATS, default="text", help="(default: %(default)s)")
    for field in fields(TargetLimits):
        kind = float if isinstance(field.default, float) else int
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=kind, default=field.default, metavar="N", help="(default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status: 0, 2 for bad arguments, 1 if the socket is taken."""
    options = _arguments(argv)
    set_up(options.log_level, options.log_format, options.log)
    try:
        limits = TargetLimits(**{field.name: getattr(options, field.name) for field in fields(TargetLimits)})
    except ConfigInvalid as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Blocked in every thread and waited for by this one: a handler would run only once this thread wakes, and a signal
    # to a stopped process may go to any thread.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it outlives the terminal of whoever started it
    raise_open_files()
    server = Server(limits)
    if server.most_connections < limits.max_connections:
        log.warning(
            "the limit of open files allows %d connections of %d: raise it (ulimit -n, LimitNOFILE)",
            *(server.most_connections, limits.max_connections),
        )
    tables = (BdevMethods(server), NvmfMethods(server), AuthenticationMethods(server), PrivateMethods(server))
    methods = {name: method for one in tables for name, method in one.table().items()}
    methods["rpc_get_methods"] = Method(lambda params: _names(params, methods))
    try:
        rpc = RpcServer(options.socket, methods)
    except OSError as error:
        log.error("control socket %s: %s", options.socket, error.strerror)
        server.close()
        return 1
    rpc.start()
    log.info("pid %d, boot id %s, control socket %s", os.getpid(), server.boot_id, options.socket)
    signal.sigwait(ends)
    log.info("ending")
    rpc.close()
    server.close()
    return 0


def _names(params: Params, methods: dict[str, Method]) -> list[str]:
    params.ignore("current", "include_aliases")
    params.finish()
    return sorted(methods)


if __name__ == "__main__":
    sys.exit(main())
