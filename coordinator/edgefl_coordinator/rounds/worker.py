"""The aggregation worker: `python -m edgefl_coordinator.rounds.worker SECONDS` does the jobs it is told.

With `founding.task` the only code of the coordinator that imports the trainer. It runs in a process of its own, sees
files only, and opens neither the store nor a socket. It imports once and forks for each job (`worker_process.do_jobs`).

Guarantees: the same job gives the same bytes, in whatever order the replies arrived: methods aggregate in site-name
order with sums in float64. The peers whose rollout maps a broadcast holds get new numbers for every round and
receiver, from a key that members do not know, so that a number names nobody over time. Source:
docs/methods.md, aggregation; docs/security.md, exchange policy.
"""

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.jobs import (
    MAX_RESULT_BYTES,
    EncodedPayloads,
    Job,
    JobResult,
    read_job,
    read_replies,
    write_result,
)
from edgefl_coordinator.rounds.judging import beside_the_average, judge
from edgefl_coordinator.rounds.operator_gate import judged
from edgefl_coordinator.rounds.protection.bounding import Protection
from edgefl_coordinator.rounds.worker_process import do_jobs
from edgefl_protocol import EdgeflError, Payload
from edgefl_protocol.durable import read_bounded
from edgefl_trainer.contract import Method, Phase, State, Task
from edgefl_trainer.engine.handout import final_phase, handed_out, without_sites
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.method_halves import secret_numbering, stamped
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.spec import spec_from_facts


def run_job(job: Job, scratch: Path | None = None) -> JobResult:
    """Do one job; what the gate judges lies in a folder below `scratch`.

    Raises:
        OperatorError: the method does not exist or does not take these settings, or the gate gives no verdict.
        StorageError: a file of the job is missing.
        PayloadError: a file of the job breaks its form.
    """
    method, task = _method(job), _task(job)
    phases = method.phases(task.rounds)
    kinds = tuple(phase.kind for phase in phases)
    if job.kind == "start":
        state = method.start(task, sorted(job.sites))
        return JobResult(state.payload().to_bytes(), kinds, _broadcasts(method, task, state, 1, job))
    if job.state is None:
        raise OperatorError(f"a job of kind {job.kind} needs a state")
    stored = _payload(job.state)
    state = without_sites(method, State(dict(stored.arrays), dict(stored.scalars)), job.gone)
    if job.kind == "broadcast":
        return JobResult(b"", kinds, _broadcasts(method, task, state, job.number, job))
    return _judged_by_gate(method, task, state, job, _aggregate(method, task, state, job, kinds), scratch)


def _aggregate(method: Method, task: Task, state: State, job: Job, kinds: tuple[str, ...]) -> JobResult:
    """Aggregate the sound replies of a round; the others are named with what is wrong."""
    phase = method.phases(task.rounds)[job.number - 1]
    replies = read_replies(job)

    def take(chosen: Mapping[str, Payload]) -> JobResult:
        following = method.aggregate(state, phase, chosen)
        broadcasts = _broadcasts(method, task, following, job.number + 1, job)
        return JobResult(following.payload().to_bytes(), kinds, broadcasts)

    verdict = judge(
        replies,
        method.broadcast(state, phase, sorted(replies)),
        take,
        quorum=job.quorum,
        beside=beside_the_average(method.travels, phase.kind),
        protection=Protection(job.protection, job.granted),
    )
    made = verdict.result or JobResult(b"", kinds, {})
    return dataclasses.replace(
        made, refused=verdict.refused, problem=verdict.problem, bounded=verdict.bounded, noticed=verdict.noticed
    )


def _judged_by_gate(
    method: Method, task: Task, state: State, job: Job, made: JobResult, scratch: Path | None
) -> JobResult:
    """Return what was made; where the gate refuses it, the state before the round, and what goes out of that."""
    phase = made.phases[job.number - 1]
    if not job.gate or made.problem or phase == "warm":  # which makes no model, but settles what the others need
        return made
    before = state.payload().to_bytes()
    verdict = judged(job, phase, len(made.phases), before, made.state, scratch)
    if verdict.accepted:
        return dataclasses.replace(made, gate="accepted", gate_said=verdict.said)
    anew = _broadcasts(method, task, state, job.number + 1, job)
    return dataclasses.replace(made, state=before, broadcasts=anew, gate="refused", gate_said=verdict.said)


def _broadcasts(method: Method, task: Task, state: State, number: int, job: Job) -> Mapping[str, bytes]:
    """Make the broadcasts of exchange `number`; after the last exchange they are what the method hands out."""
    if not job.sites:
        return {}
    state = State(Payload(state.arrays).arrays, state.values)  # read-only: all broadcasts share one copy
    phases, sites = method.phases(task.rounds), sorted(job.sites)
    over = number > len(phases)
    phase = final_phase(task) if over else phases[number - 1]
    made = handed_out(method, task, state, sites) if over else method.broadcast(state, phase, sites)
    return EncodedPayloads({name: _stamped(made[name], phase, task, number, name, job) for name in sites})


def _stamped(payload: Payload, phase: Phase, task: Task, number: int, receiver: str, job: Job) -> Payload:
    """Add the scalars that every site reads, and draw the peers' numbers from the coordinator's key."""
    numbering = secret_numbering(bytes.fromhex(job.order_key), receiver, number)
    return stamped(payload, phase, task.rounds, numbering)


def _payload(path: str) -> Payload:
    return Payload.from_bytes(read_bounded(path, MAX_RESULT_BYTES), MAX_RESULT_BYTES)


def _method(job: Job) -> Method:
    module, _, name = job.method.rpartition(":")
    kind = getattr(importlib.import_module(module), name, None) if module else METHODS.get(job.method)
    if kind is None:
        raise OperatorError(f"there is no method {job.method}; `edgefl-train methods` lists them")
    try:
        method: Method = build(kind, job.settings)
    except (TypeError, ValueError) as error:
        raise OperatorError(f"method {job.method} does not take these settings: {error}") from error
    return method


def _task(job: Job) -> Task:
    try:
        spec = spec_from_facts(job.task["backbone"])
    except TypeError as error:
        raise OperatorError(f"[task.backbone] of config.toml does not describe a backbone: {error}") from error
    plain = {key: value for key, value in job.task.items() if key != "backbone"}
    return Task(**{**plain, "classes": tuple(plain["classes"]), "backbone": spec})


def main(folder: Path) -> int:
    """Do the job in `folder`; returns the exit status, with one sentence on stderr where it is 1."""
    try:
        write_result(folder, run_job(read_job(folder), folder))
    except EdgeflError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(do_jobs(main, float(sys.argv[1])))
