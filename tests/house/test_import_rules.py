"""Who may import whom. Source: docs/design.md 2 (import rules) and 4 (a method never sees the engine)."""

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
from tests.house.conftest import walked

OURS = ("edgefl_protocol", "edgefl_exchange", "edgefl_trainer", "edgefl_export", "edgefl_client", "edgefl_coordinator")
LEARNING = ("torch", "torchvision", "timm", "onnx", "onnxscript", "sklearn", "scipy", "safetensors")
BASE = {"numpy", "onnxruntime", "PIL", "click", "cryptography", "requests", "urllib3", "certifi"}
EXTRAS = {"edgefl_client.scoring.decoders": {"pillow_heif", "pydicom"}}  # asked for before they are imported


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
    "rules that two sides share open no file and read no clock": (
        "edgefl_protocol.rules",
        ("pathlib", "os", "io", "socket", "time", "datetime", "edgefl_protocol.durable"),
    ),
    "the exchange knows the protocol only": ("edgefl_exchange", (*OURS[2:], *LEARNING, "onnxruntime", "PIL")),
    "the device knows protocol and exchange only": (
        "edgefl_client",
        ("edgefl_trainer", "edgefl_export", "edgefl_coordinator"),
    ),
    "no learning framework on the device": ("edgefl_client", LEARNING),
    "the trainer never imports export or device": (
        "edgefl_trainer",
        ("edgefl_export", "edgefl_coordinator", "edgefl_client"),
    ),
    "export needs no coordinator and no device": (
        "edgefl_export",
        ("edgefl_coordinator", "edgefl_client", "edgefl_exchange"),
    ),
    "the coordinator needs no device and no export": (
        "edgefl_coordinator",
        ("edgefl_client", "edgefl_export", "edgefl_exchange"),
    ),
    "a method sees no engine, no data, no file": (
        "edgefl_trainer.methods",
        ("edgefl_trainer.engine", "edgefl_trainer.data", "edgefl_protocol.durable", "pathlib", "os", "io", "socket"),
    ),
}

# Of Flower (docs/decisions/0063), and `run_simulation` in the one module that starts Ray.
OF_FLOWER = {
    f"flwr.{module}.{name}"
    for module, names in {
        "app": ("Array", "ArrayRecord", "Context", "Error", "Message", "RecordDict"),
        "clientapp": ("ClientApp",),
        "serverapp": ("Grid", "ServerApp"),
    }.items()
    for name in names
}

# From the top floor down: a room may import those below it, and the modules of its own.
FLOORS = {
    "edgefl_protocol": (
        "bundle", "messages", "records", "envelopes", "fields", "routes", "pictures", "rules", "payload", "tensors",
        "processor", "lock_file", "durable", "strict_json", "pae", "distribution", "sentences", "errors",
    ),
    "edgefl_trainer": (
        "cli", "commands", "flower", "live", "reports", "experiments", "tracking", "audit", "engine", "method_halves",
        "methods",
        "learning", "evaluate", "data", "contract", "models", "losses", "rollout", "augment", "torch_seed", "bounds",
        "gaussian_noise", "typed_values", "declared_ranges", "declared_names", "environment", "errors",
    ),
    "edgefl_export": (
        "cli", "commands", "bundles", "methods", "int8", "parity", "graphs", "key_store", "errors",
    ),
    "edgefl_client": (
        "cli", "commands", "doctor", "sharing", "learning", "scoring", "trust", "runtime", "memory", "home",
    ),
    "edgefl_coordinator": (
        "cli", "commands", "founding", "web", "rounds", "members", "store", "commits", "payloads", "settings",
        "process_memory", "errors",
    ),
}  # fmt: skip
ROOM_MODULES = 20
SOCKETS = {"edgefl_exchange", "edgefl_coordinator.web"}  # rooms that may open one


@pytest.mark.parametrize("rule", RULES)
def test_rule(modules, rule: str) -> None:
    """docs/design.md 2."""
    inside, forbidden = RULES[rule]
    assert not offences(modules, inside, forbidden)


def test_of_flower_only_what_it_promises_to_keep(modules) -> None:
    """docs/decisions/0063: messages and their records, two apps, the Grid; no strategy, no client."""
    found = {
        (module.name, target) for module in modules.values() for target, _ in module.imports() if under(target, "flwr")
    }
    starts = ("edgefl_trainer.flower.simulation", "flwr.simulation.run_simulation")
    assert starts in found and {target for _, target in found - {starts}} <= OF_FLOWER
    assert all(under(name, "edgefl_trainer.flower") for name, _ in found)


