"""What some data holds, before anything is learned: sites and classes, lesions, splits, sizes, and what cannot be read.

Every picture is decoded once, and all that fail are listed, not the first alone. What a run refuses of classes, sites
and rows that were read is listed beside them: the rows are counted all the same. Values out: printing is the command's.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from PIL import Image, ImageDraw

from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures.imaging import decode
from edgefl_protocol.sentences import counted
from edgefl_trainer.data.errors import DataError, TaskError
from edgefl_trainer.data.federation import alike_sites, label_rows, select, wrong_sites
from edgefl_trainer.data.learnable import unlearnable
from edgefl_trainer.data.learned_from import lesions_of, picture_name, pixel_digest, told_of_lesions, told_of_pictures
from edgefl_trainer.data.questions import (
    Vocabulary,
    answer_labels,
    asks,
    no_picture,
    told_of_questions,
    vocabulary_of,
)
from edgefl_trainer.data.rows import Row, SourceRows
from edgefl_trainer.data.site_rows import REPORTED, check_names
from edgefl_trainer.data.sited_rows import agreeing, sited_rows
from edgefl_trainer.data.sources.files import FilePixels
from edgefl_trainer.data.specs import Spec, parse_spec, read_specs
from edgefl_trainer.data.tasks import NEVUS, alike_classes, listed, near_classes

UNLABELLED = "no label"
REFUSES = "a run refuses this data:"  # above the reasons
NO_SITE = "no site"
CELL_PX, HEAD_PX, NAME_PX = 84, 18, 110  # of the contact sheet
PICTURES = 2  # of a class at a site
LEAST = 2  # pictures of a class: one to learn from, one to judge on

Picture = tuple[str, str]  # folder or zip, file
Digests = dict[Picture, bytes]  # picture → `pixel_digest`, where it can be read


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # (site, column) → rows, see `column_of`
    splits: Counter[tuple[str, str]] = field(default_factory=Counter)  # (site, split) → rows
    lesions: dict[str, set[str]] = field(default_factory=dict)  # of each site
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (width, height) → images, where read from files
    broken: list[str] = field(default_factory=list)  # a sentence for each picture that cannot be read
    blank: list[str] = field(default_factory=list)  # names of pictures of one colour
    looked_for: list[str] = field(default_factory=list)  # a sentence on how the names of missing pictures came about
    warnings: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # a sentence for each thing that a run refuses
    without: list[str] = field(default_factory=list)  # a sentence for each source of questions without any picture
    vocabulary: Vocabulary | None = None  # of the training questions; None where nothing is asked

    @property
    def sites(self) -> list[str]:
        """Names of the sites, in order."""
        return sorted(self.lesions)

    @property
    def classes(self) -> list[str]:
        """Names of the columns, in order; rows without a label last."""
        return sorted({name for _, name in self.counts}, key=lambda name: (name == UNLABELLED, name))


@dataclass(frozen=True)
class Tables:
    """What was read of some data."""

    rows: list[tuple[SourceRows, list[Row]]]  # of each SPEC its table, and its rows as a run deals them
    refused: list[str]  # a sentence for each thing that a run refuses of these rows
    taking_part: list[Row]  # of the sites that the SPECs ask for
    near: list[str] = field(default_factory=list)  # a sentence for each group of classes of the data that may be one

    def unlearnable(self) -> list[str]:
        """Write a sentence for each thing that a run which learns from labels refuses beside them."""
        if asks([table for table, _ in self.rows]):
            return []
        return list(unlearnable([row for _, rows in self.rows for row in rows], self.taking_part))


def read_tables(specs: Sequence[str], seed: int = 0, task: str = "all") -> Tables:
    """Read each SPEC; a `DataError` where one is written wrongly, or its rows cannot be read.

    `task`: as `--task` writes it; `all` alone refuses classes that differ in case.
    """
    parsed = [parse_spec(text) for text in specs]
    tables = read_specs(parsed, seed, gaps=True)
    dealt, refused = [], list[str]()
    for spec, table in zip(parsed, tables, strict=True):
        refused.extend(table.refused)
        try:
            rows = sited_rows(spec, table, seed)
        except DataError as error:
            rows = list(table.rows)
            refused.append(str(error))
        else:
            refused.extend(wrong_sites(spec, table, rows))
        dealt.append(rows)
    dealt = agreeing(parsed, tables, dealt)
    every = [row for rows in dealt for row in rows]
    part = [row for spec, rows in zip(parsed, dealt, strict=True) for row in rows if spec.site in (None, row.site)]
    read = Tables(list(zip(tables, dealt, strict=True)), refused, part)
    refused.extend(_refused_together(parsed, read, seed))
    if not asks(tables):
        pictures = Counter(row.label for row in every if row.label is not None)
        refused.extend(alike_classes(every, sorted(pictures) if task == "all" else ()))
        read.near.extend(near_classes(pictures))
    return read


def _refused_together(specs: Sequence[Spec], read: Tables, seed: int) -> Iterator[str]:
    """Write what a run refuses of the rows that a site has in several tables: other @rows, an image named twice."""
    tables, rows = [table for table, _ in read.rows], [row for _, found in read.rows for row in found]
    checks: list[Callable[[], object]] = [partial(select, specs, tables, rows, None, seed)]
    if not any(table.refused for table in tables):  # which say it of one table, with the lines
        checks.append(partial(check_names, read.taking_part))
    for check in checks:
        try:
            check()
        except DataError as error:
            yield str(error)


def with_others(specs: Sequence[str], found: DataError, seed: int, task: str, *, labels: bool) -> DataError:
    """Add to what a run refuses of some data everything else that it refuses, as `edgefl-train data` lists it.

    `labels`: whether the run learns from labels.
    """
    try:
        tables = read_tables(specs, seed, task)
    except DataError:  # nothing can be read beyond it
        return found
    told = [str(found), *tables.refused, *(tables.unlearnable() if labels else ())]
    for table, _ in tables.rows:
        if isinstance(table.pixels, FilePixels) and not table.asks and table.pixels.missing:
            for check in (
                partial(table.pixels.check_present, len(table.rows)),
                partial(table.pixels.check_others, table.rows),
            ):
                try:
                    check()
                except DataError as error:
                    told.append(str(error))
    told = list(dict.fromkeys(told))
    return found if len(told) == 1 else DataError("\n".join([REFUSES, *(f"  {line}" for line in told)]))


def column_of(row: Row) -> str:
    """Return what the survey counts a row under: its class, or of a question whether it is open or closed."""
    if row.question is not None:
        return "closed" if row.question.closed else "open"
    return row.label or UNLABELLED


def gathered(tables: Tables, task: str) -> Tables:
    """Call the rows' classes as a task does; as they are, and what is wrong, where the data lacks its classes.

    A `TaskError` where the task is written wrongly.
    """
    if task == "all" or asks([table for table, _ in tables.rows], task):
        return tables
    try:
        names, labels = label_rows([row for _, rows in tables.rows for row in rows], task, None)
    except TaskError:
        raise
    except DataError as error:
        return replace(tables, refused=[*tables.refused, str(error)])
    called = iter(names[label] if label >= 0 else None for label in labels)
    rows = [(table, [replace(row, label=next(called)) for row in rows]) for table, rows in tables.rows]
    return replace(tables, rows=rows, near=[] if task == NEVUS else tables.near)


def survey(read: Tables) -> Survey:
    """Count rows and decode every picture that lies in a file."""
    found, tables = Survey(refused=[*read.refused, *read.unlearnable()]), read.rows
    for table, rows in tables:
        found.warnings.extend(line for line in table.warnings if not any(line in told for told in found.refused))
        for row in rows:
            site = row.site or NO_SITE
            found.counts[site, column_of(row)] += 1
            found.splits[site, row.split] += 1
            found.lesions.setdefault(site, set()).add(row.lesion)
    pictures = _examine_all(found, tables)
    found.warnings.extend(alike_sites(found.lesions))
    found.warnings.extend(_learned_and_judged(tables, pictures))
    if asks([table for table, _ in tables]):
        return _asked(found, [row for _, rows in tables for row in rows])
    found.warnings.extend(_named_twice(tables))
    found.warnings.extend(_of_two_labels(tables, pictures))
    found.warnings.extend(_blank(found))
    found.warnings.extend(_without_site(tables))
    found.warnings.extend(read.near)
    found.warnings.extend(_thin(found))
    return found


def _examine_all(found: Survey, tables: Sequence[tuple[SourceRows, list[Row]]]) -> Digests:
    """Decode the picture of every row; one that several questions show, once. Return a digest of each one's pixels."""
    digests: Digests = {}
    seen: set[Picture] = set()
    for table, rows in tables:
        if not isinstance(table.pixels, FilePixels):
            continue
        if table.pixels.missing and table.pixels.note:
            found.looked_for.append(table.pixels.note)
        if table.asks and len(table.pixels.missing) == len(table.each_picture()):
            found.without.append(no_picture(table.pixels))
            continue
        for row in rows:
            picture = (table.pixels.store.name, row.source)
            if not table.asks or picture not in seen:
                digest = _examine(found, table.pixels, row)
                digests |= {picture: digest} if digest is not None else {}
            seen.add(picture)
    return digests


