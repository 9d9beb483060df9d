"""`edgefl-train`: run, evaluate, predict with and compare federated methods. Results on stdout, the rest on stderr.

Exit status: 0 done; 1 failed (data, disk, training, a damaged file); 2 what was asked for cannot be had (an option, a
name, a setting, a missing extra), and nothing was begun; 3 refused (signature, trust, policy). A known failure is one
sentence, never a traceback.
"""

import json
import sys
from pathlib import Path
from typing import Any

import click

from edgefl_protocol.errors import BundleError, EdgeflError, EnvelopeError, RecordError
from edgefl_trainer.commands.extra import needs_trainer
from edgefl_trainer.commands.finetune import finetune
from edgefl_trainer.commands.join import join
from edgefl_trainer.errors import USAGE_CODES, FederationRefused

FAILED, USAGE, REFUSED = 1, 2, 3
SITE_FIGURES = (  # `evaluate.metrics.METRIC_NAMES`, without what that module imports
    "balanced_accuracy", "macro_precision", "macro_recall", "macro_f1", "specificity", "auroc", "accuracy", "ece",
    "brier", "aurc", "open_accuracy", "open_balanced_accuracy",
)  # fmt: skip


def main() -> None:
    """Console entry point."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("stopped; go on with --resume (join: the same command)", err=True)
        sys.exit(FAILED)
    except EdgeflError as error:
        click.echo(f"edgefl-train: {error}", err=True)
        sys.exit(exit_code(error))
    except OSError as error:
        click.echo(f"edgefl-train: {error.filename or 'a file'} cannot be used: {error.strerror or error}.", err=True)
        sys.exit(FAILED)


def exit_code(error: EdgeflError) -> int:
    """The exit status of a command that ends with this error."""
    if isinstance(error, BundleError | EnvelopeError | RecordError | FederationRefused):
        return REFUSED
    return USAGE if error.code in USAGE_CODES else FAILED


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="edgefl")
def cli() -> None:
    """Train federations of sites on skin images that never leave them."""


cli.add_command(finetune)
cli.add_command(join)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of text.")
@needs_trainer
def methods(as_json: bool) -> None:
    """List the methods, what each sends, and which need labels. What travels is told for the default settings."""
    from edgefl_trainer.methods import METHODS

    facts: list[dict[str, Any]] = [
        {
            "name": name,
            "family": kind.family,
            "paper": kind.paper,
            "travels": list(kind().travels),
            "needs_labels": kind.needs_labels,
        }
        for name, kind in sorted(METHODS.items())
    ]
    if as_json:
        click.echo(json.dumps(facts))
        return
    for fact in facts:
        labels = "labelled images" if fact["needs_labels"] else "no labels"
        click.echo(f"{fact['name']:<14}{', '.join(fact['travels']) or 'nothing'} travels; {labels}; {fact['paper']}")


@cli.command()
@click.argument("method")
@click.option("--data", multiple=True, metavar="SPEC", help="Data, repeatable; see docs/reference/data.md.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Run directory.")
@click.option(
    "--partition",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Sites and rows, as `edgefl-train partition` dealt them.  [default: those of the data]",
)
@click.option(
    "--task", type=click.Choice(["all", "nevus"]), help="Classes of the data, or nevus against other.  [default: all]"
)
@click.option("--classes", metavar="A,B,…", help="Keep only these classes.")
@click.option(
    "--backbone",
    metavar="NAME",
    help="derm-vit-tiny-84 (comes along), run:DIR, file:PATH, timm:NAME, cnn:NAME, vit:WIDTHxDEPTH/PATCH or tiny.",
)
@click.option(
    "--image-px", type=click.IntRange(min=1), metavar="PX", help="Side of the images.  [default: the backbone's own]"
)
@click.option("--participation", type=float, metavar="SHARE", help="Share of the sites in each round.  [default: 1]")
@click.option("--unlabelled", type=click.Choice(["none", "site", "spread"]), help="Use of images without a label.")
@click.option(
    "--labels",
    type=float,
    metavar="SHARE",
    help="Share of each site's training images whose label is used.  [default: 1]",
)
@click.option(
    "--balance", type=click.Choice(["none", "class"]), help="Draw the classes of a site equally.  [default: none]"
)
@click.option(
    "--select",
    type=click.Choice(["last", "tune"]),
    help="Which round is kept: the last, or the best on tune rows (of a backbone: by its probe).  [default: last]",
)
@click.option(
    "--probe-every",
    type=click.IntRange(min=0),
    metavar="ROUNDS",
    help="Self-supervised: rounds from one linear probe of the encoder to the next, 0 for none.  [default: 5]",
)
@click.option("--rounds", type=int, metavar="N", help="Train rounds.  [default: the preset's]")
@click.option("--epochs", type=int, metavar="N", help="Local epochs of a round.  [default: the preset's]")
@click.option("--images-per-site", type=int, metavar="N", help="Most training images of a site, 0 for all.")
@click.option("--seed", type=int, metavar="N", help="Seed of every draw.  [default: 0]")
@click.option(
    "--preset", type=click.Choice(["tiny", "bench84", "paper"]), help="Schedule and sizes.  [default: bench84]"
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="TOML file of settings.",
)
@click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Hyper-parameter of the method; repeatable."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where to compute.  [default: auto]")
@click.option(
    "--autocast",
    type=click.Choice(["auto", "none", "bf16"]),
    help="Backbone precision; auto is bf16 on CUDA.  [default: auto]",
)
@click.option(
    "--engine",
    type=click.Choice(["local"]),
    default="local",
    show_default=True,
    help="Where the sites run: local is in this process, one after the other.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print summary.json instead of text.")
@needs_trainer
def run(method: str, out: Path, as_json: bool, resume: bool, **options: Any) -> None:
    """Learn with METHOD over all sites of the data. Model, metrics and summary are left in DIR."""
    from edgefl_trainer.commands.results_text import summary_text
    from edgefl_trainer.engine.run import run as run_federation
    from edgefl_trainer.engine.settings import resolve

    assignments, config = options.pop("assignments"), options.pop("config")
    del options["engine"]  # there is one
    if options["classes"] is not None:
        options["classes"] = tuple(name.strip() for name in options["classes"].split(","))
    options["data"] = options["data"] or None
    settings = resolve(method, options, config, assignments)
    summary = run_federation(settings, out, resume=resume)
    click.echo(json.dumps(summary) if as_json else summary_text(summary))


@cli.command()
@click.option(
    "--data", multiple=True, required=True, metavar="SPEC", help="Data to deal, repeatable; see docs/reference/data.md."
)
@click.option(
    "--scheme",
    required=True,
    type=click.Choice(["natural", "iid", "dirichlet", "pathological", "domain"]),
    help="The sites of the data; even; uneven classes; few classes a site; sites of the data cut into equally many.",
)
@click.option("--sites", type=int, metavar="N", help="Number of sites, held-out ones included.")
@click.option("--alpha", type=float, metavar="A", help="Dirichlet: concentration, small is uneven.  [default: 0.3]")
@click.option(
    "--dirichlet-by",
    type=click.Choice(["class", "site"]),
    help="Dirichlet: draw sites for each class, or classes for each of equally large sites.  [default: class]",
)
@click.option("--classes-per-site", type=int, metavar="N", help="Pathological, domain: classes that a site holds.")
@click.option("--classes", metavar="A,B,…", help="Deal only these classes.  [default: all]")
@click.option(
    "--holdout-sites", type=float, metavar="SHARE", default=0.0, show_default=True, help="Share of sites never trained."
)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of every draw.")
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.json",
    help="The partition; its picture FILE.png goes beside it.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
@needs_trainer
def partition(
    data: tuple[str, ...], seed: int, classes: str | None, out: Path, as_json: bool, dirichlet_by: Any, **numbers: Any
) -> None:
    """Deal images to sites once, for runs that will be compared. Prints the class table."""
    from edgefl_trainer.commands.partition import partition_json, partition_text, summary_line, write_partition
    from edgefl_trainer.data.plan import Plan

    wanted = None if classes is None else [name.strip() for name in classes.split(",")]
    made, picture = write_partition(data, Plan(by=dirichlet_by, **numbers), seed, wanted, out)
    click.echo(json.dumps(partition_json(made)) if as_json else partition_text(made))
    click.echo(f"{summary_line(made)}; wrote {out} and {picture}", err=True)


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path, file_okay=False))
@click.option("--data", multiple=True, required=True, metavar="SPEC", help="Data to judge on; repeatable.")
@click.option(
    "--ood",
    multiple=True,
    metavar="textures|skin|PATH",
    help="Pictures not of the task (drawn, or a folder or zip): does the uncertainty tell them apart? Repeatable.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@needs_trainer
def evaluate(run_dir: Path, data: tuple[str, ...], ood: tuple[str, ...], device: str, as_json: bool) -> None:
    """Judge the models of a finished RUN on other data. Takes all `test` rows, else all `val` rows."""
    from edgefl_trainer.commands.results_text import site_lines
    from edgefl_trainer.engine.evaluation import evaluate as judge_run
    from edgefl_trainer.engine.models import open_run

    summary = judge_run(open_run(run_dir), data, device, ood)
    click.echo(f"reported on {summary['reported_rows']} rows", err=True)
    click.echo(json.dumps(summary) if as_json else "\n".join(site_lines(summary)))


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path, file_okay=False))
@click.argument("images", metavar="IMAGES…", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--site", required=True, metavar="NAME", help="Whose model scores.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object for each image, with the keys of `edgefl score`."
)
@needs_trainer
def predict(run_dir: Path, images: tuple[Path, ...], site: str, as_json: bool) -> None:
    """Score IMAGES with the model that a site learned in RUN. This is the reference for what a device says."""
    from edgefl_trainer.commands.results_text import score_line
    from edgefl_trainer.engine.models import open_run
    from edgefl_trainer.engine.prediction import predict_files

    failed = 0
    for score in predict_files(open_run(run_dir), site, images):
        failed += "error" in score
        click.echo(json.dumps(score) if as_json else score_line(score))
    if failed:
        click.echo(f"{failed} of {len(images)} images could not be scored", err=True)
        sys.exit(1)


@cli.command()
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--experiment",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Stand the runs beside the paper's numbers in this experiments/*.toml.",
)
@click.option(
    "--metric",
    type=click.Choice(SITE_FIGURES),
    metavar="NAME",
    help=f"Figure of a site: {', '.join(SITE_FIGURES)}.  [default: balanced_accuracy; with --experiment the paper's]",
)
@click.option(
    "--spread",
    type=click.Choice(["sample", "population"]),
    default="sample",
    show_default=True,
    help="Standard deviation behind ±: divided by n - 1, or by n.",
)
@click.option(
    "--format",
    "style",
    type=click.Choice(["md", "csv", "json", "latex"]),
    default="md",
    show_default=True,
    help="Form.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PNG",
    help="Also draw accuracy on tune rows over rounds and bytes, or what the experiment's file asks for.",
)
@needs_trainer
def table(
    runs: tuple[Path, ...], file: Path | None, metric: str | None, spread: str, style: str, plot: Path | None
) -> None:
    """Compare finished runs in a table, site by site. It has mean and spread, worst site, bytes of a round.

    A RUN is a run directory, or a folder with finished runs below it.
    """
    from edgefl_trainer.commands.experiment import print_comparison, print_table

    ddof = 1 if spread == "sample" else 0
    if file is None:
        print_table(runs, style, metric or "balanced_accuracy", plot, ddof)
    elif metric is not None:
        raise click.UsageError("--metric and --experiment cannot stand together: the experiment names its figures.")
    else:
        print_comparison(file, runs, style, plot, ddof)


@cli.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where the runs go.")
@click.option("--tiny", is_flag=True, help="The file's tiny variant: drawn lesions, an untrained network, seconds.")
@click.option("--rows", metavar="A,B,…", help="Only these rows, by label or folder name.  [default: all]")
@click.option("--parts", metavar="A,B,…", help="Only these parts of the table.  [default: all]")
@click.option("--seeds", metavar="N,N,…", default="0", show_default=True, help="Seeds of the runs.")
@click.option("--data", multiple=True, metavar="SPEC", help="Other data than the file's, for every part; repeatable.")
@click.option("--task", type=click.Choice(["all", "nevus"]), help="Instead of the file's.")
@click.option("--backbone", metavar="NAME", help="Instead of the file's; see `edgefl-train run --help`.")
@click.option("--image-px", type=click.IntRange(min=1), metavar="PX", help="Instead of the file's.")
@click.option("--balance", type=click.Choice(["none", "class"]), help="Instead of the file's.")
@click.option("--select", type=click.Choice(["last", "tune"]), help="Instead of the file's.")
@click.option("--preset", type=click.Choice(["tiny", "bench84", "paper"]), help="Instead of the file's.")
@click.option("--rounds", type=int, metavar="N", help="Instead of the file's.")
@click.option("--epochs", type=int, metavar="N", help="Instead of the file's.")
@click.option("--pretrain-rounds", type=int, metavar="N", help="Rounds of the runs that rows start from.")
@click.option("--pretrain-epochs", type=int, metavar="N", help="Epochs of a round of the runs that rows start from.")
@click.option("--images-per-site", type=int, metavar="N", help="Instead of the file's.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="For every row whose method has KEY; pretrain.KEY for the runs that rows start from.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where to compute.  [default: auto]")
@click.option("--autocast", type=click.Choice(["auto", "none", "bf16"]), help="Backbone precision.  [default: auto]")
@click.option("--dry-run", is_flag=True, help="Print the commands that do the same, and run nothing.")
@click.option(
    "--format",
    "style",
    type=click.Choice(["md", "csv", "json", "latex"]),
    default="md",
    show_default=True,
    help="Form of the table.",
)
@needs_trainer
def experiment(file: Path, out: Path, dry_run: bool, style: str, **options: Any) -> None:
    """Run a paper's table, and print it beside the paper's numbers. The tables are files: experiments/*.toml.

    Finished runs in DIR are kept, stopped ones go on. Runs lie in DIR/PART/ROW/seed-N.
    """
    from edgefl_trainer.commands.experiment import print_commands, run_and_print

    failed = 0
    if dry_run:
        print_commands(file, out, options)
    else:
        failed = run_and_print(file, out, options, style)
    if failed:
        click.echo(f"{failed} runs failed; the same command tries them again", err=True)
        sys.exit(FAILED)
