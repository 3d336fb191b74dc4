"""Flags for a router of several processes: the role of this one and the addresses of the others."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_sbs.console.extras import without_kubernetes
from sglang_sbs.router.election import ElectionTimes
from sglang_sbs.router.options.option import read
from sglang_sbs.wire.curve import CurveKeys, keys_in

Role = Literal["router", "scheduler", "front-end"]

IN_THE_CLEAR = Path("none")
"""Value of a key-file flag that deliberately disables encryption."""
_WILDCARDS = ("*", "0.0.0.0", "::", "")
_HOW = "write tcp://HOST:PORT, e.g. tcp://10.0.0.1:7700"


@dataclass(frozen=True, slots=True)
class SeveralProcesses:
    """Role of one process of a router, and addresses of the others; the default is a router in one
    process."""

    role: Role = "router"
    schedulers: tuple[str, ...] = ()
    """Addresses of all schedulers in order of preference. Only front ends and schedulers without an
    election have them."""
    listen: str | None = None
    """Address at which this scheduler accepts front ends."""
    advertise: str = ""
    """Address by which front ends and other schedulers reach this one; empty if none needs it."""
    election: tuple[str, ElectionTimes] | None = None
    """URL of the lock (``--sbs-election``), and the times of the election."""
    keys: CurveKeys | None = None

    @property
    def apart(self) -> bool:
        """Whether this is a front end whose schedulers are started separately, perhaps on another
        machine."""
        return self.role == "front-end" and not self.schedulers[0].startswith("ipc:")


def several_of(args: argparse.Namespace, warnings: list[str]) -> SeveralProcesses:
    """Return the settings that the flags for several processes make; warnings are appended. Raises:
    ValueError, naming the flag and what to write instead."""
    role: Role = args.sbs_role
    named = tuple(part.strip() for part in (args.sbs_scheduler or "").split(",") if part.strip())
    if role == "router" and named:
        role = "front-end"
    if role != "scheduler":
        for flag in ("listen", "advertise", "election"):
            if getattr(args, f"sbs_{flag}") is not None:
                raise ValueError(f"--sbs-{flag} is for schedulers: sglang-sbs scheduler")
    if role == "router":
        return SeveralProcesses()
    for endpoint in named:
        _check("--sbs-scheduler", endpoint)
    if len(set(named)) < len(named):
        raise ValueError(f"--sbs-scheduler {args.sbs_scheduler}: one address is listed twice")
    if role == "front-end":
        if not named:
            raise ValueError("--sbs-role front-end needs --sbs-scheduler tcp://HOST:PORT")
        return SeveralProcesses(role, named, keys=_keys(args, "--sbs-scheduler", named, warnings))
    return _scheduler(args, named, warnings)


def _scheduler(
    args: argparse.Namespace, named: tuple[str, ...], warnings: list[str]
) -> SeveralProcesses:
    if args.frontends > 1:
        raise ValueError("--frontends is for front ends: a scheduler serves no clients")
    listen: str | None = args.sbs_listen
    if listen is None:
        if not named:
            raise ValueError(f"a scheduler needs --sbs-listen: {_HOW}")
        if len(named) > 1:
            how = f"select this one with --sbs-listen {named[0]}"
            raise ValueError(f"--sbs-scheduler names several schedulers: {how}")
        listen, named = named[0], ()
    _check("--sbs-listen", listen)
    advertise: str = args.sbs_advertise or ""
    if advertise:
        _check("--sbs-advertise", advertise)
    elif _host(listen) not in _WILDCARDS:
        advertise = listen
    if (named or args.sbs_election) and not advertise:
        why = "the others need one address of this scheduler"
        raise ValueError(f"--sbs-listen {listen}: {why}: give it --sbs-advertise tcp://HOST:PORT")
    if args.sbs_election is None and named and advertise not in named:
        raise ValueError(
            f"--sbs-scheduler {','.join(named)}: this scheduler ({advertise}) is not in the list; "
            "list all of them there, the same on each, or set --sbs-advertise to the listed address"
        )
    keys = _keys(args, "--sbs-listen", (listen, *named), warnings)
    if args.sbs_election is None:
        return SeveralProcesses("scheduler", named, listen, advertise, None, keys)
    if args.sbs_election.startswith("k8s:") and (install := without_kubernetes()):
        raise ValueError(f"--sbs-election {args.sbs_election} needs a Kubernetes client: {install}")
    given = (getattr(args, f"sbs_election_{kind}_secs") for kind in ("lease", "renew", "retry"))
    times = read("--sbs-election", lambda seconds: ElectionTimes(*seconds), given)
    election = (args.sbs_election, times)
    return SeveralProcesses("scheduler", (), listen, advertise, election, keys)


def _check(flag: str, endpoint: str) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    number = port.isascii() and port.isdigit() and int(port) <= 65535
    if not (endpoint.startswith("tcp://") and host and (number or port == "*")):
        raise ValueError(f"{flag} {endpoint!r}: {_HOW}")


def _keys(
    args: argparse.Namespace, flag: str, endpoints: tuple[str, ...], warnings: list[str]
) -> CurveKeys | None:
    path: Path | None = args.sbs_scheduler_key_file
    far = [endpoint for endpoint in endpoints if not is_local(endpoint)]
    if path is None and far:
        raise ValueError(
            f"{flag} {far[0]} can be reached from other machines: give all sides "
            "--sbs-scheduler-key-file FILE with the same secret (openssl rand -hex 32 > FILE), or "
            "--sbs-scheduler-key-file none if any host that reaches it may schedule"
        )
    if path == IN_THE_CLEAR:
        warnings.append(
            "--sbs-scheduler-key-file none: front ends and schedulers trust any host that reaches "
            "them, and their messages are not encrypted"
        )
        return None
    return None if path is None else read("--sbs-scheduler-key-file", keys_in, path)


def is_local(endpoint: str) -> bool:
    """Return whether a ZMQ endpoint is reachable only from this machine."""
    if endpoint.startswith("ipc://"):
        return True
    host = _host(endpoint)
    return host in ("localhost", "::1", "lo") or host.startswith("127.")


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
