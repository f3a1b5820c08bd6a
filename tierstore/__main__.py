"""``python -m tierstore``: the command line."""

from __future__ import annotations

from tierstore.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
