"""How fast a bundle scores on this very device, and what memory it takes; without PyTorch, on drawn pictures.

What is measured is what `edgefl score` or `edgefl ask` does: the same network, the same threads, on drawn pictures.
Each row is warmed and timed as a whole run; the median is what to expect, the 95th percentile what a waiting person
notices. Beside it stand the floors: the network's linear layers alone, in float and in 8 bits (`linear_floor`), run in
turn with the network. Where other work was running before, the table says so: its times and ratios are then no property
of the device. Peak memory is that of this process from its beginning to the photo's result, with one model open and
before any batch, so a caller that wants the figure of scoring alone asks in a process of its own (`second_process`); it
holds the drawn photo and the libraries too, so scoring takes at most that much. Source: docs/results/device.md.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edgefl_client.doctor.drawn_picture import camera_photo, drawn_picture
from edgefl_client.memory import peak_memory_mib
from edgefl_protocol.processor import has_vnni, multiplies_bytes

if TYPE_CHECKING:
    from edgefl_client.doctor.linear_floor import LinearLayers
    from edgefl_client.scoring.asker import Asker
    from edgefl_client.scoring.network import Network
    from edgefl_client.scoring.scorer import Scorer

REPEATS: Final = 9
BATCH: Final = 8
PHOTO_REPEATS: Final = 3


@dataclass(frozen=True)
class Work:
    """What a model does here, to be timed."""

    network: "Network"
    drawn: Callable[[int], object]  # runs so many drawn pictures through the network, ready for it
    photo: Callable[[], object]  # takes a photo of 12 megapixels from its bytes to its result


def scoring(scorer: "Scorer") -> Work:
    """Describe what `edgefl score` does."""
    side, photo = _side(scorer.network), camera_photo()
    small = scorer.prepare(drawn_picture(side, side))
    return Work(
        scorer.network,
        lambda pictures: scorer.score_batch([small] * pictures, as_it_is=True),
        lambda: scorer.score(photo),
    )


def asking(asker: "Asker", question: str) -> Work:
    """Describe what `edgefl ask` does; of several pictures it asks the same question."""
    side, photo = _side(asker.network), camera_photo()
    pixels = asker.prepare(drawn_picture(side, side)).pixels
    tokens = asker.read(question).tokens
    return Work(
        asker.network,
        lambda pictures: asker.network.run(np.stack([pixels] * pictures), tokens),
        lambda: asker.ask(photo, question),
    )


def _side(network: "Network") -> int:
    return max(network.side_px, 84)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One thing that was timed."""

    what: str  # in words
    threads: int  # of the network
    pictures: int  # in one run
    milliseconds: float  # median of the runs
    p95_milliseconds: float  # 95th percentile of the runs; with few of them, the slowest
    pictures_per_second: float  # at the median


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The network's linear layers alone, for one picture, and how the network stands to them."""

    precision: str  # `fp32` or `int8`, of the products
    threads: int  # of the run
    milliseconds: float  # median of the runs
    times: float  # milliseconds of the network, one picture, over these
    share: float  # of the multiplications that were run; the rest is reckoned in


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured on this device."""

    precision: str  # `fp32` or `int8`, of the bundle
    vnni: bool  # whether the processor names the instructions for 8-bit products
    whole_numbers: bool  # whether 8-bit layers run in whole numbers here; else they run in float, with the same scores
    rows: Sequence[Timed]  # the times
    peak_memory_mib: float  # largest resident memory of this process up to the photo's score
    processors: int  # that this process may use
    load_average: float | None  # of the last minute before anything was measured; None where the system tells none
    floors: Sequence[Floor] = ()  # in float and in 8 bits; none for a network that is no vision transformer

    def to_json(self) -> dict[str, Any]:
        """Give the figures as plain values, for JSON."""
        return {
            **asdict(self),
            "rows": [asdict(row) for row in self.rows],
            "floors": [asdict(floor) for floor in self.floors],
        }


def measure(
    work: Work, single: Callable[[], Work], layers: "Callable[[], LinearLayers | None]" = lambda: None
) -> Measured:
    """Time the network alone, in batches, on one thread, and a photo of 12 megapixels from its bytes to its result.

    Args:
        work: of the bundle, with the threads that scoring uses.
        single: makes that of the same bundle with one thread; called when memory was read.
        layers: reads the network's linear layers, of which the floors are; called when memory was read.
    """
    from edgefl_client.runtime import processors  # `doctor` imports this, and no runtime

    load_average = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    threads = work.network.threads
    one = timed("network, one picture", threads, lambda: work.drawn(1))
    whole = timed("12-megapixel JPEG, all of it", threads, work.photo, repeats=PHOTO_REPEATS)
    peak_mib = round(peak_memory_mib(), 1)
    batch = timed("network, 8 pictures", threads, lambda: work.drawn(BATCH), pictures=BATCH)
    alone = single()
    found = layers()
    return Measured(
        precision=work.network.precision,
        vnni=has_vnni(),
        whole_numbers=multiplies_bytes(),
        rows=(one, timed("network, one picture", 1, lambda: alone.drawn(1)), batch, whole),
        peak_memory_mib=peak_mib,
        processors=processors(),
        load_average=load_average,
        floors=() if found is None else _floors(found, work),
    )


def _floors(layers: "LinearLayers", work: Work) -> tuple[Floor, ...]:
    """Time the linear layers and the network in turn: a busy machine slows both."""
    from edgefl_client.doctor.linear_floor import floor_run

    floors, threads = [], work.network.threads
    for precision in ("fp32", "int8"):
        part, beside_ms = medians_in_turn((floor_run(layers, precision, threads), lambda: work.drawn(1)))
        milliseconds = part / layers.share
        floors.append(
            Floor(
                precision=precision,
                threads=threads,
                milliseconds=round(milliseconds, 2),
                times=round(beside_ms / milliseconds, 2) if milliseconds else 0.0,
                share=round(layers.share, 3),
            )
        )
    return tuple(floors)


def medians_in_turn(
    works: Sequence[Callable[[], object]], repeats: int = REPEATS, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Time several works in turn, once warm, so that what disturbs one disturbs all; medians in milliseconds."""
    marks: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(repeats):
        for work, taken in zip(works, marks, strict=True):
            started = clock()
            work()
            taken.append((clock() - started) * 1e3)
    return [statistics.median(taken) for taken in marks]


