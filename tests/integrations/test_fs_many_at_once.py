"""A transaction of more files than `io.threads` comes to its end: none of the threads that compute is taken by one that waits for them."""

from __future__ import annotations

import threading
from pathlib import Path

from tierstore.fs.filesystem import TierFileSystem


def test_many_files_of_one_transaction_are_written_with_one_thread(tmp_path: Path) -> None:
    fs = TierFileSystem({"run": "r", "tiers": [{"name": "disk", "uri": str(tmp_path), "scope": "shared"}], "io": {"threads": 1}})

    def write() -> None:
        with fs.transaction:
            fs.pipe({f"/many/{number}": b"x" * 100 for number in range(12)})

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(250)
    assert not writing.is_alive(), "each waits for a thread that another one holds"
    assert len(fs.ls("/many")) == 12
    fs.close()
