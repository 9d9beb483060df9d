"""`edgefl-train data`: what some data holds and what is wrong with it, before anything is learned."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl_protocol.sentences import counted
from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import needs_trainer

if TYPE_CHECKING:
    from edgefl_trainer.data.survey import Survey

MAX_SHOWN = 20  # sizes


@click.command()
@click.argument("specs", metavar="SPEC…", nargs=-1, required=True)
@shared.task("all")
@shared.picture("--sheet", "Also draw the first pictures of each class at each site.")
@click.option(
    "--write",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also write drawn pictures (lesions:) into this new folder, with the table labels.csv: something to try a "
    "device with.",
)
@shared.force
@needs_trainer
def data(specs: tuple[str, ...], task: str | None, sheet: Path | None, folder: Path | None, force: bool) -> None:
    """Show what data holds and what is wrong with it.

    Sites by classes, or by open and closed questions, lesions, splits, sizes, what `run` would refuse, and pictures
    that cannot be read. It ends with status 1 if there is any of the last two. SPEC is as for `run --data`:
    docs/reference/data.md.
    """
    from edgefl_trainer.data.survey import contact_sheet, gathered, read_tables, survey
    from edgefl_trainer.errors import SettingError

    if sheet is not None and sheet.exists() and not force:
        raise SettingError(f"{sheet} exists already: name another file, or overwrite it with --force.")
    tables = gathered(read_tables(specs, task=task or "all"), task or "all")
    found = survey(tables)
    for line in found.warnings:
        click.echo(f"warning: {line}", err=True)
    click.echo(survey_text(found))
    if sheet is not None:
        contact_sheet(tables).save(sheet)
        click.echo(f"drew {sheet}", err=True)
    if folder is not None:
        from edgefl_trainer.data.drawn_files import TABLE, write_drawn

        click.echo(f"wrote {counted(write_drawn(tables, folder), 'picture')} and {folder / TABLE}", err=True)
    if found.refused or found.broken or found.without:
        sys.exit(1)


def survey_text(found: "Survey") -> str:
    """Write the tables for a person."""
    from edgefl_trainer.data.sources.files import MOST_NAMED
    from edgefl_trainer.data.survey import REFUSES

    splits = [
        name for name in ("train", "val", "test", "unlabelled", "") if any(key[1] == name for key in found.splits)
    ]
    shown = "lesions" if found.vocabulary is None else "pictures"
    head = ["site", *found.classes, shown, *splits]
    lines = [head]
    for site in found.sites:
        counts = [found.counts[site, label] for label in found.classes]
        dealt = [found.splits[site, split] for split in splits]
        lines.append([site, *(str(count) if count else "–" for count in [*counts, len(found.lesions[site]), *dealt])])
    text = [_table(lines)]
    if "train" in splits:
        text.append(f"a run tunes on some of the train rows: 15 % of each site's {shown}, unless @rows says otherwise")
    if found.vocabulary is not None:
        words, answers = len(found.vocabulary.questions.words), len(found.vocabulary.answers)
        text.append(f"training questions: {counted(words, 'word')}, {counted(answers, 'answer')}")
    if found.sizes:
        shown = ", ".join(f"{w} × {h} ({n:,})" for (w, h), n in found.sizes.most_common(MAX_SHOWN))
        left = len(found.sizes) - MAX_SHOWN
        more = f" and {counted(left, 'more size')}" if left > 0 else ""
        text.append(f"sizes in pixels (pictures): {shown}{more}")
    if found.refused:
        text.append(REFUSES)
        text += [f"  {line}" for line in found.refused]
    text += found.without
    if found.broken:
        text.append(f"{counted(len(found.broken), 'picture')} cannot be read:")
        text += [f"  {line}" for line in found.broken[:MOST_NAMED]]
        text += [f"  and {len(found.broken) - MOST_NAMED:,} more"] * (len(found.broken) > MOST_NAMED)
        text += found.looked_for
    return "\n".join(text)


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    )
