"""Every notebook runs from a fresh kernel, and is committed with what it showed."""

import ast
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 250 * 1024
# Folders that some machine has: what is committed must say nothing of them.
PLACES = re.compile(r"/(home|root|tmp|Users|mnt|opt|usr|var|work|content)/|[A-Z]:\\")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook):
    return [output for cell in code_of(notebook) for output in cell.outputs]


def texts_of(output):
    """What an output says, but for its pictures."""
    if output.output_type == "stream":
        return [output.text]
    data = output.get("data", {})
    return [str(data[kind]) for kind in data if not kind.startswith("image/")]


def parameters_of(notebook):
    """The one cell that is tagged so, in the manner of papermill."""
    tags_of = lambda cell: cell.metadata.get("tags", ())
    (cell,) = (cell for cell in code_of(notebook) if "parameters" in tags_of(cell))
    return cell


def with_parameters(notebook, **values):
    """Gives parameters other values, each in the line where it has its default."""
    cell = parameters_of(notebook)
    for name, value in values.items():
        line, given = rf"(?m)^{name} = \S+", f"{name} = {value!r}"
        cell.source, found = re.subn(line, given, cell.source)
        assert found == 1, name
    return notebook


def environment():
    """The kernel's: one device, and LLVM optimises as little as in other tests."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return os.environ | flags


def test_the_notebooks_are_there():
    names = {"fusion", "prioritized_replay", "quickstart", "sweeps"}
    assert names <= {path.stem for path in NOTEBOOKS}


@each
def test_a_notebook_runs_from_a_fresh_kernel(path):
    notebook = with_parameters(nbformat.read(path, as_version=4), QUICK=True)
    for cell in code_of(notebook):
        cell.outputs = []
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=300, resources=place).execute(env=environment())
    found = outputs_of(notebook)
    assert not [o for o in found if o.output_type == "error"]
    # Nothing is said to stderr, such as that a widget for the progress bar is missing.
    assert not [o.text for o in found if o.get("name") == "stderr"]
    if re.search(r"fps_jax\.train(_population)?\(", str(code_of(notebook))):
        assert "steps/s" in str(notebook.metadata.get("widgets"))


@each
def test_a_notebook_is_committed_with_small_outputs_that_name_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size <= LARGEST
    found = outputs_of(notebook)
    assert any("image/png" in output.get("data", {}) for output in found)
    for output in found:
        assert output.output_type != "error"
        for text in texts_of(output):
            assert not PLACES.search(text)
            assert str(ROOT) not in text
    # In one go, from the top.
    counts = [cell.execution_count for cell in code_of(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert "QUICK = False" in parameters_of(notebook).source


@each
def test_a_notebook_uses_public_names_only(path):
    for cell in code_of(nbformat.read(path, as_version=4)):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_"), node.attr
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                source = getattr(node, "module", None) or names[0]
                assert source.split(".")[0] not in ("tests", "conftest")
                parts = [*source.split("."), *names]
                assert not [part for part in parts if part.startswith("_")]


@pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda path: path.stem)
def test_all_notebooks_start_with_the_same_cell(path):
    first_of = lambda path: code_of(nbformat.read(path, as_version=4))[0]
    assert first_of(path).source == first_of(NOTEBOOKS[0]).source
