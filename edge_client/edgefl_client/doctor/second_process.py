"""Does the runtime work here, does the model in use score, and how fast? Asked in a second process.

A runtime built for another processor ends with a signal, and a driver may hang: the process that asks (`checks`) only
sees that the answers stop. Each step is one JSON object on one line:

    {"step": "runtime", "versions": {…}, "processors": n, "multiplies_bytes": whether 8-bit graphs run in whole numbers}
    {"step": "model", "id", "name", "version", "sha256", "expires_ms", "created_ms", "weights", "probabilities",
     "vacuity", "asks_always": whether nothing is known of its classes, "answers": whether it answers questions,
     "quality": what its card says of it in two lines, "weaknesses": what that says against it, in sentences}
    {"step": "speed", …}   what `measure.Measured` holds

or, where a step fails, {"step", "error": {"code", "message"}} as the last line. The picture is drawn here: no picture
of a patient is needed, and none is read.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edgefl_client.doctor.drawn_picture import drawn_picture

if TYPE_CHECKING:
    from edgefl_client.doctor.linear_floor import LinearLayers
    from edgefl_client.doctor.measure import Work

MOST_SECONDS: Final = 240
_START: Final = (
    "import json, sys; "
    "told = json.loads(sys.argv[1]); "
    "sys.path += [path for path in told.pop('path') if path not in sys.path]; "
    "from edgefl_client.doctor.second_process import answer; answer(**told)"
)


class ProbeEnded(Exception):
    """The second process ended, or had to be ended, before its last answer."""


def probe(
    home: Path, model: Path | None, trusted: tuple[str, ...], *, speed: bool, floors: bool
) -> Iterator[dict[str, Any]]:
    """Ask in a second process, and give its answers as they come.

    Args:
        trusted: keys of signers trusted for this call, in hexadecimal.

    Raises:
        ProbeEnded: it ended early; the sentence says how.
    """
    told = {
        "path": [path for path in sys.path if Path(path).is_absolute()],
        "home": str(home.absolute()), "model": None if model is None else str(model.absolute()),
        "trusted": list(trusted), "speed": speed, "floors": floors,
    }  # fmt: skip
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, and paths it imports from already
            [sys.executable, "-I", "-c", _START, json.dumps(told)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, cwd=tempfile.gettempdir(),
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            yield from _objects(out)
            raise ProbeEnded(f"it gave no answer within {MOST_SECONDS} s and was stopped") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        yield from _objects(out)
        if process.returncode:
            raise ProbeEnded(_how_it_ended(process.returncode, _last_line(errors)))


def answer(home: str, model: str | None, trusted: list[str], speed: bool, floors: bool) -> None:
    """Take the steps in the second process and print the answer of each."""
    from edgefl_protocol.errors import EdgeflError

    step = "runtime"
    try:
        _say(step, _runtime())
        step = "model"
        work, facts = _model(Path(home), model, trusted)
        _say(step, facts)
        step = "speed"
        if speed:
            from edgefl_client.doctor.measure import measure

            found = measure(
                work(),
                lambda: _model(Path(home), model, trusted, threads=1)[0](),
                lambda: _layers(Path(home), model, trusted) if floors else None,
            )
            _say(step, found.to_json())
    except EdgeflError as error:
        _say(step, {"error": {"code": error.code, "message": str(error)}})


def _runtime() -> dict[str, Any]:
    """Load the libraries; each may end the process where it was built for another processor."""
    import cryptography
    import onnxruntime
    import PIL

    from edgefl_client.runtime import processors
    from edgefl_protocol.processor import multiplies_bytes

    return {
        "versions": {
            "python": ".".join(map(str, sys.version_info[:3])),
            "numpy": np.__version__,
            "onnxruntime": onnxruntime.__version__,
            "pillow": PIL.__version__,
            "cryptography": cryptography.__version__,
        },
        "processors": processors(),
        "multiplies_bytes": multiplies_bytes(),
    }


def _model(
    home: Path, model: str | None, trusted: list[str], threads: int | None = None
) -> "tuple[Callable[[], Work], dict[str, Any]]":
    """Open the model as `edgefl score` or `edgefl ask` does, and try it on the drawn picture; its work, and facts."""
    from edgefl_client.doctor.measure import asking, scoring
    from edgefl_client.home import Home
    from edgefl_client.scoring.asker import Asker
    from edgefl_client.scoring.open_scorer import open_either
    from edgefl_protocol.bundle.card_words import quality_lines, weaknesses

    file = None if model is None else Path(model)
    opened, bundle = open_either(Home(home), file, tuple(trusted), threads)
    side = max(bundle.preprocess.size, 84)
    picture = drawn_picture(side, side)
    tried: dict[str, Any]
    if isinstance(opened, Asker):
        question = opened.a_question
        answer = opened.ask(picture, question)
        tried = {"probabilities": dict(answer.probabilities), "vacuity": None, "asks_always": False}
        work = partial(asking, opened, question)
    else:
        score = opened.score(picture)
        always = bundle.labels.info is None
        tried = {"probabilities": dict(score.probabilities), "vacuity": score.vacuity, "asks_always": always}
        work = partial(scoring, opened)
    return work, {
        "id": bundle.id,
        "name": bundle.manifest.name,
        "version": bundle.manifest.version,
        "sha256": bundle.sha256,
        "created_ms": bundle.manifest.created_ms,
        "expires_ms": bundle.manifest.expires_ms,
        "weights": opened.model.state_kind,
        **tried,
        "answers": bundle.questions is not None,
        "quality": list(quality_lines(bundle.card, bundle.labels, bundle.questions)),
        "weaknesses": list(weaknesses(bundle.card, bundle.labels, bundle.questions)),
    }


def _layers(home: Path, model: str | None, trusted: list[str]) -> "LinearLayers | None":
    """Read the linear layers of the model's graph; its bytes are read anew and given back at once."""
    import time

    from edgefl_client.doctor.linear_floor import linear_layers
    from edgefl_client.home import Home
    from edgefl_client.trust import models

    archive = models.read_file(Home(home), None if model is None else Path(model))
    keys = [bytes.fromhex(one) for one in trusted]
    return linear_layers(models.open_model(Home(home), archive, keys, time.time_ns() // 1_000_000).score_onnx)


def _say(step: str, facts: dict[str, Any]) -> None:
    os.write(1, json.dumps({"step": step, **facts}).encode() + b"\n")


def _objects(out: bytes) -> Iterator[dict[str, Any]]:
    for line in out.splitlines():
        if line.startswith(b'{"step"'):
            yield json.loads(line)


def _last_line(errors: Any) -> str:
    errors.seek(0)
    lines = errors.read()[-4096:].decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


def _how_it_ended(code: int, said: str) -> str:
    if code >= 0:
        return f"it ended with status {code}" + (f": {said}" if said else "")
    names = {number.value: number.name for number in signal.Signals}
    return f"it was ended by {names.get(-code, f'signal {-code}')}"
