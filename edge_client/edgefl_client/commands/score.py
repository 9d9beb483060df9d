"""`edgefl score`: pictures in, one line a picture out."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl_client.commands.options import (
    finite,
    home_of,
    home_option,
    json_option,
    model_option,
    threads_option,
    trust_option,
    weights_option,
)
from edgefl_client.doctor.findings import DAY_MS, SOON_DAYS
from edgefl_client.scoring.open_scorer import open_scorer
from edgefl_protocol.sentences import counted, duration, expiry

if TYPE_CHECKING:
    from edgefl_client.home import Home
    from edgefl_client.scoring.network import Network
    from edgefl_client.scoring.score_files import Result
    from edgefl_client.scoring.scorer import Scorer
    from edgefl_protocol.bundle import Bundle

FEW = 3  # pictures up to which no progress bar is drawn
STOPPED = 130  # status of a command that Ctrl-C ended, as shells have it: 128 and the number of the signal
LONG_S = 10.0  # from which a person who waits is told how long
_KNOWN = ("jpeg", "png", "tiff", "heic", "dicom")  # `pictures.FORMATS`, which is not loaded for the help text

heatmap_option = click.option(
    "--heatmap",
    "heatmaps",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Draw a heat map of each picture into this folder.",
)
refer_option = click.option(
    "--refer-above",
    type=click.FloatRange(0.0),
    callback=finite,
    metavar="U",
    help="Refer above this vacuity, 0 to below 0.999 (softmax models: entropy in nats, 0 to below ln of the number of "
    "classes).  [default: the bundle's]",
)
formats_option = click.option(
    "--formats",
    default="jpeg,png",
    show_default=True,
    callback=lambda _context, _option, value: parse_formats(value),
    metavar="LIST",
    help="Kinds of files to read: jpeg, png, tiff, heic and dicom. The last two need the extra of their name, such "
    "as edgefl-derm[heic].",
)


log_option = click.option(
    "--log",
    "log_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.sqlite",
    help="Append a row for each picture to this SQLite database: SHA-256 of the file (never its name), model, "
    "numbers, time. Pictures are then scored one at a time.  [default: no log]",
)


def parse_formats(value: str) -> tuple[str, ...]:
    """Split a list with commas into names of formats."""
    names = tuple(name.strip().lower() for name in value.split(",") if name.strip())
    unknown = [name for name in names if name not in _KNOWN]
    if unknown or not names:
        raise click.BadParameter(f"{', '.join(unknown) or 'an empty list'} is not known; allowed: {', '.join(_KNOWN)}.")
    return names


def _standard_input_once(
    _context: click.Context, _argument: click.Parameter, images: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse a second `-`: whoever reads first leaves nothing."""
    if images.count("-") > 1:
        raise click.UsageError("- is one picture on standard input: give it once")
    return images


