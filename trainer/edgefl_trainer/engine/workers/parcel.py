"""What every worker of this machine is given once, with all that is large in memory that they share.

Guarantees: weights and arrays lie once in memory, however many workers there are, and the process that packs them uses
the same ones; pictures stay in their file, which each worker maps. A worker finds the values that were packed, bit for
bit, and where PyTorch would have put them: at a multiple of `ALIGNED` bytes.

Nothing that another machine or user wrote is opened here: a parcel goes from a process to its own children, in memory
that has no name. Large arrays stay apart as PEP 574 has it. Source: docs/reference/runs.md, workers.
"""

import mmap
from collections.abc import Sequence
from ctypes import c_ubyte
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNED = 64  # bytes
APART = 5  # the first form of pickling that leaves large arrays apart


@dataclass(frozen=True)
class Span:
    """Where an array lies in the block."""

    start: int
    end: int
    fixed: bool  # nobody may change it


@dataclass(frozen=True)
class Parcel:
    """Values, and their arrays apart: in one block of memory, which goes with the last process that has it."""

    words: bytes
    block: Any  # of ctypes
    places: Sequence[Span]

    def open(self) -> Any:
        """Make the values again; their arrays and tensors are those of the block."""
        return ForkingPickler.loads(self.words, buffers=[self.view(place) for place in self.places])

    def view(self, place: Span) -> memoryview:
        """Return the bytes of a place, which cannot be changed where it is fixed."""
        found = memoryview(self.block).cast("B")[place.start : place.end]
        return found.toreadonly() if place.fixed else found


def pack(values: object) -> Parcel:
    """Pack values for processes of this machine; tensors of the CPU among them are the shared ones from now on.

    A `TypeError` or `AttributeError` where one of them has no form that a process could be given.
    """
    packer = _Packer()
    packer.dump(values)
    places: list[Span] = []
    known: dict[tuple[int, int], Span] = {}
    end = 0
    for raw in packer.raws:  # two of them may be one piece of memory: an array, and a tensor made of it
        place = known.setdefault((_address(raw), raw.nbytes), Span(end, end + raw.nbytes, raw.readonly))
        places.append(Span(place.start, place.end, raw.readonly))
        end = max(end, -(-place.end // ALIGNED) * ALIGNED)
    block = RawArray(c_ubyte, end + 1)  # begins a page: aligned
    parcel = Parcel(packer.stream.getvalue(), block, places)
    for raw, place in zip(packer.raws, places, strict=True):
        parcel.view(Span(place.start, place.end, fixed=False))[:] = raw
    for tensor in packer.tensors:
        found = known.get((tensor.data_ptr(), tensor.nbytes))
        if found is not None and tensor.is_contiguous():
            array = np.frombuffer(parcel.view(Span(found.start, found.end, fixed=False)), tensor.detach().numpy().dtype)
            tensor.data = torch.from_numpy(array.reshape(tensor.shape))
    return parcel


class _Packer(ForkingPickler):
    """Leaves arrays apart, and the pictures of a mapped file in that file."""

    def __init__(self) -> None:
        self.stream = BytesIO()
        self.raws: list[memoryview] = []
        self.tensors: list[torch.Tensor] = []
        super().__init__(self.stream, APART, True, self._keep)

    def _keep(self, buffer: Any) -> None:
        self.raws.append(buffer.raw())

    def reducer_override(self, value: Any) -> Any:
        """Say how a value is made again; `NotImplemented` where that is as usual."""
        base: object = getattr(value, "base", None)
        if isinstance(value, np.memmap) and isinstance(base, mmap.mmap) and value.mode == "r":
            order = "C" if value.flags.c_contiguous else "F"
            return np.memmap, (str(value.filename), value.dtype, "r", value.offset, value.shape, order)
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype != torch.bfloat16:
            plain = value.detach()
            if plain.device.type == "cpu":
                self.tensors.append(value)
            learns = value.requires_grad if isinstance(value, torch.nn.Parameter) else None
            return _tensor, (plain.cpu().numpy(), plain.device.type, learns)
        return NotImplemented


def _tensor(array: NDArray[Any], device: str, learns: bool | None) -> torch.Tensor:
    """A tensor over an array of the block; `learns` is None where it is no parameter.

    A graphics card is the one that this process uses.
    """
    found = torch.from_numpy(array).to(device)
    return found if learns is None else torch.nn.Parameter(found, requires_grad=learns)


def _address(raw: memoryview) -> int:
    return int(np.frombuffer(raw, np.uint8).ctypes.data) if raw.nbytes else 0
