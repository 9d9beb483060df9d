"""`load_federation`: from SPECs to pictures, labels and the rows of each site.

Guarantees: no lesion of a site stands in two of its train, tune, val and test rows unless the source's own split says
so; every choice is by lesion and seed, but that of the test rows, which no seed moves; the rows of a site do not depend
on which other sites are selected.
Source: docs/design.md 5 (Data SPECs, Rows, --task, --unlabelled), docs/methods.md 7.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.pictures.imaging import Colour, Fit
from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_trainer.data.cache import cached_pictures, default_cache_dir
from edgefl_trainer.data.dealing import TUNE_SHARE, USUAL, choose_tune, spread, tested
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.learned_from import (
    LEARNED,
    SourceRow,
    lesions_of,
    picture_name,
    pixel_digest,
    rows_of,
    told_of_lesions,
    told_of_pictures,
)
from edgefl_trainer.data.likeness import likeness_of
from edgefl_trainer.data.likeness import made_like as made_like_taught
from edgefl_trainer.data.partitions.partition import Partition
from edgefl_trainer.data.partitions.place import place_rows
from edgefl_trainer.data.questions import (
    QuestionRows,
    Vocabulary,
    answered,
    asks,
    picture_tables,
    told_of_questions,
)
from edgefl_trainer.data.rows import Row, SourceRows
from edgefl_trainer.data.site_rows import REPORTED, ChooseTune, Indices, SiteRows, deal_sites, partition_digest
from edgefl_trainer.data.sited_rows import LEFT_OUT, agreeing, own_rows, sited_rows
from edgefl_trainer.data.specs import Spec, check_site_name, parse_spec, read_specs
from edgefl_trainer.data.tasks import NEVUS, check_alike, class_name, gather, listed, near_classes

Unlabelled = Literal["none", "site", "spread"]


@dataclass(frozen=True, slots=True)
class Federation:
    """Pictures and rows of all sites; with `@site=NAME` one alone, with the rows that it has beside others."""

    classes: tuple[str, ...]  # class names; a label is an index into them
    images: NDArray[np.uint8]  # uint8 (m, px, px, 3), memory-mapped
    labels: NDArray[np.int64]  # int64 (n,), −1 where there is none, −2 (`OTHER_ANSWER`) where no training row has it
    lesions: tuple[str, ...]  # lesion of each row
    names: tuple[str, ...]  # image name of each row
    sites: dict[str, SiteRows]  # site name → its rows, in name order
    partition_sha256: str  # digest over site → rows → image names and labels, and over the held-out sites, if any
    masks: NDArray[np.uint8] | None = None  # uint8 (n, px, px), 0 = skin, 255 = lesion, for drawn lesions; else None
    held_out: tuple[str, ...] = ()  # sites that never train, in name order
    warnings: tuple[str, ...] = ()  # what a person should look at before anything is learned
    pictures: NDArray[np.int64] | None = None  # int64 (n,), which of `images` a row shows; None: row i shows image i
    questions: QuestionRows | None = None  # None: the pictures are asked nothing
    colour: Colour = "none"  # what was done with the colour of the light in `images`
    taught: TaughtPictures | None = None  # what the pictures are like that are learned from, where that matters

    def places(self, rows: Sequence[int] | Indices) -> Indices:
        """Return which of `images` these rows show, (len,): several rows may ask about one picture."""
        wanted = np.asarray(rows, dtype=np.int64)
        return wanted if self.pictures is None else self.pictures[wanted]

    def counts(self, rows: Indices) -> NDArray[np.int64]:
        """Count the images of each class among `rows`, (K,)."""
        labels = self.labels[rows]
        return np.bincount(labels[labels >= 0], minlength=len(self.classes)).astype(np.int64)

    @property
    def learned(self) -> Indices:
        """Rows that are learned from or tuned on, at the sites that train."""
        return rows_of([site for name, site in self.sites.items() if name not in self.held_out], LEARNED)

    def lesions_learned_among(self, other: "Federation", sites: Iterable[str]) -> tuple[list[str], int]:
        """Return the lesions that these sites of other data report on and that are learned from here, too.

        By the names of lesions, or of their images, at a site of the same name; in order, with the number of all.
        """
        known = {
            (name, key)
            for name, site in self.sites.items()
            if name not in self.held_out
            for i in rows_of([site], LEARNED)
            for key in (self.lesions[i], f"image:{self.names[i]}")
        }
        again: dict[tuple[str, str], bool] = defaultdict(bool)
        for name in sites:
            for i in other.sites[name].rows(other.report_split):
                keys = other.lesions[i], f"image:{other.names[i]}"
                again[name, other.lesions[i]] |= any((name, key) in known for key in keys)
        return sorted(lesion for (_, lesion), found in again.items() if found), len(again)

    def learned_among(self, images: NDArray[np.uint8]) -> int:
        """Count the pictures (B, px, px, 3) that are learned from or tuned on, by their pixels."""
        known = {pixel_digest(self.images[place]) for place in np.unique(self.places(self.learned))}
        return sum(pixel_digest(image) in known for image in images)

    @property
    def report_split(self) -> str:
        """`test` where the data has any test rows, else `val`: the rows that results are reported on."""
        return "test" if any(len(site.test) for site in self.sites.values()) else "val"


def load_federation(
    specs: Sequence[str],
    *,
    image_px: int,
    task: str = "all",
    whole_task: bool = True,
    classes: Sequence[str] | None = None,
    seed: int = 0,
    unlabelled: Unlabelled = "none",
    limit: int | None = None,
    fit: Fit = "squash",
    colour: Colour = "none",
    cache_dir: Path | None = None,  # of decoded pictures; None: `default_cache_dir`
    partition: Partition | None = None,
    vocabulary: Vocabulary | None = None,
    all_test: bool = False,
    made_like: TaughtPictures | None = None,
) -> Federation:
    """Read the data of a federation and deal its rows; a `DataError` says what is unusable.

    Args:
        task: `all` keeps the labels of the data; `nevus` makes them `nevus` and `other`; `NAME=A,B:REST` gathers them.
        whole_task: Every class that the task names has to be there; data to judge on, or of one site, may lack some.
        classes: Keep only rows of these classes (names of the data), in this order; None keeps all, sorted.
        seed: Of every choice of rows but that of `test`, which is the same in every run.
        unlabelled: `none`; `site`: a site's unlabelled images; `spread`: also those of no site, by training images.
        limit: At most this many training images a site, drawn by lesion; tune, val and test rows stay whole.
        fit, colour, made_like: How a picture becomes square, the colour of its light, what it is like (`Preprocess`).
        partition: Who has which image, made of the same specs; its seed then makes every choice of rows.
        vocabulary: Answers and words that a run learned, of data to judge it on; None: those of the training rows.
        all_test: Make all pictures of a source without splits `test`; a partition and `@rows` deal them all the same.
    """
    parsed = _checked(specs, image_px, limit)
    seed, held_out = (seed, ()) if partition is None else (partition.seed, partition.held_out)
    tables = _read_tables(parsed, seed, all_test=all_test and partition is None)
    rows = _read_rows(parsed, tables, partition, seed)
    asking = asks(tables, task, classes, partition)
    names, labels, questions = _targets(rows, vocabulary, task, classes, partition, whole=whole_task)
    rows, labels = _place(rows, labels, seed, spread_unplaced=unlabelled == "spread", without=held_out)
    rows, tune = select(parsed, tables, _held_back(tables, rows, labels), partition, seed)
    sites = deal_sites(rows, labels, seed=seed, keep_unlabelled=unlabelled != "none", limit=limit, tune=tune)
    taught, told = likeness_of(tables, rows, sites, held_out, image_px)
    shown, places = _shown(tables, made_like or taught, by_question=asking)
    pictures = cached_pictures(shown, image_px, fit, cache_dir or default_cache_dir(), colour)
    found = Federation(
        classes=names,
        images=pictures.images,
        labels=labels,
        lesions=tuple(row.lesion for row in rows),
        names=tuple(row.image for row in rows),
        sites=sites,
        partition_sha256=partition_digest(sites, rows, names, labels, held_out),
        masks=pictures.masks,
        held_out=held_out,
        pictures=places,
        questions=questions,
        colour=colour,
        taught=taught,
    )
    return replace(found, warnings=(*_warnings(tables, rows, found, task), *told))


def _read_tables(specs: Sequence[Spec], seed: int, *, all_test: bool) -> list[SourceRows]:
    """The tables of these SPECs; with `all_test` without a row that learns where a source names no split."""
    tables = read_specs(specs, seed)
    return [tested(table) if all_test and not spec.shares else table for spec, table in zip(specs, tables, strict=True)]


def _shown(
    tables: Sequence[SourceRows], taught: TaughtPictures | None, *, by_question: bool
) -> tuple[Sequence[SourceRows], NDArray[np.int64] | None]:
    """The tables of pictures, larger ones made like the taught, and which of them each row shows; None: its own."""
    like = made_like_taught(tables, taught)
    return picture_tables(like) if by_question else (like, None)


def _targets(
    rows: Sequence[Row],
    vocabulary: Vocabulary | None,
    task: str,
    classes: Sequence[str] | None,
    partition: Partition | None,
    *,
    whole: bool,
) -> tuple[tuple[str, ...], NDArray[np.int64], QuestionRows | None]:
    """Return what is told apart, the label of each row, and what the rows ask, if they do."""
    if rows[0].question is not None:
        return answered(rows, vocabulary)
    if partition is not None:
        classes = _classes_of(partition, classes)
    return (*label_rows(rows, task, classes, whole=whole), None)


def _warnings(tables: Sequence[SourceRows], rows: Sequence[Row], found: Federation, task: str) -> list[str]:
    told = [line for table in tables for line in table.warnings]
    if found.questions is not None:
        learning = [rows[i] for site in found.sites.values() for i in site.train]
        told += told_of_questions(rows, found.labels, found.questions.vocabulary, learning)
    told += alike_sites(found.sites)
    learned, judged = found.learned, rows_of(found.sites.values(), REPORTED)
    if found.questions is None:
        if task != NEVUS:  # which takes a nevus whichever way it is written
            used = zip(rows, found.labels, strict=True)
            told += near_classes(Counter(row.label for row, label in used if row.label is not None and label >= 0))
        named = _named(tables, rows)
        told += told_of_lesions(*([named[i] for i in part] for part in (learned, judged)))
    return told + _told_of_pictures(rows, found, learned, judged)


def _named(tables: Sequence[SourceRows], rows: Sequence[Row]) -> list[SourceRow]:
    """Each row with the name of its table."""
    return list(zip((table.name for table in tables for _ in table.rows), rows, strict=True))


def _told_of_pictures(rows: Sequence[Row], found: Federation, learned: Indices, judged: Indices) -> list[str]:
    """Compare what the rows show; of a picture that questions of both sides show, `told_of_questions` tells."""
    shown = {int(place): picture_name(rows[i]) for i, place in zip(learned, found.places(learned), strict=True)}
    asked = {int(place): picture_name(rows[i]) for i, place in zip(judged, found.places(judged), strict=True)}
    if not shown or not asked:
        return []
    known = {pixel_digest(found.images[place]): name for place, name in shown.items()}
    new = [(pixel_digest(found.images[place]), name) for place, name in asked.items() if place not in shown]
    return told_of_pictures(known, new, len(asked))


def _read_rows(
    specs: Sequence[Spec], tables: Sequence[SourceRows], partition: Partition | None, seed: int
) -> list[Row]:
    """All rows of the tables: dealt by their SPECs, or placed by the partition."""
    if partition is not None:
        return place_rows(own_rows(specs, tables, seed), partition)
    dealt = [dealt_rows(spec, table, seed) for spec, table in zip(specs, tables, strict=True)]
    return [row for rows in agreeing(specs, tables, dealt) for row in rows]


def _checked(specs: Sequence[str], image_px: int, limit: int | None) -> list[Spec]:
    if not specs:
        raise DataError("No data was named; give --data SPEC, such as --data folder:PATH.")
    if image_px < 1:
        raise DataError(f"The image size is {image_px} pixels; allowed: 1 or more.")
    if limit is not None and limit < 1:
        raise DataError(f"The limit is {limit} training images a site; allowed: 1 or more.")
    return [parse_spec(text) for text in specs]


def label_rows(
    rows: Sequence[Row], task: str, classes: Sequence[str] | None, *, whole: bool = True
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """List the classes, and the label of each row: −1 without one, or of a class that is left out.

    Raises:
        DataError: A class is not in the data, or the task cannot be had with these (`tasks.gather`).
    """
    present = sorted({row.label for row in rows if row.label is not None})
    wanted = tuple(map(class_name, classes)) if classes is not None else tuple(present)
    unknown = [name for name in wanted if name not in present]
    if unknown or len(set(wanted)) != len(wanted):
        raise DataError(
            f"Class {(unknown or wanted)[0]!r} is not in the data or named twice; it has {listed(present)}."
        )
    check_alike(rows, wanted if task == "all" else ())
    names, index = gather(task, wanted, present, whole=whole)
    labels = np.array([-1 if row.label is None else index.get(row.label, -1) for row in rows], dtype=np.int64)
    return names, labels


def dealt_rows(spec: Spec, table: SourceRows, seed: int) -> list[Row]:
    """Return the rows of one table with complete sites and splits, in order; a `DataError` where none has a site."""
    rows = sited_rows(spec, table, seed)
    for told in wrong_sites(spec, table, rows):
        raise DataError(told)
    return rows


def wrong_sites(spec: Spec, table: SourceRows, rows: Sequence[Row]) -> Iterator[str]:
    """Write what a run refuses of the sites of these rows: that there is none, or a name that cannot be used."""
    names = sorted({row.site for row in rows if row.site is not None})
    if not names:
        hint = "".join(f"{line}. " for line in table.warnings if "no column center" in line)
        yield f"{hint}No row of {spec.text!r} names a site; add @site=NAME or @split=iid:N, or name a partition."
    for name in names:
        try:
            check_site_name(name, spec.text)
        except DataError as error:
            yield str(error)


def alike_sites(names: Iterable[str]) -> list[str]:
    """Write a sentence for each two sites whose names differ in case alone: they may be one hospital."""
    found: list[str] = []
    known: dict[str, str] = {}
    for name in sorted(names):
        if (other := known.setdefault(name.casefold(), name)) != name:
            found.append(f"sites {other} and {name} differ in upper and lower case alone: are they one hospital?")
    return found


def _classes_of(partition: Partition, classes: Sequence[str] | None) -> Sequence[str]:
    """The classes of a run over a partition: those that were dealt, or some of them."""
    known = set(map(class_name, partition.classes))
    for name in classes or ():
        if class_name(name) not in known:
            raise DataError(f"Class {name!r} is not in the partition, which has {listed(partition.classes)}.")
    return partition.classes if classes is None else classes


def _place(
    rows: Sequence[Row], labels: NDArray[np.int64], seed: int, *, spread_unplaced: bool, without: Sequence[str]
) -> tuple[list[Row], NDArray[np.int64]]:
    """Deal images of no site to the sites but some, as unlabelled ones; their labels, if any, are not used.

    An image of a lesion that any site reports on is dealt to nobody.
    """
    placed = list(rows)
    labels = labels.copy()
    free = [i for i, row in enumerate(rows) if row.site is None]
    labels[free] = -1
    if spread_unplaced:
        reported = {row.lesion for row in rows if row.site is not None and row.split in REPORTED}
        free = [i for i in free if rows[i].split in ("train", "unlabelled") and rows[i].lesion not in reported]
        sizes = Counter(row.site for i, row in enumerate(rows) if row.site and row.split == "train" and labels[i] >= 0)
        known = {site: n for site, n in sizes.items() if site is not None and site not in without}
        for i, site in zip(free, spread([rows[i].lesion for i in free], known, seed), strict=True):
            placed[i] = replace(rows[i], site=site, split="unlabelled")
    return placed, labels


def _held_back(tables: Sequence[SourceRows], rows: Sequence[Row], labels: NDArray[np.int64]) -> list[Row]:
    """Leave out unlabelled rows that show a lesion which a site reports on, be it another one."""
    named = _named(tables, rows)
    judged = (i for i, row in enumerate(rows) if row.site is not None and row.split in REPORTED and labels[i] >= 0)
    is_judged = lesions_of(named[i] for i in judged)
    return [
        replace(row, split=LEFT_OUT) if row.split == "unlabelled" and is_judged(table, row) else row
        for table, row in named
    ]


def select(
    specs: Sequence[Spec], tables: Sequence[SourceRows], rows: list[Row], partition: Partition | None, seed: int
) -> tuple[list[Row], ChooseTune]:
    """Leave out (site None) the rows of sites that `@site=NAME` did not ask for, and say how tune rows are chosen."""
    if partition is not None:
        return rows, partition.tune_lesions
    spans = [(spec, len(table.rows)) for spec, table in zip(specs, tables, strict=True)]
    chosen: list[Row] = []
    for spec, length in spans:
        part = rows[len(chosen) : len(chosen) + length]
        chosen.extend(row if spec.site in (None, row.site) else replace(row, site=None) for row in part)
    return chosen, _tune_chooser(chosen, spans, seed)


def _tune_chooser(rows: Sequence[Row], spans: Sequence[tuple[Spec, int]], seed: int) -> ChooseTune:
    """Chooses the tune lesions of a site by the shares that the SPEC of its rows asks for."""
    shares: dict[str, float] = {}
    done = 0
    for spec, length in spans:
        wanted = (spec.shares or USUAL).tune
        for site in sorted({row.site for row in rows[done : done + length] if row.site and row.split == "train"}):
            if shares.setdefault(site, wanted) != wanted:
                raise DataError(
                    f"Site {site} has rows of several data sources with different @rows; give them all the same @rows."
                )
        done += length

    def choose(site: str, learning: Sequence[Row]) -> set[str]:
        return choose_tune(site, learning, seed, shares.get(site, TUNE_SHARE))

    return choose
