"""Agreement of int8 bundles with PyTorch on real pictures: each site's own model on `val` pictures of that site.

Each bundle is made as `edgefl-export bundle --precision int8` makes it, from `tune` and, for its gate, `val` rows of
the run; the pictures here are drawn anew of the same `val` rows. Targets: the same class for 99 %, mean change of
vacuity 0.01 at most; status 1 where one is missed or the gate refuses. `--write` puts the measured rows into
the page and leaves those of the run's other sites; rows of another run go.

    python -m benchmarks.device.int8_agreement RUN --write docs/results/device.md
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from benchmarks.device.device_scoring import Target, replace_section

if TYPE_CHECKING:
    from edgefl_export.parity.score_parity import Pictures
    from edgefl_trainer.engine.models import FinishedRun

MARKS = ("<!-- int8 agreement -->", "<!-- end of int8 agreement -->")
HEAD = (
    "| site | val pictures | same class | mean change of vacuity | of the map | layers in float | measured |",
    "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
)


@click.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True))
@click.option("--site", "sites", multiple=True, metavar="NAME", help="A site of the run; repeatable.  [default: all]")
@click.option("--images", default=500, show_default=True, metavar="N", help="At most, of each site.")
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="Put the table into this page as well.")
def main(run: Path, sites: tuple[str, ...], images: int, write: Path | None) -> None:
    """Measure, print, and end with 1 where a target is missed."""
    from edgefl_export.errors import GateError
    from edgefl_export.int8.calibration import federation_of
    from edgefl_trainer.engine.models import open_run

    finished = open_run(run)
    data = federation_of(finished)
    lines: dict[str, str] = {}
    missed = False
    for site in sites or finished.sites:
        rows = np.random.default_rng(1).permutation(data.sites[site].val.astype(np.int64))[:images]
        try:
            line, targets = one_site(finished, site, np.array(data.images[rows]))
        except GateError as error:  # the other sites are measured all the same
            line, targets = f"| {site} | {len(rows)} | refused: {error} | | | |", [Target("refused", 1, 0)]
        line += time.strftime(" %Y-%m-%d |")
        print(line, file=sys.stderr, flush=True)
        lines[site] = line
        missed = missed or any(target.missed for target in targets)
    print("\n".join([*HEAD, *lines.values()]))
    if write is not None:
        write_rows(write, f"State of the run: {finished.summary['state_sha256'][:12]}.", finished.sites, lines)
    sys.exit(missed)


def write_rows(page: Path, run: str, sites: Sequence[str], lines: Mapping[str, str]) -> None:
    """Put rows into the page, beside those of the same run's other sites.

    Args:
        page: with the marks.
        run: a line that says which run the rows are of.
        sites: of the run, in the order of the table.
        lines: site → row.
    """
    before = page.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0].splitlines()
    known = {line.split("|")[1].strip(): line for line in before if line.startswith("|")} if run in before else {}
    rows = {**known, **lines}
    replace_section(page, "\n".join([run, "", *HEAD, *(rows[site] for site in sites if site in rows)]), MARKS)


def one_site(finished: "FinishedRun", site: str, pictures: "Pictures") -> tuple[str, list[Target]]:
    """The row of a site, and what of it is judged."""
    from edgefl_client.runtime import load_graph, processors
    from edgefl_export.bundles.assemble import build_members, site_model
    from edgefl_export.int8.calibration import calibration_of
    from edgefl_export.int8.precision import agreement
    from edgefl_export.parity.score_parity import graph_scores
    from edgefl_protocol.tensors import read_tensors
    from edgefl_trainer.engine.models import predict

    model = site_model(finished, site)
    made = build_members(model, int8=calibration_of(finished, site))
    weights = read_tensors(made.files["weights.safetensors"], max_bytes=1 << 30)[0]
    said = predict(model.predictor, pictures)
    outputs = {"probabilities": said.probabilities, "vacuity": said.vacuity, "map": said.maps}
    expected = {name: value for name, value in outputs.items() if value is not None}
    scores = graph_scores(load_graph(made.files["score.onnx"], processors()), weights, pictures, 8)
    found = agreement(expected, scores, model.predictor.seen)
    kept = json.loads(made.files["card.json"])["metrics"]["int8"]["kept_in_float"]
    maps = "none" if found.map_change is None else f"{found.map_change:.4f}"
    figures = f"{found.same_class:.2%} | {found.change:.4f} | {maps}"
    line = f"| {site} | {len(pictures)} | {figures} | {len(kept)} |"
    return line, [Target("another class", 1 - found.same_class, 0.01), Target("change", found.change, 0.01)]


if __name__ == "__main__":
    main()
