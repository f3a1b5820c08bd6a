"""``python -m tierstore.testing.serve DIR --bucket NAME``: the embedded S3 server in the foreground, to try things by hand."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from tierstore.errors import TierStoreError
from tierstore.testing.servers import embedded_server

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the server, makes the buckets, says how to reach it, and waits for Ctrl-C or SIGTERM; its data stays in the folder."""
    parser = argparse.ArgumentParser(prog="python -m tierstore.testing.serve", description="An S3 server on 127.0.0.1, for trying things.")
    parser.add_argument("directory", help="where its data lies; it is there again at the next start (not with moto)")
    parser.add_argument("--port", type=int, help="the first of ten free ports (default: found)")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to make; may be given again")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with embedded_server(given.directory, given.port) as server:
            for name in given.bucket:
                server.make_bucket(name)
            sys.stdout.write(
                f"{server.kind} serves {server.endpoint_url} until Ctrl-C; in another shell:\n"
                f"export S3_ENDPOINT={server.endpoint_url} S3_KEY={server.access_key} S3_SECRET={server.secret_key}\n"
            )
            sys.stdout.flush()
            while True:
                signal.pause()
    except KeyboardInterrupt:
        return 0
    except TierStoreError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
