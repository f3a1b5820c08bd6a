"""Connections of s3fs instances whose event loop is closed."""

from __future__ import annotations

from typing import Any

__all__ = ["abandon_connections"]


def abandon_connections(fs: Any) -> None:
    """Closes the sockets of an s3fs instance under a loop that is closed already, and so can't close them itself."""
    session = getattr(getattr(getattr(fs, "_s3", None), "_endpoint", None), "http_session", None)
    for one in dict(getattr(session, "_sessions", None) or {}).values():
        idle = getattr(one.connector, "_conns", {})
        for protocol in [entry[0] for entries in idle.values() for entry in entries]:
            transport = protocol.transport
            if getattr(transport, "_sock", None) is not None:
                transport._sock.close()
                transport._sock = None
        idle.clear()
        one.detach()
