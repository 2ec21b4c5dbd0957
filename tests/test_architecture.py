"""The house keeps its shape: imports go one way, names are documented, README runs."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fps_jax

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fps_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.py"))
# What each room may import of the package; `fps_jax/__init__.py` gathers from all.
MAY_IMPORT = {
    "checks": set(),
    "types": set(),
    "objectives": {"checks", "types", "objectives"},
    "models": {"checks", "types", "models"},
    "replay": {"checks", "types", "replay"},
    "agents": {"checks", "types", "objectives", "models", "replay", "agents"},
    "runtime": {"checks", "types", "runtime"},
}
PURE = [m for m in MODULES if m.relative_to(PACKAGE).parts[0] not in ("runtime",)]


def relative(path):
    return str(path.relative_to(ROOT))


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """The dotted names that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def definitions(path):
    """Functions and classes of a module that are not private, methods included."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (n for n in node.body if isinstance(n, ast.FunctionDef))


def own_lines(node):
    """Lines of a function without its docstring and the functions within it."""
    length = lambda n: (n.end_lineno or n.lineno) - n.lineno + 1
    inner = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)][1:]
    nested = {id(m) for n in inner for m in ast.walk(n) if m is not n}
    docstring = len((ast.get_docstring(node) or "").splitlines())
    return (
        length(node) - docstring - sum(length(n) for n in inner if id(n) not in nested)
    )


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path):
    if path == PACKAGE / "__init__.py":
        return
    rooms = {
        name.split(".")[1] for name in imported(path) if name.startswith("fps_jax.")
    }
    assert rooms <= MAY_IMPORT[room(path)]


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_nothing_imports_the_experiments(path):
    assert not any(name.startswith("experiments") for name in imported(path))


@pytest.mark.parametrize("path", PURE, ids=relative)
def test_pure_rooms_neither_compile_nor_touch_the_world(path):
    text = path.read_text()
    for forbidden in ("jax.jit", "jax.pmap", "open(", "import time", "PRNGKey("):
        assert forbidden not in text


@pytest.mark.parametrize("path", MODULES + EXPERIMENTS, ids=relative)
def test_files_and_functions_are_one_idea_long(path):
    assert len(path.read_text().splitlines()) <= 420
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert own_lines(node) <= 60, node.name


@pytest.mark.parametrize("path", MODULES + EXPERIMENTS, ids=relative)
def test_public_functions_describe_every_argument(path):
    for node in definitions(path):
        if node.name.startswith("_") or isinstance(node, ast.ClassDef):
            continue
        docstring = ast.get_docstring(node)
        assert docstring, f"{node.name} has no docstring"
        arguments = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        told = [a for a in arguments if a not in ("self", "cls")]
        if "Args:" in docstring:
            missing = [a for a in told if not re.search(rf"\b{a}\b", docstring)]
            assert not missing, f"{node.name} does not describe {missing}"


def test_every_public_name_is_there_and_documented():
    for name in fps_jax.__all__:
        assert inspect.getdoc(getattr(fps_jax, name)), name


def test_the_import_does_no_work_and_prints_nothing():
    code = "import fps_jax, jax; assert not jax._src.xla_bridge._backends"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def blocks(language):
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_readme_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_the_readme_names_only_commands_that_there_are():
    makefile = (ROOT / "Makefile").read_text()
    for line in "".join(blocks("bash")).splitlines():
        for target in re.findall(r"^make (\S+)", line):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for module in re.findall(r"python -m (experiments\.\w+)", line):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
