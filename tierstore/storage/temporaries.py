"""Names of temporaries that say who made them, so that those of dead processes can be swept and no others.

A name is ``<kind>-<host>-<boot>-<pid namespace>-<pid>-<start>-<nonce>``. An owner is provably dead only if it lived on this host
and either in an earlier boot of it, or in this boot and this pid namespace with no process of that pid and start time left.
A container that shares the host's name but not its processes proves nothing, and neither does another node of a shared file system.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Owner", "owner_is_alive", "owner_is_dead", "temporary_name", "this_process"]

_NAME = re.compile(r"[a-z]+-([0-9a-f]{12})-([0-9a-f]{8}|none)-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who made a temporary. `start` is the process's start in clock ticks since boot; 0 where the system doesn't say."""

    host: str
    boot: str
    namespace: int
    pid: int
    start: int


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """Field 22 of ``/proc/<pid>/stat`` (proc(5)); None if there is no such process. The name in field 2 may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def this_process() -> Owner:
    """The running process as an owner."""
    machine = _text("/etc/machine-id")
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return Owner(
        host=hashlib.sha256(f"{socket.gethostname()}\n{machine}".encode()).hexdigest()[:12],
        boot=_text("/proc/sys/kernel/random/boot_id")[:8] or "none",
        namespace=namespace,
        pid=os.getpid(),
        start=(_start_of(os.getpid()) if namespace else None) or 0,
    )


def temporary_name(kind: str) -> str:
    """A fresh name for a temporary of this process; `kind` is lower-case letters."""
    me = this_process()
    return f"{kind}-{me.host}-{me.boot}-{me.namespace}-{me.pid}-{me.start}-{secrets.token_hex(8)}"


def owner_is_dead(name: str) -> bool:
    """True if `name` is a temporary's whose owner provably lives no more; False if it lives, may live, or is not ours to judge."""
    found = _NAME.fullmatch(name)
    if not found:
        return False
    me = this_process()
    if found[1] != me.host or "none" in (found[2], me.boot):
        return False
    if found[2] != me.boot:
        return bool(_text("/etc/machine-id"))  # without it the name alone would say that it is this machine, rebooted
    if int(found[3]) != me.namespace or not me.namespace:
        return False
    return _start_of(int(found[4])) != int(found[5])


def owner_is_alive(name: str) -> bool | None:
    """True if the process that `name` names lives, False if it provably does not, None if nobody here can tell."""
    if owner_is_dead(name):
        return False
    found = _NAME.fullmatch(name)
    me = this_process()
    here = found is not None and found[1] == me.host and found[2] == me.boot != "none" and int(found[3]) == me.namespace != 0
    return True if here else None
