"""Writes golden stores with the library: make_library.py COMMAND FOLDER

COMMAND is the built `ckptdelta`. Run once for each version of the format whose stores are to be kept for good XX and FOLDER-2 must not exist. What went in is recorded in FOLDER.json and FOLDER-2.json, from the
arrays themselves, not from what came out. Fails unless every coding, predictor and kind of symbol stream has been used.

The runs of the first differ in their codec. Each has a base and deltas, and among its tensors all dtypes, shapes with 0 to 4
dimensions, values that do not change, that change a little and that change wholly, copies and rounded copies. The second
has matrices whose rows and columns differ, and integers that share bits.
"""

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "reader"))
import ckd_reader  # noqa: E402
import ckd_steps  # noqa: E402
import ckd_symbols  # noqa: E402

SAFETENSORS = {"f8e4m3": "F8_E4M3", "f8e5m2": "F8_E5M2"}
METADATA = {"format": "pt", "note": "golden"}
CODINGS, PREDICTORS = range(6), range(4)
RULES = {1, 10, 17, 20, 35}
GRADIENT_RULES = {49, 55, 65}
STREAMS = {"dense, CLASS, with contexts", "dense, CLASS, without contexts", "dense, SPLIT, without contexts",
           "sparse, one range", "sparse, several ranges"}
FRAMES = {"framed, shared bits", "framed, levels", "framed, shared bits, levels", "framed, levels, phase"}
INTEGERS = {"i64": 8, "i32": 4, "i16": 2, "i8": 1, "u64": 8, "u32": 4, "u16": 2, "u8": 1}


def bf16(values):
    bits = values.astype("<f4").view("<u4").astype("<u8")
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype("<u2")


