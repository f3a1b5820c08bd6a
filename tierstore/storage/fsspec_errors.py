"""What fsspec file systems raise, as tierstore's errors. Their own messages may hold credentials and are left to the cause."""

from __future__ import annotations

import asyncio
import errno

from tierstore.errors import AccessError, DeadlineError, NotFoundError, StorageError, TemporaryError, TierFullError, TierStoreError

__all__ = ["may_pass", "translate_fsspec"]

_FULL = {errno.ENOSPC, errno.EDQUOT}
_PASSING = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.EPIPE,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}
_PASSING_NAMES = ("ClientConnectionError", "ServerDisconnectedError", "ClientPayloadError", "ServiceUnavailable", "TooManyRequests")


def translate_fsspec(error: Exception, what: str, limit_s: float) -> TierStoreError:
    """The tierstore error for `error`, raised while doing `what` (``"reading memory://x/y"``)."""
    if isinstance(error, TierStoreError):
        return error
    code = getattr(error, "errno", None)
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return NotFoundError(f"{what}: there is no such file", hint="it was deleted, or never written")
    if isinstance(error, PermissionError):
        return AccessError(f"{what}: not permitted", hint="check the credentials in the tier's options, and the permissions there")
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)) or type(error).__name__ == "FSTimeoutError":
        return DeadlineError(f"{what}: not done within {limit_s:.0f} s", hint="check the server and the network, or raise stall_timeout_s")
    if code in _FULL:
        return TierFullError(f"{what}: no space left", hint="free space or raise the quota")
    if isinstance(error, ConnectionError) or code in _PASSING or any(c.__name__ in _PASSING_NAMES for c in type(error).__mro__):
        return TemporaryError(
            f"{what}: the connection failed ({type(error).__name__})", hint="it is tried again; check that the server runs"
        )
    if isinstance(error, NotImplementedError):
        return StorageError(f"{what}: this file system can't do it", hint="`tierstore doctor --probe URI` says what it can do")
    return StorageError(f"{what}: failed ({type(error).__name__})", hint="see the cause in the log with --debug")


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    return isinstance(error, TierStoreError) and error.retryable