def _learned_and_judged(tables: Sequence[tuple[SourceRows, list[Row]]], digests: Digests) -> list[str]:
    """Sentences on lesions and pictures that are learned from and judged on, as a run would say them.

    Of a picture that questions of both sides show, `told_of_questions` tells. A site's unlabelled rows count as learned
    from, as methods without labels do, but those of a lesion that is judged on: a run leaves them out.
    """
    rows = [(table, row) for table, found in tables for row in found if row.label is not None]
    learned = [(table, row) for table, row in rows if row.split == "train"]
    judged = [(table, row) for table, row in rows if row.split in REPORTED]
    named = ([(table.name, row) for table, row in part if not table.asks] for part in (learned, judged))
    is_judged = lesions_of((table.name, row) for table, row in judged)
    unlabelled = [
        (table, row)
        for table, found in tables
        for row in found
        if row.split == "unlabelled" and row.site is not None and not is_judged(table.name, row)
    ]
    known = {
        digests[picture]: picture_name(row)
        for table, row in (*unlabelled, *learned)
        if (picture := _picture(table, row)) in digests
    }
    shown = {_picture(table, row) for table, row in learned if table.asks}
    asked = {
        picture if table.asks else number: (picture, picture_name(row))
        for number, (table, row) in enumerate(judged)
        if (picture := _picture(table, row)) in digests
    }
    new = [(digests[picture], name) for picture, name in asked.values() if picture not in shown]
    return [*told_of_lesions(*named), *told_of_pictures(known, new, len(asked))]


