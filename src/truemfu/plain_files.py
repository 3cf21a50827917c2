"""Files and folders of our own, opened so that nothing in their place can block us or lead us elsewhere.

    read_given         a file that the user names, of bounded size
    read, read_end     a regular file alone: a FIFO, a device or a folder is an OSError at once
    append, replace    never through a symbolic link; `replace` is whole or not there at all
    remove             what is there, whatever it is; of a link the link alone
    make_folder        a folder of ours in the place of anything else

An experiment may do anything to the folder it runs in, and a folder may come from anywhere.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path


def open_plain(path: Path, flags: int) -> int:
    """A descriptor of a regular file, without waiting for anyone; an OSError in words for anything else."""
    try:
        file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO nobody reads, a socket
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


def _not_plain(what: str, path: Path) -> OSError:
    return OSError(errno.EINVAL, f"{what}, not a file", str(path))


def read(path: Path) -> bytes:
    """All of a regular file."""
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read()


def read_given(path: Path, most: int = 256 << 20) -> bytes:
    """All of a file that the user names, a pipe included; an OSError where it has no end."""
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def read_end(path: Path, most: int) -> tuple[bytes, int]:
    """The last bytes of a regular file, at most so many, and its size."""
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - most, 0))
        return file.read(most), size


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file, at once; it is made where it is missing."""
    file = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    try:
        write_all(file, data)
    finally:
        os.close(file)


def replace(path: Path, data: bytes) -> None:
    """Write under a temporary name and rename it: a reader never sees half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        remove(temporary)
        file = open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            write_all(file, data)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except OSError:
        remove(temporary)
        raise


def write_all(file: int, data: bytes) -> None:
    """Every byte, or the OSError that kept some from being written."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def remove(path: Path) -> None:
    """Remove what is there, if anything; what a link points to stays."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def what_is_there(path: Path) -> str | None:
    """What is at this path instead of a regular file, in words; None for a file, and where nothing is."""
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
    """Make a folder here unless there is one, in the place of anything else; whether it had to be made."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if is_folder(path):
            return False
        path.unlink(missing_ok=True)  # never a folder, which another thread may have made meanwhile
        path.mkdir(exist_ok=True)
    return True


def names_in(folder: Path, suffix: str) -> list[str]:
    """The names in a folder that end like this, sorted and without that end; none where there is none."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return []
    return sorted(entry.removesuffix(suffix) for entry in entries if entry.endswith(suffix))


def is_name(text: str) -> bool:
    """Whether this can name a file of ours in a folder, and leads out of none."""
    return (
        text not in ("", ".", "..")
        and text.isprintable()
        and not {"/", "\\"} & set(text)
        and len(os.fsencode(text)) <= _LONGEST_NAME
    )


_LONGEST_NAME = 255 - len(".pt.trace.json.gz")
"""The longest end a name of ours gets; file systems take 255 bytes."""
