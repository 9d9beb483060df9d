"""`benchmarks/training/peers.py`: what its figures mean, by hand; the peers themselves are not here."""

import socket

import pytest
from benchmarks.training import peers


@pytest.fixture
def script() -> dict:
    return vars(peers)


def test_lines_that_hold_code_are_counted(script, tmp_path) -> None:
    """Five: the import, two of a call, `def` and `return`; no docstring, comment or blank line."""
    (tmp_path / "one.py").write_text(
        '"""What it is.\n\nMore.\n"""\n\nimport os  # the first\n\nos.path.join(\n    "a")\n\n\n'
        'def two() -> str:\n    """Say it."""\n    # so\n    return "b"\n'
    )
    assert script["written_lines"](tmp_path / "one.py") == 5


def test_a_row_is_medians_and_images_of_all_sites(script) -> None:
    """By hand: 4 sites of 32 images in 8 s are 16 a second, in 4 processor seconds 32."""
    peer = script["Peer"]("it", 14, None, None, "", [7.0, 8.0, 30.0], [4.0], [3 * 2**20])
    assert peer.row() == "| it | 8.0 | 16.0 | 4.0 | 32.0 | 3 | 14 |"


def test_who_listens_answers(script) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert script["answers"](address)
    assert not script["answers"](address)
