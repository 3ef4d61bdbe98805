"""Writes a golden store with lossy checkpoints with the library: make_lossy.py COMMAND FOLDER

COMMAND is the built `ckptdelta`. Run once; FOLDER must not exist. What it contains is what the library loads from it, and recorded in
FOLDER.json. Fails unless weights are about what was saved, and every part of a lossy block's payload has been used.

Two runs of the fidelities near and coarse, the latter named compact, each a lossy base and deltas: weights that move in a few strong directions, their moments with zeros,
vectors, stacks and convolutions, in f32, bf16 and f16, masters with rounded copies, outliers, NaNs and infinities that come and
go, and tiles of more than one block.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parent / "reader")]
import ckd_lattice  # noqa: E402
import ckd_reader  # noqa: E402
import make_library  # noqa: E402
import support_safetensors  # noqa: E402
from make_library import Saver, bf16, scaled  # noqa: E402

EFFORTS = {"near": (5, 9, 1, 5), "compact": (5, 1, 9, 5)}
FIDELITIES = {"near": "near", "compact": "coarse"}  # by the names of the runs
PARTS = {"levels", "rows", "steps", "factor", "shared", "shared factor", "exceptions", "grid", "no grid"}
INTEGERS = {("linear", how) for how in (0, 1, 2, 4, 8, 16)} | {("levels", how) for how in (0, 1, 8)}
NAMES = {"BF16": "bf16", "F32": "f32", "F16": "f16", "I64": "i64"}


def values_of(dtype, data):
    """Floats of what a tensor's bytes mean."""
    if dtype == "bf16":
        return (np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)).view("<f4").astype("f8")
    return np.frombuffer(data, {"f32": "<f4", "f16": "<f2"}[dtype]).astype("f8")