def test_every_rule_names_a_package_that_exists(modules) -> None:
    """A rule over a folder that was renamed would hold for nothing."""
    for inside, _ in RULES.values():
        assert any(under(name, inside) for name in modules), inside


def test_the_engine_knows_of_methods_only_their_table(modules) -> None:
    """docs/design.md 4: what a method adds it declares (`contract.Declaration`); nobody asks for its type."""
    found = offences(modules, "edgefl_trainer.engine", ("edgefl_trainer.methods",))
    assert {line.rpartition(" ")[2] for line in found} == {"edgefl_trainer.methods.METHODS"}


def test_on_a_device_only_learning_knows_a_methods_record(modules) -> None:
    """CONTRIBUTING: loader and device check a bundle against its record (`LearningPlan`) and know no method's name."""
    records = {name for name in modules if re.fullmatch(r"edgefl_protocol\.bundle\.fed\w+_plan", name)}
    found = offences(modules, "edgefl_client", tuple(records))
    assert len(records) == 2 and found
    assert {line.partition(":")[0].rpartition("/")[0] for line in found} == {"edge_client/edgefl_client/learning"}


def test_the_engine_names_no_method(modules) -> None:
    """In no text but docstrings; `head`, `local` and `finetune` are words too, and count where they are all of it."""
    from edgefl_trainer.methods import METHODS

    common = {"head", "local", "finetune"}
    assert common < METHODS.keys()
    for module in modules.values():
        if under(module.name, "edgefl_trainer.engine"):
            for text in texts(module.tree):
                named = {word for word in re.findall(r"[a-z]+(?:-[a-z]+)*", text) if word in METHODS}
                assert text not in METHODS and named <= common, f"{module.path}: {text}"
            assert not re.search(r"\.family\b", module.text), f"{module.path} asks for a method's family"


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a module that is no docstring."""
    said = {id(node.value) for node in walked(tree) if isinstance(node, ast.Expr)}
    for node in walked(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def told_apart(tree: ast.AST) -> Iterator[str]:
    """Texts that something is compared with: in a comparison, a `match`, or as the keys of a table."""
    for node in walked(tree):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Dict):
            parts = [*node.keys]
        for part in parts:
            yield from texts(part) if part is not None else ()


def methods_told_apart(tree: ast.AST, methods: Collection[str]) -> list[str]:
    """Names of methods among these texts."""
    return [text for text in told_apart(tree) if text in methods]


def test_device_and_coordinator_tell_no_methods_apart(modules) -> None:
    """docs/design.md 2: the tables of `learning` and of the trainer say what a method is; whoever else works with one
    asks its record, its learner or the task."""
    from edgefl_trainer.methods import METHODS

    for module in modules.values():
        inside = under(module.name, "edgefl_client") and not under(module.name, "edgefl_client.learning")
        if inside or under(module.name, "edgefl_coordinator"):
            assert not methods_told_apart(module.tree, METHODS), str(module.path)


@pytest.mark.parametrize(
    "source",
    [
        'task.method == "fedclf"',
        'm in ("fedavg", "fedclf")',
        '{"fedclf": 1}',
        'match m:\n    case "fedclf":\n        1',
    ],
)
def test_a_method_told_apart_is_found(source: str) -> None:
    """The check above can fail."""
    assert methods_told_apart(ast.parse(source), {"fedclf"}) == ["fedclf"]


def test_help_and_messages_name_no_method_that_devices_learn(modules) -> None:
    """A method that is added needs no other text: the device's rooms outside `learning`, and commands of the export."""
    from edgefl_export.methods.table import GRAPHS

    rooms = [name for name in modules if under(name, "edgefl_client") and not under(name, "edgefl_client.learning")]
    export = [name for name in modules if under(name, "edgefl_export.commands")]
    for name in (*rooms, *export, "edgefl_export.cli"):
        for text in texts(modules[name].tree):
            assert not any(method in text.lower() for method in GRAPHS), f"{modules[name].path}: {text}"