def _named_twice(tables: Sequence[tuple[SourceRows, list[Row]]]) -> Iterator[str]:
    """Write a sentence on files that rows of different names share."""
    names: dict[Picture, set[str]] = defaultdict(set)
    for table, rows in tables:
        for row in rows:
            if isinstance(table.pixels, FilePixels):
                names[_picture(table, row)].add(row.image)
    several = {file: sorted(found) for (_, file), found in names.items() if len(found) > 1}
    if several:
        file, found = next(iter(several.items()))
        yield (
            f"{counted(len(several), 'file')} {'is' if len(several) == 1 else 'are'} named by several rows, such as "
            f"{file} by {found[0]} and {found[1]}"
        )


def _of_two_labels(tables: Sequence[tuple[SourceRows, list[Row]]], digests: Digests) -> Iterator[str]:
    """Write a sentence on pictures that have two labels."""
    labels: dict[bytes, dict[str, str]] = defaultdict(dict)
    for table, rows in tables:
        for row in rows:
            digest = digests.get(_picture(table, row))
            if digest is not None and row.label is not None:
                labels[digest].setdefault(row.label, row.image)
    several = [found for found in labels.values() if len(found) > 1]
    if several:
        (label, name), (other, twin) = list(several[0].items())[:2]
        yield (
            f"{counted(len(several), 'picture')} {'has' if len(several) == 1 else 'have'} two labels, by "
            f"{'its' if len(several) == 1 else 'their'} pixels, such as {name} ({label}) and {twin} ({other})"
        )


def _picture(table: SourceRows, row: Row) -> Picture:
    """Return where the picture of a row lies."""
    return (table.pixels.store.name if isinstance(table.pixels, FilePixels) else table.name, row.source)


