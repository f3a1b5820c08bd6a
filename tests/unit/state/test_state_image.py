"""Images: recycled, bounded, never a SIGBUS, swept after a crash, left alone by a forked child (CASES 38)."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from tierstore.errors import AccessError, ClosedError, DeadlineError, TierFullError, UsageError
from tierstore.state import image as image_module
from tierstore.state.image import ImagePool
from tierstore.storage.temporaries import temporary_name

PAGE = mmap.PAGESIZE


@pytest.fixture(params=["anonymous", "file"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "anonymous" else tmp_path / ".tmp"


def names(directory: Path | None) -> list[str]:
    return [] if directory is None or not directory.exists() else sorted(os.listdir(directory))


def test_an_image_is_as_long_as_asked_for_in_whole_pages_of_memory(directory: Path | None) -> None:
    pool = ImagePool(directory, max_nbytes=1 << 20)
    image = pool.acquire(PAGE + 1)
    assert image.capacity == 2 * PAGE
    assert len(image.view) == PAGE + 1
    assert image.path is None or image.path.stat().st_size == PAGE + 1
    image.view[-1] = 7
    assert image.view[-1] == 7
    image.release()
    pool.close()


def test_a_released_image_is_the_next_one(directory: Path | None) -> None:
    pool = ImagePool(directory, max_nbytes=64 << 20)
    for nbytes in (10 << 20, 9 << 20, 7 << 20, 10 << 20):
        image = pool.acquire(nbytes)
        image.view[0] = 1
        assert pool.nbytes == 10 << 20
        image.release()
        assert len(names(directory)) <= 1
    pool.close()


def test_a_much_larger_image_is_not_wasted_on_a_small_save(directory: Path | None) -> None:
    pool = ImagePool(directory, max_nbytes=64 << 20)
    pool.acquire(30 << 20).release()
    image = pool.acquire(8 << 20)
    assert image.capacity == 8 << 20
    image.release()
    pool.close()


def test_idle_images_make_room_for_another_size(directory: Path | None) -> None:
    pool = ImagePool(directory, max_nbytes=32 << 20)
    pool.acquire(8 << 20).release()
    pool.acquire(20 << 20).release()
    assert pool.nbytes == 28 << 20
    pool.acquire(31 << 20).release()
    assert pool.nbytes == 31 << 20
    pool.close()


def test_a_second_release_does_not_free_the_next_save(directory: Path | None) -> None:
    pool = ImagePool(directory, max_nbytes=1 << 20)
    first = pool.acquire(1 << 20)
    first.release()
    second = pool.acquire(1 << 20)
    first.release()
    with pytest.raises(DeadlineError):
        pool.acquire(1 << 20, timeout=0)
    second.release()
    pool.close()


def test_the_budget_is_waited_for_and_the_deadline_names_the_sizes(directory: Path | None) -> None:
    pool = ImagePool(directory, max_nbytes=10 << 20)
    held = pool.acquire(8 << 20)
    with pytest.raises(DeadlineError) as caught:
        pool.acquire(8 << 20, timeout=0.01)
    assert caught.value.context["in_flight"] == 8 << 20
    assert "max_inflight" in caught.value.hint
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(pool.acquire(8 << 20, timeout=30).capacity))
    waiter.start()
    held.release()
    waiter.join(30)
    assert got == [8 << 20]
    assert pool.nbytes <= 10 << 20
    pool.close()


def test_many_threads_never_exceed_the_budget(directory: Path | None) -> None:
    pool = ImagePool(directory, max_nbytes=32 << 20)
    peaks: list[int] = []
    asked: list[int] = []
    in_use = 0
    lock = threading.Lock()

    def save(size: int) -> None:
        nonlocal in_use
        for _ in range(8):
            image = pool.acquire(size << 20, timeout=60)
            with lock:
                in_use += size << 20
                asked.append(in_use)
            peaks.append(pool.nbytes)
            with lock:
                in_use -= size << 20
            image.release()

    threads = [threading.Thread(target=save, args=(4 + i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(peaks) == 48
    assert max(asked) <= 32 << 20
    assert max(peaks) <= 48 << 20, "a recycled image is at most half as large again as what was asked for"
    pool.close()


def test_a_save_larger_than_the_budget_goes_alone_and_its_image_is_kept(directory: Path | None, caplog: pytest.LogCaptureFixture) -> None:
    pool = ImagePool(directory, max_nbytes=1 << 20)
    small = pool.acquire(PAGE)
    with pytest.raises(DeadlineError):
        pool.acquire(3 << 20, timeout=0)
    small.release()
    pool.acquire(3 << 20).release()
    assert "io.max_inflight" in caplog.text
    assert pool.nbytes == 3 << 20
    pool.acquire(3 << 20).release()
    assert caplog.text.count("let through alone") == 1
    pool.close()


def test_a_full_tmpfs_is_an_error_with_sizes_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    pool = ImagePool(tmp_path, max_nbytes=1 << 30)
    kept = pool.acquire(1 << 20)
    kept.release()
    monkeypatch.setattr(image_module.os, "posix_fallocate", full)
    with pytest.raises(TierFullError) as caught:
        pool.acquire(64 << 20)
    assert "64MiB" in caught.value.message
    assert "are free" in caught.value.message
    assert names(tmp_path) == []  # idle images were given up for it
    monkeypatch.undo()
    pool.acquire(64 << 20).release()
    pool.close()


def test_a_read_only_directory_is_an_access_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    pool = ImagePool(tmp_path, max_nbytes=1 << 20)
    monkeypatch.setattr(image_module.os, "open", refuse)  # root, which CI may be, is refused nothing by a real folder
    with pytest.raises(AccessError, match="Permission denied"):
        pool.acquire(1)


def test_close_frees_all_and_later_releases_too(directory: Path | None) -> None:
    pool = ImagePool(directory, max_nbytes=1 << 20)
    pool.acquire(PAGE).release()
    held = pool.acquire(100 * PAGE)
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.acquire(1)
    held.release()
    assert names(directory) == []
    assert pool.nbytes == 0


def test_a_waiter_is_told_when_the_pool_is_closed() -> None:
    pool = ImagePool(None, max_nbytes=PAGE)
    pool.acquire(PAGE)
    errors: list[type] = []

    def wait() -> None:
        try:
            pool.acquire(PAGE)
        except ClosedError as error:
            errors.append(type(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    pool.close()
    waiter.join(30)
    assert errors == [ClosedError]


def test_a_view_that_outlives_the_pool_stays_readable(directory: Path | None) -> None:
    pool = ImagePool(directory, max_nbytes=1 << 20)
    image = pool.acquire(PAGE)
    image.view[:3] = b"abc"
    view = image.view[:3].toreadonly()
    image.release()
    pool.close()
    assert bytes(view) == b"abc"


def test_images_of_a_killed_process_are_swept_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import sys, time; from tierstore.state.image import ImagePool\n"
        f"images = [ImagePool({str(tmp_path)!r}, max_nbytes=1 << 20).acquire(1) for _ in range(2)]\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        assert len(names(tmp_path)) == 2
        ImagePool(tmp_path, max_nbytes=1 << 20)
        assert len(names(tmp_path)) == 2  # the owner lives
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    reused = re.sub(r"-\d+-([0-9a-f]{16})$", r"-1-\1", temporary_name("image"))  # our id, another start: the id was used again
    foreign = ["image-1-x", temporary_name("image"), "upload-123"]
    for name in (reused, *foreign):
        (tmp_path / name).touch()
    ImagePool(tmp_path, max_nbytes=1 << 20)
    assert names(tmp_path) == sorted(foreign)


def test_a_forked_child_neither_uses_nor_frees_its_parents_images(directory: Path | None) -> None:
    pool = ImagePool(directory, max_nbytes=1 << 20)
    held = pool.acquire(1 << 20)
    held.view[0] = 1
    before = names(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forking beside threads, which is what is tested
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            held.release()
            own = pool.acquire(1 << 20, timeout=60)
            own.view[0] = 2
            own.release()
            pool.close()
            code = 0 if held.view[0] == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert held.view[0] == 1
    assert set(before) <= set(names(directory))
    with pytest.raises(DeadlineError):
        pool.acquire(1, timeout=0)
    held.release()
    pool.close()
    assert names(directory) == []


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="can hold nothing"):
        ImagePool(None, max_nbytes=0)


def test_only_few_layouts_are_remembered() -> None:
    pool = ImagePool(None, max_nbytes=PAGE)
    for i in range(10):
        pool.remember(i, str(i))
    assert [i for i in range(10) if pool.layout(i) is not None] == [6, 7, 8, 9]
