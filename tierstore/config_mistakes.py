"""Mistakes in a configuration, told with file, line, key, value, reason and remedy; secrets masked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.errors import ConfigError

__all__ = ["ABSENT", "MASK", "KeyPath", "Mistake", "MistakesError", "config_error", "is_secret", "key_text", "redact"]

KeyPath = tuple[str | int, ...]
"""Where a value stands: mapping keys and list positions from the top."""

MASK = "***"
ABSENT: Any = object()
"""The value of a mistake that is about a key, not a value."""

_SECRET = re.compile(r"key|secret|token|passw|pwd|credential|\bsas\b|(^|_)sas(_|$)|auth|cookie|signature", re.IGNORECASE)
_USERINFO = re.compile(r"://.*@", re.DOTALL)
_QUERY = re.compile(r"(://[^?]*\?).*", re.DOTALL)
_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One thing that is wrong, and what to do about it."""

    path: KeyPath
    reason: str
    remedy: str
    value: Any = ABSENT
    file: str = ""
    line: int | None = None


class MistakesError(ValueError):
    """Carries several mistakes out of one validator."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__("; ".join(m.reason for m in mistakes))
        self.mistakes = tuple(mistakes)


def is_secret(name: object) -> bool:
    """Whether the value of a key of this name must not be shown (access keys and their ids, tokens, passwords, headers)."""
    return isinstance(name, str) and bool(_SECRET.search(name))


def redact(value: Any) -> Any:
    """A copy of `value` with every secret replaced by ``***``: values of secret keys, user information and queries in URIs."""
    if isinstance(value, Mapping):
        return {k: MASK if is_secret(k) else redact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(v) for v in value]
    if isinstance(value, str):
        return _QUERY.sub(rf"\1{MASK}", _USERINFO.sub(f"://{MASK}@", value))  # a presigned URL's query is a credential
    return value


def key_text(path: KeyPath) -> str:
    """Writes a path as ``tiers[2].max_bandwidth``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f"{'.' if text else ''}{step}"
    return text


def config_error(mistakes: Sequence[Mistake], subject: str) -> ConfigError:
    """All mistakes in one error; `subject` names the configuration where a mistake has no file of its own.

    ``context["mistakes"]`` lists them for machines: file, line, key, value, reason, remedy.
    """
    told = tuple(
        {
            "file": m.file,
            "line": m.line,
            "key": key_text(m.path),
            "value": None if m.value is ABSENT else _shown(m),
            "reason": m.reason,
            "remedy": m.remedy,
        }
        for m in mistakes
    )
    if len(mistakes) == 1:
        return ConfigError(_line(mistakes[0], subject), hint=mistakes[0].remedy, mistakes=told)
    lines = [f"{len(mistakes)} mistakes in {subject}"]
    for mistake in mistakes:
        lines.append(f"  - {_line(mistake, subject)}")
        lines.append(f"    {mistake.remedy}")
    return ConfigError("\n".join(lines), hint="mend them all, nothing was opened or changed", mistakes=told)


def _line(mistake: Mistake, subject: str) -> str:
    where = mistake.file or subject
    if mistake.line is not None:
        where += f":{mistake.line}"
    key = key_text(mistake.path)
    value = "" if mistake.value is ABSENT else f" = {_shown(mistake)}"
    return f"{where}: {key}{value}: {mistake.reason}" if key else f"{where}{value}: {mistake.reason}"


def _shown(mistake: Mistake) -> str:
    if any(is_secret(step) for step in mistake.path) or ("options" in mistake.path and not isinstance(mistake.value, Mapping)):
        return MASK
    text = repr(redact(mistake.value))
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
