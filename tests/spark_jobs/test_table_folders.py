"""The folders that the project makes beside a table: whose they may be, and the access that they give."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark.sql import DataFrame

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.rebuild import check_staging, staging_of
from spark_jobs.table_folders import check_folder, create_folder
from stream_consumers.errors import UntrustedFileError

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
ANOTHER_USER = 1234
OF_OWNER, OF_USER, OF_GROUP, MASK, OF_OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
NOBODY = 0xFFFFFFFF


def acl(*entries: tuple[int, int, int]) -> bytes:
    """An access control list in the format of the kernel."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def sharing(group: int) -> bytes:
    """A list that lets another user read, and gives the group these permissions; the mode then is 0750."""
    own, other = (OF_OWNER, 7, NOBODY), (OF_OTHERS, 0, NOBODY)
    return acl(own, (OF_USER, 5, ANOTHER_USER), (OF_GROUP, group, NOBODY), (MASK, 5, NOBODY), other)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    made = tmp_path / "t"
    made.mkdir(0o750)
    return made


@pytest.fixture
def shared(table: Path) -> Path:
    """A table that a list shares with one user, and not with its group."""
    try:
        os.setxattr(table, ACCESS, sharing(group=0))
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip("this file system has no access control lists")
    assert mode(table) == 0o750
    return table


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def created(table: Path) -> Path:
    folder = table.with_name("t_made")
    create_folder(str(folder), table=str(table))
    return folder


@pytest.mark.parametrize("given", [0o700, 0o2750, 0o777])
def test_a_new_folder_has_the_mode_of_the_table_and_keeps_what_it_is_given_later(table: Path, given: int) -> None:
    table.chmod(given)
    assert mode(created(table)) == given
    created(table).chmod(0o710)
    assert mode(created(table)) == 0o710


def test_a_folder_that_another_user_puts_in_place_of_the_new_one_keeps_its_access(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = table.with_name("payroll")
    private.mkdir(0o700)
    (private / "secret").touch()
    make = os.mkdir

    def exchanged(path: str, access: int) -> None:
        make(path, access)
        os.rename(path, f"{path}_away")
        os.rename(private, path)

    monkeypatch.setattr(os, "mkdir", exchanged)
    assert mode(created(table)) == 0o700


def test_a_new_folder_is_private_if_the_table_is_a_link_to_a_folder_elsewhere(tmp_path: Path) -> None:
    elsewhere, table = tmp_path / "secure" / "t", tmp_path / "t"
    elsewhere.mkdir(parents=True)
    elsewhere.chmod(0o755)
    elsewhere.parent.chmod(0o700)
    table.symlink_to(elsewhere)
    assert mode(created(table)) == 0o700


def test_a_new_folder_has_the_mode_of_a_table_that_is_a_link_to_a_folder_beside_it(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir(0o750)
    (tmp_path / "t").symlink_to(tmp_path / "versions")
    assert mode(created(tmp_path / "t")) == 0o750


def test_a_new_folder_has_the_group_of_the_table_or_is_private(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = os.stat(table).st_gid + 1
    found = os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 0, os.getuid(), group, *[0] * 4))
    given: list[int] = []
    monkeypatch.setattr(os, "fchown", lambda folder, user, group: given.append(group))
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda path: found)
        folder = created(table)
    assert (given, mode(folder)) == ([group], 0o755)
    folder.rmdir()

    def refuse(folder: int, user: int, group: int) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda path: found)
        patched.setattr(os, "fchown", refuse)
        folder = created(table)
    assert mode(folder) == 0o700


def test_a_new_folder_has_the_access_control_lists_of_the_table(shared: Path) -> None:
    os.setxattr(shared, DEFAULT, sharing(group=0))
    folder = created(shared)
    assert [os.getxattr(folder, name) for name in (ACCESS, DEFAULT)] == [sharing(group=0)] * 2
    assert mode(folder) == 0o750


def test_a_new_folder_inherits_no_access_that_the_table_does_not_give(shared: Path) -> None:
    os.setxattr(shared.parent, DEFAULT, sharing(group=5))
    os.removexattr(shared, ACCESS)
    shared.chmod(0o750)
    folder = created(shared)
    assert mode(folder) == 0o750
    assert not {ACCESS, DEFAULT} & set(os.listxattr(folder))


def test_a_new_folder_whose_lists_cannot_be_set_is_private(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: int, name: str, value: bytes) -> None:
        raise OSError(errno.ENOTSUP, "no lists here")

    monkeypatch.setattr(os, "setxattr", refuse)
    assert mode(created(shared)) == 0o700


def of_another_user(folder: Path, patched: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    user = os.getuid() + ANOTHER_USER
    patched.setattr(os, "lstat", lambda path: SimpleNamespace(st_mode=stat.S_IFDIR | 0o777, st_uid=user))


def a_link(folder: Path, patched: pytest.MonkeyPatch) -> None:
    folder.symlink_to(folder.parent / "t")


def a_link_to_nothing(folder: Path, patched: pytest.MonkeyPatch) -> None:
    folder.symlink_to(folder.parent / "nothing")


def a_file(folder: Path, patched: pytest.MonkeyPatch) -> None:
    folder.touch()


@pytest.mark.parametrize("make", [of_another_user, a_link, a_link_to_nothing, a_file])
def test_what_another_user_may_have_made_is_neither_written_nor_read(
    table: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    ingestion = Ingestion(group="g", table=str(table))
    staging, letters = staging_of(ingestion), ingestion.dead_letters()
    for folder, uses in {
        letters.path: (
            lambda: letters.append(cast("DataFrame", None), ledger=ingestion.ledger(), number=1, bid="b"),
            letters.log,
        ),
        staging.table: (lambda: check_staging(ingestion, staging),),
        staging.dead_letters().path: (lambda: check_staging(ingestion, staging),),
    }.items():
        with monkeypatch.context() as patched:
            make(Path(folder), patched)
            for use in uses:
                with pytest.raises(UntrustedFileError):
                    use()
        left = Path(folder)
        assert left.is_symlink() or left.is_file() or not list(left.iterdir())
        left.rmdir() if left.is_dir() and not left.is_symlink() else left.unlink()
    assert list(table.parent.iterdir()) == [table]


@pytest.mark.parametrize("owner", ["this user", "the owner of the table", "root"])
def test_a_folder_of_this_user_or_of_the_owner_of_the_table_is_used(
    table: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    folder, me = created(table), os.geteuid()
    user = {"this user": me + 1, "the owner of the table": me + 2, "root": 0}[owner]
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    monkeypatch.setattr(os, "stat", lambda path: SimpleNamespace(st_uid=me + 2))
    monkeypatch.setattr(os, "lstat", lambda path: SimpleNamespace(st_mode=stat.S_IFDIR | 0o700, st_uid=user))
    check_folder(str(folder), table=str(table))


def test_nothing_is_made_or_checked_on_another_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    create_folder("s3a://lake/t_made", table="s3a://lake/t")
    assert not list(tmp_path.iterdir())
