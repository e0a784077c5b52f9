"""Protects the local folders that this project makes beside a table: its dead letters, and the staging of a rebuild.

In a folder that several users share, another user could make such a folder first, and read what is written there.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress

from spark_jobs.table_location import LOCAL, absolute_location, scheme
from stream_consumers.errors import UntrustedFileError

_ROOT = 0
_ACLS = ("system.posix_acl_access", "system.posix_acl_default", "system.nfs4_acl")
"""The extended attributes in which Linux keeps the access control lists of a folder."""


def create_folder(folder: str, *, table: str) -> None:
    """Create a local folder with the access that the table's folder gives, and :func:`check_folder` an existing one.

    If the table is a link to a folder elsewhere, the folders above that one limit access as well, so that the new
    folder is private. An existing folder keeps its access, which its owner may have chosen. If this process cannot
    create the folder, Spark does, which may run as another user.

    Args:
        folder: the folder.
        table: the table beside it.

    Raises:
        UntrustedFileError: see :func:`check_folder`.
    """
    path, of_table = absolute_location(folder), absolute_location(table)
    if scheme(table) == LOCAL and os.access(of_table, os.W_OK):
        with suppress(OSError):
            os.mkdir(path, stat.S_IRWXU)
            opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # Who can write the folder above may have put another folder into the place of the new one.
                if not os.listdir(opened) and _parent(path) == _parent(os.path.realpath(of_table)):
                    _give_access(opened, of_table)
            finally:
                os.close(opened)
    check_folder(folder, table=table)


def check_folder(folder: str, *, table: str) -> None:
    """Check that a local folder, if it exists, belongs to this user, to root or to the owner of the table.

    Args:
        folder: the folder.
        table: the table beside it.

    Raises:
        UntrustedFileError: another user made it, and could read or change what is in it; or it is a link.
    """
    if scheme(table) != LOCAL:
        return
    try:
        found = os.lstat(absolute_location(folder))
    except OSError:
        return
    trusted = {os.geteuid(), _ROOT}
    with suppress(OSError):
        trusted.add(os.stat(absolute_location(table)).st_uid)
    is_folder = stat.S_ISDIR(found.st_mode)
    if is_folder and found.st_uid in trusted:
        return
    of_user = f"belongs to the user {found.st_uid}, who could read and change what is written there"
    raise UntrustedFileError(
        f"{folder} {of_user if is_folder else 'is a link or a file, and not a folder'}",
        remedy=f"If you trust what is in it, make it a folder of the owner of {table} (chown -R); otherwise delete it.",
    )


def _parent(path: str) -> str:
    return os.path.realpath(os.path.dirname(path))


def _give_access(folder: int, table: str) -> None:
    """Give an open folder the group, the mode and the access control lists of a table's."""
    own = os.stat(table)
    mode = stat.S_IMODE(own.st_mode)
    try:
        if os.fstat(folder).st_gid != own.st_gid:
            # Only members of a group can give it.
            os.fchown(folder, -1, own.st_gid)
        _copy_acls(table, folder)
    except OSError:
        # The mode alone could give access to users who cannot read the table.
        mode &= stat.S_IRWXU
    if stat.S_IMODE(os.fstat(folder).st_mode) != mode:
        os.fchmod(folder, mode)


def _copy_acls(table: str, folder: int) -> None:
    """Copy the lists of a table, and remove those that the folder inherited."""
    # Elsewhere, the bits of the group in the mode are those of the group, and not of all users in a list.
    if sys.platform == "linux":
        for name in _ACLS:
            if (acl := _acl(table, name)) is not None:
                os.setxattr(folder, name, acl)
            elif _acl(folder, name) is not None:
                os.removexattr(folder, name)


def _acl(path: str | int, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise
