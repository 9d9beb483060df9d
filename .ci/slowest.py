"""Print the forty tests that took longest, and the minutes of each file of results that pytest wrote (JUnit XML)."""

import sys
from pathlib import Path
from xml.etree import ElementTree

SHOWN = 40


def main() -> None:
    """Read the files named on the command line."""
    took: list[tuple[float, str, str]] = []
    for file in map(Path, sys.argv[1:]):
        cases = list(ElementTree.parse(file).getroot().iter("testcase"))  # noqa: S314, our own file
        took += [
            (float(case.get("time", 0)), file.stem, f"{case.get('classname')}.{case.get('name')}") for case in cases
        ]
        minutes = sum(float(case.get("time", 0)) for case in cases) / 60
        print(f"{file.stem}: {len(cases)} tests, {minutes:.1f} minutes, added up over the processes")
    for seconds, tier, name in sorted(took, reverse=True)[:SHOWN]:
        print(f"{seconds:7.1f} s  {tier:5}  {name}")


if __name__ == "__main__":
    main()
