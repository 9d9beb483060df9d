"""What tests/slow_modules.py and the markers of pyproject.toml promise of slow tests: their order, and both sizes."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.slow_modules import dealt

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("long", [0, 1, 7, 20])
def test_each_process_begins_with_its_share_of_the_long_tests(processes: int, long: int) -> None:
    """xdist's worksteal gives the next of n processes an nth of what is left; the others keep their order."""
    items = [SimpleNamespace(number=n, get_closest_marker=lambda name, n=n: n >= 40 - long or None) for n in range(40)]
    found = [item.number for item in dealt(items, processes)]
    assert sorted(found) == list(range(40)) and [n for n in found if n < 40 - long] == list(range(40 - long))
    for place in range(processes):
        part, found = found[: len(found) // (processes - place)], found[len(found) // (processes - place) :]
        begins = [n >= 40 - long for n in part]
        assert sum(begins) in (long // processes, -(-long // processes))
        assert begins == sorted(begins, reverse=True)


def test_more_long_tests_than_a_part_holds() -> None:
    items = [SimpleNamespace(number=n, get_closest_marker=lambda name: True) for n in range(7)]
    assert sorted(item.number for item in dealt(items, 3)) == list(range(7))


def test_the_larger_form_of_what_test_all_leaves_out_runs_there() -> None:
    """`smaller` beside a case that is `slow` and not `nightly`, in the same list."""
    found = 0
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "mark.smaller" not in text or file == Path(__file__):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr == "smaller":
                found -= 1
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
                cases = [ast.unparse(one) for one in getattr(node.args[1], "elts", ())]
                small = [one for one in cases if "mark.smaller" in one]
                larger = [one for one in cases if "mark.slow" in one and "mark.nightly" not in one]
                assert not small or larger, f"{file}:{node.lineno}"
                found += len(small)
    assert found == 0  # each stands in such a list
