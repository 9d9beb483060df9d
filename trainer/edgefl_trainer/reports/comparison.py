"""Several runs beside one another: the rows of `edgefl-train table`, and a dot for each site."""

from collections.abc import Sequence

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.evaluate.chance import chance_of
from edgefl_trainer.evaluate.plots.metric_plot import plot_metric
from edgefl_trainer.evaluate.tables.rows import Figure, named, runs_of_rows, table_rows, usual_metric
from edgefl_trainer.evaluate.tables.text import MAX_SITE_COLUMNS, bytes_text, caption, figure_text, origin, time_text
from edgefl_trainer.experiments.variants import told_apart
from edgefl_trainer.reports.blocks import ReportBlock, ReportCell, ReportTable, Section, ShownPicture, Words
from edgefl_trainer.reports.run_facts import RunFacts


def comparison_section(runs: Sequence[RunFacts]) -> Section:
    """Compare runs of one task; an `EdgeflError` where they are of several."""
    summaries = told_apart([facts.run for facts in runs])
    metric = usual_metric(summaries)
    try:
        rows = table_rows(summaries, metric)
    except ValueError as error:
        raise EdgeflError(f"{error}: name other runs, or make a report of each.", "run") from error
    names = sorted({name for row in rows for name in row.sites})
    shown = names if len(names) <= MAX_SITE_COLUMNS else []
    body = [
        [
            ReportCell(name),
            *(ReportCell(figure_text(row.sites.get(site, Figure(mean=None)))) for site in shown),
            *(ReportCell(figure_text(one)) for one in (row.mean, Figure(mean=row.worst), row.pooled)),
            *(ReportCell(bytes_text(count)) for count in (row.bytes_up_per_round, row.bytes_down_per_round)),
            ReportCell(time_text(row.seconds)),
        ]
        for name, row in zip(named(rows), rows, strict=True)
    ]
    told = caption(summaries, origin([facts.environment for facts in runs]), metric).replace("`", "")
    head = ("method", *shown, "mean ± std", "worst", "all rows", "up / round", "down / round", "time")
    blocks: list[ReportBlock] = [ReportTable(head=head, rows=body, caption=told)]
    try:
        chance = [chance_of(some, metric) for some in runs_of_rows(summaries)]
        blocks.append(
            ShownPicture(png=plot_metric(rows, metric, chance), caption="Each site of each row, and its mean.")
        )
    except ValueError as error:
        blocks.append(Words(text=f"No picture: {error}."))
    return Section(title="The runs compared", blocks=blocks)
