"""Who may import whom. Source: docs/design.md 2 (import rules) and 4 (a method never sees the engine)."""

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

OURS = ("edgefl_protocol", "edgefl_trainer", "edgefl_export", "edgefl_client", "edgefl_coordinator")
LEARNING = ("torch", "torchvision", "timm", "onnx", "onnxscript", "sklearn", "scipy", "safetensors")
BASE = {"numpy", "onnxruntime", "PIL", "click", "cryptography", "requests", "urllib3", "certifi"}
EXTRAS = {"edgefl_client.decoders": {"pillow_heif", "pydicom"}}  # asked for before they are imported


def under(name: str, prefix: str) -> bool:
    """Whether a dotted name is a module or lies below it."""
    return name == prefix or name.startswith(prefix + ".")


def offences(modules, inside: str, forbidden: tuple[str, ...], besides: tuple[str, ...] = ()) -> list[str]:
    """Imports below `inside` of something forbidden, as `path:line imports name`."""
    return [
        f"{module.path}:{line} imports {target}"
        for module in modules.values()
        if under(module.name, inside)
        for target, line in module.imports()
        if any(under(target, one) for one in forbidden) and not any(under(target, one) for one in besides)
    ]


RULES = {
    "the protocol stands alone": ("edgefl_protocol", (*OURS[1:], *LEARNING, "onnxruntime", "requests")),
    "the device knows the protocol only": ("edgefl_client", ("edgefl_trainer", "edgefl_export", "edgefl_coordinator")),
    "no learning framework on the device": ("edgefl_client", LEARNING),
    "the trainer never imports export": ("edgefl_trainer", ("edgefl_export", "edgefl_coordinator")),
    "export needs no coordinator and no device": ("edgefl_export", ("edgefl_coordinator", "edgefl_client")),
    "the coordinator needs no device and no export": ("edgefl_coordinator", ("edgefl_client", "edgefl_export")),
    "a method sees no engine, no data, no file": (
        "edgefl_trainer.methods",
        ("edgefl_trainer.engine", "edgefl_trainer.data", "edgefl_protocol.durable", "pathlib", "os", "io", "socket"),
    ),
    "models know no method and no engine": (
        "edgefl_trainer.models",
        ("edgefl_trainer.engine", "edgefl_trainer.methods", "edgefl_trainer.data"),
    ),
    "evaluation knows no method and no engine": (
        "edgefl_trainer.evaluate",
        ("edgefl_trainer.engine", "edgefl_trainer.methods"),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(modules, rule: str) -> None:
    """docs/design.md 2."""
    inside, forbidden = RULES[rule]
    assert not offences(modules, inside, forbidden)


def test_every_rule_names_a_package_that_exists(modules) -> None:
    """A rule over a folder that was renamed would hold for nothing."""
    for inside, _ in RULES.values():
        assert any(under(name, inside) for name in modules), inside


def test_only_live_imports_the_exchange(modules) -> None:
    """docs/design.md 2: of the device the trainer may use `edgefl_client.exchange`, from `edgefl_trainer.live` only."""
    for module in modules.values():
        if under(module.name, "edgefl_trainer"):
            for target, line in module.imports():
                if under(target, "edgefl_client"):
                    allowed = under(module.name, "edgefl_trainer.live") and under(target, "edgefl_client.exchange")
                    assert allowed, f"{module.path}:{line} imports {target}"


def reachable(modules, start: tuple[str, ...]) -> set[str]:
    """Modules of ours that a process can load from these, following imports wherever they stand."""
    seen: set[str] = set()
    ahead = list(start)
    while ahead:
        name = ahead.pop()
        if name in modules and name not in seen:
            seen.add(name)
            ahead += [name.rpartition(".")[0]]
            for target, _ in modules[name].imports():
                ahead += [target, target.rpartition(".")[0]]
    return seen


def test_the_http_process_imports_the_protocol_only(modules) -> None:
    """docs/design.md 2: the process that serves loads no trainer and no learning framework, not even on demand."""
    serving = reachable(modules, ("edgefl_coordinator.app", "edgefl_coordinator.service"))
    assert {"edgefl_coordinator.handling", "edgefl_coordinator.store", "edgefl_protocol.envelope"} <= serving
    assert "edgefl_coordinator.worker" not in serving
    for name in serving:
        assert not under(name, "edgefl_trainer"), name
        for target, line in modules[name].imports():
            assert target.partition(".")[0] not in LEARNING, f"{modules[name].path}:{line} imports {target}"


def test_the_worker_and_init_alone_of_the_coordinator_import_the_trainer(modules) -> None:
    """docs/design.md 2. `init` runs before there is a server: it asks the trainer about a backbone or a run."""
    users = {
        module.name
        for module in modules.values()
        if under(module.name, "edgefl_coordinator")
        for target, _ in module.imports()
        if under(target, "edgefl_trainer")
    }
    assert users <= {"edgefl_coordinator.worker", "edgefl_coordinator.setup"} and "edgefl_coordinator.worker" in users


def test_what_runs_in_the_base_install_imports_base_packages_only(modules) -> None:
    """docs/design.md 2: protocol and device need nothing beyond the six dependencies and the standard library.

    `decoders` runs in a process of its own and imports an extra only for a picture that needs it.
    """
    import sys

    for module in modules.values():
        if under(module.name, "edgefl_protocol") or under(module.name, "edgefl_client"):
            for target, line in module.imports():
                top = target.partition(".")[0]
                known = top in BASE | EXTRAS.get(module.name, set()) or top in sys.stdlib_module_names or top in OURS
                assert known, f"{module.path}:{line} imports {target}"


def test_the_bare_folder_names_are_never_imported(modules) -> None:
    """docs/design.md 2: `import export` would work in a checkout and nowhere else."""
    bare = {"export", "trainer", "protocol", "coordinator", "edge_client"}
    for module in modules.values():
        for target, line in module.imports():
            assert target.partition(".")[0] not in bare, f"{module.path}:{line} imports {target}"


def of_ours(modules) -> dict[str, set[str]]:
    """Module → the modules of ours that it names in its imports."""
    named = {
        name: {target if target in modules else target.rpartition(".")[0] for target, _ in module.imports()}
        for name, module in modules.items()
    }
    return {name: {one for one in found if one in modules} - {name} for name, found in named.items()}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import one another in turn; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_imports_run_in_a_circle(modules) -> None:
    """docs/design.md 2. An import inside a function hides a circle, it does not cut it.

    Edges are the modules that are named: that a package's own `__init__` runs before them is Python's doing.
    """
    assert circle(of_ours(modules)) == []


def test_a_circle_is_found(modules) -> None:
    """The check above can fail: one import back closes a circle."""
    graph = of_ours(modules)
    graph["edgefl_client.drawn"].add("edgefl_client.measure")
    assert {"edgefl_client.drawn", "edgefl_client.measure"} == set(circle(graph))


def test_a_breach_is_found(modules) -> None:
    """The checks above can fail: each finds an import that does exist."""
    assert offences(modules, "edgefl_export", ("torch",))
    assert offences(modules, "edgefl_coordinator", ("edgefl_trainer",))
    assert "edgefl_trainer.methods.fedavg" in reachable(modules, ("edgefl_coordinator.worker",))
