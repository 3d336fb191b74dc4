"""Flags of several processes: which part this one is, and where the others are."""

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
"""As a key file: there is none, and that is meant so."""
_WILDCARDS = ("*", "0.0.0.0", "::", "")
_HOW = "write tcp://HOST:PORT, e.g. tcp://10.0.0.1:7700"


@dataclass(frozen=True, slots=True)
class SeveralProcesses:
    """One part of a router that is several processes; the default: all of it."""

    role: Role = "router"
    schedulers: tuple[str, ...] = ()
    """Where front ends find schedulers, and those each other without an election: in order."""
    listen: str | None = None
    """Where this scheduler listens for front ends."""
    advertise: str = ""
    """Where it can be reached, as the others know it; empty: it need not be known."""
    election: tuple[str, ElectionTimes] | None = None
    """Where the lock is, as a URL."""
    keys: CurveKeys | None = None

    @property
    def apart(self) -> bool:
        """Whether this is a front end whose schedulers are started by somebody else, maybe on
        another machine."""
        return self.role == "front-end" and not self.schedulers[0].startswith("ipc:")


def several_of(args: argparse.Namespace, warnings: list[str]) -> SeveralProcesses:
    """What the flags say. Raises: ValueError, naming the flag and what to write instead."""
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
        raise ValueError(f"--sbs-scheduler {args.sbs_scheduler}: one address is there twice")
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
            how = f"say which of them this one is, with --sbs-listen {named[0]}"
            raise ValueError(f"--sbs-scheduler names several schedulers: {how}")
        listen, named = named[0], ()
    _check("--sbs-listen", listen)
    advertise: str = args.sbs_advertise or ""
    if advertise:
        _check("--sbs-advertise", advertise)
    elif _host(listen) not in _WILDCARDS:
        advertise = listen
    if (named or args.sbs_election) and not advertise:
        why = "the others must know this scheduler by one address"
        raise ValueError(f"--sbs-listen {listen}: {why}: give it --sbs-advertise tcp://HOST:PORT")
    if args.sbs_election is None and named and advertise not in named:
        raise ValueError(
            f"--sbs-scheduler {','.join(named)}: this scheduler ({advertise}) is not in the list; "
            "write all of them there, the same on each, or --sbs-advertise as it is written there"
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
            "--sbs-scheduler-key-file none if everybody who reaches it may schedule"
        )
    if path == IN_THE_CLEAR:
        warnings.append(
            "--sbs-scheduler-key-file none: front ends and schedulers believe whoever reaches "
            "them, and anybody on the way reads what they say"
        )
        return None
    return None if path is None else read("--sbs-scheduler-key-file", keys_in, path)


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach a ZMQ endpoint."""
    if endpoint.startswith("ipc://"):
        return True
    host = _host(endpoint)
    return host in ("localhost", "::1", "lo") or host.startswith("127.")


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
