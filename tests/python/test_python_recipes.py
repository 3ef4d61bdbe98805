"""The programs of docs/recipes.md run on two ranks as they stand, stop, and go on with the losses of an uninterrupted training.

Skipped where the trainer is not installed."""

import importlib.util
import re
from pathlib import Path

import pytest

from support_python import ROOT, ckptdelta, needs_package, needs_torch
from support_torch_ranks import run_ranks

pytestmark = [needs_package, needs_torch]
TEXT = (ROOT / "docs/recipes.md").read_text()
# The output of the program goes to a file of its rank.
OUTPUT = '''import functools, os
print = functools.partial(print, file=open(f"losses-{os.environ['RANK']}", "a"), flush=True)
'''
END = "os._exit(0)  # without the threads of torch, which can abort a process that ends\n"


def recipe(trainer):
    body, = re.findall(rf"^## {trainer}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL))


def needs(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def set_to(code, **values):
    for name, value in values.items():
        code, count = re.subn(rf'(?<=\b{name}": )\w+|(?<=^{name} = )\w+', str(value), code, flags=re.MULTILINE)
        assert count == 1, name
    return code


def losses(folder, world=2):
    """By rank and step; a step that was made again counts as it was the last time."""
    return [dict(line.split() for line in (folder / f"losses-{rank}").read_text().splitlines()) for rank in range(world)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stage, bf16", [(0, False), (0, True), (1, False), (2, True), (3, False), (3, True)])
def test_deepspeed(tmp_path, stage, bf16):
    needs("deepspeed")
    code = OUTPUT + recipe("DeepSpeed").replace("STAGE, STEPS, EVERY = 2, 12, 4", f"STAGE, STEPS, EVERY = {stage}, STEPS, 4")
    if not bf16:
        code = set_to(code, enabled=False).replace("dtype=torch.bfloat16, ", "")
    if stage in (1, 2):
        code = code.replace("        self.register_buffer", "        self.layers[3].requires_grad_(False)\n        self.register_buffer")
        assert "requires_grad_" in code
    assert f"STAGE, STEPS, EVERY = {stage}" in code and ("bfloat16" in code) == bf16 and "torch.manual_seed(1)" in code
    found = {}
    for name, ends in (("straight", [12]), ("resumed", [6, 12])):
        folder = tmp_path / name
        folder.mkdir()
        for steps in ends:
            script = folder / f"train{steps}.py"
            own = code.replace("STEPS, 4", f"{steps}, 4")
            if (folder / "runs").exists():
                own = own.replace("torch.manual_seed(1)", "torch.manual_seed(2)")  # other weights, which the store's must replace
            script.write_text(f"import os\nos.chdir({str(folder)!r})\n" + own + END)
            run_ranks(script)
            found[name] = losses(folder)
    assert found["resumed"] == found["straight"] and all(list(own) == [str(step) for step in range(1, 13)] for own in found["straight"])
    with ckptdelta.open(tmp_path / "resumed/runs") as store:
        assert [checkpoint.step for checkpoint in store.checkpoints("gpt")] == [4, 8, 12] and store.verify()
        again = store.state_dict(run="gpt", step=12)
    with ckptdelta.open(tmp_path / "straight/runs") as store:
        made = store.state_dict(run="gpt", step=12)
    module = made["model" if stage == 0 else "module"]
    assert module["seen"] > 0 and all(value.equal(again["model" if stage == 0 else "module"][name]) for name, value in module.items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_torchtitan(tmp_path, mode):
    needs("torchtitan")
    script = Path(__file__).with_name("titan_run.py")
    recipe_file = tmp_path / "recipe.py"
    recipe_file.write_text(recipe("torchtitan"))
    found = {}
    for name, ends in (("straight", [12]), ("resumed", [6, 12])):
        folder = tmp_path / name
        folder.mkdir()
        for steps in ends:
            run_ranks(script, recipe_file, folder, mode, steps)
            assert (folder / f"done-{steps}").exists()
        found[name] = losses(folder)
        with ckptdelta.open(folder / "store") as store:
            assert [checkpoint.step for checkpoint in store.checkpoints("llama")] == [8, 12] and store.verify()
            roles = {tensor.name: tensor.role for tensor in store.tensors(run="llama")}
            assert roles["0.weight"] == "weight" and roles["optimizer.state.0.weight.exp_avg_sq"] == "exp_avg_sq"
    assert found["resumed"] == found["straight"] and all(list(own) == [str(step) for step in range(1, 13)] for own in found["straight"])


def test_torchtitan_goes_on_from_a_folder_of_its_own(tmp_path):
    needs("torchtitan")
    script = Path(__file__).with_name("titan_run.py")
    recipe_file = tmp_path / "recipe.py"
    recipe_file.write_text(recipe("torchtitan"))
    straight, before, after = (tmp_path / name for name in ("straight", "before", "after"))
    for folder, manager, steps, more in ((straight, "-", 12, []), (before, "-", 6, []), (after, recipe_file, 12, [before / "store/step-6"])):
        folder.mkdir()
        run_ranks(script, manager, folder, "disabled", steps, *more)
    for own, first, then in zip(losses(straight), losses(before), losses(after)):
        assert list(then) == [str(step) for step in range(7, 13)] and {**first, **then} == own
    with ckptdelta.open(after / "store") as store:
        assert [checkpoint.step for checkpoint in store.checkpoints("llama")] == [8, 12]


def test_torchtitan_calls_what_the_recipe_overrides():
    """Where torchtitan is installed: the methods are there, with the arguments that the recipe takes."""
    needs("torchtitan")
    import inspect

    from torchtitan.components.checkpointer import CheckpointManager
    names = re.findall(r"^    def (\w+)\(self", recipe("torchtitan"), re.MULTILINE)
    assert len(names) == 5
    for name in names[1:]:
        assert callable(getattr(CheckpointManager, name)), name
    arguments = list(inspect.signature(CheckpointManager.dcp_save).parameters)
    assert arguments == ["self", "state_dict", "checkpoint_id", "async_mode", "enable_garbage_collection", "to_hf"]
