"""`edgefl doctor`: is everything in order on this device? One finding a check: ok, warn or fail, and what to do.

Nothing is changed by looking, nothing is sent but the question for the time, and no check needs another: without a
membership, a model or a network the others still answer. A finding `fail` means that something the device is there for
does not work; `warn`, that it soon may not, or that nobody is reached, which scoring does not need.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgefl_client.doctor.findings import DAY_MS, SOON_DAYS, Finding
from edgefl_client.doctor.home_checks import (
    check_disk,
    check_home,
    check_outbox,
    check_personal,
    check_policy,
    check_signers,
)
from edgefl_client.doctor.measure import table, was_busy
from edgefl_client.doctor.membership_checks import check_certificate, check_coordinator, check_keys, check_rounds
from edgefl_client.doctor.second_process import ProbeEnded, probe
from edgefl_client.home import Home
from edgefl_client.sharing.enrolled_device import Device
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.sentences import counted, expiry

OLD_MODEL_DAYS = 180
SLOW_MS = 1000  # from which a person's thoughts are interrupted (Nielsen, Usability Engineering, 1993, 5.5)
_STATES = ("fail", "warn", "ok")  # what to act on first


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, and the table of times."""

    findings: Sequence[Finding]  # in the order of the checks
    speed: dict[str, Any] | None  # what the second process measured; None where it did not

    @property
    def healthy(self) -> bool:
        """Whether no check failed."""
        return all(one.state != "fail" for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Give what `edgefl doctor --json` prints."""
        return {"healthy": self.healthy, "findings": [asdict(one) for one in self.findings], "speed": self.speed}


def examine(
    device: Device,
    *,
    online: bool,
    speed: bool,
    floors: bool = True,
    model: Path | None = None,
    trusted: tuple[str, ...] = (),
) -> Diagnosis:
    """Make every check.

    Args:
        speed: whether to measure times, which takes some seconds.
        floors: whether to measure the floors of the network's linear layers too, which nobody can act on.
        trusted: public keys of signers trusted for this call, in hexadecimal.
    """
    home, now_ms = device.home, device.clock_ms()
    findings = [*_guarded("home", lambda: check_home(home)), *_guarded("disk", lambda: check_disk(home))]
    probed, measured = _probe(home, model, trusted, now_ms, speed=speed, floors=floors)
    findings += probed
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "signers": lambda: check_signers(home, now_ms),
        "personal": lambda: check_personal(home),
        "policy": lambda: check_policy(home, now_ms),
        "outbox": lambda: check_outbox(home, now_ms),
    }
    if (home.member / "membership.json").exists():
        checks |= {
            "keys": lambda: check_keys(device, now_ms),
            "rounds": lambda: check_rounds(device, now_ms),
            "certificate": lambda: check_certificate(device, now_ms),
            "coordinator": lambda: check_coordinator(device, online=online),
        }
    else:
        findings.append(Finding(check="keys", state="ok", found="member of no federation"))
    for name, check in checks.items():
        findings += _guarded(name, check)
    return Diagnosis(findings=findings, speed=measured)


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Collect the findings of a check; an error it raises is one, too."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except EdgeflError as error:
        found.append(Finding(check=name, state="fail", found=str(error)))
    except OSError as error:
        found.append(Finding(check=name, state="fail", found=f"{error.filename}: {error.strerror}"))
    return found


def _probe(
    home: Home, model: Path | None, trusted: tuple[str, ...], now_ms: int, *, speed: bool, floors: bool
) -> tuple[list[Finding], dict[str, Any] | None]:
    """Ask the second process for runtime, model and times."""
    found: list[Finding] = []
    measured: dict[str, Any] | None = None
    gives = "score"
    steps = ["runtime", "model", *(["speed"] if speed else [])]
    try:
        for told in probe(home.root, model, trusted, speed=speed, floors=floors):
            step = str(told.pop("step"))
            steps.remove(step)
            if "error" in told:
                state = "warn" if told["error"]["code"] == "no_model" else "fail"
                found.append(Finding(check=step, state=state, found=told["error"]["message"]))
            elif step == "runtime":
                found.append(_runtime(told))
            elif step == "model":
                gives = "answer" if told["answers"] else "score"
                found += [_model(told, now_ms, named=model is not None), *_quality(told, named=model is not None)]
            else:
                measured = told
                found.append(_speed(told, gives))
    except ProbeEnded as error:
        found.append(
            Finding(
                check=steps[0] if steps else "runtime",  # after its last answer: the runtime failed to end
                state="fail",
                found=f"the process that tried it did not finish: {error}",
                advice="install the wheel again, the one for this processor and Python: pip install "
                "--force-reinstall WHEEL",
            )
        )
    return found, measured


def _runtime(told: dict[str, Any]) -> Finding:
    names = ", ".join(f"{name} {number}" for name, number in told["versions"].items())
    eight = "computes 8-bit models in whole numbers" if told["multiplies_bytes"] else "computes 8-bit models in float"
    return Finding(
        check="runtime",
        state="ok",
        found=f"the libraries run on this machine, with {counted(told['processors'], 'processor')}",
        detail=f"{names}; {eight}",
    )


def _speed(measured: dict[str, Any], gives: str) -> Finding:
    """Say how long the model takes; `gives` is what it gives to a picture, a score or an answer."""
    slowest = max(one["p95_milliseconds"] for one in measured["rows"] if one["pictures"] == 1)
    memory = f"memory {measured['peak_memory_mib']:g} MiB at most, including the drawn photo and this check"
    took = f"{'an' if gives == 'answer' else 'a'} {gives} took up to {slowest:g} ms"
    if was_busy(measured):
        again = "other work was running, so measure again when the device is idle"
        return Finding(check="speed", state="ok", found=f"{took}; {memory}; {again}")
    if slowest <= SLOW_MS:
        said = f"{took}, and a person notices the waiting from {SLOW_MS:,} ms on; {memory}"
        return Finding(check="speed", state="ok", found=said)
    return Finding(
        check="speed", state="warn", found=f"{took}, and a person waits from {SLOW_MS:,} ms on; {memory}",
        advice="that changes no result; a smaller model, or the same one in 8 bits, is faster",
    )  # fmt: skip


def _model(told: dict[str, Any], now_ms: int, *, named: bool) -> Finding:
    """Say that the model works, and how old it is; `named` is one given with `--model`, which sync does not fetch."""
    age_days = max(now_ms - told["created_ms"], 0) // DAY_MS
    does = "answers a question about a drawn picture" if told["answers"] else "scores a drawn picture"
    said = (
        f"{told['name']} version {told['version']} {does} with the {told['weights']} values; it was published "
        f"{counted(age_days, 'day')} ago"
    )
    left_ms = None if told["expires_ms"] is None else told["expires_ms"] - now_ms
    if left_ms is not None:
        said += f" and {expiry(left_ms)}"
    if (left_ms is not None and left_ms < SOON_DAYS * DAY_MS) or age_days > OLD_MODEL_DAYS:
        advice = "ask its publisher for a newer one" + ("" if named else ", or in a federation fetch it: edgefl sync")
        return Finding(check="model", state="warn", found=said, advice=advice)
    if told["asks_always"]:
        return Finding(
            check="model", state="warn",
            found=f"{said}; it does not say which of its classes are benign, so it asks for a look at every picture",
            advice="ask its publisher for a bundle with class information",
        )  # fmt: skip
    return Finding(check="model", state="ok", found=said)


def _quality(told: dict[str, Any], *, named: bool) -> Iterator[Finding]:
    """Say how good its own card says the model is; warn of each thing that speaks against it."""
    figures, suspicious = told["quality"]
    if not told["weaknesses"]:
        yield Finding(check="quality", state="ok", found=f"{figures}; {suspicious}")
    for weakness in told["weaknesses"]:
        yield Finding(
            check="quality", state="warn", found=weakness.removesuffix("."),
            advice="ask its publisher for a better model" + ("" if named else "; edgefl status --card shows the card"),
        )  # fmt: skip


def diagnosis_text(found: Diagnosis, *, verbose: bool = False) -> str:
    """Write the diagnosis for a person: what fails and what deserves attention first, and how much there is to do.

    Args:
        verbose: also with details and the table of times, which nobody can act on.
    """
    lines = []
    for one in sorted(found.findings, key=lambda finding: _STATES.index(finding.state)):
        lines.append(
            f"{one.state:<4}  {one.check:<11}  {one.found}" + ("" if one.advice is None else f": {one.advice}")
        )
        lines += [f"{'':<19}{one.detail}"] if verbose and one.detail is not None else []
    if verbose and found.speed is not None:
        lines += [f"      {line}" for line in table(found.speed)]
    return "\n".join([*lines, _conclusion(found.findings)])


def _conclusion(findings: Sequence[Finding]) -> str:
    failed, warned = (sum(one.state == state for one in findings) for state in ("fail", "warn"))
    if not failed and not warned:
        return "Everything that was checked is in order."
    parts = [f"{failed} of {counted(len(findings), 'check')} failed"] if failed else []
    parts += [f"{warned} ask for attention" if warned != 1 else "1 asks for attention"] if warned else []
    return f"{', '.join(parts)}: the lines at the top say what to do."
