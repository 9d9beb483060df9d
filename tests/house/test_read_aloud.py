"""What a person reads is plain English: no message turns the order of words round (CONTRIBUTING.md, house style)."""

import ast
import re

from tests.house.conftest import walked

TURNED = re.compile(
    r"[;,:] (?:allowed|needed|known|expected|read|taken) (?:is|are)\b|, for (?:it|its|the|their) \w+ (?:is|are)\b"
)


def turned(tree: ast.Module) -> list[str]:
    """Literal parts of text in a module, docstrings apart, whose order of words is turned round."""
    documented = {
        id(node.body[0].value)
        for node in walked(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0], ast.Expr)
    }
    texts = [n.value for n in walked(tree) if isinstance(n, ast.Constant) and id(n) not in documented]
    return [text for text in texts if isinstance(text, str) and TURNED.search(text)]


def test_no_message_turns_the_words_round(modules) -> None:
    """ "allowed are 3" and "read are JPEG, PNG" stop a reader; "at most 3 are allowed" does not."""
    assert {name: found for name, module in modules.items() if (found := turned(module.tree))} == {}


def test_a_turned_message_is_found() -> None:
    """The check above can fail."""
    assert turned(ast.parse('raise ValueError(f"threads is {threads}; allowed are 1 to 1024")'))
    assert turned(ast.parse('echo("Left out, for their kind is not read: .tif")'))
    assert not turned(ast.parse('"""One; known are these."""'))