class Model:
    """Tensors as bytes, moved by something like training."""

    def __init__(self, seed, small):
        self.rng = np.random.default_rng(seed)
        self.small = small
        side = 24 if small else 48
        self.weights = {f"layer.{i}": self.rng.standard_normal((side, side)) * 0.02 for i in range(2)}
        self.moment = {name: w * 0.01 for name, w in self.weights.items()}
        self.counts = np.zeros(4096 if small else 300000, dtype="<u1")
        self.words = {name: self.rng.integers(0, 200, 64, dtype=np.int64) - 100 for name in INTEGERS}
        self.noise = self.rng.bytes(500)
        self.tuned = bf16(self.rng.standard_normal(400 if small else 16384) * 0.05)
        self.seen = self.rng.integers(1 << 20, 1 << 21, 64 if small else 4096).astype("<u4")
        self.rows = (self.rng.standard_normal((4, 16) if small else (256, 16)) * 0.02).astype("<f4")

    def move(self, scale):
        for name, w in self.weights.items():
            self.moment[name] = 0.9 * self.moment[name] + self.rng.standard_normal(w.shape) * scale
            self.weights[name] = w - 0.001 * self.moment[name]
        self.counts[self.rng.integers(0, len(self.counts), 100)] += 1
        few = self.rng.integers(0, len(self.tuned), len(self.tuned) // 200)
        self.tuned[few] += self.rng.integers(0, 2, len(few)).astype("<u2") * 2 - 1
        self.seen[self.rng.integers(0, len(self.seen), 5)] += 1
        self.rows[self.rng.integers(0, len(self.rows), 3)] += np.float32(1e-6)
        for name in INTEGERS:
            self.words[name] = self.words[name] + (self.rng.random(64) < 0.3)

    def tensors(self):
        """{name: (dtype, shape, bytes)}"""
        out = {}

        def put(name, dtype, shape, data):
            out[name] = (dtype, list(shape), data if isinstance(data, bytes) else data.tobytes())

        first = self.weights["layer.0"]
        for name, w in self.weights.items():
            put("master." + name, "f32", w.shape, w.astype("<f4"))
            put(name, "bf16", w.shape, bf16(w))
            put("exp_avg." + name, "f32", w.shape, self.moment[name].astype("<f4"))
            put("exp_avg_sq." + name, "f32", w.shape, (self.moment[name] ** 2).astype("<f4"))
        put("tuned", "bf16", self.tuned.shape, self.tuned)
        put("seen", "i32", self.seen.shape, self.seen)
        put("rows", "f32", self.rows.shape, self.rows)
        put("half", "f16", first.shape, first.astype("<f4").astype("<f2"))
        put("tied", "f32", first.shape, first.astype("<f4"))
        put("wide", "f64", first.shape, first)
        put("conv", "f32", (4, 3, first.size // 48, 2), first.reshape(-1)[:first.size // 2].astype("<f4"))
        put("f8.a", "f8e4m3", (64,), (first.reshape(-1)[:64].astype("<f2").view("<u2") >> 7).astype("<u1"))
        put("f8.b", "f8e5m2", (64,), (first.reshape(-1)[:64].astype("<f2").view("<u2") >> 8).astype("<u1"))
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e-42, 3e38], "<f4")
        put("special", "f32", (8,), special.view("<u4") + np.array([0, 0, 0, 0, 5, 0, 0, 0], "<u4"))
        for name, size in INTEGERS.items():
            put(name, name, (8, 8), self.words[name].astype(f"<i{size}"))
        put("flags", "bool", (3, 3), (self.words["u8"][:9] % 2).astype("<u1"))
        put("counts", "u8", (len(self.counts),), self.counts)
        put("frozen", "u8", (500,), self.noise)
        put("scalar", "i64", (), struct.pack("<q", int(self.words["i64"][0])))
        put("empty", "f32", (0, 7), b"")
        return out


def scaled(rng, rows, columns, spread):
    """A matrix whose rows and columns differ in scale."""
    scale = np.exp(spread * (rng.standard_normal((rows, 1)) + rng.standard_normal((1, columns))))
    return rng.standard_normal((rows, columns)) * scale * 0.01


class Matrices:
    """Tensors for framed streams, as Model has them."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.gradient = {size: scaled(self.rng, 60 + size, 100, 1.0) for size in (1, 2, 4, 8)}
        self.tokens = (np.abs(scaled(self.rng, 920, 300, 1.0)) * 250).clip(0, 255).astype("<u1")
        self.kernel = scaled(self.rng, 48, 16 * 9, 1.0)
        self.wide = bf16(self.rng.standard_normal(3000)).astype("<u4") << 16
        self.even = self.rng.integers(0, 1 << 18, 3000).astype("<u8") << 20 | 5
        self.seen = self.rng.integers(1 << 20, (1 << 20) + 8, 16384).astype("<u4")

    def move(self):
        for g in self.gradient.values():
            g *= 1 + 1e-3 * self.rng.standard_normal(g.shape)
        self.tokens[self.rng.integers(0, 920, 3)] += 1
        self.kernel = scaled(self.rng, 48, 16 * 9, 1.0)
        self.wide = bf16(self.rng.standard_normal(3000)).astype("<u4") << 16
        self.seen[self.rng.integers(0, 16384, 30)] += self.rng.integers(1, 50000, 30).astype("<u4")

    def tensors(self):
        g = self.gradient
        tensors = {"exp_avg_sq.w": ("f32", g[4].shape, (g[4] ** 2).astype("<f4")),
                   "exp_avg_sq.half": ("bf16", g[2].shape, bf16(g[2] ** 2)),
                   "exp_avg.w": ("f32", g[4].shape, g[4].astype("<f4")),
                   "exact": ("f64", g[8].shape, g[8]),
                   "levels": ("i8", g[1].shape, (g[1] * 400).clip(-128, 127).astype("<i1")),
                   "tokens": ("u8", self.tokens.shape, self.tokens),
                   "kernel": ("f32", (48, 16, 3, 3), self.kernel.astype("<f4")),
                   "wide": ("f32", self.wide.shape, self.wide),
                   "even": ("i64", self.even.shape, self.even),
                   "seen": ("i32", self.seen.shape, self.seen)}
        return {name: (dtype, list(shape), data.tobytes()) for name, (dtype, shape, data) in tensors.items()}


def write_safetensors(path, tensors):
    header, at = {"__metadata__": METADATA}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": SAFETENSORS.get(dtype, dtype.upper()), "shape": shape,
                        "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


class Saver:
    """Saves models with the command, and keeps what was saved: {RUN@STEP: tensors}."""

    def __init__(self, command, folder):
        self.command, self.folder, self.saved = command, folder, {}

    def save(self, run, step, model, *options):
        tensors = self.saved[f"{run}@{step}"] = model.tensors()
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "in.safetensors"
            write_safetensors(file, tensors)
            subprocess.run([self.command, "save", self.folder, "--run", run, "--step", str(step), "--quiet", *options, file],
                           check=True)


def make(command, folder, seed=0):
    """{RUN@STEP: tensors that were saved}"""
    saver = Saver(command, folder)
    for number, codec in enumerate(("auto", "zstd", "lz4", "raw")):
        model = Model(seed + number, small=codec != "auto")
        saver.save(codec, 10, model, "--codec", codec, "--metric", f"loss={3 - number / 4}")
        for step, scale in ((20, 1e-5), (30, 1e-3)):
            model.move(scale)
            saver.save(codec, step, model, "--codec", codec)
    auto = Model(seed, small=False)
    auto.move(1e-5)
    auto.move(1e-4)
    saver.save("branch.x", 25, auto, "--parent", "auto@20", "--resumed-from", "auto@20")
    return saver.saved


def make_steps(command, folder, seed=0):
    """The same, with optimizer steps."""
    saver = Saver(command, folder)
    for run, wide in (("narrow", False), ("wide", True)):
        model = Trained(seed, wide)
        for _ in range(9):
            model.move()
        saver.save(run, 9, model)
        for step in range(10, 13):
            model.move()
            saver.save(run, step, model, "--max-load-cost", "20", *model.options())
    return saver.saved


def make_gradients(command, folder, seed=0):
    """The same, with gradients that were bf16, clipped and not."""
    saver = Saver(command, folder)
    for run, clip in (("clipped", 0.7), ("plain", 1.0)):
        model = Trained(seed, wide=False, clip=clip)
        for _ in range(9):
            model.move()
        saver.save(run, 9, model)
        for step in range(10, 13):
            model.move()
            saver.save(run, step, model, "--max-load-cost", "20", *model.options())
    return saver.saved


def rules(store):
    """Of all blocks that are optimizer steps."""
    found = set()
    for key in store.manifests:
        checkpoint = store.checkpoint(*key)
        for block in (b for t in checkpoint.tensors.values() for b in t.blocks if b.predictor == 4):
            group = checkpoint.groups[block.dependencies[-1].content]
            found.add(ckd_steps.Group(group.chunk.payload(group)).rule)
    return found


def make_frames(command, folder, seed=0):
    """The same, with framed streams."""
    saver, model = Saver(command, folder), Matrices(seed)
    saver.save("auto", 10, model)
    model.move()
    saver.save("auto", 20, model)
    return saver.saved


class Trained:
    """
    Two parameters that an optimizer moves: one by AdamW in f32 or in f64, one by SGD with Nesterov momentum. clip: gradients
    are bf16 numbers times it.
    """

    def __init__(self, seed, wide, clip=None):
        self.rng, self.wide, self.step, self.clip = np.random.default_rng(seed), wide, 0, clip
        shape = (48, 48)
        self.w = (scaled(self.rng, *shape, 0.5) * 2).astype("<f4")
        self.m, self.v = np.zeros(shape, "<f4"), np.zeros(shape, "<f4")
        self.x, self.u = scaled(self.rng, *shape, 0.5).astype("<f4"), np.zeros(shape, "<f4")

    def move(self):
        self.step += 1
        f, g = np.float32, scaled(self.rng, 48, 48, 0.7).astype("<f4")
        if self.clip:
            g = (bf16(g).astype("<u4") << 16).view("<f4") * f(self.clip)
        bias1, bias2 = 1 - 0.9 ** self.step, 1 - 0.95 ** self.step
        if self.wide:
            self.m = (0.9 * self.m.astype("f8") + (1 - 0.9) * g).astype("<f4")
            self.v = (0.95 * self.v.astype("f8") + (1 - 0.95) * g.astype("f8") * g).astype("<f4")
            kept = (self.w - 1e-4 * self.w.astype("f8")).astype("<f4")
            below = ((np.sqrt(self.v) / f(np.sqrt(bias2))).astype("f8") + 1e-8).astype("<f4")
        else:
            self.m = self.m + f(1 - 0.9) * (g - self.m)
            self.v = self.v * f(0.95) + f(1 - 0.95) * g * g
            kept = self.w * f(1 - 1e-4)
            below = np.sqrt(self.v) / f(np.sqrt(bias2)) + f(1e-8)
        self.w = kept - f(1e-3 / bias1) * self.m / below
        self.u = f(0.8) * self.u + g
        self.x = self.x - f(0.01) * (g + f(0.8) * self.u)

    def options(self):
        return ("--adamw", f"w:lr=1e-3,step={self.step},beta2=0.95,weight_decay=0.1",
                "--sgd", "lr=0.01,momentum=0.8,nesterov=1")

    def tensors(self):
        named = {"w": self.w, "x": self.x, "exp_avg.w": self.m, "exp_avg_sq.w": self.v, "exp_avg.x": self.u}
        return {name: ("f32", list(a.shape), a.astype("<f4").tobytes()) for name, a in named.items()}


class Planes:
    """Tensors for run streams: bytes that are nearly all zero."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def plane(self, dtype, count, one_in, largest):
        values = self.rng.integers(1, largest + 1, count) * self.rng.choice([-1, 1], count)
        return (values * (self.rng.random(count) * one_in < 1)).astype(dtype)

    def tensors(self):
        tensors = {"rare": ("i8", self.plane("<i1", 5000, 300, 2)), "wide": ("i8", self.plane("<i1", 70000, 50, 128)),
                   "mask": ("bool", self.plane("<i1", 9000, 40, 1).astype("?"))}
        return {name: (dtype, [len(data)], data.tobytes()) for name, (dtype, data) in tensors.items()}


def make_runs(command, folder, seed=0):
    """The same, with run streams."""
    saver, model = Saver(command, folder), Planes(seed)
    saver.save("auto", 10, model)
    saver.save("auto", 20, model)
    return saver.saved


class Tuned:
    """Tensors for change streams: few values change, mostly by one step, the smallest ones most often."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.small, self.even = bf16(self.rng.standard_normal(12000) * 0.02), bf16(1 + self.rng.random(3000))
        self.rows = (self.rng.standard_normal((96, 40)) * 0.02).astype("<f4").view("<u4")

    def move(self):
        size = (self.small.astype("<u4") << 16).view("<f4")
        likely = np.where(np.abs(size) < 1e-3, 0.5, np.where(np.abs(size) < 4e-3, 0.1, 0.01))
        for values, chance in ((self.small, likely), (self.even, 0.03)):
            far = np.where(self.rng.random(len(values)) < 0.05, 3, 1)
            values += (far * self.rng.choice([-1, 1], len(values)) * (self.rng.random(len(values)) < chance)).astype("<u2")
        self.rows[self.rng.choice(96, 7, replace=False)] += self.rng.integers(-9, 10, (7, 40)).astype("<u4")

    def tensors(self):
        return {name: (dtype, list(a.shape), a.tobytes())
                for name, dtype, a in (("small", "bf16", self.small), ("even", "bf16", self.even), ("rows", "f32", self.rows))}


CHANGES = {"changes, gaps, one list", "changes, gaps, several lists", "changes, runs, one list"}


def make_changes(command, folder, seed=0):
    """The same, with change streams."""
    saver, model = Saver(command, folder), Tuned(seed)
    for step in (10, 20, 30):
        saver.save("auto", step, model)
        model.move()
    return saver.saved


def kind_of_changes(payload):
    """By the number of lists and the kind of the first one's places."""
    lists = payload[1]
    count, at = ckd_symbols.take_varint(payload, 1 + lists)
    if lists == 1 and count == 0:
        return "changes, none"
    kind = payload[at]
    return f"changes, {'gaps' if kind == 1 else 'runs'}, {'several lists' if lists > 1 else 'one list'}"


def kind_of_frame(payload):
    columns, at = ckd_symbols.take_varint(payload, ckd_symbols.take_varint(payload, 2)[1])
    parts = ["framed"] + ["shared bits"] * bool(payload[1]) + ["levels"] * bool(columns)
    return ", ".join(parts + ["phase"] * bool(columns and payload[at]))


def kind_of_stream(payload, width):
    if payload[0] == 0x83:
        return kind_of_changes(payload)
    if payload[0] == 0x82:
        return "runs"
    if payload[0] == 0x81:
        return kind_of_frame(payload)
    if payload[0] == 0x80:
        return f"sparse, {'several ranges' if payload[1] else 'one range'}"
    header = ckd_symbols.Header(payload, width)
    return f"dense, {'SPLIT' if header.mode else 'CLASS'}, {'with' if header.contexts else 'without'} contexts"


def coverage(store):
    """The (predictor, coding) pairs and the kinds of symbol streams that occur."""
    used, streams = set(), set()
    for key in store.manifests:
        for tensor in store.checkpoint(*key).tensors.values():
            for block in tensor.blocks:
                if block.count:
                    used.add((block.predictor, block.coding))
                if block.count and block.coding == 5:
                    streams.add(kind_of_stream(block.chunk.payload(block), 8 * tensor.size))
    return used, streams


def clean(folder):
    """Leaves what is the format's."""
    for name in ("catalog.db", "catalog.db-journal", "data/lock", "data/readers"):
        (folder / name).unlink(missing_ok=True)
    for name in ("i", "t", "n", "k"):
        shutil.rmtree(folder / "data" / name, ignore_errors=True)


def describe(folder, saved):
    """Writes FOLDER.json; returns what the store makes use of."""
    store = ckd_reader.Store(folder)
    used, streams = coverage(store)
    print("predictor, coding:", sorted(used))
    print("symbol streams:", sorted(streams))
    expected = {}
    for (run, step) in store.manifests:
        checkpoint = store.checkpoint(run, step)
        expected[f"{run}@{step}"] = {
            "tensors": {n: {"role": ckd_reader.ROLES[checkpoint.tensors[n].role], "dtype": d, "shape": s,
                            "sha256": hashlib.sha256(b).hexdigest()} for n, (d, s, b) in saved[f"{run}@{step}"].items()},
            "blobs": {n: hashlib.sha256(checkpoint.blob(n)).hexdigest() for n in checkpoint.blobs}}
    assert set(expected) == set(saved)
    text = json.dumps({folder.name: {"checkpoints": expected}}, indent=1, sort_keys=True)
    folder.with_suffix(".json").write_text(text + "\n")
    return used, streams


def write_golden(command, folder, making):
    if folder.exists():
        sys.exit(f"{folder} exists; golden stores are written once")
    saved = making(command, folder)
    clean(folder)
    return describe(folder, saved)


def write_steps(command, folder):
    write_golden(command, folder, make_steps)
    assert rules(ckd_reader.Store(folder)) >= RULES, "not every kind of rule was used"


def write_gradients(command, folder):
    used = write_golden(command, folder, make_gradients)[0]
    assert (4, 7) in used and rules(ckd_reader.Store(folder)) >= GRADIENT_RULES, "not every kind of rule was used"


def main(argv):
    command, folder = str(Path(argv[1]).resolve()), Path(argv[2])
    used, streams = write_golden(command, folder, make)
    assert {c for _, c in used} == set(CODINGS) and {p for p, _ in used} == set(PREDICTORS), "not everything was used"
    more = write_golden(command, folder.with_name(folder.name + "-2"), make_frames)[1]
    assert "runs" in write_golden(command, folder.with_name(folder.name + "-runs"), make_runs)[1]
    assert CHANGES <= write_golden(command, folder.with_name(folder.name + "-changes"), make_changes)[1]
    dense = {kind for kind in STREAMS if kind.startswith("dense")}  # sparse ones are no longer written
    assert dense <= streams | more and FRAMES <= more, "not every kind of stream was used"
    write_steps(command, folder.with_name(folder.name + "-steps"))
    write_gradients(command, folder.with_name(folder.name + "-gradients"))


if __name__ == "__main__":
    main(sys.argv)
