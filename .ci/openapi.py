"""The coordinator's HTTP interface as an OpenAPI document, made from the routes and limits that the program has.

It tells paths, methods, sizes and every status with its media type. What an envelope holds is sealed and stands in
docs/security.md 2.2; which signed refusals a route gives stands here, for their status is that of HTTP, too.
`tests/coordinator/web/test_openapi.py` asks a running coordinator whether this is so (docs/security.md check 41).
"""

import json
from collections import defaultdict
from typing import Any, Final

from edgefl_coordinator.web.guard import PLAIN_PATHS, SEALED_PATHS, longest_body
from edgefl_protocol.distribution import VERSION
from edgefl_protocol.messages.refusals import REFUSAL_STATUS
from edgefl_protocol.routes import ROUTES, Route

_ALL: Final = "bad_message not_approved replayed seq_behind seq_jump internal storage_full"
_REPLY: Final = "no_round round_closed already_replied idem_conflict no_blob bad_blob bad_contribution too_large busy"
_OF: Final = {  # signed refusals of each route, beside those of all
    "enrol": "unknown_invite expired_invite used_invite known_key replaced_key",
    "enrol-proof": "bad_proof idem_conflict",
    "task": "pending",
    "broadcast": "pending no_round round_closed small_cohort not_found",
    "reply": f"pending {_REPLY}",
    "blob": "pending idem_conflict not_found too_large",
    "index": "pending",
    "bundle": "pending not_found",
    "keys": "pending",
    "rotate": "pending bad_proof idem_conflict known_key replaced_key",
}
_SEALED: Final = "application/octet-stream"
_TEXT: Final = "text/plain"
_JSON: Final = "application/json"
_PLAIN: Final = {  # what each open path answers: status → meaning and media type
    "/healthz": {200: ("The server runs.", _TEXT)},
    "/v1/time": {200: ("The signed time.", _SEALED), 400: ("The nonce is missing, or not of its form.", _TEXT)},
    "/v1/keys": {200: ("The signed record of the coordinator's keys.", _SEALED)},
    "/v1/root": {200: ("The published root sets, one a line.", _SEALED), 404: ("None was published.", _SEALED)},
}
_SHORT: Final = {"type": "string", "maxLength": 100}
_BYTES: Final = {"type": "string", "format": "binary"}
_UNSEALED: Final = "Not signed, so it only ever means: try again later."


def document() -> dict[str, Any]:
    """Return the document."""
    sealed = {route.path: {"post": _post(route)} for route in ROUTES.values()}
    plain = {path: {"get": _get(path)} for path in sorted(PLAIN_PATHS)}
    assert sealed.keys() == SEALED_PATHS and plain.keys() == _PLAIN.keys()
    assert set(REFUSAL_STATUS) == {code for codes in (_ALL, *_OF.values()) for code in codes.split()} | {"unsupported"}
    paths = {path: {**sealed.get(path, {}), **plain.get(path, {})} for path in sorted({*sealed, *plain})}
    told = "Every other method and path is answered with 404. " + _UNSEALED
    return {"openapi": "3.1.0", "info": {"title": "EdgeFL coordinator", "version": VERSION, "description": told},
            "paths": paths}  # fmt: skip


def text() -> str:
    """Return it as it lies in docs/reference/openapi.json."""
    return json.dumps(document(), indent=1) + "\n"


def _post(route: Route) -> dict[str, Any]:
    sealed = defaultdict[int, list[str]](list)
    for code in f"{_ALL} {_OF[route.cty]}".split():
        sealed[REFUSAL_STATUS[code]].append(code)
    responses = {200: _response("The sealed and signed answer.", {_SEALED: _BYTES})}
    for status, codes in sealed.items():
        responses[status] = _response(f"Sealed and signed: {', '.join(sorted(codes))}.", {_SEALED: _BYTES})
    refused = {"type": "object", "properties": {"error": {"const": "refused"}}, "required": ["error"]}
    unsealed = {
        400: ("The length does not fit the body.", {_TEXT: _SHORT}),
        401: ("Whatever failed before the signature was verified.", {_JSON: refused}),
        404: ("There is a query.", {_TEXT: _SHORT}),
        411: ("No length is given, or a transfer coding is.", {_TEXT: _SHORT}),
        413: ("The body is too long.", {_TEXT: _SHORT}),
        415: ("The body has a content coding.", {_TEXT: _SHORT}),
        503: ("There is no room, or the store cannot be asked who sends.", {_TEXT: _SHORT}),
    }
    for status, (meaning, content) in unsealed.items():
        also = {_SEALED: _BYTES} if status in sealed else {}
        told = responses[status]["description"] if also else ""
        responses[status] = _response(f"{told} {meaning} {_UNSEALED}".strip(), {**also, **content})
    body = {"required": True, "content": {_SEALED: {"schema": {**_BYTES, "maxLength": longest_body(route.path)}}}}
    return {"operationId": route.cty, "requestBody": body, "responses": _sorted(responses)}


def _get(path: str) -> dict[str, Any]:
    answers = {
        404: ("There is a query.", _TEXT),
        411: ("There is a transfer coding.", _TEXT),
        413: ("There is a body.", _TEXT),
        415: ("There is a content coding.", _TEXT),
        503: ("Too many requests, or the store cannot be read.", _TEXT),
        **_PLAIN[path],
    }
    if path == "/v1/time":
        del answers[404]
    if path == "/v1/root":  # with a query as text, without a set empty
        answers[404] = (answers[404][0] + " Or there is a query.", _SEALED)
    content = {status: {kind: _SHORT if kind == _TEXT else _BYTES} for status, (_, kind) in answers.items()}
    if path == "/v1/root":
        content[404][_TEXT] = _SHORT
    responses = {status: _response(meaning, content[status]) for status, (meaning, _) in answers.items()}
    operation = {"operationId": "get" + path.replace("/", "-"), "responses": _sorted(responses)}
    if path == "/v1/time":
        nonce = {"type": "string", "pattern": "^[A-Za-z0-9_-]{16,64}$"}
        operation["parameters"] = [{"name": "nonce", "in": "query", "required": True, "schema": nonce}]
    return operation


def _response(told: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": told, "content": {kind: {"schema": schema} for kind, schema in content.items()}}


def _sorted(responses: dict[int, Any]) -> dict[str, Any]:
    return {str(status): responses[status] for status in sorted(responses)}
