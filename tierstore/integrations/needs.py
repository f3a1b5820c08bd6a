"""What a door says where its framework is not installed, or is too old."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(*packages: str, extra: str) -> Iterator[None]:
    """Around a door's imports of its framework: says which extra of tierstore installs it.

    Args:
        packages: The framework's top-level names, as they are imported.
        extra: The extra of tierstore that installs versions which the door was run with.

    Raises:
        ImportError: One of `packages`, or a name in it, can't be imported; of the same class as the error that it explains, so that
            ``except ModuleNotFoundError`` sees what it looks for. What is missing inside of another package stays as it is.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        raise type(error)(
            f"{error}\n  hint: pip install 'tierstore[{extra}]' installs a version of {packages[0]} that tierstore works with",
            name=error.name,
            path=error.path,
        ) from error
