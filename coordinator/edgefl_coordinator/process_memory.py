"""What the C library keeps of a server's memory: as little as it can be told to. Without glibc nothing changes.

Requests and replies of all sizes come and go between what stays, so the heap is full of holes. glibc gives back what is
free at its end, and no hole. A connection that ends is garbage, with its buffers, until Python looks at all objects:
rarely, where 80,000 of them stand (docs/results/behind_decisions.md, memory of a coordinator).
"""

import contextlib
import ctypes
import gc

RETURN_S = 60.0  # between two returns
_M_ARENA_MAX = -8  # glibc, malloc.h


def bound_arenas() -> None:
    """Let all threads share two arenas; each of up to sixteen would keep what it once held."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def look_past_what_stands() -> None:
    """Let Python's garbage collector pass over all objects of now: so it looks often at what comes later."""
    gc.collect()
    gc.freeze()


def return_free_memory() -> None:
    """Give every free page back to the system, from inside the heap as well: some milliseconds for 50 MiB."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
