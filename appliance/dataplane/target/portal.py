"""A port that the target listens on: connections are accepted, or turned away where no more files may be opened."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Final

from forebay.appliance.dataplane.target.subsystems import ListenAddress

__all__ = ["Portal"]

log = logging.getLogger(__name__)

_BACKLOG: Final = 512


class Portal:
    """A listening socket and its thread; several subsystems may share it."""

    def __init__(
        self,
        family: str,
        address: str,
        port: int,
        accept: Callable[[socket.socket, Portal], None],
        refused: Callable[[str], None],
    ) -> None:
        kind = socket.AF_INET6 if family == "IPv6" else socket.AF_INET
        self._sock = socket.socket(kind, socket.SOCK_STREAM)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((address, port))
            self._sock.listen(_BACKLOG)
            # Given up to close a connection for which there is no other descriptor: it would wait for an answer else.
            self._spare: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._sock.close()
            raise
        self.address = ListenAddress(family, address, self._sock.getsockname()[1])
        self._accept = accept
        self._refused = refused
        self._closed = False
        self._thread = Thread(target=self._run, name=f"portal {address}:{self.address.port}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if not self._closed:
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        self._turn_away()
                    else:
                        log.error("accept on %s port %d: %s", self.address.address, self.address.port, error)
                    time.sleep(0.05)  # whatever it is, it will not be gone at once
                continue
            self._accept(sock, self)

    def _turn_away(self) -> None:
        """Close the connection that waits to be accepted: the process may open no more files."""
        self._refused("the process may open no more files")
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)
        self._sock.settimeout(0)
        with suppress(OSError):  # another thread was faster with the descriptor
            self._sock.accept()[0].close()
        self._sock.settimeout(None)
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Stop listening; returns when the thread has ended."""
        self._closed = True
        with suppress(OSError):  # it may not be listening any more
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        self._sock.close()
        if self._spare is not None:
            os.close(self._spare)
