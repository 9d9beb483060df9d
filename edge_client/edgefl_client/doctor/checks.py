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
from edgefl_client.doctor.measure import table
from edgefl_client.doctor.membership_checks import check_certificate, check_coordinator, check_keys
from edgefl_client.doctor.second_process import ProbeEnded, probe
from edgefl_client.home import Home
from edgefl_client.sharing.enrolled_device import Device
from edgefl_protocol.errors import EdgeflError

OLD_MODEL_DAYS = 180


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
    device: Device, *, online: bool, speed: bool, model: Path | None = None, trusted: tuple[str, ...] = ()
) -> Diagnosis:
    """Make every check.

    Args:
        speed: whether to measure times, which takes some seconds.
        trusted: public keys of signers trusted for this call, in hexadecimal.
    """
    home, now_ms = device.home, device.clock_ms()
    findings = [*_guarded("home", lambda: check_home(home)), *_guarded("disk", lambda: check_disk(home))]
    probed, measured = _probe(home, model, trusted, now_ms, speed=speed)
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
    home: Home, model: Path | None, trusted: tuple[str, ...], now_ms: int, *, speed: bool
) -> tuple[list[Finding], dict[str, Any] | None]:
    """Ask the second process for runtime, model and times."""
    found: list[Finding] = []
    measured: dict[str, Any] | None = None
    steps = ["runtime", "model", *(["speed"] if speed else [])]
    try:
        for told in probe(home.root, model, trusted, speed=speed):
            step = str(told.pop("step"))
            steps.remove(step)
            if "error" in told:
                state = "warn" if told["error"]["code"] == "no_model" else "fail"
                found.append(Finding(check=step, state=state, found=told["error"]["message"]))
            elif step == "runtime":
                names = ", ".join(f"{name} {number}" for name, number in told["versions"].items())
                eight = (
                    "runs 8-bit models in whole numbers" if told["multiplies_bytes"] else "runs 8-bit models in float"
                )
                found.append(
                    Finding(check=step, state="ok", found=f"{names}; processors: {told['processors']}; {eight}")
                )
            elif step == "model":
                found.append(_model(told, now_ms))
            else:
                measured = told
                found.append(Finding(check=step, state="ok", found=_at_most(told)))
    except ProbeEnded as error:
        found.append(
            Finding(
                check=steps[0] if steps else "runtime",  # after its last answer: the runtime failed to end
                state="fail",
                found=f"the process that tried it did not finish: {error}",
                advice="install the wheel anew, for this processor and Python: pip install --force-reinstall WHEEL",
            )
        )
    return found, measured


def _at_most(measured: dict[str, Any]) -> str:
    slowest = max(one["p95_milliseconds"] for one in measured["rows"] if one["pictures"] == 1)
    return (
        f"a score took at most {slowest:g} ms; memory {measured['peak_memory_mib']:g} MiB, an upper bound: "
        "the drawn photo and this check are in it"
    )


def _model(told: dict[str, Any], now_ms: int) -> Finding:
    age_days = max(now_ms - told["created_ms"], 0) // DAY_MS
    said = f"{told['id']} scores a drawn picture with the {told['weights']} values; {age_days} days old"
    left_days = None if told["expires_ms"] is None else (told["expires_ms"] - now_ms) // DAY_MS
    if left_days is not None:
        said += f", expires in {left_days} days"
    if (left_days is not None and left_days < SOON_DAYS) or age_days > OLD_MODEL_DAYS:
        return Finding(check="model", state="warn", found=said, advice="fetch a newer one: edgefl pull")
    return Finding(check="model", state="ok", found=said)


def diagnosis_text(found: Diagnosis) -> str:
    """Write the diagnosis for a person: a line per finding, then the table of times."""
    lines = [
        f"{one.state:<4}  {one.check:<11}  {one.found}" + ("" if one.advice is None else f": {one.advice}")
        for one in found.findings
    ]
    lines += [] if found.speed is None else [f"      {line}" for line in table(found.speed)]
    return "\n".join(lines)
