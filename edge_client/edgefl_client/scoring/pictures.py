"""From the bytes of a file to pixels, whatever kind of picture it is; the file's name is never asked.

JPEG and PNG are decoded here by `edgefl_protocol.pictures.imaging`, as in training. TIFF, and HEIC and DICOM where
their extra is installed, are read only where they are named, in a second process (`decoders`) that is started for the
first such picture and kept; it is killed when a picture takes longer than 30 s, and started anew after anything but a
plain answer, so that the answer to one picture is never taken for another's. It looks for its modules where this
process does, and reads neither the environment nor the folder it starts in. Only pixels come back.
"""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.distribution import needs_extra
from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures.imaging import MAX_FILE_BYTES, MAX_PIXELS, REDUCE, DecodedPicture, flattened, open_photo
from edgefl_protocol.sentences import joined_by_and

Pixels = NDArray[np.uint8]  # (H, W, 3), RGB

FORMATS: Final = ("jpeg", "png", "tiff", "heic", "dicom")
DEFAULT_FORMATS: Final = ("jpeg", "png")  # the readers of the others are larger targets: read where they are named
MODULE_OF: Final = {"heic": "pillow_heif", "dicom": "pydicom"}  # what the extra of that name installs
SUFFIXES: Final = {
    "jpeg": (".jpg", ".jpeg", ".jpe", ".jfif"), "png": (".png",), "tiff": (".tif", ".tiff"), "heic": (".heic", ".heif"),
    "dicom": (".dcm",),
}  # fmt: skip
NEVER_READ: Final = (".gif", ".webp", ".bmp", ".avif", ".jp2", ".psd", ".dng", ".nef", ".cr2", ".cr3", ".arw")
TIMEOUT_S: Final = 30.0  # of one picture in the second process

# -I alone finds no module that lies in a user's own folder or where PYTHONPATH points.
_START: Final = (
    "import runpy, sys; "
    "sys.path += [path for path in sys.argv[1:] if path not in sys.path]; "
    "runpy.run_module('edgefl_client.scoring.decoders', run_name='__main__')"
)

_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"mif1")


def kind_of(data: bytes) -> str | None:
    """Name the format that the content starts like; None for none of `FORMATS`."""
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith((b"II*\x00", b"MM\x00*")):
        return "tiff"
    if data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS:
        return "heic"
    return "dicom" if data[128:132] == b"DICM" else None


def name_of(data: bytes) -> str | None:
    """Name the kind of picture that the content starts like, for a person, also one that is never read."""
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    if data.startswith(b"BM") and data[6:10] == bytes(4):
        return "BMP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    kind = kind_of(data)
    return None if kind is None else kind.upper()


