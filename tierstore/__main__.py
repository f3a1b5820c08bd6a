"""``python -m tierstore`` and the script ``tierstore``: the command line."""

from __future__ import annotations

import gc
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line. Ctrl-C while it is being loaded, which takes a second, ends it as Ctrl-C later does."""
    try:
        if sys.argv[1:2] == ["complete-names"]:  # somebody pressed Tab: not the whole command line
            from tierstore.cli.names_asked import main as complete_names

            complete_names(sys.argv[2:])
        gc.disable()  # nothing of what is loaded now becomes garbage, and looking for it is a tenth of a start; the verb has it again
        from tierstore.cli.main import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        os._exit(130)  # half-loaded modules have nothing to tidy up, and may fail at it
    command_line()


if __name__ == "__main__":
    main()
