"""`edgefl ask`: a picture and a question in, ranked answers out, or a refusal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl_client.commands.options import home_of, home_option, json_option, model_option, threads_option, trust_option
from edgefl_client.commands.score import formats_option, tell_of_model
from edgefl_client.scoring.open_scorer import open_asker

if TYPE_CHECKING:
    from edgefl_client.home import Home
    from edgefl_client.scoring.asker import Asker
    from edgefl_client.scoring.score_files import Failure
    from edgefl_protocol.pictures.answer import PictureAnswer


def one_question(context: click.Context, words: tuple[str, ...]) -> str:
    """Take the question, one argument; a usage error that names quotes where there are several."""
    if len(words) > 1:
        asked = " ".join(words).replace('"', "")
        raise click.UsageError(f'the question must stand in quotes: {context.command_path} IMAGE "{asked}"', context)
    return words[0]


@click.command()
@click.argument("image", metavar="IMAGE")
@click.argument(
    "question",
    nargs=-1,
    required=True,
    callback=lambda context, _, words: one_question(context, words),
    metavar="QUESTION",
)
@model_option
@trust_option
@json_option
@click.option(
    "--top", type=click.IntRange(1, 100), default=5, show_default=True, metavar="N", help="Number of answers to tell."
)
@click.option(
    "--heatmap",
    "drawings",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Draw the picture, where the model looked, question and answer into this folder.",
)
@click.option(
    "--log",
    "log_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.sqlite",
    help="Append a row to this SQLite database: SHA-256 of file and question (never name or text), model, numbers, "
    "time.  [default: no log]",
)
@formats_option
@threads_option
@home_option
@click.pass_context
def ask(
    context: click.Context,
    image: str,
    question: str,
    model: Path | None,
    trusted: tuple[str, ...],
    as_json: bool,
    top: int,
    drawings: Path | None,
    log_file: Path | None,
    formats: tuple[str, ...],
    threads: int | None,
    home_dir: str | None,
) -> None:
    """Answer a question about a picture. It needs a model that learned questions. IMAGE is a file, or - for standard
    input.

    It tells the most probable answers and how probable each is, or that there is none and why. An answer is no finding.
    """
    if _is_file(question) and not _is_file(image) and image != "-":
        raise click.UsageError(f'the picture comes first: {context.command_path} {question} "{image}"', context)
    home = home_of(context, home_dir)
    asker, bundle = open_asker(home, model, trusted, threads)
    from edgefl_client.commands import score_text
    from edgefl_client.scoring.ask_file import AskingJob, ask_file
    from edgefl_client.scoring.pictures import PictureReader
    from edgefl_client.scoring.score_files import Failure
    from edgefl_protocol.bundle.card_words import weaknesses
    from edgefl_protocol.pictures.answer import PictureAnswer

    troubles = list[str]()
    if drawings is not None:
        drawings.mkdir(parents=True, exist_ok=True)
    with PictureReader(formats) as reader, _open_log(log_file, home, asker, question) as log:
        job = AskingJob(asker=asker, reader=reader, drawings=drawings, top=top, not_drawn=troubles.append, log=log)
        result = ask_file(job, image, question)
    failed = isinstance(result, Failure)
    refused = isinstance(result, PictureAnswer) and result.refused
    # What speaks against the model's answers is of no use where it gives none.
    against = () if refused else weaknesses(bundle.card, bundle.labels, bundle.questions)
    told = partial(tell_of_model, bundle, asker.network, drawings, against)
    if not (failed or refused):
        told()
    if as_json:
        click.echo(score_text.answer_json(result, question, top))
    else:
        click.echo("\n".join(score_text.answer_lines(result, asker.how_right, top)), err=failed)
    if refused:
        told()
    if troubles:
        click.echo("\n".join(map(score_text.printable, troubles)), err=True)
    if isinstance(result, Failure):
        context.exit(2 if result.code == "missing_extra" else 1)
    context.exit(1 if troubles else 0)


def _is_file(text: str) -> bool:
    """Whether there is a file of this name; a question may be no name at all, or a far too long one."""
    with suppress(OSError, ValueError):
        return Path(text).is_file()
    return False


@contextmanager
def _open_log(
    file: Path | None, home: "Home", asker: "Asker", question: str
) -> "Iterator[Callable[[PictureAnswer | Failure, str | None], None] | None]":
    """Open the log that takes the result; None where none is asked for."""
    if file is None:
        yield None
        return
    from edgefl_client.scoring.log_file import LogFile, circumstances
    from edgefl_client.scoring.log_forms import ANSWERS, answer_columns

    home.refuse_in_new_home(file)
    with LogFile(file, ANSWERS, circumstances(home, asker.model, asker.network)) as log:
        yield lambda result, image_sha256: log.append(image_sha256, answer_columns(question, result))