def _asked(found: Survey, rows: Sequence[Row]) -> Survey:
    """Add what training questions hold, and what bears on the figures of the others."""
    vocabulary = vocabulary_of(rows)
    for site in found.sites:
        if (number := sum(row.site == site for row in rows)) < LEAST:
            found.warnings.append(
                f"site {site} has {counted(number, 'question')}: too few to learn from and to judge on"
            )
    labels, learning = answer_labels(rows, vocabulary.answers), [row for row in rows if row.split == "train"]
    found.warnings.extend(told_of_questions(rows, labels, vocabulary.questions, learning))
    return replace(found, vocabulary=vocabulary)


def _pictures_of(found: Survey) -> Counter[str]:
    """Column → pictures of all sites together."""
    pictures: Counter[str] = Counter()
    for (_, label), number in found.counts.items():
        pictures[label] += number
    return pictures


def _blank(found: Survey) -> Iterator[str]:
    """Write a sentence on pictures of one colour."""
    if found.blank:
        yield f"{counted(len(found.blank), 'picture')} of one colour, with nothing to learn from: {listed(found.blank)}"


def _without_site(tables: Sequence[tuple[SourceRows, list[Row]]]) -> Iterator[str]:
    """Write a sentence on labelled rows of no site beside rows of one; that no row has a site, a run refuses."""
    for table, rows in tables:
        free = [row.image for row in rows if row.site is None and row.label is not None]
        if free and any(row.site is not None for row in rows):
            yield (
                f"{counted(len(free), 'labelled picture')} of {table.name} with no site (an empty center?), which no "
                f"site learns from or is judged on: {listed(free)}"
            )


def _thin(found: Survey) -> Iterator[str]:
    """Sentences on sites of one class, and on classes with too few lesions at all sites together to learn and judge."""
    labels = [name for name in found.classes if name != UNLABELLED]
    for site in found.sites:
        held = [label for label in labels if found.counts[site, label]]
        if len(held) == 1 < len(labels) and site != NO_SITE:
            yield f"site {site} has one class, {held[0]}: its figures will say nothing"
    for label in labels:
        if (number := _pictures_of(found)[label]) < LEAST:
            yield f"class {label} has {counted(number, 'picture')}: too few to learn from and to judge on"


def _examine(found: Survey, pixels: FilePixels, row: Row) -> bytes | None:
    """Decode one picture and return a digest of its pixels; None where it cannot be read."""
    named = row.image if row.image == row.source else f"{row.image} ({row.source})"
    try:
        image = decode(pixels.store.read(row.source))
    except (ImageError, DataError) as error:
        found.broken.append(f"{named}: {error}" if isinstance(error, ImageError) else str(error))
        return None
    height, width, _ = image.shape
    found.sizes[width, height] += 1
    if (image == image[0, 0]).all():
        found.blank.append(named)
    return pixel_digest(image)


def contact_sheet(tables: Tables) -> Image.Image:
    """Draw the first pictures of each class at each site: sites down, classes across."""
    chosen = list(_chosen(tables.rows))
    sites = sorted({site for site, *_ in chosen})
    classes = sorted({label for _, label, *_ in chosen})
    size = (NAME_PX + CELL_PX * PICTURES * len(classes), HEAD_PX + CELL_PX * len(sites))
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for column, label in enumerate(classes):
        pen.text((NAME_PX + CELL_PX * PICTURES * column + 3, 3), label, fill="black")
    for line, site in enumerate(sites):
        pen.text((3, HEAD_PX + CELL_PX * line + CELL_PX // 2 - 6), site[:18], fill="black")
    for site, label, number, table, row in chosen:
        try:
            picture, _ = next(iter(table.pixels.load([row], CELL_PX - 2, "squash")))
        except DataError:
            continue  # the survey names it
        place = NAME_PX + CELL_PX * (PICTURES * classes.index(label) + number)
        sheet.paste(Image.fromarray(picture), (place, HEAD_PX + CELL_PX * sites.index(site)))
    return sheet


def _chosen(tables: Sequence[tuple[SourceRows, list[Row]]]) -> Iterator[tuple[str, str, int, SourceRows, Row]]:
    taken: Counter[tuple[str, str]] = Counter()
    drawn: set[tuple[str, str, str]] = set()  # many questions show one picture
    for table, rows in tables:
        for row in rows:
            key = (row.site or NO_SITE, column_of(row))
            if taken[key] < PICTURES and (*key, row.source) not in drawn:
                yield *key, taken[key], table, row
                taken[key] += 1
                drawn.add((*key, row.source))
