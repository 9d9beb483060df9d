"""Several runs beside one another: the rows of `edgefl-train table`, and a dot for each site."""

from collections.abc import Sequence

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.evaluate.chance import chance_of
from edgefl_trainer.evaluate.plots.metric_plot import plot_metric
from edgefl_trainer.evaluate.tables.rows import runs_of_rows, table_rows, usual_metric
from edgefl_trainer.evaluate.tables.text import caption, origin, table_page
from edgefl_trainer.experiments.variants import told_apart
from edgefl_trainer.reports.blocks import ReportBlock, ReportTable, Section, ShownPicture, Words, plain
from edgefl_trainer.reports.run_facts import RunFacts


def comparison_section(runs: Sequence[RunFacts]) -> Section:
    """Compare runs of one task; an `EdgeflError` where they are of several."""
    summaries = told_apart([facts.run for facts in runs])
    metric = usual_metric(summaries)
    try:
        rows = table_rows(summaries, metric)
    except ValueError as error:
        raise EdgeflError(f"{error}: name other runs, or make a report of each.", "run") from error
    head, lines = table_page(summaries, metric)
    told = caption(summaries, origin([facts.environment for facts in runs]), metric).replace("`", "")
    blocks: list[ReportBlock] = [ReportTable(head=head, rows=[plain(*line) for line in lines], caption=told)]
    try:
        chance = [chance_of(some, metric) for some in runs_of_rows(summaries)]
        blocks.append(
            ShownPicture(png=plot_metric(rows, metric, chance), caption="Each site of each row, and its mean.")
        )
    except ValueError as error:
        blocks.append(Words(text=f"No picture: {error}."))
    return Section(title="The runs compared", blocks=blocks)
