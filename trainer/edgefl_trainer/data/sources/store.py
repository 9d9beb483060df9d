"""Read files of a folder or a zip, by relative name and never outside it.

Guarantees: a name with `..`, a drive, a leading slash, a backslash or a NUL is refused before anything is opened; a
link that leaves the folder is refused, and so is a link in the place of a folder; no read is larger than
`MAX_FILE_BYTES`, nor is what it unpacks to while it is read; nothing is ever extracted to disk.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from edgefl_protocol.pictures.imaging import MAX_FILE_BYTES
from edgefl_protocol.sentences import listed
from edgefl_trainer.data.errors import DataError

MAX_TABLE_BYTES = 200_000_000  # one CSV
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
TABLE_SUFFIXES = (".csv", ".json")
OTHER_SUFFIXES = (  # pictures in forms that no run reads
    ".tif", ".tiff", ".gif", ".bmp", ".webp", ".avif", ".heic", ".heif", ".jp2", ".jpe", ".jfif", ".dcm", ".dng",
)  # fmt: skip
_BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # of other forms `zipfile` unpacks all that it is given at once


class FileStore(Protocol):
    """Files by relative name."""

    name: str

    def names(self) -> Sequence[str]:
        """List all file names, relative, with `/`, in name order.

        A `DataError` where one, of no hidden folder, is a link to a folder, or a link to nothing that may have been a
        folder, a picture or a table: what lies there would be left out in silence.
        """
        ...

    def top_folders(self) -> Sequence[str]:
        """Return names of the outermost folders, empty ones too, in name order; without hidden ones."""
        ...

    def has(self, name: str) -> bool:
        """Tell whether a file of this name is there; cheaper than `names` where a set has many files.

        A `DataError` where the name leaves the store.
        """
        ...

    def read(self, name: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Read the bytes of one file.

        Raises:
            DataError: The name leaves the store, no such file is there, or it is larger than `max_bytes`.
        """
        ...

    def identity(self, names: Sequence[str]) -> str:
        """Digest that changes when one of these files changes."""
        ...


def open_store(path: Path) -> FileStore:
    """Open a folder or a zip file; a `DataError` where neither is there."""
    if path.is_dir():
        return FolderStore(path)
    if path.is_file():
        return ZipStore(path)
    raise DataError(f"No folder or zip file at {path}; check the path in the data SPEC.")


def is_image_name(name: str, suffixes: Sequence[str] = IMAGE_SUFFIXES) -> bool:
    """Tell whether a file name ends like an image we read, or as given, and neither it nor a folder above is hidden."""
    pure = PurePosixPath(name)
    return pure.suffix.lower() in suffixes and not pure.name.startswith(".") and not is_hidden(str(pure.parent))


def _may_be_read(name: str) -> bool:
    """Tell whether a link to nothing may stand for what a run reads: a folder has no ending, or one with a space."""
    ending = PurePosixPath(name).suffix.lower()
    return ending in (*IMAGE_SUFFIXES, *TABLE_SUFFIXES) or not ending[1:].isalnum()


def is_hidden(name: str) -> bool:
    """Tell whether a folder, or one above a file, is the system's rather than a person's."""
    return any(part.startswith((".", "@")) or part == "__MACOSX" for part in PurePosixPath(name).parts)


def pictures_by_name(store: FileStore, called: Callable[[str], str], folder: str) -> Callable[[str], str | None]:
    """Return what finds the picture file of a data set by the name that its lists call it, None where it is not there.

    Of several with one name it is the one below a folder called `folder`, where the official files lie: beside it there
    may be copies of another size or colour. A `DataError` where that leaves none, or more than one, of a name that is
    looked for: files that no list names are nobody's concern.
    """
    found: dict[str, list[str]] = {}
    for name in filter(is_image_name, store.names()):
        found.setdefault(called(name), []).append(name)

    def find(key: str) -> str | None:
        files = found.get(key, ())
        return _official(store, key, files, folder) if len(files) > 1 else next(iter(files), None)

    return find


def _official(store: FileStore, key: str, files: Sequence[str], folder: str) -> str:
    official = [file for file in files if folder in PurePosixPath(file).parts]
    if len(official) != 1:
        raise DataError(
            f"{store.name} holds {len(files)} pictures called {key}: {listed(files)}; keep one, in the folder {folder}."
        )
    return official[0]


def check_relative(name: str, where: str) -> None:
    """Refuse, by a `DataError`, a name that could point outside its folder or zip."""
    pure = PurePosixPath(name)
    bad = not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or ":" in name
    if bad:
        raise DataError(f"{where} names the file {name!r}, which may lie outside it; use a plain relative path with /.")


