"""Safe access to own files and folders: nothing else at their paths can block or redirect it.

    read_given         a file that the user names, of bounded size
    read, read_end     only a regular file: a FIFO, a device or a folder is an OSError at once
    append, replace    never through a symbolic link; `replace` is atomic
    remove             anything; of a link only the link
    make_folder        a folder, replacing anything else
    Descriptor         one that stays open, and whether its number still belongs to it

An experiment may do anything to its folder, and a folder may be untrusted.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path


def open_plain(path: Path, flags: int) -> int:
    """A descriptor of a regular file, without blocking; a readable OSError for anything else."""
    try:
        file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO without a reader, a socket
            raise _not_plain("a FIFO or a socket", path) from None
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW and os.path.lexists(path):
            raise _not_plain("a symbolic link", path) from None
        raise
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise _not_plain("a FIFO" if stat.S_ISFIFO(mode) else "a device", path)


_HIGH = 1000


class Descriptor:
    """An open descriptor of ours.

    A program may close all descriptors, as daemons do, and then open others, which get the same numbers: what
    is written to such a number, or closes it, changes a file of the program.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._file = _file_of(number)

    @classmethod
    def high(cls, number: int) -> Descriptor:
        """The same file under a high number, where the limit of open files allows it; `number` is closed.

        A program that has closed its standard streams opens others in their place, which get the lowest
        numbers: ours there would receive what it prints.
        """
        try:
            import fcntl

            high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        except (ImportError, OSError):
            return cls(number)
        os.close(number)
        return cls(high)

    @property
    def is_ours(self) -> bool:
        """Whether the number still belongs to the file it was opened for."""
        return self._file is not None and _file_of(self.number) == self._file

    def close(self) -> None:
        """Close it, unless the program has done so."""
        if self.is_ours:
            os.close(self.number)
        self._file = None


def _file_of(number: int) -> tuple[int, int] | None:
    """Device and inode behind a descriptor; None if it is closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _not_plain(what: str, path: Path) -> OSError:
    return OSError(errno.EINVAL, f"{what}, not a file", str(path))


def read(path: Path) -> bytes:
    """All of a regular file."""
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read()


def read_given(path: Path, most: int = 256 << 20) -> bytes:
    """All of a file that the user names, also a pipe; an OSError if it is too large."""
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def read_end(path: Path, most: int) -> tuple[bytes, int]:
    """The last `most` bytes of a regular file, and its size."""
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - most, 0))
        return file.read(most), size


def append(path: Path, data: bytes) -> None:
    """Append to a file at once; it is created if missing."""
    file = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    try:
        write_all(file, data)
    finally:
        os.close(file)


def replace(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write under a temporary name and rename it: a reader never sees an incomplete file.

    `durable`: its content is on the disk, or the file server, before it gets its name.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        remove(temporary)
        file = open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            write_all(file, data)
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except OSError:
        remove(temporary)
        raise


def write_all(file: int, data: bytes) -> None:
    """Write every byte, or raise the OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def remove(path: Path) -> None:
    """Remove anything at this path; the target of a link stays."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def what_is_there(path: Path) -> str | None:
    """What is at this path instead of a regular file, as text; None for a file or nothing."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO"}
    return kinds.get(stat.S_IFMT(mode), "a device or a socket")


def is_folder(path: Path) -> bool:
    """Whether this is a folder itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def make_folder(path: Path) -> bool:
    """Create a folder unless it exists, replacing anything else; whether it was created."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if is_folder(path):
            return False
        path.unlink(missing_ok=True)  # never a folder, which another thread may have created
        path.mkdir(exist_ok=True)
    return True


def names_in(folder: Path, suffix: str) -> list[str]:
    """The names with this suffix in a folder, sorted and without the suffix; none without a folder."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return []
    return sorted(entry.removesuffix(suffix) for entry in entries if entry.endswith(suffix))


def is_name(text: str) -> bool:
    """Whether this is a valid name for a file in a folder, and not a path."""
    return (
        text not in ("", ".", "..")
        and text.isprintable()
        and not {"/", "\\"} & set(text)
        and len(os.fsencode(text)) <= _LONGEST_NAME
    )


_LONGEST_NAME = 255 - len(".pt.trace.json.gz")
"""The longest suffix of a name; file systems allow 255 bytes."""
