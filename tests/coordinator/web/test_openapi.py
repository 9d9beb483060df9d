"""A running coordinator answers as docs/reference/openapi.json says: docs/security.md check 41, and 42 for messages.

schemathesis makes requests from the document, good ones and bad ones. Random bytes never get past the envelope, so a
member seals as many again: payloads of the route's own message, with fields left out, added, and of other values.
"""

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance, unsupported_method
from tests.coordinator.web.served import Served
from tests.fuzz.targets import TARGETS

from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import ROUTES

CASES = int(os.environ.get("EDGEFL_CASES", "600"))  # requests in all
DOCUMENT = json.loads((Path(__file__).parents[3] / "docs/reference/openapi.json").read_text())
# What is not listed is answered with 404, whatever the method; and no bytes of a generator are a sealed envelope.
NOT_ASKED = [unsupported_method, positive_data_acceptance]
PLACES = {"enrol": 0, "enrol-proof": 2, "task": 4, "broadcast": 6, "reply": 7, "blob": 13, "index": 4, "bundle": 10,
          "keys": 4, "rotate": 17}  # fmt: skip  # of each route's message among those that are fuzzed
SEEDS = TARGETS["message"].seeds()
VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=40), st.sampled_from(["' OR 1=1 --", "../../etc/passwd", "\x00", "ａ", "0" * 32, "main"]),
)  # fmt: skip


class Raw:
    """Bytes in a payload's place."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def to_bytes(self) -> bytes:
        return self.data


@st.composite
def payloads(draw: Any, cty: str, member: Any) -> Any:
    """The route's own message, changed or not, or bytes that are none."""
    own = [Payload.from_bytes(seed[1:]) for seed in SEEDS if seed[0] == PLACES[cty]]
    if cty == "enrol":
        own = [member.enrolment(bytes(32)).to_payload()]
    found = draw(st.sampled_from(own))
    if draw(st.integers(0, 5)) == 0:
        data = bytearray(found.to_bytes())
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return Raw(bytes(data[: draw(st.integers(0, len(data)))]))
    names = st.one_of(st.sampled_from(["x", *found.scalars]), st.from_regex(r"[!-~]{1,20}", fullmatch=True))
    changed = {**found.scalars, **draw(st.dictionaries(names, VALUES, max_size=2))}
    gone = draw(st.sets(st.sampled_from(["x", *changed]), max_size=1)) if changed else set()
    changed.pop("__metadata__", None)
    return Payload(found.arrays, {name: value for name, value in changed.items() if name not in gone})


@pytest.fixture
def served(make_coordinator: Callable[..., Any], clock: Any, tools: Any) -> Iterator[tuple[Served, Any]]:
    """A coordinator on 127.0.0.1, and a member."""
    clock.now_ms = time.time_ns() // 1_000_000
    coordinator = make_coordinator(port=0, limits={"open_per_minute": 1_000_000})
    member = tools.quick_member(coordinator, "clinic-a")
    coordinator.store.close()
    running = Served(coordinator.store.home)
    yield running, member
    running.close()


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, pytest.param(12_500, marks=pytest.mark.nightly)])
def test_every_answer_is_one_that_the_document_tells(served, clock, capsys, cases) -> None:
    """Check 41: no status of 500 or above, none that is not in the document, each with its media type and form."""
    running, member = served
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    operations = [found.ok() for found in schema.get_all_operations()]
    modes = [pair for pair in itertools.product(operations, ("good", "bad", "odd", "sealed")) if is_possible(*pair)]
    seen: Counter[tuple[str, int, bool]] = Counter()  # path, status, whether it was a sealed route's signed answer
    with requests.Session() as session:
        for operation, mode in modes:
            ask(operation, mode, cases // len(modes), running, session, member, clock, seen)
    statuses = Counter(status for (_, status, _), count in seen.items() for _ in range(count))
    with capsys.disabled():
        print(f"\n{seen.total()} requests, answered with {dict(sorted(statuses.items()))}")
    assert {200, 400, 401, 403, 404, 409, 415} <= statuses.keys() and max(statuses) < 500
    assert {path for path, *_ in seen} == set(DOCUMENT["paths"])
    reached = {path for path, status, signed in seen if signed and status != 400}
    assert reached == {route.path for route in ROUTES.values()}  # behind what reads the payload


def is_possible(operation: Any, mode: str) -> bool:
    """Whatever bytes a body has are good ones of the document, so only a parameter can be bad."""
    return {"bad": operation.path == "/v1/time", "sealed": operation.method == "post"}.get(mode, True)


def ask(
    operation: Any, mode: str, cases: int, running: Served, session: requests.Session, member: Any, clock: Any,
    seen: "Counter[tuple[str, int, bool]]",
) -> None:  # fmt: skip
    """Send so many requests of one operation and check each answer."""
    kind = GenerationMode.NEGATIVE if mode == "bad" else GenerationMode.POSITIVE
    authority = str(running.home.tls / "ca.pem")
    (cty,) = [route.cty for route in ROUTES.values() if route.path == operation.path] or [""]

    @settings(max_examples=cases, deadline=None, database=None, phases=[Phase.generate], derandomize=True)
    @given(data=st.data())
    def once(data: Any) -> None:
        case = data.draw(operation.as_strategy(generation_mode=kind))
        if mode == "odd":
            case.query = data.draw(st.sampled_from([{}, {"x": "1"}, {"nonce": "0" * 16, "more": "\r\n"}]))
            case.headers = data.draw(st.sampled_from([{}, {"Content-Encoding": "gzip"}, {"Range": "bytes=0-,1-"}]))
            if operation.method == "post":
                case.body = bytes(data.draw(st.sampled_from([0, 1, 6, 2**16, 2**16 + 1, 2**20, 2**20 + 1])))
        if mode == "sealed":
            clock.now_ms = time.time_ns() // 1_000_000
            number = data.draw(st.integers(2, 4)) if ROUTES[cty].in_round else 0
            case.body = member.envelope(cty, data.draw(payloads(cty, member)), rnd=number)
        where = f"https://127.0.0.1:{running.port}"
        try:
            answer = case.call(base_url=where, session=session, timeout=20, verify=authority)
        except requests.ConnectionError:  # closed unread, and the answer went with it: docs/security.md, decision 9
            assert mode == "odd" and len(case.body) >= 2**16
            return
        signed = operation.method == "post" and "application/octet-stream" in answer.headers["content-type"]
        seen[operation.path, answer.status_code, signed] += 1
        case.validate_response(answer, excluded_checks=NOT_ASKED)

    once()
