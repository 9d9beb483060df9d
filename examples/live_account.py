"""What a live federation came to: who sent how much, what left each device, and whether learning together helped."""

from dataclasses import dataclass, field
from typing import Any

import click

Reports = dict[str, dict[str, Any]]


@dataclass
class Account:
    """Filled while the federation runs."""

    before: dict[str, float] = field(default_factory=dict)  # balanced accuracy of a device that learned alone
    after: dict[str, float] = field(default_factory=dict)  # … with the others
    up: dict[str, list[int]] = field(default_factory=dict)  # bytes of each reply
    down: dict[str, list[int]] = field(default_factory=dict)  # bytes of each broadcast
    digests: dict[str, str] = field(default_factory=dict)  # of each device's state
    hospitals: Reports = field(default_factory=dict)

    def alone(self, device: str, report: dict[str, Any]) -> None:
        """A device learned for itself."""
        gate = report["gate"]
        self.before[device] = gate["personal_balanced_accuracy"]
        click.echo(
            f"{device} learned alone from {report['learned_from']} pictures: balanced accuracy "
            f"{gate['personal_balanced_accuracy']:.3f} on {gate['held_back']} held back, the model it fetched "
            f"{gate['bundle_balanced_accuracy']:.3f}"
        )

    def sent(self, reports: Reports) -> None:
        """Devices answered an exchange."""
        for device, report in reports.items():
            learned, got = report["learning"] or {}, report["broadcast"] or {}
            if learned.get("state") == "failed" or got.get("error"):
                raise click.ClickException(f"{device}: {learned.get('message') or got['error']['message']}")
            size = sum(one["bytes"] for one in report["sent"] if one["outcome"] == "accepted")
            self.up.setdefault(device, []).append(size)
            self.down.setdefault(device, []).append(got.get("bytes", 0))
            self._learned(device, learned)
            click.echo(f"{device} received {got.get('bytes', 0):,} bytes and sent {size:,}")

    def ended(self, reports: Reports, hospitals: Reports) -> None:
        """The last hand-out."""
        for device, report in reports.items():
            self.down[device].append((report["broadcast"] or {}).get("bytes", 0))
        self.hospitals = hospitals

    def show(self, status: dict[str, Any], devices: Any) -> None:
        """The whole account."""
        click.echo(f"{status['federation']}: {status['method']}, {status['rounds']} exchanges, state {status['state']}")
        click.echo(f"{'member':<12}{'exchanges':>10}{'bytes sent':>14}{'received':>14}  balanced accuracy")
        for name, found in self.hospitals.items():
            lines = found["metrics"]
            up, down = (sum(line[f"bytes_{way}"] for line in lines) for way in ("up", "down"))
            click.echo(_row(name, len(lines), up, down, _hospital_words(found)))
        for name in self.up:
            words = ""
            if name in self.before and name in self.after:
                words = f"{self.before[name]:.3f} alone, {self.after[name]:.3f} with the others (pictures held back)"
            click.echo(_row(name, len(self.up[name]), sum(self.up[name]), sum(self.down[name]), words))
        for name in self.up:
            left = devices.what_left(name)["last_24_hours"]
            click.echo(f"what left {name}: {left['bytes']:,} bytes in {left['rounds']} rounds, and no picture")
        click.echo(f"digest of the whole federation: {status['state_sha256']}")
        for name, found in self.hospitals.items():
            click.echo(f"  {name} {found['site_sha256']}")
        for name, digest in self.digests.items():
            click.echo(f"  {name}   {digest}")
        if any(found["state_sha256"] != status["state_sha256"] for found in self.hospitals.values()):
            raise click.ClickException("a hospital was told another digest than the coordinator shows")

    def _learned(self, device: str, learned: dict[str, Any]) -> None:
        gate = learned.get("gate")
        if gate is not None:
            self.after[device] = gate["personal_balanced_accuracy"]
        if learned.get("state_sha256"):
            self.digests[device] = learned["state_sha256"]


def _hospital_words(found: dict[str, Any]) -> str:
    """The first and the last figure on tune rows, and that on test rows; nothing where a method makes no model."""
    judged = [line["tune_balanced_accuracy"] for line in found["metrics"] if "tune_balanced_accuracy" in line]
    [site] = found["sites"].values()
    if not judged or site["balanced_accuracy"] is None:
        return ""
    test = site["balanced_accuracy"]
    return f"{judged[0]:.3f} after round 1, {judged[-1]:.3f} at the end (tune rows); {test:.3f} (test rows)"


def _row(name: str, exchanges: int, up: int, down: int, words: str) -> str:
    return f"{name:<12}{exchanges:>10}{up:>14,}{down:>14,}  {words}"
