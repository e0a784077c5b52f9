"""The folder of a server, with locks that show which processes live, the server's address, and its clients."""

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

from spark_jobs.jars import cache_folder, check_parents, make_folders
from stream_consumers.errors import UntrustedFileError

SERVERS_VARIABLE = "STREAM_ASSETS_SPARK_SERVERS"
NAME_LENGTH = 20
"""The number of hexadecimal digits in the name of a server's folder."""
_PRIVATE = 0o700
_NAMESPACES = Path("/proc/self/ns")
# Errors of file systems that do not support locks, such as some network mounts and sandboxes.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class UnusableFolderError(Exception):
    """No folder can keep a server safely; the message says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, with facts about it.

    Args:
        port: the port on the loopback interface.
        token: the token that clients authenticate with; it is never shown.
        pid: the id of the server's process.
        cores: the number of tasks that can run at the same time.
        master: the Spark master.
        python: the path of the interpreter of its workers.
        cwd: the working folder.
        started: the time of the start, in seconds since 1970.
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
        path: a folder in :func:`servers_folder`; :func:`server_folder` chooses its name.
    """

    path: Path

    @property
    def log(self) -> Path:
        """The log of the server and its JVM."""
        return self.path / "log"

    @property
    def settings(self) -> Path:
        """The settings that the server starts with; the server deletes the file as soon as it has read it."""
        return self.path / "settings.json"

    @property
    def clients(self) -> Path:
        """The folder of the files that clients hold locked, each named after its session."""
        return self.path / "clients"

    @property
    def interpreter(self) -> Path:
        """The script that Spark starts Python workers with."""
        return self.path / "python"

    @property
    def workers(self) -> Path:
        """The folder of the files that worker daemons hold locked."""
        return self.path / "workers"

    @property
    def port(self) -> Path:
        """The Unix socket from which clients receive the server's port, to hold it."""
        return self.path / "port"

    @property
    def _address(self) -> Path:
        return self.path / "address.json"

    def create(self) -> None:
        """Create the folder, and mark it as just used; call this within :func:`folders_lock`.

        Raises:
            UnusableFolderError: the folder cannot be created, or another user could write to it.
        """
        make_private_folder(self.path)
        make_private_folder(self.clients)
        os.utime(self.clients)

    def start_lock(self, *, waits: bool = True) -> AbstractContextManager[None]:
        """Hold the lock under which one process at a time starts, joins or ends the server.

        Raises:
            BlockingIOError: another process holds the lock, and ``waits`` is false.
            UnusableFolderError: the file system has no locks.
        """
        return _exclusive_lock(self.path / "starting", waits=waits)

    def last_used(self) -> float:
        """Return the last time at which the folder was created or a client came or went, in seconds since 1970."""
        return self.clients.stat().st_mtime

    @contextmanager
    def alive_lock(self) -> Iterator[int]:
        """Open the file whose lock shows that the server lives, and lock it until every process has closed it.

        A process that inherits the descriptor keeps the lock. Only a process that starts a server calls this, while no
        server lives: it waits for processes that are calling :meth:`is_alive`.
        """
        descriptor = os.open(self.path / "alive", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(descriptor, fcntl.LOCK_EX)
            # The id of the last server may belong to another process by now.
            os.truncate(descriptor, 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def process(self) -> int | None:
        """Return the id of the server's process, or of the last one; ``None`` during a start. It leads its group."""
        try:
            return int((self.path / "alive").read_text())
        except (OSError, ValueError):
            return None

    def is_alive(self) -> bool:
        """Return whether a server lives or is starting, by its lock, because its process id may be reused."""
        try:
            with (self.path / "alive").open("rb") as alive:
                # The lock is shared, so that several processes can check at the same time.
                _lock(alive.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    def address(self) -> Address | None:
        """Return the address of the server; ``None`` if no server is ready."""
        try:
            found = json.loads(self._address.read_bytes())
            return Address(**{name.name: found[name.name] for name in fields(Address)})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def publish(self, address: Address) -> None:
        """Write the address of the server."""
        write_private(self._address, asdict(address))

    def request_end(self) -> None:
        """Remove the address, so that the server, which checks it, ends."""
        self._address.unlink(missing_ok=True)

    def register_client(self, session: str) -> int:
        """Register a client: its session, and the server, live as long as this process has the descriptor open.

        If the process is killed, the kernel closes the descriptor.
        """
        while True:
            descriptor = os.open(self.clients / session, os.O_RDWR | os.O_CREAT, 0o600)
            _lock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
            # Between the two calls the server removed the file, because it was not locked yet.
            os.close(descriptor)

    @staticmethod
    def unregister_client(client: int) -> None:
        """Release a descriptor of :meth:`register_client`, even if a forked child has inherited it."""
        fcntl.flock(client, fcntl.LOCK_UN)
        os.close(client)

    def connected_sessions(self) -> list[str]:
        """Return the sessions whose clients are alive."""
        return [file.name for file in sorted(self.clients.iterdir()) if not _client_has_ended(file)]

    def remove_ended_clients(self) -> list[str]:
        """Remove the files of clients that have ended, and return their sessions; each is returned once."""
        return [file.name for file in sorted(self.clients.iterdir()) if _client_has_ended(file, forget=True)]


def _client_has_ended(client: Path, *, forget: bool = False) -> bool:
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


def folders_lock(*, waits: bool = True) -> AbstractContextManager[None]:
    """Hold the lock under which one process at a time creates or removes folders of servers.

    Raises:
        BlockingIOError: another process holds the lock, and ``waits`` is false.
        UnusableFolderError: no folder can keep servers.
    """
    return _exclusive_lock(servers_folder() / "tidying", waits=waits)


@contextmanager
def _exclusive_lock(file: Path, *, waits: bool) -> Iterator[None]:
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
    """Return the parent of all server folders: ``$STREAM_ASSETS_SPARK_SERVERS``, else ``spark-servers`` in the cache.

    Raises:
        UnusableFolderError: the folder cannot be created, or another user could write to it.
    """
    given = os.environ.get(SERVERS_VARIABLE)
    path = Path(given) if given else cache_folder() / "spark-servers" / _host_key()
    own = [path] if given else [path.parent, path]
    try:
        make_folders(own[0].parent)
        check_parents(own[0])
    except (OSError, UntrustedFileError) as error:
        raise UnusableFolderError(f"{own[0]} cannot be used: {error}") from error
    for folder in own:
        make_private_folder(folder)
    return path.absolute()


def _host_key() -> str:
    """Return a name for this user on this host or in this container, from its file, network and process namespaces."""
    parts = [f"{os.getuid()}@{os.uname().nodename}"]
    for namespace in ("mnt", "net", "pid"):
        with suppress(OSError):
            parts.append(str((_NAMESPACES / namespace).stat().st_ino))
    return "-".join(parts)


def server_folders() -> list[ServerFolder]:
    """Return the folders of all servers of this user on this machine, alive or not."""
    return [ServerFolder(path) for path in sorted(servers_folder().iterdir()) if path.is_dir()]


def server_folder(key: str) -> ServerFolder:
    """Return the folder of the server of a configuration; call this within :func:`folders_lock`.

    All users of the machine see the folder's name in the command line of the server, and the configuration holds
    secrets. So the name also depends on a salt that only this user can read: no other user can guess a secret and
    confirm it by the name.

    Args:
        key: the digest of the configuration.
    """
    salt = servers_folder() / "salt"
    if not salt.exists():
        write_private(salt, {"salt": secrets.token_hex()})
    return ServerFolder(salt.with_name(hmac.new(salt.read_bytes(), key.encode(), "sha256").hexdigest()[:NAME_LENGTH]))


def make_private_folder(path: Path) -> None:
    """Create a folder that only this user can access, or make an existing one of this user so.

    Raises:
        UnusableFolderError: the folder cannot be created or used, or it belongs to another user.
    """
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=_PRIVATE)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UnusableFolderError(f"{path} is not a folder of this user")
        if stat.S_IMODE(found.st_mode) != _PRIVATE:
            path.chmod(_PRIVATE)
        if not os.access(path, os.W_OK | os.X_OK):
            raise UnusableFolderError(f"{path} cannot be written")
        # The interpreter of the workers is a script in this folder.
        if os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0):
            raise UnusableFolderError(f"{path} is mounted so that nothing in it can be executed (noexec)")
    except OSError as error:
        raise UnusableFolderError(f"{path} cannot be used: {error}") from error


def write_private(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON to a file that only this user can read; the file appears complete or not at all."""
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
