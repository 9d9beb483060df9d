"""Pages that cannot go stale: links, generated parts, decision records, change log. Source: docs/design.md."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.house.conftest import walked

LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)")
CITED = re.compile(r"\bdocs/(?:[a-z_]+/)?(?:[a-z_0-9-]+\.md|(?<=decisions/)\d{4})")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
RECORD_WORDS = 250
PARAGRAPH_WORDS = 120
RECORD_PARTS = ("## Context", "## Decision", "## What it costs")


def pages(root: Path, tracked) -> Iterator[Path]:
    """Every tracked Markdown page."""
    yield from (root / path for path in tracked if path.suffix == ".md")


def anchors(page: Path) -> set[str]:
    """The fragment of each heading, as it is made where Markdown is shown."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_a_page_opens_with_its_reader_and_has_short_paragraphs(root: Path, tracked) -> None:
    """Who reads it, and what they can do afterwards; then at most 120 words in a paragraph and in a point of a list.
    Tables and code are counted by nobody."""
    kept = re.compile(r"docs/(guides|reference|results)/[^/]+\.md|docs/(design|methods|security)\.md")
    found = [root / path for path in tracked if kept.fullmatch(str(path))]
    assert len(found) > 25
    for page in found:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        blocks = re.split(r"\n\s*\n", text)
        assert re.match(r"For .+?\. Afterwards ", blocks[1].replace("\n", " ")), f"{page.name}: for whom, and what for?"
        for part in re.split(r"\n\s*\n|\n(?=\s*(?:[|#<]|[*+-] |\d+\. ))", text):
            prose = "" if part.lstrip().startswith(("|", "#", "<")) else part
            assert len(prose.split()) <= PARAGRAPH_WORDS, f"{page.name}: divide the paragraph {prose[:60]!r}"


def test_links_lead_somewhere(root: Path, tracked) -> None:
    """Every relative link names a file that is tracked, and a heading that is there."""
    known = {str(path) for path in tracked} | {str(parent) for path in tracked for parent in path.parents}
    for page in pages(root, tracked):
        for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, fragment = target.partition("#")
            where = (page.parent / name).resolve() if name else page
            assert str(where.relative_to(root)) in known, f"{page.relative_to(root)} links to {target}"
            if fragment and where.suffix == ".md":
                assert fragment in anchors(where), f"{page.relative_to(root)} links to {target}"


def test_a_page_that_is_cited_is_here(root: Path, tracked) -> None:
    """Docstrings, messages and help name pages by path: `docs/design.md 5`, `docs/decisions/0028`."""
    known = {str(path) for path in tracked}
    for path in tracked:
        if path.suffix in {".py", ".toml", ".md", ""} and path.name != "CHANGELOG.md":
            for cited in CITED.findall((root / path).read_text(encoding="utf-8", errors="ignore")):
                found = cited in known or any(name.startswith(cited) for name in known if "decisions/" in cited)
                assert found, f"{path} cites {cited}"


@pytest.mark.parametrize("page", ["docs/reference/commands.md", "docs/reference/openapi.json", "docs/security.md"])
def test_generated_parts_are_fresh(page: str, root: Path, environment) -> None:
    """Help texts and the status of the checks are what the code and the tests say now: `make pages` writes them."""
    words = [sys.executable, str(root / ".ci/write_pages.py"), "--print", page]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert (root / page).read_text(encoding="utf-8") == done.stdout, f"{page} is stale: run `make pages`"


def test_each_check_says_how_far_it_holds(root: Path) -> None:
    """docs/security.md 7: 72 rows; each holds, with its counts, or in part and what is missing, or does not and why.
    Only what no test names is not held."""
    page = (
        (root / "docs/security.md").read_text(encoding="utf-8").partition("\n## 7. Checks")[2].partition("\n## 8. ")[0]
    )
    rows = re.findall(
        r"^\| (\d+) \| [PNS, ]+ \|.*\| (held|held in part|not held): (.+?)(?:\. Tests: (.*))? \|$", page, re.M
    )
    assert [int(number) for number, *_ in rows] == list(range(1, 73))
    for number, state, told, tests in rows:
        assert bool(tests) == (state != "not held"), number
        assert "@" not in told and len(told) > 3, number
    assert "wholly or in part" not in page


def test_decision_records_have_their_parts(root: Path) -> None:
    """At most 250 words each: context, decision, what it costs; numbered without a gap."""
    records = sorted((root / "docs/decisions").glob("[0-9]*.md"))
    assert [int(record.name[:4]) for record in records] == list(range(1, len(records) + 1)) and len(records) >= 8
    for record in records:
        lines = record.read_text(encoding="utf-8").splitlines()
        assert re.fullmatch(r"# \d{4} .+", lines[0]) and lines[0][2:6] == record.name[:4], record.name
        assert [line for line in lines if line.startswith("## ")] == list(RECORD_PARTS), record.name
        assert len(record.read_text(encoding="utf-8").split()) <= RECORD_WORDS, f"{record.name} is too long"


def test_the_change_log_knows_this_version(root: Path) -> None:
    """Keep a Changelog: newest first, this version or an open section on top, known headings only."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## \[(.+?)\]", text, re.M)
    assert first and first[1] in (version, "Unreleased")
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= kinds


def test_a_site_is_never_called_a_client(root: Path, tracked, modules) -> None:
    """docs/design.md 3: one word per thing, in docstrings and on the pages; HTTP has clients, and titles of papers."""
    allowed = re.compile(r"HTTP clients?|across heterogeneous clients|client-specific prompt generation", re.I)
    texts = [(page, page.read_text(encoding="utf-8")) for page in pages(root, tracked)]
    for module in modules.values():
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node for node in walked(module.tree) if isinstance(node, documented))
        texts += [(module.path, ast.get_docstring(node) or "") for node in nodes]
    assert len(texts) > 1000
    for path, text in texts:
        found = [line for line in allowed.sub("", text).splitlines() if re.search(r"\bclients?\b", line, re.I)]
        assert not found, f"{path}: {found[0]}"


def test_the_first_steps_are_as_few_as_the_page_says(root: Path) -> None:
    """docs/guides/first-steps.md: at most 3 commands to a score, 6 to a contribution; test_pages.py executes them."""
    page = (root / "docs/guides/first-steps.md").read_text(encoding="utf-8")
    told = [int(number) for number in re.findall(r"^\| the first .*\| (\d+) \|$", page, re.M)]
    _, alone, member = re.split(r"^## ", page, flags=re.M)
    install = len(re.findall(r"^pip install ", page, re.M))
    counted = []
    for part, last in ((alone, "score"), (member, "score"), (member, "contribute")):
        typed = re.findall(r"^\$ edgefl (\w+)", part, re.M)
        before = typed[: typed.index(last)]
        counted.append(install + len(before) - before.count("score") + 1)
    assert counted == told and max(counted[:2]) <= 3 and counted[2] <= 6
