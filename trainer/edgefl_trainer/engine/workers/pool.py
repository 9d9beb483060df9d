"""Workers: processes of this machine that work on the sites of a phase side by side.

Guarantees: a site gives the same bits in whichever worker it works, as in the engine's own process, because it is given
the same values and computes with as many threads; the engine alone writes to the disk. A worker that dies is one
sentence with the name of its site; sites that others finished by then are handed over first. Workers end with the
process that began them, however that ends. Each begins when a site waits for it, and reads the run's data once.

A fresh process costs seconds and a copy of every library: workers are forked from one that has loaded the libraries and
nothing else, no graphics card and no thread (Python's `forkserver`). Source: docs/reference/runs.md, workers.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import parent_process
from threading import Thread
from typing import Any, Literal

import torch

from edgefl_protocol import Payload
from edgefl_protocol.sentences import counted
from edgefl_trainer.contract import Scalar, State
from edgefl_trainer.engine.checkpoint import SiteResult
from edgefl_trainer.engine.local_engine import Given, RunObserver
from edgefl_trainer.engine.workers.messages import (
    error_of,
    error_words,
    received,
    send,
    state_of,
    words_of,
)
from edgefl_trainer.engine.workers.run_again import RunAgain, check_same, read_run
from edgefl_trainer.engine.workers.shared_network import share, shared_network
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.models.cnn import Backbone

VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE_S = 10  # for a worker that was asked to end
LOADED = (__name__, "edgefl_trainer.methods", "timm", "torchvision", "kornia", "sklearn", "scipy.special")

Half = Literal["learn", "judge"]
SameRun = tuple[str, str]  # its settings as TOML, and the digest of the rows that its own process read


def crowded_line(workers: int, threads: int, cores: int) -> str:
    """Write that workers of so many threads each hinder one another, and what to do; empty where they fit."""
    if workers == 1 or workers * threads <= cores:
        return ""
    told = f"{workers} workers of {counted(threads, 'thread')} each hinder one another on {counted(cores, 'core')}"
    if workers > cores:
        return f"{told}: give --workers {cores}."
    return (
        f"{told}: set OMP_NUM_THREADS={cores // workers}. Where that number is the same, so is a run to the last bit."
    )


def cores_here() -> int:
    """Count the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def card_of(worker: int, cards: int, visible: str | None) -> str | None:
    """Return `CUDA_VISIBLE_DEVICES` of a worker, which shows it one of the run's cards; None where there is none.

    Args:
        worker: its number, from 0; more workers than cards share them in turn.
        cards: how many the run sees.
        visible: the variable as the run has it.
    """
    if not cards:
        return None
    named = [name.strip() for name in (visible or "").split(",") if name.strip()]
    names = named[:cards] if len(named) >= cards else [str(number) for number in range(cards)]
    return names[worker % cards]


class Workers:
    """Up to `count` workers; a context that ends them."""

    def __init__(self, count: int, run: SameRun, network: Backbone, sizes: Mapping[str, int] | None = None) -> None:
        """Take what each worker is given once; sites of large `sizes` begin first, so that none ends alone with one."""
        self._count, self._run, self._network, self._sizes = count, run, network, sizes or {}
        self._shared: tuple[str, Any] | None = None
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self._workers:
            worker.end(at_once=kind is not None)

    def learn(self, names: Sequence[str], given: Given, observer: RunObserver) -> Iterator[tuple[str, SiteResult]]:
        """Have each site work once.

        Raises:
            TrainingError: a worker died; or what a site itself raises.
        """
        yield from self._each("learn", names, given, observer.site_started, observer.site_reported)

    def judge(self, names: Sequence[str], given: Given) -> Iterator[tuple[str, Mapping[str, Scalar]]]:
        """Have the model of each site judged; raises as `learn`."""
        yield from self._each("judge", names, given, lambda name: None, lambda name, facts: None)

    def _each(
        self,
        half: Half,
        names: Sequence[str],
        given: Given,
        started: Callable[[str], None],
        reported: Callable[[str, Mapping[str, Scalar]], None],
    ) -> Iterator[tuple[str, Any]]:
        waiting = sorted(names, key=lambda name: (-self._sizes.get(name, 0), name), reverse=True)  # taken from its end
        failed: dict[str, BaseException] = {}
        busy: dict[Connection, _Worker] = {}
        while busy or (waiting and not failed):
            while waiting and not failed and len(busy) < self._count:
                worker, name = self._free(busy), waiting.pop()
                started(name)
                busy[worker.link] = worker
                worker.begin(half, name, given(name))
            ready = wait(list(busy), timeout=0 if failed else None)
            for link in ready:
                worker = busy[link]  # type: ignore[index]  # `wait` gives back what it was given
                kind, value = worker.answer()
                if kind == "told":
                    reported(worker.site, value)
                    continue
                del busy[worker.link]
                if kind == "failed":
                    failed[worker.site] = value
                else:
                    yield worker.site, value
            if failed and not ready:
                break
        for name in sorted(failed):
            raise failed[name]

    def _free(self, busy: Mapping[Connection, "_Worker"]) -> "_Worker":
        """A worker that has nothing to do, new where there is none."""
        found = next((worker for worker in self._workers if worker.link not in busy), None)
        if found is None:
            if self._shared is None:
                self._shared = share(self._network)
            found = _Worker(self._run, self._shared, len(self._workers))
            self._workers.append(found)
        return found