class FolderStore:
    """The files of one folder."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root.resolve()

    def names(self) -> list[str]:
        """List all file names (see `FileStore.names`)."""
        found = []
        for path in self._root.rglob("*"):  # it looks into no folder behind a link
            name = path.relative_to(self._root).as_posix()
            if path.is_file():
                found.append(name)
            elif path.is_symlink() and not is_hidden(name) and (path.is_dir() or _may_be_read(path.name)):
                leads = "a folder: put the folder" if path.is_dir() else "nothing: put the file"
                raise DataError(f"{name} in {self.name} is a link to {leads} itself there, or remove the link.")
        return sorted(found)

    def top_folders(self) -> list[str]:
        """Return names of the outermost folders (see `FileStore.top_folders`)."""
        return sorted(p.name for p in self._root.iterdir() if p.is_dir() and not is_hidden(p.name))

    def has(self, name: str) -> bool:
        """Tell whether a file of this name is there (see `FileStore.has`)."""
        return self._path(name).is_file()

    def read(self, name: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Read the bytes of one file (see `FileStore.read`)."""
        path = self._path(name)
        try:
            with path.open("rb") as stream:
                data = stream.read(max_bytes + 1)
        except OSError as error:
            raise DataError(f"{name} in {self.name} cannot be read: {error.strerror}.") from error
        if len(data) > max_bytes:
            raise DataError(f"{name} in {self.name} is larger than the {max_bytes} bytes allowed.")
        return data

    def identity(self, names: Sequence[str]) -> str:
        """Digest over names, sizes and modification times: reading every picture again would cost what it saves."""
        digest = hashlib.sha256(str(self._root).encode())
        for name in names:
            try:
                stat = self._path(name).stat()
            except OSError as error:
                raise DataError(f"{name} is not in {self.name}: {error.strerror}.") from error
            digest.update(f"\0{name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
        return digest.hexdigest()

    def _path(self, name: str) -> Path:
        check_relative(name, self.name)
        path = (self._root / name).resolve()
        if not path.is_relative_to(self._root):
            raise DataError(f"{name} in {self.name} is a link that leaves the folder; copy the file into it.")
        return path


class ZipStore:
    """The members of one zip file, read in place."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:
            raise DataError(f"{path} is not a readable zip file{_why(error)}.") from error
        self._members = {info.filename: info for info in self._zip.infolist() if not info.is_dir()}

    def names(self) -> list[str]:
        """List all file names, relative, with `/`, in name order."""
        return sorted(self._members)

    def top_folders(self) -> list[str]:
        """Return names of the outermost folders (see `FileStore.top_folders`); empty ones where the zip lists them."""
        outermost = {name.partition("/")[0] for name in self._zip.namelist() if "/" in name}
        return sorted(name for name in outermost if not is_hidden(name))

    def has(self, name: str) -> bool:
        """Tell whether a member of this name is there (see `FileStore.has`)."""
        check_relative(name, self.name)
        return name in self._members

    def read(self, name: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Read the bytes of one member (see `FileStore.read`); the bound holds for the unpacked size."""
        info = self._info(name)
        if info.file_size > max_bytes:
            raise DataError(f"{name} in {self.name} unpacks to more than the {max_bytes} bytes allowed.")
        if info.compress_type not in _BOUNDED:
            raise DataError(
                f"{name} in {self.name} is compressed by method {info.compress_type}, which is not read "
                "because it may take any amount of memory; make the zip with the usual method, deflate."
            )
        try:
            with self._zip.open(info) as stream:
                data = stream.read(max_bytes + 1)
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError) as error:
            raise DataError(f"{name} in {self.name} cannot be unpacked: {error}.") from error
        if len(data) > max_bytes:
            raise DataError(f"{name} in {self.name} unpacks to more than the {max_bytes} bytes allowed.")
        return data

    def identity(self, names: Sequence[str]) -> str:
        """Digest over names, sizes and CRC-32 of the members, which the zip's directory states without unpacking."""
        digest = hashlib.sha256(b"zip")
        for name in names:
            info = self._info(name)
            digest.update(f"\0{name}\0{info.file_size}\0{info.CRC}".encode())
        return digest.hexdigest()

    def _info(self, name: str) -> zipfile.ZipInfo:
        check_relative(name, self.name)
        if name not in self._members:
            raise DataError(f"{name} is not in {self.name}; the list of pictures names a file that is missing.")
        return self._members[name]


def _why(error: Exception) -> str:
    """Say what `zipfile` found, unless that is what the sentence says already."""
    return "" if str(error) == "File is not a zip file" else f": {error}"
