"""save and load: loaded bits equal saved bits; parents, duplicates, branches, selection."""

import os
import re

import numpy as np
import pytest

import support_safetensors as st
from support_cli import CORRUPT, FAILED, NOT_FOUND, USAGE, run, state, store  # noqa: F401


def special_values(dtype):
    """All bytes for dtypes of one byte. For others NaNs with payloads, infinities, both zeros, denormals,
    noise."""
    size = st.SIZES[dtype]
    if size == 1:
        return bytes(range(256))
    exponent = {"F64": 11, "F32": 8, "BF16": 8, "F16": 5}.get(dtype)
    bits = 8 * size
    values = [0, 1, 2 ** bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 0x5A5A % 2 ** bits]
    if exponent:
        mantissa = bits - 1 - exponent
        infinity = ((1 << exponent) - 1) << mantissa
        sign = 1 << (bits - 1)
        values += [infinity, infinity | sign, infinity | 1, infinity | sign | 5, infinity | (1 << (mantissa - 1)) | 3,
                   1, 3, sign | 1, (1 << mantissa) - 1, 1 << mantissa]
    noise = np.random.default_rng(7).bytes(size * 1000)
    return b"".join(v.to_bytes(size, "little") for v in values) + noise


@pytest.mark.parametrize("codec", ["auto", "zstd", "lz4", "raw"])
def test_every_dtype_and_value(store, codec):
    tensors, later = {}, {}
    for dtype in st.SIZES:
        raw = special_values(dtype)
        tensors[f"all.{dtype}"] = (dtype, [len(raw) // st.SIZES[dtype]], raw)
        changed = bytearray(raw)
        changed[len(raw) // 2] ^= 1
        later[f"all.{dtype}"] = (dtype, [len(raw) // st.SIZES[dtype]], bytes(changed))
    store.save(1, tensors, "--codec", codec)
    store.save(2, later, "--codec", codec)
    assert st.same(store.load("--step", 1)[0], tensors)
    assert st.same(store.load("--step", 2)[0], later)


def test_shapes(store):
    tensors = {
        "scalar": np.float32(3.5).reshape(()), "empty": np.zeros((3, 0, 2), np.float64), "one": np.ones(1, np.int8),
        "none": np.zeros(0, np.uint16), "deep": np.arange(6, dtype=np.int32).reshape([1] * 14 + [2, 3]),
        "bool": np.array([True, False, True]), "\u00e9 \u20ac/\"\\\n\u0001": np.arange(3, dtype=np.uint8),
        "x" * 1023: np.arange(5, dtype=np.uint64),
    }
    store.save(1, tensors)
    assert st.same(store.load()[0], tensors)
    shown = {t["name"]: t for t in store.json("show")["tensors"]}
    assert shown.keys() == tensors.keys()
    assert shown["scalar"]["shape"] == [] and shown["scalar"]["elements"] == 1
    assert shown["empty"]["shape"] == [3, 0, 2] and shown["empty"]["bits_per_element"] is None
    assert "\x01" not in store.call("show").out and "\\x0a\\x01" in store.call("show").out


def test_no_tensors_at_all(store):
    store.save(1, {})
    assert store.load() == ({}, None)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "\u00e9": "\u20ac\n\"", "": ""}])
def test_metadata(store, metadata):
    store.save(1, {"w": np.ones(4, np.float32)}, metadata=metadata)
    assert store.load()[1] == metadata


def test_several_files(store):
    a = store.file({"w": np.arange(4, dtype=np.float32)}, {"format": "pt", "a": "1"})
    b = store.file({"v": np.arange(3, dtype=np.int64)}, {"format": "pt", "b": "2"})
    c = store.file({})
    run("save", store.path, "--run", "a", "--step", 1, a, b, c)
    tensors, metadata = store.load()
    assert st.same(tensors, {"w": np.arange(4, dtype=np.float32), "v": np.arange(3, dtype=np.int64)})
    assert metadata == {"format": "pt", "a": "1", "b": "2"}


def test_files_that_repeat_a_tensor_or_key(store):
    a = store.file({"w": np.ones(1, np.float32)}, {"k": "1"})
    b = store.file({"w": np.ones(1, np.float32)})
    c = store.file({"v": np.ones(1, np.float32)}, {"k": "2"})
    save = ["save", store.path, "--run", "a", "--step", 1]
    twice = run(*save, a, b, expect=USAGE)
    assert "'w'" in twice.err and str(a) in twice.err and str(b) in twice.err
    run(*save, a, a, expect=USAGE)
    assert "'k'" in run(*save, a, c, expect=USAGE).err
    assert not store.path.exists(), "a usage error must not create the store"


def test_large_tensors_in_pieces(store):
    """More than one piece of 16 MiB, and lengths that are not multiples of a block."""
    noise = np.random.default_rng(3)
    big = noise.integers(0, 2 ** 16, 9 * 1024 * 1024 + 77, dtype=np.uint16)
    tensors = {"big": big, "wide": np.cumsum(noise.standard_normal(300_001)), "bytes": noise.bytes(10)}
    tensors["bytes"] = ("U8", [10], tensors["bytes"])
    store.save(1, tensors)
    assert st.same(store.load()[0], tensors)


def test_a_chain_of_deltas(store):
    steps = [state(1, step) for step in range(6)]
    for step, tensors in enumerate(steps):
        store.save(step, tensors)
    listed = store.checkpoints()
    assert [c["step"] for c in listed] == list(range(6))
    assert listed[0]["kind"] == "base" and listed[0]["parent"] is None and listed[0]["depth"] == 0
    assert listed[1]["kind"] == "delta" and listed[1]["parent"] == "a@0"
    assert listed[1]["stored_bytes"] < listed[0]["stored_bytes"]
    for step, tensors in enumerate(steps):
        assert st.same(store.load("--step", step)[0], tensors)
    assert st.same(store.load("--step", "latest")[0], steps[-1])
    assert st.same(store.load()[0], steps[-1])
    chain = store.json("show", "--step", 1)["chain"]
    assert chain == ["a@1", "a@0"]


def test_the_latest_has_the_largest_step(store):
    store.save(7, state(1, 2))
    store.save(3, state(1, 1))
    assert st.same(store.load()[0], state(1, 2))


def test_base_depends_on_nothing(store):
    store.save(1, state(1, 1))
    store.save(2, state(1, 2), "--base")
    base = store.checkpoints()[1]
    assert base["kind"] == "base" and base["parent"] is None and base["parent_id"] is None and base["depth"] == 0


def test_copies_and_casts_cost_nothing(store):
    """A bf16 weight is its rounded master. Masters are saved first, wherever they are in the files."""
    master = np.random.default_rng(5).standard_normal(1 << 16).astype(np.float32)
    bits = master.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    store.save(1, {"w": ("BF16", [1 << 16], rounded.tobytes()), "tied": ("BF16", [1 << 16], rounded.tobytes()),
                   "master.w": master})
    shown = {t["name"]: t for t in store.json("show")["tensors"]}
    assert shown["master.w"]["role"] == "master"
    assert shown["w"]["method"] == "cast" and shown["w"]["stored_bytes"] < 1000
    assert shown["tied"]["method"] in ("cast", "copy") and shown["tied"]["stored_bytes"] < 1000
    loaded = store.load()[0]
    assert loaded["w"][2] == loaded["tied"][2] == rounded.tobytes()


# -------------------------------------------------------------------------------------------------- lineage

def test_a_parent_in_another_run_makes_a_branch(store):
    store.save(100, state(1, 1), run_name="gpt")
    store.save(0, state(1, 2), "--parent", "gpt@100", "--resumed-from", "gpt@latest", run_name="tuned")
    store.save(1, state(1, 3), run_name="tuned")
    tuned = [c for c in store.checkpoints() if c["run"] == "tuned"]
    assert tuned[0]["parent"] == tuned[0]["resumed_from"] == "gpt@100" and tuned[0]["kind"] == "delta"
    assert tuned[1]["parent"] == "tuned@0" and tuned[1]["resumed_from"] is None
    assert store.json("show", "--run", "tuned")["chain"][0] == "tuned@1"
    assert st.same(store.load("--run", "tuned", "--step", 0)[0], state(1, 2))
    gpt = next(c for c in store.checkpoints() if c["run"] == "gpt")
    assert tuned[0]["parent_id"] == tuned[0]["resumed_from_id"] == gpt["id"]


@pytest.mark.parametrize("option", ["--parent", "--resumed-from"])
def test_missing_parents(store, option):
    store.save(1, state(1))
    store.save(2, state(1), option, "a@7", expect=NOT_FOUND)
    store.save(2, state(1), option, "b@1", expect=NOT_FOUND)
    store.save(2, state(1), option, "@best", expect=NOT_FOUND)
    assert len(store.checkpoints()) == 1
    for bad in ("a", "a@", "@", "a@-1", "1"):
        store.save(2, state(1), option, bad, expect=USAGE)


def test_duplicates_are_refused(store):
    store.save(1, state(1))
    refused = store.save(1, state(1), expect=FAILED)
    assert "run 'a'" in refused.err and "step 1" in refused.err and "--on-duplicate" in refused.err
    assert st.same(store.load()[0], state(1))


def test_same_ok(store):
    store.save(1, state(1), metadata={"k": "v"})
    before = store.checkpoints()
    again = store.save(1, state(1), "--on-duplicate", "same-ok", metadata={"k": "v"})
    assert "already" in again.out
    said = store.save(1, state(1), "--on-duplicate", "same-ok", "--json", metadata={"k": "v"}).json()
    assert said["checkpoints"] == before == store.checkpoints()
    other = store.save(1, state(2), "--on-duplicate", "same-ok", expect=FAILED).err
    assert "--on-duplicate branch" in other and "same-ok" not in other
    assert "--on-duplicate same-ok" in store.save(1, state(2), expect=FAILED).err
    store.save(1, state(1), "--on-duplicate", "same-ok", metadata={"k": "other"}, expect=FAILED)
    fewer = state(1)
    del fewer["step"]
    store.save(1, fewer, "--on-duplicate", "same-ok", metadata={"k": "v"}, expect=FAILED)
    assert store.checkpoints() == before
    store.save(2, state(1), "--on-duplicate", "same-ok")  # step 2 is no duplicate


def test_branch(store):
    for step in (1, 2, 3):
        store.save(step, state(1, step))
    for quiet in ([], ["-q"]):
        store.save(2, state(9), "--on-duplicate", "branch", *quiet, expect_message=f"'a~{3 if quiet else 2}'")
    runs = {c["run"]: c for c in store.checkpoints() if "~" in c["run"]}
    assert set(runs) == {"a~2", "a~3"}
    assert runs["a~2"]["step"] == 2
    assert st.same(store.load("--run", "a~2")[0], state(9))
    assert st.same(store.load("--run", "a", "--step", 2)[0], state(1, 2))
    said = store.save(3, state(8), "--on-duplicate", "branch", "--json", expect_message="a~").json()
    assert said["checkpoints"][0]["run"].startswith("a~")


# ---------------------------------------------------------------------------------------------------- roles

def roles(store, *args):
    store.save(1, {"w": np.ones(9, np.float32), "exp_avg.w": np.ones(9, np.float32),
                   "exp_avg_sq.w": np.ones(9, np.float32), "max_exp_avg_sq.w": np.ones(9, np.float32),
                   "master.w": np.ones(9, np.float32), "ema.w": np.ones(9, np.float32),
                   "count": np.arange(9), "mask": np.ones(9, bool)}, *args)
    return {t["name"]: t["role"] for t in store.json("show")["tensors"]}


def test_roles_from_names(store):
    assert roles(store) == {"w": "weight", "exp_avg.w": "exp_avg", "exp_avg_sq.w": "exp_avg_sq", "mask": "other",
                            "max_exp_avg_sq.w": "exp_avg_sq", "master.w": "master", "ema.w": "weight", "count": "other"}


def test_roles_from_patterns(store):
    assert roles(store, "--role", "ema.*=other", "--role", "e*=master", "--role", "?=exp_avg") == {
        # w is no weight
        "w": "exp_avg", "exp_avg.w": "master", "exp_avg_sq.w": "master", "max_exp_avg_sq.w": "other",
        "master.w": "other", "ema.w": "other", "count": "other", "mask": "other"}


def test_a_pattern_without_matches_is_reported(store):
    store.save(1, state(1), "--role", "nothing*=other", expect_message="'nothing*=other' is unused")
    store.save(2, state(1), "--role", "nothing*=other", "-q")
    for bad in ("x", "x=", "=weight", "x=auto", "x=Weight"):
        store.save(3, state(1), "--role", bad, expect=USAGE)


def test_metric(store):
    store.save(1, state(1), "--metric", "val_loss=2.5e-1")
    store.save(2, state(1))
    first, second = store.checkpoints()
    assert (first["metric_name"], first["metric"]) == ("val_loss", 0.25)
    assert (second["metric_name"], second["metric"]) == (None, None)
    for bad in ("val_loss", "=1", "val_loss=", "val_loss=x", "val_loss=nan", "n" * 32 + "=1", "loss= 5", "loss=0x10", "loss=inf", "loss=1e999",
                "loss=.", "loss=1e", "loss=1e+", "loss=1 "):
        store.save(3, state(1), "--metric", bad, expect=USAGE)
    for step, good in enumerate(("1e-320", "-.5", "+5.E-1", "17"), 3):
        store.save(step, state(1), "--metric", f"loss={good}")
        assert store.checkpoints()[-1]["metric"] == float(good)


# ----------------------------------------------------------------------------------------------------- load

def test_choosing_tensors(store):
    store.save(1, state(1), metadata={"k": "v"})
    tensors, metadata = store.load("--tensor", "*.bias", "--tensor", "exp_avg.*")
    assert tensors.keys() == {"layers.0.bias", "exp_avg.layers.0.weight"} and metadata == {"k": "v"}
    tensors, _ = store.load("--tensor", "step")
    assert tensors.keys() == {"step"}
    out = store.folder / "none"
    store.call("load", "--out", out, "--tensor", "nothing*", expect=NOT_FOUND)
    assert not out.exists() and not store.temporary_files()


def test_the_run_may_be_omitted_if_there_is_one(store):
    run("list", store.path, expect=NOT_FOUND)
    store.save(1, state(1), run_name="first")
    assert st.same(store.load()[0], state(1))
    store.save(1, state(2), run_name="second")
    store.save(5, state(2), run_name="second")
    for command in (["load", "--out", store.folder / "x"], ["show"], ["diff", 1, 5], ["verify", "--step", 1]):
        refused = store.call(*command, expect=USAGE)
        assert re.search(r"first.*second", refused.err) and "--run" in refused.err
    assert st.same(store.load("--run", "first")[0], state(1))


def test_missing_checkpoints_and_tensors(store):
    out = store.folder / "x"
    run("load", store.path, "--out", out, expect=NOT_FOUND)
    store.save(1, state(1))
    store.call("load", "--step", 2, "--out", out, expect=NOT_FOUND)
    store.call("load", "--run", "b", "--out", out, expect=NOT_FOUND)
    store.call("load", "--out", store.folder / "absent" / "x", expect=NOT_FOUND)
    store.call("list", "--run", "b", expect=NOT_FOUND)
    store.call("list", "--run", "", expect=NOT_FOUND)  # a variable of the shell that is not set: not "the only run"
    run("save", store.path, "--run", "a", "--step", 2, store.folder / "absent", expect=NOT_FOUND)
    assert not out.exists() and not store.temporary_files()


def test_existing_files_are_not_replaced(store):
    store.save(1, state(1))
    out = store.folder / "out"
    out.write_text("precious")
    refused = store.call("load", "--out", out, expect=FAILED)
    assert "--force" in refused.err and str(out) in refused.err
    assert out.read_text() == "precious" and not store.temporary_files()
    store.call("load", "--out", out, "--force")
    assert st.same(st.read(out)[0], state(1)) and not store.temporary_files()
    folder = store.folder / "folder"
    folder.mkdir()
    store.call("load", "--out", folder, "--force", expect=FAILED)
    assert folder.is_dir()
    assert (out.stat().st_mode & 0o777) == 0o666 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_same_bytes_every_time(store):
    store.save(1, state(1), metadata={"b": "1", "a": "2"})
    store.call("load", "--out", store.folder / "one")
    store.call("load", "--out", store.folder / "two", "--threads", 1)
    assert (store.folder / "one").read_bytes() == (store.folder / "two").read_bytes()


def test_reading_changes_nothing(store):
    store.save(1, state(1))
    store.save(2, state(1, 1))
    before = {name: (p.read_bytes(), p.stat().st_mtime_ns) for name, p in store.files().items()}
    store.load()
    for command in ("list", "show", "report", "verify"):
        store.call(command)
    store.call("diff", 1, 2)
    assert {name: (p.read_bytes(), p.stat().st_mtime_ns) for name, p in store.files().items()} == before


def test_a_load_needs_little_memory(store):
    """Loads 128 MiB of zeros with an address space smaller than that."""
    if os.environ.get("CKPTDELTA_SAN"):
        pytest.skip("sanitizers reserve address space")
    import resource
    big = np.zeros(128 << 20, np.uint8)
    path = store.file({"big": big})
    limit = 160 << 20

    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    run("save", store.path, "--run", "a", "--step", 1, "--threads", 1, path, preexec_fn=limited)
    out = store.folder / "out"
    run("load", store.path, "--out", out, "--threads", 1, preexec_fn=limited)
    assert out.stat().st_size >= big.size and out.read_bytes()[-1 << 20:] == bytes(1 << 20)


def test_corrupt_input_saves_nothing(store):
    good = store.file({"v": np.ones(4, np.float32)})
    bad = store.file({"w": np.ones(4, np.float32)})
    bad.write_bytes(bad.read_bytes()[:-1])
    run("save", store.path, "--run", "a", "--step", 1, good, bad, expect=CORRUPT)
    assert not store.path.exists()


def rounded(values):
    """Rounds to bf16."""
    bits = values.view("<u4").astype("<u8")
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


class Adam:
    """Two parameters, one with a master, and a scale without weight decay. Updates in f32."""

    def __init__(self):
        self.rng, self.step = np.random.default_rng(3), 0
        self.w = {n: (self.rng.standard_normal((40, 50)) * 0.1).astype(np.float32) for n in ("a.weight", "b.weight", "a.scale")}
        self.m = {n: np.zeros((40, 50), np.float32) for n in self.w}
        self.v = {n: np.zeros((40, 50), np.float32) for n in self.w}

    def move(self):
        self.step += 1
        f, lr = np.float32, 0.002
        for n, w in self.w.items():
            g = (self.rng.standard_normal(w.shape) * 1e-3).astype(f)
            self.m[n] = self.m[n] + f(1 - 0.9) * (g - self.m[n])
            self.v[n] = self.v[n] * f(0.99) + f(1 - 0.99) * g * g
            below = np.sqrt(self.v[n]) / f(np.sqrt(1 - 0.99 ** self.step)) + f(1e-6)
            kept = w * f(1 if n == "a.scale" else 1 - lr * 0.1)
            self.w[n] = kept - f(lr / (1 - 0.9 ** self.step)) * self.m[n] / below
        return self

    def options(self, *more):
        both = f"lr=0.002,beta2=0.99,eps=1e-6,step={self.step}"
        return ("--max-load-cost", 50, "--adamw", f"*.scale:weight_decay=0,{both}", "--adamw", f"{both},weight_decay=0.1", *more)

    def tensors(self, order=("", "exp_avg_sq.", "exp_avg.")):
        parts = {"": self.w, "exp_avg.": self.m, "exp_avg_sq.": self.v}
        out = {prefix + n: parts[prefix][n] for prefix in order for n in self.w}
        out["master.b.weight"] = out.pop("b.weight")
        out["b.weight"] = ("BF16", [40, 50], rounded(out["master.b.weight"]))
        return out


def methods(store, step):
    return {t["name"]: t["method"] for t in store.json("show", "--step", step)["tensors"]}


def test_one_optimizer_step(store):
    """The file may have the tensors in any order."""
    model = Adam().move().move()
    store.save(2, model.tensors())
    for step in (3, 4):
        now = model.move().tensors()
        store.save(step, now, *model.options())
        assert st.same(store.load("--step", step)[0], now)
        of = methods(store, step)
        assert {n for n, c in of.items() if c == "step"} == \
            {n for n in of if n.startswith("exp_avg_sq.")} | {"a.weight", "a.scale", "master.b.weight"}, of
        assert of["b.weight"] == "cast"
    run("verify", store.path, "-q")


def test_wrong_optimizer_options_are_harmless(store):
    model = Adam().move().move()
    store.save(2, model.tensors())
    now = model.move().tensors()
    store.save(3, now, "--adamw", "lr=9,step=77,beta1=0,beta2=0.1", "--adam", "c.*:lr=1,step=1", "--sgd", "c*:lr=1,nesterov=1",
               expect_message="'c.*' is unused: it matches no weight")
    assert st.same(store.load("--step", 3)[0], now)
    assert "step" not in methods(store, 3).values()


def test_sgd(store):
    rng = np.random.default_rng(5)
    w, u = rng.standard_normal((60, 60)).astype(np.float32), rng.standard_normal((60, 60)).astype(np.float32)
    store.save(1, {"w": w, "exp_avg.w": u})
    u = np.float32(0.9) * u + rng.standard_normal((60, 60)).astype(np.float32)
    now = {"w": w - np.float32(0.1) * u, "exp_avg.w": u}
    store.save(2, now, "--sgd", "lr=0.1,momentum=0.9", "--max-load-cost", 50)
    assert methods(store, 2)["w"] == "step"
    assert st.same(store.load("--step", 2)[0], now)


@pytest.mark.parametrize("option,text", [
    ("adamw", ""), ("adamw", "lr=1"), ("adamw", "step=1"), ("adamw", "lr=1,step=0"), ("adamw", "lr=1,step=1,beta1=1"),
    ("adamw", "lr=-1,step=1"), ("adamw", "lr=1,step=1,momentum=0"), ("adam", "lr=1,step=1,eps"), ("adam", "lr=nan,step=1"),
    ("adam", "x:"), ("sgd", "momentum=1"), ("sgd", "lr=1,beta1=0"), ("sgd", "lr=1,nesterov=2"), ("sgd", "lr=1,dampening=1")])
def test_invalid_optimizer_options(store, option, text):
    refused = run("save", store.path, "--run", "a", "--step", 1, f"--{option}", text, store.file({"w": np.ones(3, np.float32)}),
                  expect=USAGE)
    assert f"--{option} is" in refused.err