@click.command()
@click.argument("images", nargs=-1, required=True, callback=_standard_input_once, metavar="IMAGES...")
@model_option
@trust_option
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV on standard output.")
@heatmap_option
@refer_option
@weights_option
@log_option
@formats_option
@click.option(
    "--batch",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    metavar="N",
    help="Pictures to score at a time; with --heatmap or --log always one.",
)
@threads_option
@home_option
@click.pass_context
def score(
    context: click.Context,
    images: tuple[str, ...],
    model: Path | None,
    trusted: tuple[str, ...],
    as_json: bool,
    as_csv: bool,
    heatmaps: Path | None,
    refer_above: float | None,
    weights: str | None,
    log_file: Path | None,
    formats: tuple[str, ...],
    batch: int,
    threads: int | None,
    home_dir: str | None,
) -> None:
    """Score pictures: files, folders, patterns or standard input. A folder stands for all pictures in it, - for one
    picture on standard input.

    `--json` prints one object a picture, in order.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv cannot be used together")
    home = home_of(context, home_dir)
    scorer, vouched = open_scorer(home, model, trusted, threads, refer_above, weights)
    from edgefl_client.commands import score_text
    from edgefl_client.scoring import folder_files, score_files
    from edgefl_client.scoring.pictures import PictureReader

    troubles, failures = list[str](), list[score_files.Failure]()
    with PictureReader(formats) as reader, open_log(log_file, home, scorer) as log:
        home.refuse_in_new_home(heatmaps)
        files = folder_files.expand(images, reader.suffixes)
        unread = folder_files.left_out(images, reader)
        if not files:
            raise click.UsageError(_none_there(images, reader.suffixes, unread))
        prepare(vouched.bundle, heatmaps, scorer, unread, refer_above)
        tell_empty(images, reader.suffixes)
        table = score_text.CsvLines(vouched.bundle.labels.classes)
        if as_csv:
            click.echo(table.head(), color=True)
        task = score_files.ScoringJob(
            scorer=scorer, reader=reader, heatmaps=heatmaps, batch=batch, log=log,
            not_drawn=lambda name, error: troubles.append(score_files.no_map_words(name, error)),
        )  # fmt: skip
        line_of = score_text.json_line if as_json else table.row if as_csv else score_text.human_line
        with _tells_how_many(len(files)) as done, _progress(len(files), with_maps=heatmaps is not None) as step:
            for result in score_files.score_files(task, vouched.before_each(files)):
                if isinstance(result, score_files.Failure):
                    failures.append(result)
                click.echo(line_of(result), color=True)  # else a name that holds a colour's code loses it
                done.append(result.image)
                step(1)
    if failures:
        noun = "pictures" if len(files) > 1 else "picture"
        troubles.append(f"{len(failures)} of {len(files)} {noun} could not be scored.")
        troubles += sorted({one.message for one in failures if one.code == "missing_extra"})
    if troubles:
        click.echo("\n".join(map(score_text.printable, troubles)), err=True)
        context.exit(2 if failures and all(one.code == "missing_extra" for one in failures) else 1)


@contextmanager
def _tells_how_many(pictures: int) -> Iterator[list[str | None]]:
    """On Ctrl-C, say of how many pictures the result stands, and end as a shell expects; gives the list to fill."""
    done: list[str | None] = []
    try:
        yield done
    except KeyboardInterrupt:
        click.echo(f"\nstopped: {len(done)} of {counted(pictures, 'picture')} done; score the others again", err=True)
        raise click.exceptions.Exit(STOPPED) from None


def _none_there(given: Sequence[str], suffixes: Sequence[str], unread: str | None) -> str:
    from edgefl_client.commands.score_text import printable
    from edgefl_client.scoring.folder_files import without_pictures

    drawings = sum(without_pictures(given, suffixes).values())
    none = _only_drawings(drawings) or f"the given folders hold no file whose name ends in {', '.join(suffixes)}"
    return printable(none if unread is None else f"{none}. {unread}")


def _only_drawings(count: int) -> str | None:
    return f"no picture to score ({count} of EdgeFL's own heat maps left out)" if count else None


def tell_empty(given: Sequence[str], suffixes: Sequence[str]) -> None:
    """Name each of the given folders that holds nothing to score."""
    from edgefl_client.commands.score_text import printable
    from edgefl_client.scoring.folder_files import without_pictures

    for folder, drawings in without_pictures(given, suffixes).items():
        what = _only_drawings(drawings) or f"no file whose name ends in {', '.join(suffixes)}"
        click.echo(f"{printable(folder)} holds {what}", err=True)


def prepare(
    bundle: "Bundle", heatmaps: Path | None, scorer: "Scorer", unread: str | None, refer_above: float | None
) -> None:
    """Make the folder of heat maps, and say what has to be said before the first score."""
    from edgefl_client.commands.score_text import printable
    from edgefl_protocol.bundle.card_words import weaknesses
    from edgefl_protocol.bundle.never_predicted import never_predicted
    from edgefl_protocol.pictures.wording import learned_where

    if unread is not None:
        click.echo(printable(unread), err=True)
    personal = scorer.model.state_kind == "personal"
    against = weaknesses(bundle.card, scorer.labels, learned_here=personal)
    before_scoring(bundle, scorer.network, heatmaps, against)
    click.echo(learned_where(scorer.model), err=True)
    if (looser := _looser(bundle, refer_above)) is not None:
        click.echo(looser, err=True)
    if bundle.labels.info is None:
        click.echo(
            "This model does not say which of its classes are benign, so it asks for a look at every picture; its "
            "publisher can export it again with class information.",
            err=True,
        )
    if personal:
        never = never_predicted(scorer.labels, learned_here=True)
        benign = f" {never.sentence}" if never.sentence is not None and never.warning is None else ""
        click.echo(
            "Scored with the personal values learned on this device; --weights bundle scores with the bundle's."
            f"{benign}",
            err=True,
        )


def _looser(bundle: "Bundle", refer_above: float | None) -> str | None:
    """Say that the caller's threshold of uncertainty asks for fewer looks than the card's; None where it does not."""
    own = bundle.card.refer_above
    if refer_above is None or own is None or refer_above <= max(own, float(f"{own:g}")):  # as it is told here
        return None
    measure, unit = ("a vacuity", "") if "vacuity" in bundle.outputs else ("an entropy", " nats")
    return (
        f"The model itself asks for a look above {measure} of {own:g}{unit}; with --refer-above that is "
        f"{refer_above}{unit}, so the recommendation is looser than the model's own."
    )


def before_scoring(bundle: "Bundle", network: "Network", heatmaps: Path | None, against: Sequence[str]) -> None:
    """Make the folder of drawings, and say what any model has said of it before its first result."""
    if heatmaps is not None:
        heatmaps.mkdir(parents=True, exist_ok=True)
    tell_of_model(bundle, network, heatmaps, against)


def tell_of_model(bundle: "Bundle", network: "Network", heatmaps: Path | None, against: Sequence[str]) -> None:
    """Say what a model is for, what speaks against it (`card_words.weaknesses`), and when it expires."""
    from edgefl_protocol.bundle.question_words import why_no_map
    from edgefl_protocol.bundle.shown_map import no_map

    if bundle.card.research_use_only:
        click.echo("Research use only: an aid for study, not a diagnosis.", err=True)
    for weakness in against:
        click.echo(weakness, err=True)
    left_ms = network.left_ms
    if left_ms is not None and left_ms < SOON_DAYS * DAY_MS:
        click.echo(
            f"The model {expiry(left_ms)} and cannot be used after that: ask its publisher for a newer one, or in a "
            "federation fetch it with edgefl sync.",
            err=True,
        )
    why_not = no_map(bundle.card.map) if bundle.questions is None else why_no_map(bundle.card.map, bundle.questions)
    if heatmaps is not None and why_not is not None:
        click.echo(f"{why_not} The pictures are drawn without a map.", err=True)


@contextmanager
def open_log(
    file: Path | None, home: "Home", scorer: "Scorer"
) -> "Iterator[Callable[[Result, str | None], None] | None]":
    """Open the log that takes each result; None where none is asked for."""
    if file is None:
        yield None
        return
    from edgefl_client.scoring.log_file import LogFile, circumstances
    from edgefl_client.scoring.log_forms import SCORES, score_columns

    home.refuse_in_new_home(file)
    with LogFile(file, SCORES, circumstances(home, scorer.model, scorer.network)) as log:
        yield lambda result, image_sha256: log.append(image_sha256, score_columns(result))


@dataclass
class _Pace:
    """Says after the first picture with a map how long the others take, where that is long."""

    left: int  # pictures
    begun: float | None = field(default_factory=time.monotonic)  # seconds; None once it was said

    def step(self, pictures: int) -> None:
        """Count pictures as done."""
        self.left -= pictures
        if self.begun is None or self.left == 0:
            return
        first_s, self.begun = time.monotonic() - self.begun, None
        if first_s * self.left >= LONG_S:
            others = f"the other {counted(self.left, 'picture')} take about {duration(first_s * self.left)}"
            click.echo(f"A picture with its map took {first_s:.1f} s; {others}.", err=True)


@contextmanager
def _progress(pictures: int, *, with_maps: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error for a person at a terminal; for few pictures, and in a log, what maps take."""
    if pictures <= FEW or not at_a_terminal():
        yield _Pace(pictures).step if with_maps else lambda _steps: None
        return
    with click.progressbar(length=pictures, label="Scoring", file=sys.stderr) as bar:
        yield bar.update


def at_a_terminal() -> bool:
    """Tell whether standard error is a terminal to which the results are not printed, too."""
    return sys.stderr.isatty() and not sys.stdout.isatty()
