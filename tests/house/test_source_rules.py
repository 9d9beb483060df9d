"""What our source never holds, how long it may get, and what no tracked file may say."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.house.conftest import MAY_LOAD, walked

MODULE_LINES, FUNCTION_LINES = 400, 60
LONGER = "# Longer than the rule:"  # the reason, as the first comment of a long function

BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "telnetlib", "builtins"}
BANNED_BUILTINS = {"eval", "exec", "compile", "__import__"}
BANNED_CALLS = {
    ("torch", "load"),
    ("torch", "save"),
    ("yaml", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("ssl", "_create_unverified_context"),
    ("ssl", "_create_stdlib_context"),
    ("urllib3", "disable_warnings"),
    ("tempfile", "mktemp"),
    ("concurrent.futures", "ProcessPoolExecutor"),
}
# What pickles, in a module that imports multiprocessing: `send_bytes` and `recv_bytes` do not.
PICKLING = {"ForkingPickler", "send", "recv", "Queue", "SimpleQueue", "JoinableQueue", "Pool", "Manager"}
BANNED_METHODS = {"extractall", "extract"}
BANNED_KEYWORDS = {
    ("verify", False),
    ("check_hostname", False),
    ("shell", True),
    ("allow_pickle", True),
    ("trust_remote_code", True),
}
BANNED_VALUES = {"CERT_NONE", "CERT_OPTIONAL", "PROTOCOL_TLS", "PROTOCOL_SSLv23"}  # of ssl: contexts that check nobody
SQL = re.compile(
    r"^\s*(SELECT\b.*\bFROM|INSERT\s+INTO|UPDATE\b.*\bSET|DELETE\s+FROM|(CREATE|DROP|ALTER)\s+\w+)", re.I | re.S
)


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """docs/security.md check 38: lines that hold something forbidden."""
    imported = _imported_names(tree)
    processes = any("multiprocessing" in _modules_of(node) for node in walked(tree))
    for node in walked(tree):
        if processes and isinstance(node, ast.Attribute) and node.attr in PICKLING:
            yield node.lineno, f"{ast.unparse(node)} pickles"
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            yield from _reference_findings(node, imported)
        if isinstance(node, ast.Dict):
            yield from _dict_findings(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _import_findings(node)
        elif isinstance(node, ast.Call):
            yield from _call_findings(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            yield from _assignment_findings(node)
        if (isinstance(node, ast.Attribute) and node.attr in BANNED_VALUES) or (
            isinstance(node, ast.Name) and node.id in BANNED_VALUES
        ):
            yield node.lineno, "a TLS context that checks nobody"
        if _is_sql_text(node):
            yield node.lineno, "SQL built from text"


def _modules_of(node: ast.AST) -> set[str]:
    """The packages that an import takes something from."""
    named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(getattr(node, "module", ""))]
    return {name.partition(".")[0] for name in named}


def _imported_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for: `import torch as t` gives t: torch, `from os import path` path: os.path."""
    names: dict[str, str] = {}
    for node in walked(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _full_name(node: ast.expr, imported: dict[str, str]) -> str:
    """`t.load` as `torch.load`; empty for what is no dotted name."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := _full_name(node.value, imported)):
        return f"{owner}.{node.attr}"
    return ""


def _reference_findings(node: ast.Attribute | ast.Name, imported: dict[str, str]) -> Iterator[tuple[int, str]]:
    """A banned function that is named, whether it is called there or kept for later."""
    name = _full_name(node, imported)
    owner, _, last = name.rpartition(".")
    kept_method = isinstance(node, ast.Attribute) and node.attr in BANNED_METHODS
    if (owner, last) in BANNED_CALLS or (not owner and name in BANNED_BUILTINS) or owner == "builtins" or kept_method:
        yield node.lineno, name or ast.unparse(node)


def _dict_findings(node: ast.Dict) -> Iterator[tuple[int, str]]:
    """A switch in a dictionary, which `**` may turn into an argument."""
    for key, value in zip(node.keys, node.values, strict=True):
        named = key.value if isinstance(key, ast.Constant) else ""
        if any(named == name and _is(value, bad) for name, bad in BANNED_KEYWORDS):
            yield node.lineno, f"{named}: {ast.unparse(value)}"


def _import_findings(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str]]:
    """A banned module, or a banned function or value taken out of its module, whatever it is called afterwards."""
    if isinstance(node, ast.Import):
        yield from ((node.lineno, a.name) for a in node.names if a.name.partition(".")[0] in BANNED_MODULES)
        return
    module = node.module or ""
    if module.partition(".")[0] in BANNED_MODULES:
        yield node.lineno, f"from {module}"
    for alias in node.names:
        whole = alias.name == "*" and any(module == owner for owner, _ in BANNED_CALLS)
        pickles = "multiprocessing" in _modules_of(node) and alias.name in PICKLING
        if whole or pickles or (module, alias.name) in BANNED_CALLS or alias.name in BANNED_VALUES:
            yield node.lineno, f"from {module} import {alias.name}"


def _assignment_findings(node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> Iterator[tuple[int, str]]:
    """A switch set after the fact: `session.verify = False`, and also in a tuple."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        for place, value in pairs:
            name = place.attr if isinstance(place, ast.Attribute) else place.id if isinstance(place, ast.Name) else ""
            if any(name == banned and _is(value, bad) for banned, bad in BANNED_KEYWORDS):
                yield node.lineno, f"{name} = {ast.unparse(value) if value else ''}"


def _is(value: ast.expr | None, constant: bool) -> bool:
    """Whether an expression is this truth value, or 0 or 1 in its place."""
    return isinstance(value, ast.Constant) and type(value.value) in (bool, int) and value.value == constant


def _call_findings(node: ast.Call) -> Iterator[tuple[int, str]]:
    for keyword in node.keywords:
        if any(keyword.arg == name and _is(keyword.value, bad) for name, bad in BANNED_KEYWORDS):
            yield node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"
    if isinstance(node.func, ast.Name) and node.func.id == "setattr" and len(node.args) == 3:
        named = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        if any(named == name and _is(node.args[2], bad) for name, bad in BANNED_KEYWORDS):
            yield node.lineno, f"setattr {named}"


def _is_sql_text(node: ast.AST) -> bool:
    """An f-string, a `%` or `+` or `.format` whose text begins as SQL does."""
    if isinstance(node, ast.JoinedStr) and any(isinstance(part, ast.FormattedValue) for part in node.values):
        return _is_sql("".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.Add):
        return _is_sql(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return _is_sql(node.func.value)
    return False


def _is_sql(text: object) -> bool:
    value = text.value if isinstance(text, ast.Constant) else text
    return isinstance(value, str) and bool(SQL.match(value))


def test_the_source_holds_nothing_forbidden(modules) -> None:
    """docs/security.md check 38, over the five packages; one call of one module is allowed, see `MAY_LOAD`."""
    each = [(m.path.as_posix(), line, what) for m in modules.values() for line, what in findings(m.tree)]
    assert not [(path, line, what) for path, line, what in each if (path, what) != (MAY_LOAD, "torch.load")]


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "yaml.load(text)",
        "eval(text)",
        "requests.get(url, verify=False)",
        "requests.get(url, verify=0)",
        "session.verify = False",
        "self.session.verify = verify = False",
        "session.verify, session.trust_env = False, True",
        "session.verify: bool = False",
        'setattr(session, "verify", False)',
        "context.verify_mode = ssl.CERT_NONE",
        "context.verify_mode = CERT_NONE",
        "wrap(sock, cert_reqs=ssl.CERT_NONE)",
        "from ssl import CERT_NONE",
        "from ssl import CERT_NONE as relaxed",
        "context.check_hostname = False",
        "make_context(check_hostname=False)",
        "from ssl import _create_unverified_context",
        "ssl.SSLContext(ssl.PROTOCOL_TLS)",
        "from torch import load",
        "from yaml import load as read",
        "from os import system",
        "from pickle import loads as read",
        "import marshal as m",
        "import torch as t; t.load(p)",
        "import yaml as y; y.load(p)",
        "import os as o; o.system(x)",
        "import ssl as s; s._create_unverified_context()",
        "import tempfile as t\ndef f():\n    return t.mktemp()",
        "from os import *",
        "from multiprocessing.reduction import ForkingPickler",
        "import multiprocessing.reduction as r\nr.ForkingPickler.dumps(x)",
        "from multiprocessing.connection import Connection\ndef f(link: Connection):\n    link.send(x)",
        "import multiprocessing.connection as c\ndef f(link: c.Connection):\n    return link.recv()",
        "from multiprocessing import get_context\nget_context('spawn').Pool(2)",
        "from concurrent.futures import ProcessPoolExecutor",
        "read = torch.load",
        "run = eval",
        "builtins.eval(x)",
        "import builtins as b",
        "from builtins import eval as e",
        "requests.get(u, **{'verify': False})",
        "options = {'shell': True}",
        "f = ZipFile(a).extractall",
        "subprocess.run(line, shell=True)",
        "archive.extractall(folder)",
        "numpy.load(file, allow_pickle=True)",
        "db.execute(f\"SELECT * FROM members WHERE name = '{name}'\")",
        'db.execute("DELETE FROM members WHERE name = " + name)',
        'db.execute("UPDATE members SET name = %s" % name)',
        'db.execute("INSERT INTO members VALUES ({})".format(name))',
    ],
)
def test_a_forbidden_line_is_found(line: str) -> None:
    """docs/security.md check 38: the search above can fail."""
    assert list(findings(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "re.compile(text)",
        'f"updated {name}, set aside"',
        "run(command, shell=False)",
        "session.verify = str(ca_file)",
        "session.verify = True",
        "context.check_hostname = True",
        "context.verify_mode = ssl.CERT_REQUIRED",
        "verified, shell = False, False",
        "from torch import nn",
        "import json as torch; torch.load(file)",
        "{'verify': True, 'shell': False}",
        "signature.verify(data)",
        "from multiprocessing.connection import Connection\ndef f(link: Connection):\n    link.send_bytes(b)",
        "client.send(request)",
        'db.execute("SELECT 1 FROM x")',
    ],
)
def test_a_harmless_line_is_not(line: str) -> None:
    assert not list(findings(ast.parse(line)))


