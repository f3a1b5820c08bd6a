"""Named crash points: no-ops unless ``TIERSTORE_CRASH_AT`` names one (PROTOCOLS.md §9.1).

``TIERSTORE_CRASH_AT=commit.before-record`` ends the process with `os._exit` at the first pass,
``commit.before-record:3`` at the third. ``TIERSTORE_CRASH_LOG=FILE`` appends each name that is passed,
so that a test can show that every registered point was reached.
"""

from __future__ import annotations

import os
from collections import Counter

__all__ = ["CRASH_EXIT", "CRASH_POINTS", "reach"]

CRASH_EXIT = 86
"""The exit status of a process that died at a crash point."""

CRASH_POINTS: tuple[str, ...] = (
    "persist.before-shard",
    "persist.after-shard",
    "persist.before-part",
    "persist.after-part",
    "persist.before-receipt",
    "persist.after-receipt",
    "commit.before-objects",
    "commit.before-index",
    "commit.before-manifest",
    "commit.before-record",
    "commit.after-record",
    "promote.before-file",
    "promote.after-file",
    "quantise.before-document",
    "quantise.after-document",
    "promote.before-manifest",
    "promote.before-record",
    "promote.after-record",
    "promote.before-replicated",
    "promote.after-replicated",
    "reference.before-record",
    "reference.after-record",
    "bring.before-receipt",
    "bring.after-receipt",
    "bring.before-unmark",
    "bring.after-unmark",
    "expire.before-record",
    "expire.after-record",
    "evict.before-evicting",
    "evict.after-evicting",
    "evict.before-evicted",
    "evict.after-evicted",
    "sweep.before-swept",
    "sweep.after-swept",
    "sweep.before-reduced",
    "sweep.after-reduced",
    "sweep.before-trim",
    "orphan.before-condemned",
    "orphan.after-condemned",
    "delete.before-audit",
    "delete.after-audit",
    "delete.after-record",
    "delete.after-manifest",
    "delete.after-payload",
    "delete.after-parts",
    "delete.after-log",
    "files.before-data",
    "files.after-data",
    "files.before-claim",
    "files.after-claim",
    "files.before-entry",
    "files.after-entry",
    "files.before-clean",
    "files.after-clean",
    "files.before-gone",
    "files.after-gone",
    "files.before-evict",
    "files.after-evict",
    "posix.before-rename",
    "posix.after-rename",
    "posix.create-before-link",
    "posix.create-after-link",
    "s3.after-part",
    "s3.before-complete",
    "s3.after-complete",
)
"""Every point that the code passes; `reach` refuses a name that is not here."""

_AT, _, _NTH = os.environ.get("TIERSTORE_CRASH_AT", "").partition(":")
_LOG = os.environ.get("TIERSTORE_CRASH_LOG", "")
_passed: Counter[str] = Counter()


def reach(name: str) -> None:
    """Passes the crash point `name`: dies there if the environment says so."""
    if not (_AT or _LOG):
        return
    assert name in CRASH_POINTS, f"unregistered crash point {name}"
    if _LOG:
        with open(_LOG, "a", encoding="utf-8") as log:
            log.write(name + "\n")
    _passed[name] += 1
    if name == _AT and _passed[name] == int(_NTH or 1):
        os._exit(CRASH_EXIT)
