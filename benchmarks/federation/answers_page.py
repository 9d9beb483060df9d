"""Write the figures of finished runs over questions into a page, between two marks; run again as runs finish.

Two tables: each method overall, and against the question alone, seed by seed; then open and closed questions by site.
Runs in folders of no row, such as those of a method's switches, are left out and named.
Figures are those of `edgefl-train table RUNS --experiment FILE`, in per cent, to one decimal.

    python -m benchmarks.federation.answers_page runs/vqa-rad docs/results/vqa_rad.md \\
        --experiment experiments/medvqa-vqa-rad.toml
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from edgefl_trainer.experiments.comparison import ComparedRow, Found
    from edgefl_trainer.experiments.files import Experiment

BEGIN, END = "<!-- figures: written by benchmarks/federation/answers_page.py -->", "<!-- end of figures -->"
ALONE = "question-alone"  # folder of the row that sees no picture


def page_tables(experiment: "Experiment", found: "Sequence[Found]") -> str:
    """Return both tables as Markdown, with the caption of the comparison's settings."""
    from edgefl_trainer.evaluate.tables.text import bytes_text, markdown
    from edgefl_trainer.experiments.comparison import lines_of

    (part,) = experiment.parts
    lines = [line for line in lines_of(experiment, part, found) if line.seeds]
    names = [column.name for column in part.columns]
    wide = [i for i, name in enumerate(names) if "," not in name]
    against = _against(experiment, found)
    head = ["method", *(names[i] for i in wide), "over question alone, by seed", "up / round", "seeds"]
    body = [
        [
            line.label,
            *(_shown(line, i) for i in wide),
            against.get(line.label, "–"),
            bytes_text(line.bytes_up_per_round),
            ", ".join(map(str, line.seeds)),
        ]
        for line in lines
    ]
    first = markdown(head, body, "").strip()
    rest = [i for i in range(len(names)) if i not in wide]
    second = markdown(["method", *(names[i] for i in rest)], [_cells(line, rest) for line in lines], "").strip()
    return f"{first}\n\n{second}"


def _cells(line: "ComparedRow", columns: Sequence[int]) -> list[str]:
    return [line.label, *(_shown(line, i) for i in columns)]


def _shown(line: "ComparedRow", column: int) -> str:
    cell = line.ours[column]
    if cell.value is None:
        return "–"
    return f"{100 * cell.value:.1f}" + ("" if cell.std is None else f" ± {100 * cell.std:.1f}")


def _against(experiment: "Experiment", found: "Sequence[Found]") -> dict[str, str]:
    """Return by label the mean accuracy minus that of the question alone, for each seed that both have."""
    means = {(one.row, one.measured.seed): 100 * one.measured.summary["mean_accuracy"] for one in found}
    seeds = sorted({seed for _, seed in means})
    shown = {}
    for row in experiment.rows:
        pairs = [(means.get((row.folder, seed)), means.get((ALONE, seed))) for seed in seeds]
        differences = [f"{mine - alone:+.1f}" for mine, alone in pairs if mine is not None and alone is not None]
        if differences and row.folder != ALONE:
            shown[row.label] = ", ".join(differences)
    return shown


def replaced(page: str, tables: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """Return the page with the tables between its two marks; a `ValueError` where it has no such marks."""
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"the page lacks {marks[0]} and {marks[1]}")
    return f"{before}{marks[0]}\n\n{tables}\n\n{marks[1]}{after}"


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--experiment", "file", required=True, type=click.Path(path_type=Path, exists=True), help="Its file.")
@click.argument("page", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(runs: tuple[Path, ...], file: Path, page: Path) -> None:
    """Write the figures of RUNS into PAGE."""
    from edgefl_protocol.errors import EdgeflError
    from edgefl_trainer.engine.folder import run_folders
    from edgefl_trainer.experiments.files import read_experiment
    from edgefl_trainer.experiments.finished import find_runs

    try:
        experiment = read_experiment(file)
        folders = list(dict.fromkeys(path for folder in runs for path in run_folders(folder)))
        other = _of_no_row(experiment, folders)
        found = find_runs(experiment, [path for path in folders if path not in other])
        tables = replaced(page.read_text(encoding="utf-8"), page_tables(experiment, found))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for path in other:
        click.echo(f"left out {path}: its folder is that of no row", err=True)
    page.write_text(tables, encoding="utf-8")
    click.echo(f"wrote {len(found)} runs into {page}")


def _of_no_row(experiment: "Experiment", folders: "Sequence[Path]") -> list[Path]:
    """List the runs that lie as an experiment lays its runs, in the folder of a row that this one does not have."""
    from edgefl_trainer.experiments.planning import place_of

    parts, rows = {part.name for part in experiment.parts}, {row.folder for row in experiment.rows}
    lying = [(path, place_of(path)) for path in folders]
    return [path for path, place in lying if place is not None and place[0] in parts and place[1] not in rows]


if __name__ == "__main__":
    main()
