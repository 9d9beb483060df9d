"""The form of a reply, against forms written by hand (docs/security.md, poisoning)."""

import numpy as np
import pytest

from edgefl_protocol import Payload
from edgefl_protocol.rules.reply_forms import difference, form_parts


def test_what_is_there_by_class_is_a_part_of_its_own_with_any_number_of_rows() -> None:
    reply = Payload(
        {
            "features": np.ones((5, 128), np.float16),
            "head.bias": np.ones(3, np.float32),
            "maps.0": np.ones((2, 9), np.float16),
            "maps.12": np.ones((7, 9), np.float16),
            "prototypes.1": np.ones(4, np.float32),
        },
        {"n_train": 5, "n.1": 3, "site_sha256": "a"},
    )
    assert form_parts(reply, "all") == {
        "all": (
            ("array features", "float16 with shape (any, 128)"),
            ("array head.bias", "float32 with shape (3)"),
            ("scalar n_train", "a number"),
            ("scalar site_sha256", "text"),
        ),
        "array maps.<k>": (("array maps.<k>", "float16 with shape (any, 9)"),),
        "array prototypes.<k>": (("array prototypes.<k>", "float32 with shape (4)"),),
        "scalar n.<k>": (("scalar n.<k>", "a number"),),
    }


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        ((("array a", "x"),), (("array a", "y"),), "the array a is x, but in that one it is y"),
        ((), (("array a", "y"),), "the array a is missing, but that one holds it"),
        ((("array a", "x"),), (), "the array a is not in the form that that one has"),
        ((("a", "x"), ("b", "x")), (("a", "y"), ("b", "z")), "the a is x, but in that one it is y"),
    ],
)
def test_the_first_difference_is_said(found, wanted, said) -> None:
    assert difference(found, wanted, "that one") == said
