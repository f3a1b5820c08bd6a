"""Images that a memory tier took in by a link: the pool has them again when nobody else has them, and never before."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierstore.errors import TierFullError
from tierstore.state import image_memory
from tierstore.state.copy_threads import CopyThreads
from tierstore.state.image import Image, ImagePool

PAGE = mmap.PAGESIZE
NBYTES = 3 * PAGE + 5


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ImagePool]:
    made = ImagePool(tmp_path / ".tmp", max_nbytes=64 * PAGE)
    yield made
    made.close()


def lend(image: Image, name: Path, fill: int = 0) -> Path:
    """What a tier does: a second name; then the save is done."""
    image.view[:] = bytes([fill]) * image.nbytes
    assert image.path is not None
    os.link(image.path, name)
    image.release()
    return name


def test_a_lent_image_is_not_filled_again_while_the_tier_has_it(pool: ImagePool, tmp_path: Path) -> None:
    first = lend(pool.acquire(NBYTES), tmp_path / "shard-1", fill=1)
    second = lend(pool.acquire(NBYTES), tmp_path / "shard-2", fill=2)
    assert (first.read_bytes(), second.read_bytes()) == (b"\1" * NBYTES, b"\2" * NBYTES)
    assert pool.made == 2
    assert pool.nbytes == 8 * PAGE


def test_what_eviction_unlinked_is_the_next_image(pool: ImagePool, tmp_path: Path) -> None:
    for number in range(10):
        kept = lend(pool.acquire(NBYTES), tmp_path / f"shard-{number}", fill=number)
        (tmp_path / f"shard-{number - 1}").unlink(missing_ok=True)
        assert kept.read_bytes() == bytes([number]) * NBYTES
    assert pool.made == 2
    assert len(os.listdir(tmp_path / ".tmp")) == 2


def test_what_the_tier_holds_does_not_count_as_in_flight(tmp_path: Path) -> None:
    pool = ImagePool(tmp_path / ".tmp", max_nbytes=4 * PAGE)
    for number in range(5):
        lend(pool.acquire(NBYTES, timeout=0), tmp_path / f"shard-{number}")
    pool.close()


def test_a_file_that_somebody_reads_is_not_filled_again_before_it_is_closed(pool: ImagePool, tmp_path: Path) -> None:
    name = lend(pool.acquire(NBYTES), tmp_path / "shard", fill=1)
    with name.open("rb") as reading:
        name.unlink()
        image = pool.acquire(NBYTES)
        image.view[:] = bytes(image.nbytes)
        assert reading.read() == b"\1" * NBYTES
        image.release()
    with_map = lend(pool.acquire(NBYTES), tmp_path / "shard", fill=3)
    with with_map.open("rb") as reading, mmap.mmap(reading.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        reading.close()
        with_map.unlink()
        for _ in range(2):
            other = pool.acquire(NBYTES)
            other.view[:] = bytes(other.nbytes)
        assert mapped[:] == b"\3" * NBYTES


def test_an_image_whose_own_name_is_gone_is_never_filled_again(pool: ImagePool, tmp_path: Path) -> None:
    image = pool.acquire(NBYTES)
    assert image.path is not None
    path = image.path
    name = lend(image, tmp_path / "shard", fill=7)
    path.unlink()  # now the file has one name, which is the tier's
    again = pool.acquire(NBYTES)
    again.view[:] = bytes(again.nbytes)
    assert name.read_bytes() == b"\7" * NBYTES
    shutil.rmtree(tmp_path / ".tmp")
    again.release()
    pool.acquire(NBYTES).release()
    assert pool.made == 3


def test_a_file_follows_the_layout_to_the_byte(pool: ImagePool) -> None:
    lengths = [NBYTES, NBYTES - 1, 2 * PAGE, 4 * PAGE, NBYTES]
    for nbytes in lengths:
        image = pool.acquire(nbytes)
        assert image.path is not None
        image.view[:] = b"\5" * nbytes
        assert image.path.read_bytes() == b"\5" * nbytes
        image.release()
    assert pool.made == 1


def test_growing_into_a_full_tmpfs_is_an_error_not_a_fault_in_mid_copy(pool: ImagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.acquire(4 * PAGE).release()
    pool.acquire(PAGE).release()

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_memory.os, "posix_fallocate", full)
    with pytest.raises(TierFullError, match="are free"):
        pool.acquire(4 * PAGE)


def test_a_tmpfs_that_is_full_of_our_own_checkpoints_fails_no_save(
    pool: ImagePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = lend(pool.acquire(NBYTES), tmp_path / "shard", fill=1)
    real = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_memory.os, "posix_fallocate", full)
    image = pool.acquire(NBYTES)
    assert image.path is None
    assert "anonymous memory" in caplog.text
    image.release()
    monkeypatch.setattr(image_memory.os, "posix_fallocate", real)
    assert pool.acquire(NBYTES).path is None, "what stands in is recycled too"
    name.unlink()
    image = pool.acquire(NBYTES)
    assert image.path is not None
    assert pool.made == 2


def test_a_tmpfs_that_is_full_of_a_save_on_its_way_fails_no_save_either(pool: ImagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    busy = pool.acquire(NBYTES)  # the tier takes it in a moment: whether it has already must make no difference
    monkeypatch.setattr(image_memory.os, "posix_fallocate", full)
    assert busy.path is not None
    assert pool.acquire(NBYTES).path is None


def test_the_tiers_file_outlives_the_pool(tmp_path: Path) -> None:
    pool = ImagePool(tmp_path / ".tmp", max_nbytes=64 * PAGE)
    name = lend(pool.acquire(NBYTES), tmp_path / "shard", fill=9)
    late = pool.acquire(NBYTES)
    pool.close()
    lend(late, tmp_path / "late", fill=8)
    assert os.listdir(tmp_path / ".tmp") == []
    assert name.read_bytes() == b"\x09" * NBYTES
    assert (tmp_path / "late").read_bytes() == b"\x08" * NBYTES


def test_reserved_images_are_all_that_later_saves_use(pool: ImagePool, tmp_path: Path) -> None:
    touched: list[int] = []
    threads = CopyThreads(2)

    def touch(image: Image) -> None:
        touched.append(image.nbytes)
        image.touch(threads)

    assert pool.reserve(NBYTES, 2, touch) == 2
    assert pool.reserve(NBYTES, 2, touch) == 0
    assert touched == [NBYTES] * 4, "who has used memory may still have something to do with it"
    for number in range(6):
        lend(pool.acquire(NBYTES), tmp_path / f"shard-{number}")
        (tmp_path / f"shard-{number - 1}").unlink(missing_ok=True)
    assert pool.made == 2
    assert pool.reserve(NBYTES, 2, touch) == 0
    threads.close()


def test_reserved_images_are_kept_beyond_the_budget(tmp_path: Path) -> None:
    pool = ImagePool(tmp_path / ".tmp", max_nbytes=PAGE)
    assert pool.reserve(NBYTES, 2, lambda image: None) == 2
    assert pool.reserve(NBYTES, 2, lambda image: None) == 0
    assert pool.nbytes == 8 * PAGE
    pool.close()


def test_where_there_is_room_for_some_there_are_some(
    pool: ImagePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, left = os.posix_fallocate, [1]

    def full(fd: int, offset: int, nbytes: int) -> None:
        if not left:
            raise OSError(28, "No space left on device")
        left.pop()
        real(fd, offset, nbytes)

    monkeypatch.setattr(image_memory.os, "posix_fallocate", full)
    assert pool.reserve(NBYTES, 2, lambda image: None) == 1
    assert "images=1 are prepared, not 2" in caplog.text
    pool.close()
    other = ImagePool(pool.directory, max_nbytes=64 * PAGE)
    with pytest.raises(TierFullError):
        other.reserve(NBYTES, 2, lambda image: None)


def test_touching_keeps_what_is_in_used_memory(pool: ImagePool) -> None:
    threads = CopyThreads(2)
    image = pool.acquire(NBYTES)
    image.touch(threads)
    image.view[:] = b"\6" * NBYTES
    image.touch(threads)
    assert bytes(image.view) == b"\6" * NBYTES
    threads.close()
