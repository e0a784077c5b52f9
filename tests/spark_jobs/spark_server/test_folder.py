"""What a server keeps in its folder: whose it is, who lives, and who is connected."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_jobs.spark_server.folder import (
    Address,
    ServerFolder,
    UnusableFolderError,
    make_private_folder,
    server_folder,
    server_folders,
    servers_folder,
)

ADDRESS = Address(port=1, token="secret", pid=2, cores=3, master="local[3]", python="python", cwd="/", started=4.0)
_processes = multiprocessing.get_context("forkserver")


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    made = ServerFolder(tmp_path / "server")
    made.create()
    return made


def test_the_address_is_for_this_user_only_and_its_token_is_shown_nowhere(server: ServerFolder) -> None:
    server.publish(ADDRESS)
    assert server.address() == ADDRESS
    assert [stat.S_IMODE(path.stat().st_mode) for path in (server.path, server.path / "address.json")] == [0o700, 0o600]
    assert "secret" not in f"{ADDRESS} {ADDRESS!r}"
    server.request_end()
    assert server.address() is None


def test_the_name_of_a_server_tells_those_who_see_it_nothing_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_ASSETS_SPARK_SERVERS", str(tmp_path / "first"))
    first = server_folder("key")
    assert server_folder("key") == first != server_folder("another")
    (salt,) = (tmp_path / "first").iterdir()
    assert stat.S_IMODE(salt.stat().st_mode) == 0o600
    assert server_folders() == []
    monkeypatch.setenv("STREAM_ASSETS_SPARK_SERVERS", str(tmp_path / "second"))
    assert server_folder("key").path.name != first.path.name, "it depends on the salt"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"port": 1}', "null"])
def test_an_address_that_cannot_be_read_is_none(server: ServerFolder, text: str) -> None:
    (server.path / "address.json").write_text(text)
    assert server.address() is None


def test_a_folder_that_somebody_else_planted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "planted"
    planted.symlink_to(tmp_path)
    with pytest.raises(UnusableFolderError):
        make_private_folder(planted)
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o755)
    make_private_folder(mine)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "getuid", lambda: mine.stat().st_uid + 1)
    with pytest.raises(UnusableFolderError):
        make_private_folder(mine)


def test_no_other_user_can_replace_the_folder_of_the_servers_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STREAM_ASSETS_SPARK_SERVERS", raising=False)
    monkeypatch.setenv("STREAM_ASSETS_CACHE", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        made = servers_folder()
    finally:
        os.umask(before)
    above = [made.parent, tmp_path / "new" / "cache", tmp_path / "new"]
    assert [stat.S_IMODE(folder.stat().st_mode) & 0o022 for folder in above] == [0, 0, 0]
    made.parent.chmod(0o775)
    servers_folder()
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700, "an older release made it"
    (tmp_path / "new").chmod(0o777)
    with pytest.raises(UnusableFolderError):
        servers_folder()
    monkeypatch.setenv("STREAM_ASSETS_SPARK_SERVERS", str(tmp_path / "new" / "servers"))
    with pytest.raises(UnusableFolderError):
        servers_folder()


def test_a_place_where_no_worker_could_be_executed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
    with pytest.raises(UnusableFolderError):
        make_private_folder(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_place_without_locks_is_told(server: ServerFolder, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def unsupported(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("spark_jobs.spark_server.folder.fcntl.flock", unsupported)
    with pytest.raises(UnusableFolderError), server.start_lock():
        pass
    with pytest.raises(UnusableFolderError), server.alive_lock():
        pass
    with pytest.raises(UnusableFolderError):
        server.register_client("a-session")


def test_a_container_has_servers_of_its_own_whatever_its_host_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process number, and the loopback interface, mean something else in another one."""
    monkeypatch.delenv("STREAM_ASSETS_SPARK_SERVERS", raising=False)
    monkeypatch.setenv("STREAM_ASSETS_CACHE", str(tmp_path))
    namespaces = tmp_path / "ns"
    namespaces.mkdir()
    monkeypatch.setattr("spark_jobs.spark_server.folder._NAMESPACES", namespaces)
    assert servers_folder() == servers_folder()
    places = {servers_folder()}
    for number, namespace in enumerate(("mnt", "net", "pid")):
        (namespaces / namespace).touch()
        places.add(servers_folder())
        assert len(places) == 2 + number


def test_a_server_lives_as_long_as_one_process_has_its_descriptor(server: ServerFolder) -> None:
    assert not server.is_alive()
    with server.alive_lock() as life:
        # It inherits the descriptor, and outlives who started it.
        words = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        child = subprocess.Popen(words, pass_fds=[life], stdin=subprocess.PIPE)
    assert server.is_alive()
    child.kill()
    child.communicate()
    assert not server.is_alive()


def test_who_looks_whether_a_server_lives_hides_nothing_from_others_and_who_starts_one_waits(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = server.path / "alive"
    alive.write_text("12345")
    lock, locked = fcntl.flock, threading.Event()
    numbers: list[str] = []

    def locking(descriptor: int, kind: int) -> None:
        locked.set()
        lock(descriptor, kind)

    def live() -> None:
        with server.alive_lock():
            numbers.append(alive.read_text())

    with alive.open() as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        assert not server.is_alive(), "somebody else only looks"
        monkeypatch.setattr("spark_jobs.spark_server.folder.fcntl.flock", locking)
        thread = threading.Thread(target=live)
        thread.start()
        assert locked.wait(60)
        assert server.process() == 12345
    thread.join(60)
    assert numbers == [""], "the number of a server that is dead may be that of another process"


def test_a_client_that_is_killed_is_forgotten_once(server: ServerFolder) -> None:
    started = _processes.Event()
    child = _processes.Process(target=_connect, args=(server, started))
    child.start()
    assert started.wait(60)
    own = server.register_client("own")
    assert server.connected_sessions() == ["own", "theirs"]
    assert server.remove_ended_clients() == []
    child.kill()
    child.join()
    assert server.connected_sessions() == ["own"]
    assert server.remove_ended_clients() == ["theirs"]
    assert server.remove_ended_clients() == []
    server.unregister_client(own)
    assert server.remove_ended_clients() == ["own"]


def _connect(server: ServerFolder, started: Event) -> None:
    server.register_client("theirs")
    started.set()
    signal.pause()


def test_a_client_that_the_server_took_for_gone_connects_anew(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server looked between the making of the file and its lock."""
    made = os.open
    taken: list[str] = []

    def opened(path: Path, flags: int, mode: int) -> int:
        descriptor = made(path, flags, mode)
        if not taken:
            taken.extend(server.remove_ended_clients())
        return descriptor

    monkeypatch.setattr("spark_jobs.spark_server.folder.os.open", opened)
    descriptor = server.register_client("late")
    monkeypatch.undo()
    assert taken == ["late"]
    assert os.fstat(descriptor).st_ino == (server.clients / "late").stat().st_ino
    os.close(descriptor)
