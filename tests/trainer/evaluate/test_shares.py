"""Columns that say what share of its model a site sends. Source: docs/methods.md 8.4, 11.4."""

import csv
import io

import pytest
from tests.trainer.evaluate.conftest import ONE, summary

from edgefl_trainer.evaluate.tables.shares import share_text
from edgefl_trainer.evaluate.tables.text import render_table


@pytest.mark.parametrize(
    ("share", "told"),
    [(None, "–"), (0.0, "0 %"), (0.0026, "0.26 %"), (0.000497, "0.05 %"), (0.094, "9.4 %"), (0.123, "12 %"),
     (1.0017, "100 %"), (1.6, "160 %")],
)  # fmt: skip
def test_shares_are_per_cents_of_two_digits(share, told):
    assert share_text(share) == told


def test_a_column_stands_beside_the_bytes_where_its_share_is_known():
    """A run from before a share was kept leaves a gap, and a table of such runs has no column."""
    whole = summary("fedavg", 0, {"a": 0.5}, share_of_full_models=0.25)
    text = render_table([ONE, whole])
    assert "| up / round | of full model | down / round |" in text and "of what learns" not in text
    assert "| 1.5 KiB | 25 % | 3.0 MiB |" in text and "| 1.5 KiB | – | 3.0 MiB |" in text
    assert "the network, frozen or not" in text
    assert "of full model" not in render_table([ONE])
    both = render_table([whole | {"share_of_models": 1.0}])
    assert "| up / round | of what learns | of full model | down / round |" in both
    assert "| 100 % | 25 % |" in both and "if each site sent all that it learns" in both


def test_shares_are_means_over_seeds_and_unrounded_in_csv():
    runs = [summary("fedavg", seed, {"a": 0.5}, share_of_models=share) for seed, share in ((0, 0.002), (1, 0.0033))]
    [row] = csv.DictReader(io.StringIO(render_table(runs, "csv")))
    assert float(row["share_of_models"]) == pytest.approx(0.00265) and row["share_of_full_models"] == ""