class PictureReader:
    """Decodes the pictures of one run; a context manager, because a process may stand behind it.

    Args:
        formats: names of `FORMATS` that are read; any other file is refused.
    """

    def __init__(self, formats: Sequence[str] = DEFAULT_FORMATS) -> None:
        self._formats = tuple(name for name in FORMATS if name in formats)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "PictureReader":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Endings of the names that a folder's pictures have, in lower case."""
        return tuple(suffix for name in self._formats for suffix in SUFFIXES[name])

    @property
    def other_suffixes(self) -> tuple[str, ...]:
        """Endings of pictures of the kinds that are not read."""
        others = (suffix for name in FORMATS if name not in self._formats for suffix in SUFFIXES[name])
        return (*others, *NEVER_READ)

    def told_of_others(self, endings: Sequence[str]) -> str:
        """Say that files of these endings are not read, and what reads them; whoever named other kinds has chosen."""
        counts = ", ".join(f"{endings.count(one)} {one}" for one in sorted(set(endings)))
        chosen = "" if self._formats == DEFAULT_FORMATS else f" with --formats {','.join(self._formats)}"
        told = f"Left out, because files of these kinds are not read{chosen}: {counts}."
        kinds = [name for name, suffixes in SUFFIXES.items() if not set(suffixes).isdisjoint(endings)]
        if chosen or not kinds:
            return told
        named = joined_by_and([name.upper() for name in kinds])
        return f"{told} To read {named} too, give --formats {self._with_kinds(kinds)}"

    def _with_kinds(self, kinds: Collection[str]) -> str:
        """The whole value of `--formats` that reads these kinds, too."""
        return ",".join(name for name in FORMATS if name in self._formats or name in kinds)

    def decode(self, data: bytes) -> DecodedPicture:
        """Decode a file.

        Raises:
            ImageError: the file is refused; `missing_extra` where only an extra could read it.
        """
        kind = kind_of(data)
        if not data:
            raise ImageError("the file is empty; copy it again", code="empty")
        if kind not in self._formats:
            allowed = joined_by_and([name.upper() for name in self._formats])
            name = name_of(data)
            found = "of an unknown kind" if name is None else f"a {name}"
            advice = "convert it" if kind is None else f"convert it, or give --formats {self._with_kinds([kind])}"
            raise ImageError(
                f"this file is {found} by its content; only {allowed} can be read: {advice}",
                code="unsupported_format",
            )
        if kind in ("jpeg", "png"):
            return flattened(open_photo(data))
        if kind in MODULE_OF and find_spec(MODULE_OF[kind]) is None:
            raise ImageError(
                f"the file is a {kind.upper()}, which needs {needs_extra(kind)}",
                code="missing_extra",
            )
        if len(data) > MAX_FILE_BYTES:
            raise ImageError(
                f"the file has {len(data):,} bytes; at most {MAX_FILE_BYTES:,} are allowed: {REDUCE}", code="too_large"
            )
        return self._ask(kind, data)

    def close(self) -> None:
        """End the second process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, kind: str, data: bytes) -> DecodedPicture:
        process, answered = self._started(), False
        timer = threading.Timer(TIMEOUT_S, process.kill)
        timer.start()
        try:
            decoded = _exchange(process, kind, data)
            answered = True
            return decoded
        except ImageError:  # an answer, too
            answered = True
            raise
        except (BrokenPipeError, EOFError) as error:
            timed_out = not timer.is_alive()
            why = f"could not be read within {TIMEOUT_S:.0f} s" if timed_out else "could not be read"
            raise ImageError(f"the {kind.upper()} {why}; convert it to JPEG or PNG", code="unreadable") from error
        finally:
            timer.cancel()
            if not answered:  # also after Ctrl-C or a lack of memory here: half an answer may still be in the pipe
                self.close()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and paths it imports from already
                [sys.executable, "-I", "-c", _START, *(path for path in sys.path if Path(path).is_absolute())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=tempfile.gettempdir(),
                env={"OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C ends the run, which then ends this process
            )
        return self._process


def _exchange(process: "subprocess.Popen[bytes]", kind: str, data: bytes) -> DecodedPicture:
    """Send one file and take its pixels, or the reason why there are none."""
    from edgefl_client.scoring.decoders import ANSWER, PIXELS, REFUSED, REQUEST

    if process.stdin is None or process.stdout is None:  # both are pipes: never, but the type allows it
        raise EOFError("no pipe")
    process.stdin.write(REQUEST.pack(kind.encode(), len(data)))
    process.stdin.write(data)
    process.stdin.flush()
    found, first, second, white = ANSWER.unpack(_exactly(process.stdout, ANSWER.size))
    if found == PIXELS and 0 < first * second <= MAX_PIXELS and 0 <= white <= 1:
        pixels = np.frombuffer(_exactly(process.stdout, first * second * 3), dtype=np.uint8)
        return DecodedPicture(pixels.reshape(first, second, 3), white)
    if found != REFUSED or first + second > 10_000:
        raise EOFError("the answer of the second process cannot be understood")
    code, sentence = _exactly(process.stdout, first), _exactly(process.stdout, second)
    raise ImageError(sentence.decode("utf-8", "replace"), code=code.decode("ascii", "replace"))


def _exactly(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) != length:
        raise EOFError("the second process ended")
    return data
