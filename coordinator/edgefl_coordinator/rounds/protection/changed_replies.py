"""Replies of which some arrays are changed: each is made when it is asked for, so many take the memory of one.

Guarantees: an array that is made is checked as those of a payload are, cannot be written, and is not kept. The other
arrays, and what holds them, such as the window of mapped files, stay as they came. Pure. Source: docs/methods.md,
aggregation.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_protocol.payload import Scalar
from edgefl_protocol.tensors import check_values

Numbers = NDArray[Any]  # of an array, in order, whatever its shape

WHOLE = slice(None)


@dataclass(frozen=True)
class MadeArray:
    """An array that is made anew each time: its shape, and what makes a part of its numbers."""

    shape: tuple[int, ...]
    numbers: Callable[[slice], Numbers]


class ChangedArrays(Mapping[str, NDArray[Any]]):
    """The arrays of a reply, some of them made in the place of its own."""

    def __init__(self, own: Mapping[str, NDArray[Any]], made: Mapping[str, MadeArray]) -> None:
        self.own, self.made = own, made

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return the reply's own array, or make it; a `PayloadError` where that holds what may not travel."""
        if name not in self.made:
            return self.own[name]
        array = self.made[name].numbers(WHOLE).reshape(self.made[name].shape)
        check_values(name, array)
        array.flags.writeable = False
        return array

    def __contains__(self, name: object) -> bool:
        return name in self.own

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


def changed(
    reply: Payload, made: Mapping[str, MadeArray] | None = None, scalars: Mapping[str, Scalar] | None = None
) -> Payload:
    """Return the reply with some of its arrays made otherwise, and some scalars replaced."""
    before = reply.arrays.made if isinstance(reply.arrays, ChangedArrays) else {}
    payload = Payload({}, {**reply.scalars, **(scalars or {})})
    arrays = ChangedArrays(as_it_came(reply), {**before, **(made or {})})
    object.__setattr__(payload, "arrays", arrays)  # which a payload would make all at once
    return payload


def replaced(reply: Payload, name: str, array: NDArray[Any]) -> Payload:
    """Return the reply with another array of that name; it may have more rows, or fewer."""
    return changed(reply, {name: MadeArray(array.shape, lambda part: array.reshape(-1)[part])})


def as_it_came(reply: Payload) -> Mapping[str, NDArray[Any]]:
    """Return the arrays before any change: they tell names and types without making an array."""
    return reply.arrays.own if isinstance(reply.arrays, ChangedArrays) else reply.arrays


def numbers_of(reply: Payload, name: str, part: slice) -> Numbers:
    """Return a part of an array's numbers, and make no more than that."""
    arrays = reply.arrays
    if isinstance(arrays, ChangedArrays) and name in arrays.made:
        return arrays.made[name].numbers(part)
    return arrays[name].reshape(-1)[part]