class _Worker:
    """One worker, seen from the engine's process."""

    def __init__(self, run: SameRun, shared: tuple[str, Any], index: int) -> None:
        """Begin it. What it is given is plain: a connection, words, a number, and the block of the shared network."""
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload([name for name in LOADED if name in sys.modules])
        self.link, its_own = Pipe()
        self.site = ""
        card = card_of(index, torch.cuda.device_count(), os.environ.get(VISIBLE))
        given = (its_own, card, torch.get_num_threads(), run, *shared)
        self._process = processes.Process(target=_work, args=given, daemon=True)
        self._process.start()
        its_own.close()  # so that the worker's death ends the connection

    def begin(self, half: Half, site: str, given: tuple[State, Payload]) -> None:
        """Have it work on a site."""
        state, broadcast = given
        self.site = site
        with suppress(OSError):  # it has died: its answer tells
            send(self.link, {"half": half, "site": site}, state.payload(), broadcast)

    def answer(self) -> tuple[str, Any]:
        """Return what it says: `told` and facts of a step, `done` and a result, or `failed` and an error."""
        try:
            words = words_of(received(self.link))
            if words["kind"] == "failed":
                return "failed", error_of(words)
            if words["kind"] == "learned":
                state, reply = state_of(received(self.link)), received(self.link)
                return "done", SiteResult(state, reply, words["metrics"])
        except (EOFError, OSError):
            return "failed", TrainingError(self._how_it_died())
        return words["kind"], words["facts"]

    def end(self, *, at_once: bool) -> None:
        """End it; what it is doing is not waited for where it has to end at once."""
        self.link.close()
        if not at_once:
            self._process.join(PATIENCE_S)
        self._process.kill()
        self._process.join()
        self._process.close()

    def _how_it_died(self) -> str:
        self._process.join(PATIENCE_S)
        code = self._process.exitcode
        killed = f"was killed by the system (signal {-code})" if code is not None and code < 0 else "ended by itself"
        return (
            f"site {self.site}: the worker that learned there {killed}; nothing that was finished is lost. Go on with "
            "`edgefl-train run --resume --out DIR`, and add a smaller --workers if memory was full."
        )


def _work(link: Connection, card: str | None, threads: int, run: SameRun, words: str, block: Any) -> None:
    """Be a worker: take sites until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process hears it and ends the workers
    Thread(target=_end_with_parent, daemon=True).start()
    if card is not None:
        os.environ[VISIBLE] = card  # before CUDA begins here: `cuda` is this card in every thread
    again: RunAgain | None = None
    with suppress(EOFError, OSError):
        while True:
            asked, state, broadcast = words_of(received(link)), state_of(received(link)), received(link)
            try:
                if again is None:
                    again = read_run(run[0], threads, shared_network(words, block))
                    check_same({"partition_sha256": run[1]}, again.digests)
                if asked["half"] == "judge":
                    send(link, {"kind": "done", "facts": again.judge(asked["site"], state, broadcast)})
                else:
                    found = again.learn(
                        asked["site"], state, broadcast, lambda facts: send(link, {"kind": "told", "facts": facts})
                    )
                    told = {"kind": "learned", "metrics": found.metrics}
                    send(link, told, found.state.payload(), found.reply)
            except Exception as error:  # noqa: BLE001  # it is raised again in the engine's process
                send(link, {"kind": "failed", **error_words(error)})


def _end_with_parent() -> None:
    """Wait for the end of the engine's process, whichever end it is, and end, too."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