def test_only_live_imports_the_exchange(modules) -> None:
    """docs/design.md 2: of the trainer, a GPU site in a live federation alone talks to a coordinator."""
    for module in modules.values():
        if under(module.name, "edgefl_trainer") and not under(module.name, "edgefl_trainer.live"):
            for target, line in module.imports():
                assert not under(target, "edgefl_exchange"), f"{module.path}:{line} imports {target}"


def test_only_its_room_imports_flower(modules) -> None:
    """docs/design.md 2: a run, a site and a device need nothing of it; commands load the room on demand."""
    for module in modules.values():
        if not under(module.name, "edgefl_trainer.flower"):
            for target, line in module.imports():
                assert target.partition(".")[0] not in {"flwr", "ray"}, f"{module.path}:{line} imports {target}"


def room_of(name: str) -> str:
    """The room of a dotted name below its package: the second part."""
    return [*name.split("."), ""][1]


def climbing(modules, floors: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Imports from a room into one above it, as `path:line imports name`."""
    return [
        f"{module.path}:{line} imports {target}"
        for module in modules.values()
        for package in [module.name.partition(".")[0]]
        if package in floors and room_of(module.name)
        for target, line in module.imports()
        if under(target, package) and room_of(target) in floors[package]
        if floors[package].index(room_of(target)) < floors[package].index(room_of(module.name))
    ]


def test_no_import_runs_up(modules) -> None:
    """docs/design.md 2: commands above rooms, rooms above what they stand on."""
    assert climbing(modules, FLOORS) == []


def test_every_room_has_a_floor(modules) -> None:
    """A room that FLOORS does not name would be free to import anything."""
    for package, floors in FLOORS.items():
        assert {room_of(name) for name in modules if under(name, package)} - {""} == set(floors)


def test_an_import_that_runs_up_is_found(modules) -> None:
    """The check above can fail: with the floors turned over, most imports climb."""
    over = {package: floors[::-1] for package, floors in FLOORS.items()}
    assert len(climbing(modules, over)) > 100


def test_a_room_holds_at_most_twenty_modules(modules, tracked) -> None:
    """docs/design.md 2; `methods` has a file for each method."""
    paths = [
        *(module.path for module in modules.values()),
        *(path for path in tracked if path.parts[0] == "benchmarks"),
    ]
    rooms = Counter(str(path.parent) for path in paths if path.parent.name != "methods")
    assert {room: count for room, count in rooms.items() if count > ROOM_MODULES} == {}


def test_sockets_are_opened_in_two_rooms(modules) -> None:
    """docs/design.md 2: whoever asks which code talks to a network reads these rooms."""
    users = {
        ".".join(module.name.split(".")[: 1 if under(module.name, "edgefl_exchange") else 2])
        for module in modules.values()
        for target, _ in module.imports()
        if target.partition(".")[0] in {"socket", "requests", "urllib3", "http", "uvicorn", "h11", "asyncio"}
    }
    assert users == SOCKETS


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
    serving = reachable(modules, ("edgefl_coordinator.web.app", "edgefl_coordinator.web.service"))
    assert {
        "edgefl_coordinator.web.sealed_requests",
        "edgefl_coordinator.store.store",
        "edgefl_protocol.envelopes.envelope",
    } <= serving
    assert "edgefl_coordinator.rounds.worker" not in serving
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
    assert (
        users <= {"edgefl_coordinator.rounds.worker", "edgefl_coordinator.founding.task"}
        and "edgefl_coordinator.rounds.worker" in users
    )


def test_what_runs_in_the_base_install_imports_base_packages_only(modules) -> None:
    """docs/design.md 2: protocol and device need nothing beyond the six dependencies and the standard library.

    `decoders` runs in a process of its own and imports an extra only for a picture that needs it.
    """
    import sys

    for module in modules.values():
        if module.name.partition(".")[0] in ("edgefl_protocol", "edgefl_exchange", "edgefl_client"):
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
    graph["edgefl_client.doctor.drawn_picture"].add("edgefl_client.doctor.measure")
    assert {"edgefl_client.doctor.drawn_picture", "edgefl_client.doctor.measure"} == set(circle(graph))


def test_a_breach_is_found(modules) -> None:
    """The checks above can fail: each finds an import that does exist."""
    assert offences(modules, "edgefl_export", ("torch",))
    assert offences(modules, "edgefl_coordinator", ("edgefl_trainer",))
    assert "edgefl_trainer.methods.fedavg" in reachable(modules, ("edgefl_coordinator.rounds.worker",))