def test_modules_are_short(modules, tracked, root: Path) -> None:
    """At most 400 lines a module, of a test too."""
    counts = {m.path.as_posix(): len(m.text.splitlines()) for m in modules.values()}
    for path in tracked:
        if path.suffix == ".py" and (root / path).exists():
            counts[path.as_posix()] = len((root / path).read_text(encoding="utf-8").splitlines())
    assert len(counts) > len(modules)
    assert not {path: count for path, count in counts.items() if count > MODULE_LINES}


def test_functions_are_short(modules) -> None:
    """At most 60 lines a function with its docstring, unless its first comment gives the reason."""
    long = []
    for module in modules.values():
        lines = module.text.splitlines()
        for node in walked(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                end = node.end_lineno or node.lineno
                if end - node.lineno >= FUNCTION_LINES and not any(LONGER in line for line in lines[node.lineno : end]):
                    long.append(f"{module.path}:{node.lineno} {node.name} has {end - node.lineno + 1} lines")
    assert not long


def test_every_module_says_what_it_guarantees(modules) -> None:
    """The first line of every module is a docstring, and it is no placeholder."""
    silent = [str(m.path) for m in modules.values() if len(ast.get_docstring(m.tree) or "") < 40]
    assert not silent


def test_nothing_is_left_to_do(modules) -> None:
    """Finish it, or write it down as a known limit."""
    marks = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b")
    left = [
        f"{m.path}:{n}" for m in modules.values() for n, line in enumerate(m.text.splitlines(), 1) if marks.search(line)
    ]
    assert not left


# Put together here so that this file does not hold what it looks for.
LARGE = re.compile(r"backbones/derm-vit-\w+-84\.safetensors|examples/models/chest-questions\.edgefl")
INDEX_HOSTS = (
    "pypi" + ".org",
    "python" + "hosted.org",
    "extra-" + "index-url",
    "find-" + "links",
    "download.py" + "torch.org",
)
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|root|home/\w+|Users/\w+|opt/pypi)/")


