"""`benchmarks/device/int8_agreement.py --write`: a run for one site leaves the rows of the others on the page."""

import pytest
from benchmarks.device import int8_agreement

SITES = ("bcn", "msk", "vienna")


@pytest.fixture
def write_rows():
    return int8_agreement.write_rows


def row(site: str, day: str) -> str:
    return f"| {site} | 500 | 99.80% | 0.0018 | 0.0032 | 0 | {day} |"


def test_rows_of_the_other_sites_stay(tmp_path, write_rows):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- int8 agreement -->\n<!-- end of int8 agreement -->\nafter\n")
    write_rows(page, "Run a.", SITES, {site: row(site, "monday") for site in ("vienna", "bcn")})
    write_rows(page, "Run a.", SITES, {site: row(site, "tuesday") for site in ("msk", "bcn")})
    lines = page.read_text().splitlines()
    days = {"bcn": "tuesday", "msk": "tuesday", "vienna": "monday"}
    assert [line for line in lines if line.endswith("day |")] == [row(site, days[site]) for site in SITES]
    assert (lines[0], lines[-1], lines.count("Run a.")) == ("before", "after", 1)


def test_rows_of_another_run_go(tmp_path, write_rows):
    page = tmp_path / "page.md"
    page.write_text("<!-- int8 agreement --><!-- end of int8 agreement -->")
    write_rows(page, "Run a.", SITES, {"bcn": row("bcn", "monday")})
    write_rows(page, "Run b.", SITES, {"msk": row("msk", "tuesday")})
    assert [line for line in page.read_text().splitlines() if line.endswith("day |")] == [row("msk", "tuesday")]
