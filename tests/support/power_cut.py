"""A disk that loses what was not forced: ext4 on a loop device, of which images are taken while it is written."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SIZE_BYTES = 128 * 1024 * 1024
# Of its own accord ext4 writes nothing for longer than a test takes.
LAZY = "loop,noatime,commit=600"
_AS_ROOT = [] if os.geteuid() == 0 else ["sudo", "-n"]


class Disk:
    """A mounted disk.

    Args:
        image: the file behind its loop device.
        folder: where it is mounted.
    """

    def __init__(self, image: Path, folder: Path) -> None:
        self._image = image
        self.folder = folder

    @contextmanager
    def after_power_cut(self) -> Iterator[Path]:
        """The folder as it would be found after a power cut at this moment."""
        image = self._image.with_name("cut.img")
        shutil.copyfile(self._image, image)
        # ext4 replays its journal as it is mounted.
        with _mounted(image, self.folder.with_name("cut"), options="loop") as folder:
            yield folder
        image.unlink()


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """A new disk, mounted in a folder of the test, which may write there."""
    image = folder / "disk.img"
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    _run("mkfs.ext4", "-q", "-F", str(image))
    with _mounted(image, folder / "disk", options=LAZY) as mounted:
        _run(*_AS_ROOT, "chmod", "0777", str(mounted))
        # What a test makes is lost or not; the disk itself, and the right to write on it, are there.
        _run("sync", "--file-system", str(mounted))
        yield Disk(image, mounted)


@contextmanager
def _mounted(image: Path, folder: Path, *, options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    _run(*_AS_ROOT, "mount", "-t", "ext4", "-o", options, str(image), str(folder))
    try:
        yield folder
    finally:
        # A JVM may look at a file yet.
        _run(*_AS_ROOT, "umount", "--lazy", str(folder))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(
            "a power cut takes loop devices, mkfs.ext4 and the rights of root (or a sudo that asks for no password): "
            f"{' '.join(command)}: {done.stderr.strip()}"
        )
