"""Servers of tests find ports for themselves, whoever starts others at the same time."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tierstore.errors import TemporaryError
from tierstore.testing.servers import _PORTS, _get, _Process


class Small(_Process):
    """A server of one port that starts at once."""

    kind = "small"

    def __init__(self, directory: Path, port: int | None = None) -> None:
        super().__init__(directory, port, "key", "secret", 1)

    def _command(self) -> Sequence[str]:
        return [sys.executable, "-S", "-m", "http.server", str(self.port), "--bind", "127.0.0.1"]

    def _answers(self) -> bool:
        return _get(self.endpoint_url)[0] == 200


def answers_at(url: str) -> None:
    """Asks until there is an answer: one question alone is given up after two seconds."""
    end = time.monotonic() + 120
    while _get(url)[0] != 200:
        assert time.monotonic() < end, f"nothing answers at {url}"


def test_a_port_that_was_taken_meanwhile_is_given_up_for_another_one(tmp_path: Path) -> None:
    server = Small(tmp_path)
    first = server.endpoint_url
    with socket.socket() as other:
        other.bind(("127.0.0.1", server.port))
        other.listen()
        with server:
            second = server.endpoint_url
            assert second != first
            answers_at(second)
            server.crash()
            server.start()
            assert server.endpoint_url == second, "who knows it finds it there again"


def test_a_port_that_was_asked_for_is_no_other_one(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = Small(tmp_path, other.getsockname()[1])
        with pytest.raises(TemporaryError, match=r"(?s)it ended before it answered.*in use"):
            server.start()


def test_ports_that_another_server_has_chosen_are_not_chosen_though_it_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that started at once chose alike: one listened, and the other one took its answer for its own."""
    first = Small(tmp_path / "first")
    chosen = (first.port - _PORTS.start) // 10
    drawn = iter([chosen, *range(chosen + 1, 1000), *range(chosen)])
    monkeypatch.setattr("tierstore.testing.servers.random.SystemRandom.randrange", lambda *_: next(drawn))
    assert Small(tmp_path / "second").port != first.port