def test_no_tracked_file_names_a_package_index_or_a_machine(tracked, root: Path) -> None:
    """Pins are plain: the index is the installing machine's affair, and no file knows where it was written."""
    found = []
    for path in tracked:
        data = (root / path).read_bytes()
        if b"\0" in data[:8192]:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), 1):
            if any(host in line for host in INDEX_HOSTS) or MACHINE_PATHS.search(line):
                found.append(f"{path}:{number}: {line.strip()[:80]}")
    assert not found


def test_no_big_or_private_file_is_tracked(tracked, root: Path) -> None:
    """No real picture, key, store or cache gets in by accident. Three models may be larger: docs/decisions/0021."""
    for path in tracked:
        most = 12_000_000 if LARGE.fullmatch(path.as_posix()) else 8 * 2**20
        assert (root / path).stat().st_size < most, f"{path} is larger than {most} bytes"
        assert path.suffix not in {".key", ".pt", ".pth", ".ckpt", ".pkl", ".sqlite", ".db", ".zip", ".jpg", ".jpeg"}, (
            path
        )


NO_VERBS = frozenset(
    [
        "a",
        "all",
        "an",
        "as",
        "both",
        "each",
        "every",
        "from",
        "how",
        "in",
        "its",
        "most",
        "no",
        "none",
        "nothing",
        "of",
        "on",
        "one",
        "only",
        "some",
        "that",
        "the",
        "their",
        "these",
        "they",
        "this",
        "those",
        "to",
        "two",
        "what",
        "when",
        "where",
        "whether",
        "which",
        "who",
        "whose",
        "why",
        "with",
        "your",
    ]
)


def begins_without_verb(docstring: str) -> bool:
    """Whether a docstring begins with an article, a pronoun, a question, or a verb in the third person."""
    first = re.split(r"[\s,;:.]", docstring.strip().lower())[0]
    return first in NO_VERBS or first in {"returns", "gives", "makes", "reads", "writes", "raises", "yields", "checks"}


def test_docstrings_of_public_functions_are_imperative(modules) -> None:
    """CONTRIBUTING, house style: what the function does, not what it is; properties and classes may be nouns."""
    nouns = [
        f"{m.path}:{node.lineno} {node.name}: {docstring.splitlines()[0]}"
        for m in modules.values()
        for node in walked(m.tree)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if not any("property" in ast.unparse(one) for one in node.decorator_list)
        if (docstring := ast.get_docstring(node)) and begins_without_verb(docstring)
    ]
    assert nouns == []
    assert begins_without_verb("Whether it is due.") and not begins_without_verb("Tell whether it is due.")
