"""Readable errors and numbers for the log, alerts and the dashboard."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp


def counted(number: int, noun: str) -> str:
    """Format as ``1 request``, ``2 requests``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def plain_error(error: BaseException) -> str:
    """Describe why a worker did not respond or a router did not start, without the HTTP client's
    wording and error numbers."""
    match error:
        case TimeoutError():
            return "no answer in time"
        case aiohttp.ClientConnectorCertificateError():
            return f"cannot connect to {error.host}:{error.port}: {error.certificate_error}"
        case aiohttp.ClientConnectorError():
            return f"cannot connect to {error.host}:{error.port}: {system_error(error.os_error)}"
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection without an answer"
        case OSError(errno=int(number)):
            return str(error).removeprefix(f"[Errno {number}] ")
        case _:
            return str(error) or type(error).__name__


@contextmanager
def naming_file(flag: str, path: Path) -> Iterator[None]:
    """Context manager that adds the flag's name to errors of opening its file. Raises: OSError,
    with that text."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{flag} {path}: {system_error(error)}") from error


@contextmanager
def naming_port(flag: str, host: str, port: int) -> Iterator[None]:
    """Context manager that adds the flag at fault (the port's or the host's) to errors of
    listening. Raises: OSError, with that text."""
    try:
        yield
    except OSError as error:
        why = system_error(error)
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            text = f"{flag.replace('port', 'host')} {host}: cannot listen there: {why}"
        else:
            how = f"choose another with {flag}, or end what listens there"
            text = f"{flag} {port}: cannot listen at {host}: {why}; {how}"
        raise OSError(error.errno, text) from error


def system_error(error: OSError) -> str:
    """Return the operating system's text for an error, without the text and addresses with which
    asyncio replaces it."""
    number = error.errno or 0
    if number <= 0 or isinstance(error, ssl.SSLError):  # numbers of the resolver and OpenSSL
        return error.strerror or str(error)
    return os.strerror(number)