def timed(
    what: str,
    threads: int,
    work: Callable[[], object],
    *,
    pictures: int = 1,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> Timed:
    """Time some work, once warm."""
    work()
    marks = []
    for _ in range(repeats):
        started = clock()
        work()
        marks.append((clock() - started) * 1e3)
    marks.sort()
    median = statistics.median(marks)
    return Timed(
        what=what,
        threads=threads,
        pictures=pictures,
        milliseconds=round(median, 2),
        p95_milliseconds=round(marks[min(len(marks) - 1, -(-95 * len(marks) // 100) - 1)], 2),  # nearest rank
        pictures_per_second=round(pictures * 1e3 / median, 1) if median else 0.0,
    )


def was_busy(measured: dict[str, Any]) -> bool:
    """Tell whether other work ran before the measurement, so that its times say little of the device."""
    return measured["load_average"] is not None and measured["load_average"] > measured["processors"] / 2


def table(measured: dict[str, Any]) -> list[str]:
    """Write the figures for a person: a head that says what they are, and a line each."""
    floors = measured["floors"]
    lines = [
        f"measured here, warm, with the {measured['precision']} bundle; medians of {REPEATS} runs, "
        f"{PHOTO_REPEATS} of the photo"
    ]
    if was_busy(measured):
        load, processors = measured["load_average"], measured["processors"]
        lines.append(
            f"other work was running (load average {load:g} on {processors} processors): these times and ratios say "
            "little about this device; measure again when it is idle"
        )
    lines += [
        f"{row['what']:<30} {row['threads']:>3} threads {row['pictures_per_second']:>8.1f} pictures/s  "
        f"p95 {row['p95_milliseconds']:>8.2f} ms  median {row['milliseconds']:>8.2f} ms"
        for row in measured["rows"]
    ]
    if floors:
        lines.append(
            "floor: the network's linear layers alone for one picture, computed by the same runtime as matrix "
            "products of these shapes with random weights; for int8 the products alone"
        )
    return lines + [
        f"{'linear layers alone, ' + one['precision']:<30} {one['threads']:>3} threads  "
        f"median {one['milliseconds']:>8.2f} ms; "
        f"the {measured['precision']} network takes {one['times']:.2f} times as long"
        + ("" if one["share"] == 1 else f" ({one['share']:.0%} of the products were run, the rest is estimated)")
        for one in floors
    ]
