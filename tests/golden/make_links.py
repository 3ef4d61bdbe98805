"""Writes a golden store with links, as early versions left them when they compacted lossy chains: make_links.py COMMAND FOLDER

COMMAND is a `ckptdelta` that writes links (commit 1786b0c and before). Run once; FOLDER must not exist. What it contains is what that command loads from it, and recorded in FOLDER.json.
Fails unless manifests name own files only, and a checkpoint builds on links of another one.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parent / "reader")]
import ckd_reader  # noqa: E402
import make_library  # noqa: E402
import make_lossy  # noqa: E402

SAVES, KEPT = 8, 4


class Walking:
    """Weights that move along few directions, the moments of an optimizer, and a counter."""

    SHAPES = {"a": (48, 40), "b": (32, 72), "bias": (64,)}

    def __init__(self, seed):
        self.rng, self.step = np.random.default_rng(seed), 0
        self.values = {n: [self.rng.standard_normal(s) * 0.02, np.zeros(s), np.zeros(s)] for n, s in self.SHAPES.items()}

    def move(self):
        self.step += 1
        for weight, first, second in self.values.values():
            g = self.rng.standard_normal(weight.shape) * 0.1
            if weight.ndim > 1:
                rows, columns = weight.shape
                g += self.rng.standard_normal((rows, 1)) @ self.rng.standard_normal((1, columns))
            first += 0.1 * (g - first)
            second += 0.01 * (g ** 2 - second)
            weight -= 2e-4 * first

    def tensors(self):
        out = {}
        for name, values in self.values.items():
            for role, array in zip(("", "exp_avg.", "exp_avg_sq."), values):
                out[role + name] = ("f32", list(array.shape), array.astype("<f4").tobytes())
        out["step"] = ("i64", [], self.step.to_bytes(8, "little"))
        return out


def links_of_others(store):
    """(checkpoint, checkpoint that has the link) of all blocks that build on links of others."""
    found = set()
    for key in store.manifests:
        checkpoint = store.checkpoint(*key)
        blocks = [b for t in checkpoint.tensors.values() for b in t.blocks]
        found |= {(key, d.checkpoint) for b in blocks for d in b.dependencies if d.kind == 4 and d.checkpoint != checkpoint.id}
    return found


def make(command, folder, seed):
    """{RUN@STEP: tensors as the command loads them}"""
    saver = make_library.Saver(command, folder)
    model = Walking(seed)
    for step in range(1, SAVES + 1):
        for _ in range(3):
            model.move()
        saver.save("run", step, model, "--fidelity", "compact", *(["--base"] if step == 1 else []))
    subprocess.run([command, "compact", folder, "--keep-every", "1000", "--keep-last", str(KEPT), "--undo", "0s", "--quiet"],
                   check=True)
    return {f"run@{step}": make_lossy.load(command, folder, "run", step) for step in range(SAVES - KEPT + 1, SAVES + 1)}


def main(argv):
    command, folder, seed = str(Path(argv[1]).resolve()), Path(argv[2]), int(argv[3]) if len(argv) > 3 else 0
    make_library.write_golden(command, folder, lambda *_: make(command, folder, seed))
    store = ckd_reader.Store(folder)
    assert all(m.own_only or not m.dependencies for m in store.manifests.values()), "that command names older files"
    found = links_of_others(store)
    print("links of others:", sorted(key for key, _ in found))
    assert found, "no checkpoint builds on links of another one"


if __name__ == "__main__":
    main(sys.argv)
