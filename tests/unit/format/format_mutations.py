"""Damage for fuzzing: what storage, or someone hostile, may make of a file."""

from __future__ import annotations

from hypothesis import strategies as st

TOKENS = (
    b"0",
    b"-1",
    b"9" * 30,
    b"1e9",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b'"\\ud800"',
    b"true",
    b",",
    b":",
    b'"',
    b"\\",
    b"[",
    b"]",
    b"\xff",
    b"\x00",
)


@st.composite
def damaged(draw: st.DrawFn, seed: bytes, *, head: int | None = None, most: int = 4) -> bytes:
    """`seed` with up to `most` bit flips, truncations, splices, repetitions and inserted tokens, within its first `head` bytes."""
    body = bytearray(seed)
    for _ in range(draw(st.integers(1, most))):
        limit = min(head or len(body), len(body))
        if not limit:
            break
        at = draw(st.integers(0, limit - 1))
        other = draw(st.integers(0, limit - 1))
        width = draw(st.integers(1, 40))
        kind = draw(st.sampled_from(("flip", "flip", "token", "token", "copy", "cut", "truncate", "repeat")))
        if kind == "flip":
            body[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "token":
            token = draw(st.sampled_from(TOKENS))
            body[at : at + draw(st.integers(0, 3))] = token
        elif kind == "copy":
            body[at : at + width] = body[other : other + width]
        elif kind == "cut":
            del body[at : at + width]
        elif kind == "truncate":
            del body[at:]
        else:
            body[at:at] = body[other : other + width]
    return bytes(body)
