"""Equal blocks by their digests: what is said to be the same is the same, wherever it lies; and what is taken through another file."""

from __future__ import annotations

import random

import pytest

from tierstore.format.digest import block_digests
from tierstore.format.index import FileEntry
from tierstore.names import Attempt
from tierstore.storage.contract import Unchanged
from tierstore.tiers.matching import BlockTable, Match, match_blocks
from tierstore.tiers.references import _split, _worth_it

BLOCK = 16


def entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(name=name, nbytes=len(data), block_digests=block_digests(data, BLOCK))


def of_blocks(numbers: list[int], tail: bytes = b"") -> bytes:
    return b"".join(bytes([number]) * BLOCK for number in numbers) + tail


@pytest.mark.parametrize("seed", range(40))
def test_every_block_that_is_there_is_found_and_nothing_else(seed: int) -> None:
    dice = random.Random(seed)
    files = {f"f{n}": of_blocks([dice.randrange(12) for _ in range(dice.randrange(9))], b"x" * dice.randrange(BLOCK)) for n in range(3)}
    wanted = of_blocks([dice.randrange(16) for _ in range(12)], b"x" * dice.randrange(BLOCK))
    table = BlockTable([entry(name, data) for name, data in files.items()], BLOCK)
    matches = match_blocks(entry("f1", wanted), table)
    covered = set()
    for match in matches:
        assert wanted[match.begin : match.end] == files[match.name][match.source : match.source + match.end - match.begin]
        covered |= set(range(match.begin, match.end))
    there = {data[at : at + BLOCK] for data in files.values() for at in range(0, len(data), BLOCK)}
    expected = {
        at
        for begin in range(0, len(wanted), BLOCK)
        if wanted[begin : begin + BLOCK] in there
        for at in range(begin, min(begin + BLOCK, len(wanted)))
    }
    assert covered == expected
    assert [m.begin for m in matches] == sorted(m.begin for m in matches)


def test_the_same_place_of_the_same_file_comes_first_and_neighbours_are_one() -> None:
    data = of_blocks([7, 7, 7, 1, 2], b"end")
    table = BlockTable([entry("a", of_blocks([7, 7])), entry("b", data)], BLOCK)
    assert match_blocks(entry("b", data), table) == [Match(begin=0, end=len(data), name="b", source=0)]
    changed = data[:20] + b"!" + data[21:]
    assert match_blocks(entry("b", changed), table) == [
        Match(begin=0, end=BLOCK, name="b", source=0),
        Match(begin=2 * BLOCK, end=len(data), name="b", source=2 * BLOCK),
    ]


def test_of_a_file_of_nothing_and_against_nothing_there_is_no_match() -> None:
    assert match_blocks(entry("a", b""), BlockTable([entry("a", b"abc")], BLOCK)) == []
    assert match_blocks(entry("a", b"abc"), BlockTable([], BLOCK)) == []
    assert match_blocks(entry("a", b"abc"), BlockTable([entry("a", b"")], BLOCK)) == []


def test_of_very_many_blocks_only_those_at_the_same_place_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.tiers.matching.MOST_BLOCKS", 3)
    table = BlockTable([entry("a", of_blocks([1, 2, 3, 4]))], BLOCK)
    assert match_blocks(entry("a", of_blocks([1, 4, 3])), table) == [
        Match(begin=0, end=BLOCK, name="a", source=0),
        Match(begin=2 * BLOCK, end=3 * BLOCK, name="a", source=2 * BLOCK),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_a_match_is_cut_where_the_base_takes_bytes_from_elsewhere(seed: int) -> None:
    dice = random.Random(seed)
    cuts = sorted(dice.sample(range(1, 100), 8))
    origins = [
        Unchanged(begin=b, end=e, path=f"x{n}", source=1000 * (n + 1)) for n, (b, e) in enumerate(zip(cuts[::2], cuts[1::2], strict=True))
    ]
    where = {at: (o.path, o.source + at - o.begin) for o in origins for at in range(o.begin, o.end)}
    begin, length, shift = dice.randrange(90), dice.randrange(1, 10), dice.randrange(50)
    pieces = list(_split(Match(begin=begin + shift, end=begin + shift + length, name="n", source=begin), "own", origins))
    told = {piece.begin + k: (piece.path, piece.source + k) for piece in pieces for k in range(piece.end - piece.begin)}
    assert told == {at + shift: where.get(at, ("own", at)) for at in range(begin, begin + length)}


def test_only_what_gives_enough_is_referred_to_and_few_at_most() -> None:
    def piece(nbytes: int) -> list[Unchanged]:
        return [Unchanged(begin=0, end=nbytes, path="p", source=0)]

    owners = [Attempt(run="r", step=step, save_id="0" * 26) for step in range(6)]
    found = {owner: piece(nbytes) for owner, nbytes in zip(owners, (10, 500, 60, 400, 300, 200), strict=True)}
    assert [owner.step for owner, _ in _worth_it(found, 1000)] == [1, 3, 4, 5]
    assert [owner.step for owner, _ in _worth_it({o: found[o] for o in owners[:3]}, 1000)] == [1, 2]
    assert _worth_it({owners[0]: piece(4 << 20)}, 1 << 40)
