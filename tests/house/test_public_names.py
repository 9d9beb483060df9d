"""What a package offers is listed, complete and importable (ruff sorts). Source: docs/design.md 2 and 6."""

import ast
import importlib

import pytest
from tests.house.conftest import walked

# docs/design.md 6: names that others rely on.
CONTRACT = {
    "edgefl_trainer.losses": (
        "class_prior",
        "evidential_loss",
        "rollout_distillation",
        "distillation_targets",
        "contrastive_loss",
    ),
    "edgefl_trainer.rollout": ("attention_rollout",),
    "edgefl_trainer.methods": ("METHODS",),
    "edgefl_protocol": ("Payload", "generate_signing_key", "generate_sealing_key", "seal", "open_envelope"),
    "edgefl_protocol.errors": ("EnvelopeError",),
    "edgefl_protocol.bundle": ("load_bundle", "Bundle"),
    "edgefl_client": ("Scorer", "Asker"),
}


def listed(tree: ast.Module) -> list[str] | None:
    """The value of `__all__`, or None without one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def public_names(tree: ast.Module) -> set[str]:
    """What a package's `__init__` imports from its own project or defines, without a leading underscore."""
    names = set()
    for node in walked(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("edgefl_"):
            names |= {alias.asname or alias.name for alias in node.names}
    # A name loaded inside `__getattr__` is not offered.
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names -= {
                alias.asname or alias.name
                for inner in ast.walk(node)
                if isinstance(inner, ast.ImportFrom)
                for alias in inner.names
            }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


def test_all_is_complete_in_every_package(modules) -> None:
    """A package that offers names lists each of them; one that offers none says nothing."""
    for module in modules.values():
        if module.is_package:
            names, offered = listed(module.tree), public_names(module.tree)
            if names is None:
                assert not offered, f"{module.path} offers {sorted(offered)} without __all__"
            else:
                # What is imported for a table inside the package (`Method` for METHODS) need not be offered again.
                assert offered <= set(names) or module.name == "edgefl_trainer.methods", module.path


@pytest.mark.parametrize("name", CONTRACT)
def test_the_names_others_rely_on_exist_and_are_documented(name: str) -> None:
    """docs/design.md 6."""
    module = importlib.import_module(name)
    for attribute in CONTRACT[name]:
        value = getattr(module, attribute)
        assert value.__doc__, f"{name}.{attribute} has no docstring"


def test_what_is_listed_can_be_imported(modules) -> None:
    """`from package import *` works for every package with a list."""
    for module in modules.values():
        if module.is_package:
            package = importlib.import_module(module.name)
            for name in listed(module.tree) or []:
                assert hasattr(package, name), f"{module.name}.{name}"
