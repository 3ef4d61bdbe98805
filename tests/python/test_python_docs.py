"""The examples of docs/python.md run as they stand, section by section."""

import ast
import re
import signal

import pytest

from support_python import ROOT, WHY_NO_TORCH, ckptdelta, needs_package

pytestmark = needs_package
TEXT = (ROOT / "docs/python.md").read_text()
SECTIONS = {heading: re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
            for heading, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)}


@pytest.mark.parametrize("section", [s for s, pieces in SECTIONS.items() if pieces])
def test_the_examples_run(section, tmp_path, monkeypatch):
    code = "\n".join(SECTIONS[section])
    if "import torch" in code and WHY_NO_TORCH:
        pytest.skip(WHY_NO_TORCH)
    libraries = re.findall(r"^(?:import|from) (lightning|accelerate|transformers)\b", code, re.MULTILINE)
    for library in [*libraries, *(["accelerate"] if "transformers" in libraries else [])]:  # its Trainer needs it
        pytest.importorskip(library, reason=f"{library} cannot be imported here")
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        exec(compile(code, f"docs/python.md, {section}", "exec"), {"__name__": "example"})  # its assertions are the test's
    finally:
        signal.signal(signal.SIGTERM, handler)
    stores = [p for p in tmp_path.iterdir() if (p / "catalog.db").exists()]
    assert stores
    for path in stores:
        with ckptdelta.open(path, readonly=True) as store:
            assert store.verify()


def test_the_table_of_contents_has_every_section():
    headings = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert re.findall(r"^- \[(.*?)\]\(#", TEXT.partition("\n## ")[0], re.MULTILINE) == headings


def test_there_are_examples_in_most_sections():
    assert sum(map(len, SECTIONS.values())) >= 5


def test_the_five_lines_of_the_readme_are_calls_that_there_are():
    """Names of methods and arguments in README.md."""
    import inspect
    code, = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert len(calls) == 4
    for call in calls:
        owner = ckptdelta if call.func.value.id == "ckptdelta" else ckptdelta.Store
        arguments = inspect.signature(getattr(owner, call.func.attr)).parameters
        assert all(k.arg in arguments for k in call.keywords), ast.unparse(call)


def test_the_examples_of_the_description_run(tmp_path, monkeypatch):
    """The page of the package: with a model, an optimizer and a training step that there are already."""
    if WHY_NO_TORCH:
        pytest.skip(WHY_NO_TORCH)
    import torch
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"__name__": "example", "model": model, "optimizer": optimizer, "train_step": optimizer.step}
    monkeypatch.chdir(tmp_path)
    pieces = re.findall(r"^```python\n(.*?)^```$", (ROOT / "python/DESCRIPTION.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(pieces) == 4
    for piece in pieces:
        if "ckptdelta.transformers" in piece:
            pytest.importorskip("transformers", reason="transformers cannot be imported here")
            import transformers
            names |= {"args": transformers.TrainingArguments("output", report_to=[], use_cpu=True), "dataset": []}
        exec(compile(piece, "python/DESCRIPTION.md", "exec"), names)
    assert [c.step for c in ckptdelta.open("runs").checkpoints("gpt")] == [10, 20, 30]


def test_all_public_names_have_docstrings_and_are_listed():
    for name in ckptdelta.__all__:
        found = getattr(ckptdelta, name)
        if getattr(found, "__module__", "").startswith("ckptdelta"):
            assert found.__doc__, name
    for name, method in vars(ckptdelta.Store).items():
        assert name.startswith("_") or method.__doc__, name
