"""The one exception from "no `torch.load`": one call, in one module, that builds tensors (docs/decisions/0067)."""

import ast

from tests.house.conftest import MAY_LOAD, walked


def test_the_one_module_that_may_load_does_so_once_and_builds_tensors_alone(modules) -> None:
    """docs/security.md check 38: `weights_only=True` stands in the call; what comes before it: test_packaged.py."""
    (module,) = [m for m in modules.values() if m.path.as_posix() == MAY_LOAD]
    loads = [node for node in walked(module.tree) if isinstance(node, ast.Attribute) and node.attr == "load"]
    calls = [node for node in walked(module.tree) if isinstance(node, ast.Call) and node.func in loads]
    assert len(loads) == len(calls) == 1
    (switch,) = [keyword.value for keyword in calls[0].keywords if keyword.arg == "weights_only"]
    assert isinstance(switch, ast.Constant) and switch.value is True
