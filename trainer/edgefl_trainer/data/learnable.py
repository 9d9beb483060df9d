"""What of some data a method that learns from labels cannot learn, though every row of it could be read.

Guarantees: `edgefl-train data` and `edgefl-train run` refuse the same data, in the same words.
Source: docs/reference/data.md.
"""

from collections.abc import Iterator, Mapping, Sequence

from edgefl_protocol.sentences import counted
from edgefl_trainer.data.rows import Row

LEAST_CLASSES = 2


def too_few_classes(classes: Sequence[str]) -> str:
    """Write why data of these classes is refused; an empty string where there are enough of them."""
    if len(classes) >= LEAST_CLASSES:
        return ""
    return (
        f"The data has {counted(len(classes), 'class', 'classes')}{', ' * bool(classes)}{', '.join(classes)}, and "
        "learning from labels needs at least two: add pictures of another class, or take a method that learns "
        "without labels."
    )


def unlearnable(rows: Sequence[Row], taking_part: Sequence[Row]) -> Iterator[str]:
    """Write a sentence for each thing that a method which learns from labels refuses.

    Data without any label is meant for methods that need none, and so is a site without any: nothing is said.

    Args:
        rows: all rows, with the splits of a run.
        taking_part: those of the sites that the SPECs ask for.
    """
    classes = sorted({row.label for row in rows if row.label is not None})
    if not classes:
        return
    if told := too_few_classes(classes):
        yield told
    labelled = [row for row in taking_part if row.site is not None and row.label is not None]
    learning = {row.site for row in labelled if row.split == "train"}
    if without := sorted({row.site for row in labelled if row.site} - learning):
        yield without_images(dict.fromkeys(without, 0))


def without_images(few: Mapping[str, int], kind: str = "labelled ", needed: str = "") -> str:
    """Write which sites have too few images of a kind to learn from, and what to do."""
    held = [f"site {name} has {count or 'no'} {kind}image to train on" for name, count in few.items()]
    how = "add images, or leave the site out (--data SPEC@site=NAME uses one site of a source)"
    return f"{', '.join(held)}{needed}: {how}."
