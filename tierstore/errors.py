"""The error family: every failure says what happened, to what, and what to do next.

::

    TierStoreError                  kind                exit  also
    ├── UsageError                  usage               2     ValueError
    │   ├── ConfigError             configuration       2
    │   ├── UnsupportedTypeError    unsupported-type    2     TypeError
    │   └── StateMismatchError      state-mismatch      2     (strict load: missing, unexpected, shape, dtype)
    ├── NotFoundError               not-found           4     FileNotFoundError
    ├── ConflictError               conflict            1     FileExistsError (a create-if-absent that was lost)
    ├── IntegrityError              damage              6     ValueError
    │   ├── FormatError             format              6     (malformed, absurd or foreign bytes)
    │   ├── VersionError            version             6     (written by a newer major version)
    │   └── IncompleteError         incomplete          6     (parts, files or extents are missing)
    ├── StorageError                storage             1     OSError
    │   ├── AccessError             access              1     PermissionError
    │   ├── TierFullError           full                1     errno ENOSPC
    │   ├── TemporaryError          temporary           5     ConnectionError (retryable)
    │   ├── DeadlineError           deadline            5     TimeoutError (retryable)
    │   └── OutcomeUnknownError     outcome-unknown     5     (a commit whose answer was lost and can't be read back)
    ├── SaveError                   save                1     (a background save failed; ``__cause__`` has the reason)
    ├── CondemnedError              condemned           1     (the attempt was given up by a committer or a collector)
    ├── RankError                   rank                1     (another rank failed, or is gone)
    ├── RefusedError                refused             7     (a safety rule said no)
    ├── LockedError                 locked              8     BlockingIOError
    ├── ClosedError                 closed              1     (the store was closed, or belongs to another process)
    └── PartialError                partial             3     (some of the work was done)

Every class is picklable, keeps its context as plain data, and never carries credentials.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar

__all__ = [
    "AccessError",
    "ClosedError",
    "CondemnedError",
    "ConfigError",
    "ConflictError",
    "DeadlineError",
    "FormatError",
    "IncompleteError",
    "IntegrityError",
    "LockedError",
    "NotFoundError",
    "OutcomeUnknownError",
    "PartialError",
    "RankError",
    "RefusedError",
    "SaveError",
    "StateMismatchError",
    "StorageError",
    "TemporaryError",
    "TierFullError",
    "TierStoreError",
    "UnsupportedTypeError",
    "UsageError",
    "VersionError",
]


def _rebuild(cls: type[TierStoreError], message: str, hint: str, context: dict[str, Any]) -> TierStoreError:
    return cls(message, hint=hint, **context)


class TierStoreError(Exception):
    """Base of all errors that tierstore raises on purpose.

    Args:
        message: What happened, to which checkpoint, tier and file.
        hint: What to do next; shown on a line of its own.
        **context: Machine-readable facts such as ``run``, ``step``, ``tier``, ``file``, ``tensor``.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "", **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.context = context

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.message, self.hint, self.context)


class UsageError(TierStoreError, ValueError):
    """The caller asked for something that can't be."""

    kind = "usage"
    exit_code = 2


class ConfigError(UsageError):
    """The configuration is wrong; names file, key, value, reason and remedy."""

    kind = "configuration"


class UnsupportedTypeError(UsageError, TypeError):
    """The state holds something that can't be stored; names its path in the state."""

    kind = "unsupported-type"


class StateMismatchError(UsageError):
    """What is wanted and what is stored differ (missing, unexpected, wrong shape or dtype)."""

    kind = "state-mismatch"


class NotFoundError(TierStoreError, FileNotFoundError):
    """A run, step, tensor or file does not exist; nearest names are suggested."""

    kind = "not-found"
    exit_code = 4


class ConflictError(TierStoreError, FileExistsError):
    """A create-if-absent was lost: the name exists with other bytes (``context['existing']``: bytes)."""

    kind = "conflict"


class IntegrityError(TierStoreError, ValueError):
    """Bytes from storage are not what was promised."""

    kind = "damage"
    exit_code = 6


class FormatError(IntegrityError):
    """Bytes from storage can't be parsed, are foreign, or claim absurd sizes."""

    kind = "format"


class VersionError(IntegrityError):
    """Written by a newer major version of tierstore."""

    kind = "version"


class IncompleteError(IntegrityError):
    """Parts, files or extents are missing or overlap."""

    kind = "incomplete"


class StorageError(TierStoreError, OSError):
    """A storage failed for a reason that a retry does not mend."""

    kind = "storage"


class AccessError(StorageError, PermissionError):
    """Not writable, forbidden, or wrong credentials."""

    kind = "access"


class TierFullError(StorageError):
    """No space (or quota) left on a tier; nothing was lost."""

    kind = "full"

    def __init__(self, message: str, *, hint: str = "", **context: Any) -> None:
        super().__init__(message, hint=hint, **context)
        self.errno = errno.ENOSPC


class TemporaryError(StorageError, ConnectionError):
    """A failure that may pass: endpoint down, throttled, connection cut."""

    kind = "temporary"
    exit_code = 5
    retryable = True


class DeadlineError(StorageError, TimeoutError):
    """No progress, or not done, within the deadline."""

    kind = "deadline"
    exit_code = 5
    retryable = True


class OutcomeUnknownError(StorageError):
    """A commit was sent, its answer was lost, and the record can't be read back: done or not, nobody knows yet."""

    kind = "outcome-unknown"
    exit_code = 5


class SaveError(TierStoreError, RuntimeError):
    """A background save or promotion failed; the reason is its ``__cause__`` and in its message."""

    kind = "save"


class CondemnedError(TierStoreError, RuntimeError):
    """The attempt was condemned before it committed; names the reason and the missing ranks."""

    kind = "condemned"


class RankError(TierStoreError, RuntimeError):
    """Another rank of the group failed, or the group's rendezvous is gone; names the ranks and their reason."""

    kind = "rank"


class RefusedError(TierStoreError, RuntimeError):
    """A safety rule refused the operation; nothing was changed."""

    kind = "refused"
    exit_code = 7


class LockedError(TierStoreError, BlockingIOError):
    """Another process holds the lock or a lease."""

    kind = "locked"
    exit_code = 8


class ClosedError(TierStoreError, RuntimeError):
    """The store was closed."""

    kind = "closed"


class PartialError(TierStoreError, RuntimeError):
    """Some of the work was done, some was not; names both."""

    kind = "partial"
    exit_code = 3


def reason_of(error: BaseException) -> str:
    """`error` as the reason of another one, in a message: ``Kind: what happened``, without its hint. Not in `__all__`: no error."""
    return f"{type(error).__name__}: {error.message if isinstance(error, TierStoreError) else error}"


def without_frames(error: BaseException) -> None:
    """Lets go of what the functions that `error` and its causes passed through had in hand, gigabytes maybe; what it says stays.

    For an error that is kept. Not in `__all__`: no error.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += (one.__cause__, one.__context__)