class Drifting:
    """Weights that move along few directions, with the moments of an optimizer."""

    SHAPES = {"w": (96, 160), "bias": (160,), "stack": (3, 24, 16), "conv": (24, 4, 3, 3), "half": (32, 48), "tail": (40, 20),
              "spike": (5000,)}

    def __init__(self, seed, large):
        self.rng, self.large, self.step = np.random.default_rng(seed), large, 0
        self.weights = {n: self.rng.standard_normal(s) * 0.02 for n, s in self.SHAPES.items()}
        self.weights["spike"] = self.weights["spike"] * 1e-3
        self.weights["spike"][77] = 3.0
        self.first = {n: np.zeros(s) for n, s in self.SHAPES.items()}
        self.second = {n: np.zeros(s) for n, s in self.SHAPES.items()}
        self.big = np.zeros((530, 512))
        self.big[self.rng.integers(0, 530, 900), self.rng.integers(0, 512, 900)] = 0.5

    def move(self):
        self.step += 1
        for name, w in self.weights.items():
            rows = w.shape[0]
            g = self.rng.standard_normal(w.shape) * 0.1
            if w.ndim > 1:
                g = g.reshape(rows, -1)
                g += self.rng.standard_normal((rows, 2)) @ self.rng.standard_normal((2, g.shape[1]))
                g *= np.exp(self.rng.standard_normal((rows, 1)))
                g = g.reshape(w.shape)
                g[rows // 2] = 0
            self.first[name] = 0.9 * self.first[name] + 0.1 * g
            self.second[name] = 0.99 * self.second[name] + 0.01 * g ** 2
            self.weights[name] = w - 2e-4 * self.first[name]
        if self.large:
            self.big += 3e-4 * self.rng.standard_normal((530, 1)) @ self.rng.standard_normal((1, 512))
            self.big += 3e-6 * self.rng.standard_normal(self.big.shape)

    def odd(self, values):
        """NaNs and infinities in every other checkpoint."""
        out = values.astype("<f4")
        if self.step % 2:
            flat = out.reshape(-1)
            flat[self.rng.integers(0, flat.size, 3)] = np.array([np.nan, np.inf, -np.inf])
        return out

    def tensors(self):
        out = {}

        def put(name, dtype, array):
            data = bf16(array) if dtype == "bf16" else array.astype({"f32": "<f4", "f16": "<f2"}[dtype])
            out[name] = (dtype, list(array.shape), data.tobytes())

        for name, w in self.weights.items():
            narrow = {"half": "f16", "tail": "f32", "conv": "bf16"}.get(name, "f32")
            put("exp_avg_sq." + name, "bf16" if name == "conv" else "f32", self.odd(self.second[name]))
            put("exp_avg." + name, narrow, self.first[name])
            if name == "stack":
                put("master." + name, "f32", w)
                put(name, "bf16", w.astype("<f4"))
            else:
                put(name, narrow, self.odd(w) if name in ("tail", "conv", "half") else w)
        if self.large:
            put("big", "f32", self.big)
            if self.step < 10:
                put("exp_avg.big", "bf16", scaled(self.rng, 530, 512, 0.8))
        out["step"] = ("i64", [], self.step.to_bytes(8, "little"))
        return out


def load(command, folder, run, step):
    """What the library gives back."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.safetensors"
        subprocess.run([command, "load", folder, "--run", run, "--step", str(step), "--quiet", "--out", out], check=True)
        return {n: (NAMES[d], s, b) for n, (d, s, b) in support_safetensors.read(out)[0].items()}


def check_near(given, got):
    """Weights are not something else (how near they are depends on how far they moved), and what is not finite is kept."""
    assert given.keys() == got.keys() and given["step"] == got["step"]
    for name, (dtype, shape, data) in given.items():
        assert got[name][:2] == (dtype, shape), name
        if name == "step":
            continue
        before, after = values_of(dtype, data), values_of(dtype, got[name][2])
        finite = np.isfinite(before)
        assert np.array_equal(before[~finite], after[~finite], equal_nan=True) and np.isfinite(after[finite]).all(), name
        if not name.startswith("exp_avg"):
            distance = np.linalg.norm(after[finite] - before[finite]) / np.linalg.norm(before[finite])
            assert distance < 0.5, (name, distance)


def make(command, folder, seed=0):
    """{RUN@STEP: tensors as the library loads them}"""
    saver = Saver(command, folder)
    for run, efforts in EFFORTS.items():
        model = Drifting(seed, large=run == "compact")
        for number, effort in enumerate(efforts):
            for _ in range(5):
                model.move()
            saver.save(run, number, model, "--fidelity", FIDELITIES[run], "--effort", str(effort))
    out = {}
    for key, given in saver.saved.items():
        out[key] = load(command, folder, *key.split("@"))
        check_near(given, out[key])
    return out


def parts_of(checkpoint, block):
    """(parts of its payload, how its integers are stored)"""
    on = block.dependencies[-1] if block.dependencies else None
    shared = checkpoint.side(block, on) if on and on.kind == 2 else None
    side_by_side = shared and len(block.dependencies) > 1 and block.dependencies[-2].kind == 2
    rows = checkpoint.side(block, block.dependencies[-2]) if side_by_side else None
    b = ckd_lattice.Block(block.chunk.payload(block), block.count, block.dtype == 2, shared, rows)
    told = {"levels": b.levels, "rows": b.row is not None, "steps": b.column_step() is not None, "factor": b.factor is not None,
            "shared": shared, "shared factor": shared and b.factor is not None, "exceptions": b.exceptions,
            "grid": b.own is not None, "no grid": b.own is None, "shared rows": rows and b.row is not None,
            "shared rows' factor": rows and b.factor is not None}
    return {part for part, there in told.items() if there}, ("levels" if b.levels else "linear", b.how)


def coverage(store):
    """What occurs in lossy blocks: parts, ways to store integers, and (predictor, dtype) pairs."""
    parts, integers, kinds = set(), set(), set()
    for key in store.manifests:
        checkpoint = store.checkpoint(*key)
        for tensor in checkpoint.tensors.values():
            for block in (b for b in tensor.blocks if b.coding == 6):
                more, how = parts_of(checkpoint, block)
                parts |= more
                integers.add(how)
                kinds.add((block.predictor, block.dtype))
    return parts, integers, kinds


def main(argv):
    command, folder = str(Path(argv[1]).resolve()), Path(argv[2])
    make_library.write_golden(command, folder, make)
    parts, integers, kinds = coverage(ckd_reader.Store(folder))
    print("parts:", sorted(parts), "integers:", sorted(integers), "predictor, dtype:", sorted(kinds))
    assert parts == PARTS and integers >= INTEGERS, "not every part of a lossy block was used"
    assert kinds >= {(p, d) for p in (0, 1) for d in (2, 3, 4)}, "not every dtype was used"


if __name__ == "__main__":
    main(sys.argv)
