"""What a server and those who use it keep in its folder: who lives, where it listens, and who is connected."""

from __future__ import annotations

import errno
import fcntl
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from spark_jobs.jars import cache_folder

SERVERS_VARIABLE = "STREAM_ASSETS_SPARK_SERVERS"
NAME_LENGTH = 20
"""Of the folder of a server, in hexadecimal digits."""
_PRIVATE = 0o700
_NAMESPACES = Path("/proc/self/ns")
# What some network file systems, and sandboxes, say of all locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class UnusableFolderError(Exception):
    """There is no folder in which a server could be kept safely; the text says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and what it is.

    Args:
        port: on the loopback interface.
        token: lets in; shown nowhere.
        pid: of the server's process.
        cores: that tasks may use at the same time.
        master: the Spark master.
        python: the interpreter of its workers.
        cwd: the folder it works in.
        started: seconds since 1970.
    """

    port: int
    token: str = field(repr=False)
    pid: int
    cores: int
    master: str
    python: str
    cwd: str
    started: float


@dataclass(frozen=True, slots=True)
class ServerFolder:
    """The folder of one server.

    Args:
        path: in :func:`servers_folder`; see :func:`server_folder`.
    """

    path: Path

    @property
    def log(self) -> Path:
        """What the server and its JVM say."""
        return self.path / "log"

    @property
    def settings(self) -> Path:
        """What the server is to be started with; it is gone as soon as the server has read it."""
        return self.path / "settings.json"

    @property
    def clients(self) -> Path:
        """The files that clients hold, each called like its session."""
        return self.path / "clients"

    @property
    def interpreter(self) -> Path:
        """The Python that Spark starts workers with."""
        return self.path / "python"

    @property
    def workers(self) -> Path:
        """The files that workers hold."""
        return self.path / "workers"

    @property
    def port(self) -> Path:
        """The socket where clients get the port of the server, to hold it."""
        return self.path / "port"

    @property
    def _address(self) -> Path:
        return self.path / "address.json"

    def make(self) -> None:
        """Make it, as one that was just used; within :func:`tidying`.

        Raises:
            UnusableFolderError: it cannot be made, or somebody else could put something into it.
        """
        private_folder(self.path)
        private_folder(self.clients)
        os.utime(self.clients)

    def starting(self, *, waits: bool = True) -> AbstractContextManager[None]:
        """Of those who would start, use or end a server, one at a time.

        Raises:
            BlockingIOError: somebody does, and this one does not wait.
            UnusableFolderError: the file system has no locks.
        """
        return _alone(self.path / "starting", waits=waits)

    def used(self) -> float:
        """When it was made, or a client came or went, in seconds since 1970."""
        return self.clients.stat().st_mtime

    @contextmanager
    def life(self) -> Iterator[int]:
        """A descriptor that is locked as long as a process has it open: one that inherits it lives on with it.

        Only for who is starting a server, where none lives: it waits for those who look at this moment.
        """
        descriptor = os.open(self.path / "alive", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(descriptor, fcntl.LOCK_EX)
            # Another process may have the number of the last server by now.
            os.truncate(descriptor, 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def process(self) -> int | None:
        """The number of the process that lives, or did, and leads a process group; ``None`` while it is starting."""
        try:
            return int((self.path / "alive").read_text())
        except (OSError, ValueError):
            return None

    def is_alive(self) -> bool:
        """Whether a server lives, or starts; a number of a process would not tell, since another one may get it."""
        try:
            with (self.path / "alive").open("rb") as alive:
                # Shared: several may look at the same time.
                _lock(alive.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    def address(self) -> Address | None:
        """Where the server listens; ``None`` if there is none, or it is not ready."""
        try:
            found = json.loads(self._address.read_bytes())
            return Address(**{name.name: found[name.name] for name in fields(Address)})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def publish(self, address: Address) -> None:
        """Say where the server listens."""
        write_private(self._address, asdict(address))

    def withdraw(self) -> None:
        """Ask the server to end: it looks whether its address is still there."""
        self._address.unlink(missing_ok=True)

    def client(self, session: str) -> int:
        """A descriptor that the process has open as long as it wants the session, and the server, to live.

        The process may be killed, too: then it has it no more.
        """
        while True:
            descriptor = os.open(self.clients / session, os.O_RDWR | os.O_CREAT, 0o600)
            _lock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
            # The server looked between the two calls, and took it for one that was left behind.
            os.close(descriptor)

    @staticmethod
    def leave(client: int) -> None:
        """Give a descriptor of :meth:`client` back; a forked child that has it, too, does not count."""
        fcntl.flock(client, fcntl.LOCK_UN)
        os.close(client)

    def connected(self) -> list[str]:
        """The sessions whose clients live."""
        return [file.name for file in sorted(self.clients.iterdir()) if not _gone(file)]

    def forget_gone(self) -> list[str]:
        """The sessions whose clients do not live any more; they are told once."""
        return [file.name for file in sorted(self.clients.iterdir()) if _gone(file, forget=True)]


def _gone(client: Path, *, forget: bool = False) -> bool:
    try:
        with client.open("r+") as opened:
            _lock(opened.fileno(), (fcntl.LOCK_EX if forget else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if forget:
                client.unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return not forget
    return True


def tidying(*, waits: bool = True) -> AbstractContextManager[None]:
    """Of those who make or remove folders of servers, one at a time.

    Raises:
        BlockingIOError: somebody does, and this one does not wait.
        UnusableFolderError: there is no place for them.
    """
    return _alone(servers_folder() / "tidying", waits=waits)


@contextmanager
def _alone(file: Path, *, waits: bool) -> Iterator[None]:
    with file.open("w") as lock:
        _lock(lock.fileno(), fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise UnusableFolderError(f"files where servers are kept cannot be locked: {error}") from error
        raise


def servers_folder() -> Path:
    """Where servers are kept: ``$STREAM_ASSETS_SPARK_SERVERS``, else beside the jars, in a folder of :func:`_place`.

    Raises:
        UnusableFolderError: it cannot be made, or somebody else could put something into it.
    """
    given = os.environ.get(SERVERS_VARIABLE)
    path = Path(given) if given else cache_folder() / "spark-servers" / _place()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableFolderError(f"{path.parent} cannot be made: {error}") from error
    private_folder(path)
    return path.absolute()


def _place() -> str:
    """The user and the host, with the namespaces of files, ports and processes: one container of it, or none."""
    place = [f"{os.getuid()}@{os.uname().nodename}"]
    for namespace in ("mnt", "net", "pid"):
        with suppress(OSError):
            place.append(str((_NAMESPACES / namespace).stat().st_ino))
    return "-".join(place)


def server_folders() -> list[ServerFolder]:
    """Of all servers of this user on this machine, whether they live or not."""
    return [ServerFolder(path) for path in sorted(servers_folder().iterdir()) if path.is_dir()]


def server_folder(key: str) -> ServerFolder:
    """The folder of the server of a configuration; within :func:`tidying`.

    All users of the machine see its name in the command line of the server, and the configuration holds secrets. So the
    name depends on a salt, too, which only this user can read: nobody else can guess a secret and compare the names.

    Args:
        key: of the configuration.
    """
    salt = servers_folder() / "salt"
    if not salt.exists():
        write_private(salt, {"salt": secrets.token_hex()})
    return ServerFolder(salt.with_name(hmac.new(salt.read_bytes(), key.encode(), "sha256").hexdigest()[:NAME_LENGTH]))


def private_folder(path: Path) -> None:
    """Make a folder that only this user can look into, or make sure that it is one.

    Raises:
        UnusableFolderError: it cannot be made, or it is somebody else's.
    """
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=_PRIVATE)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UnusableFolderError(f"{path} is no folder of this user")
        if stat.S_IMODE(found.st_mode) != _PRIVATE:
            path.chmod(_PRIVATE)
        if not os.access(path, os.W_OK | os.X_OK):
            raise UnusableFolderError(f"{path} cannot be written")
        # The interpreter of the workers is a script in it.
        if os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0):
            raise UnusableFolderError(f"{path} is mounted so that nothing in it can be executed (noexec)")
    except OSError as error:
        raise UnusableFolderError(f"{path} cannot be used: {error}") from error


def write_private(path: Path, content: Mapping[str, object]) -> None:
    """Put JSON into a file that only this user can read; it is there as a whole, or not at all."""
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
