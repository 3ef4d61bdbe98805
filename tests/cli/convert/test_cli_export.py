"""export: a folder that programs for models can read. It is complete or absent, and has the values that load
gives."""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, FAILED, NOT_FOUND, USAGE, check_documented, run, state, store  # noqa: F401

HANDMADE = Path(__file__).resolve().parents[2] / "golden/v1/handmade"
INDEX = "model.safetensors.index.json"


def names(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def hidden(folder):
    return [p for p in folder.iterdir() if p.name.startswith(".")]


def read_all(folder):
    """(tensors, index or None, metadata of each file), read as a loader does: index first."""
    if not (folder / INDEX).exists():
        tensors, metadata = st.read(folder / "model.safetensors")
        return tensors, None, [metadata]
    index = json.loads((folder / INDEX).read_text(), object_pairs_hook=st.reject_duplicates)
    files = sorted(set(index["weight_map"].values()))
    assert files == [n for n in names(folder) if n.startswith("model-")]
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    tensors, metadata = {}, []
    for name in files:
        part, said = st.read(folder / name)
        assert all(index["weight_map"][tensor] == name for tensor in part)
        tensors.update(part)
        metadata.append(said)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"] == {"total_size": sum(len(t[2]) for t in tensors.values())}
    return tensors, index, metadata


def export(store, *args, **options):
    out = store.folder / "out"
    said = store.json("export", "--out", out, *args, **options)
    check_documented(said, "`export`", where="export")
    assert said["out"] == str(out)
    return out, said


@pytest.fixture
def saved(store):
    for step in (1, 2, 3):
        store.save(step, state(1, step), metadata={"k": "v"})
    return store


@pytest.mark.parametrize("step", [1, 3])
def test_one_file_without_an_index(saved, step):
    out, said = export(saved, "--step", step)
    assert names(out) == ["model.safetensors"]
    tensors, _, metadata = read_all(out)
    assert st.same(tensors, saved.load("--step", step)[0]) and st.same(tensors, state(1, step))
    assert metadata == [{"k": "v", "format": "pt"}]
    assert said["checkpoints"][0]["step"] == step and said["tensor_count"] == len(tensors)
    assert not said["dry_run"] and said["left_out"] == said["rounded"] == 0


def test_several_files_and_an_index(saved):
    """Four tensors of at most 64 * 64 * 4 bytes. Two fit in a file, and no file exceeds the limit."""
    out, said = export(saved, "--max-shard-size", "33000")
    tensors, index, metadata = read_all(out)
    assert index and st.same(tensors, state(1, 3)) and metadata == [{"k": "v", "format": "pt"}] * len(metadata)
    assert len(metadata) == 2
    for name in set(index["weight_map"].values()):
        assert sum(len(t[2]) for t in st.read(out / name)[0].values()) <= 33000
    assert said["files"][-1]["name"] == INDEX


def test_a_tensor_that_is_too_large_has_a_file_of_its_own(store):
    arrays = {"a": np.ones(10, np.float32), "b": np.ones(100, np.float32), "c": np.ones(10, np.float32)}
    store.save(1, arrays)
    out, _ = export(store, "--max-shard-size", "80")
    tensors, index, _ = read_all(out)
    assert st.same(tensors, arrays)
    assert [index["weight_map"][n][6:11] for n in "abc"] == ["00001", "00002", "00003"]
    out = store.folder / "exactly"
    store.call("export", "--out", out, "--match", "a|c", "--max-shard-size", 80)
    assert names(out) == ["model.safetensors"]


def test_dry_run_is_right_to_the_byte(saved):
    said = {}
    for size in ("20K", "5G"):
        out, said[size] = export(saved, "--max-shard-size", size, "--dry-run")
        assert said[size]["dry_run"] and not out.exists() and not hidden(saved.folder)
        out, done = export(saved, "--max-shard-size", size)
        assert {**done, "dry_run": True} == said[size]
        assert {f["name"]: f["bytes"] for f in done["files"]} == {n: (out / n).stat().st_size for n in names(out)}
        assert done["bytes"] == sum(f["bytes"] for f in done["files"])
        assert done["tensor_bytes"] == sum(a.nbytes for a in state(1, 3).values())
        assert sum(f["tensor_count"] for f in done["files"]) == done["tensor_count"]
        shutil.rmtree(out)
    assert len(said["20K"]["files"]) > len(said["5G"]["files"]) == 1


def test_choosing_tensors(saved):
    for args, wanted in [(["--only", "weight"], {"layers.0.weight", "layers.0.bias"}),
                         (["--only", "exp_avg,other"], {"exp_avg.layers.0.weight", "step"}),
                         (["--match", r"^layers\.0\.[wx]"], {"layers.0.weight"}),
                         (["--match", "bias", "--match", "^step$"], {"layers.0.bias", "step"}),
                         (["--match", "0", "--only", "exp_avg_sq"], {"exp_avg_sq.layers.0.weight"})]:
        out, said = export(saved, *args, "--overwrite")
        tensors = read_all(out)[0]
        assert set(tensors) == wanted and said["left_out"] == len(state(1)) - len(wanted)
        assert st.same(tensors, {n: state(1, 3)[n] for n in wanted})
    assert "no tensor" in run("export", saved.path, "--out", saved.folder / "x", "--match", "^nothing", expect=NOT_FOUND).err
    for args in (["--only", "weights,x"], ["--match", "("], ["--dtype", "int8"], ["--max-shard-size", "0"], []):
        out = ["--out", saved.folder / "x"] if args else []
        run("export", saved.path, *out, *args, expect=USAGE)
    assert not (saved.folder / "x").exists()


def bf16(values):
    """Rounds to nearest even, with integers."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7fc0), rounded)


def test_rounding_to_another_dtype(store):
    rng = np.random.default_rng(1)
    weight = (rng.standard_normal(5000) * 10.0 ** rng.integers(-44, 39, 5000)).astype(np.float32)
    weight[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1.00390625, 1.01171875]  # the last two: ties
    half = rng.standard_normal(100).astype(np.float16)
    arrays = {"w": weight, "h": half, "d": weight.astype(np.float64)[8:], "exp_avg.w": weight, "n": np.arange(3)}
    store.save(1, arrays, expect_message="marked suspect")
    out, said = export(store, "a@1", "--dtype", "bf16")
    tensors = read_all(out)[0]
    assert said["rounded"] == 3
    assert tensors["w"][:2] == ("BF16", [5000]) and tensors["w"][2] == bf16(weight).tobytes()
    assert tensors["h"][2] == bf16(half.astype(np.float32)).tobytes()
    assert tensors["d"][2] == bf16(weight[8:]).tobytes()
    assert st.same({n: tensors[n] for n in ("exp_avg.w", "n")}, {n: arrays[n] for n in ("exp_avg.w", "n")})
    tensors = read_all(export(store, "a@1", "--dtype", "f32", "--overwrite")[0])[0]
    assert st.same({n: tensors[n] for n in "wh"}, {"w": weight, "h": half.astype(np.float32)})
    with np.errstate(over="ignore"):
        narrow = weight.astype(np.float16)
    tensors = read_all(export(store, "a@1", "--dtype", "f16", "--overwrite")[0])[0]
    assert tensors["w"][0] == "F16"
    assert np.array_equal(np.frombuffer(tensors["w"][2], np.float16), narrow, equal_nan=True)


def test_every_exponent_and_tie_as_f16(store):
    """Values around every finite value of f16 and around every midpoint: exact, slightly above, slightly
    below."""
    half = np.arange(0x7c00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = ((half[1:].astype(np.float64) + half[:-1]) / 2).astype(np.float32)
    tie = np.array([65520, 2.0**-25, 1e-45, 1e-40], np.float32)
    values = np.concatenate([half, ties, tie])
    values = np.concatenate([values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(9e9))])
    values = np.concatenate([values, -values])
    store.save(1, {"w": values})
    out, _ = export(store, "--dtype", "f16")
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float16)
    assert np.array_equal(np.frombuffer(read_all(out)[0]["w"][2], np.uint16), wanted.view(np.uint16))


def test_each_blob_has_a_file(tmp_path):
    expected = json.loads((HANDMADE.parent / "handmade.json").read_text())
    blobs = expected["handmade"]["checkpoints"]["hand.made@1"]["blobs"]
    out = tmp_path / "out"
    said = run("export", HANDMADE, "--run", "hand.made", "--step", 1, "--out", out, "--json", expect_message="").json()
    written = {n[6:]: hashlib.sha256((out / n).read_bytes()).hexdigest() for n in names(out) if n.startswith("blobs/")}
    assert blobs and written == {n.replace("/", "%2F").replace("\u00e9", "%C3%A9"): d for n, d in blobs.items()}
    assert {f["blob"] for f in said["files"]} == {None, *blobs}
    shutil.rmtree(out)
    run("export", HANDMADE, "--run", "hand.made", "--step", 1, "--out", out, "--only", "weight", expect_message="")
    assert not (out / "blobs").exists()


# ------------------------------------------------------------------------------------------------- existing folders

def test_existing_files_are_not_replaced(saved):
    out = saved.folder / "out"
    for make in (lambda: out.write_text("x"), lambda: out.symlink_to(saved.folder)):
        make()
        assert "not a folder" in saved.call("export", "--out", out, "--overwrite", expect=FAILED).err
        out.unlink()
    out.mkdir()
    export(saved)  # an empty folder may exist
    before = {n: (out / n).read_bytes() for n in names(out)}
    assert "--overwrite" in saved.call("export", "--out", out, "--step", 1, expect=FAILED).err
    assert {n: (out / n).read_bytes() for n in names(out)} == before
    export(saved, "--step", 1, "--overwrite", "--max-shard-size", "20K")
    assert st.same(read_all(out)[0], state(1, 1)) and "model.safetensors" not in names(out)
    (out / "config.json").write_text("{}")
    before = {n: (out / n).read_bytes() for n in names(out)}
    assert "config.json" in saved.call("export", "--out", out, "--overwrite", expect=FAILED).err
    assert {n: (out / n).read_bytes() for n in names(out)} == before
    assert not hidden(saved.folder)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors.bak", "model-1-of-2.safetensors", ".hidden", "blobs"])
def test_folders_with_other_files_are_refused(saved, name):
    out, _ = export(saved)
    (out / name).write_text("mine")
    assert name in saved.call("export", "--out", out, "--overwrite", expect=FAILED).err
    assert (out / name).read_text() == "mine"


def test_folders_above_are_made(saved):
    out = saved.folder / "a/b/out"
    saved.call("export", "--out", f"{out}/")
    assert st.same(read_all(out)[0], state(1, 3))
    for bad in ("", "/", ".", ".."):
        saved.call("export", "--out", bad, "--overwrite", expect=USAGE)


# ---------------------------------------------------------------------------------------------- interrupted exports

@pytest.fixture
def big(store):
    rng = np.random.default_rng(1)
    store.save(1, {f"w{i}": rng.integers(0, 255, 16 << 20, dtype=np.uint8) for i in range(4)})
    return store


def stopped(big):
    """An export that has written its first file and then sleeps."""
    process = subprocess.Popen([COMMAND, "export", big.path, "--out", big.folder / "out", "--max-shard-size", "16M"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(big.folder.glob(".out.tmp-*/model-00001-of-00004.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)
    return process


def test_killed_in_the_middle(big):
    process = stopped(big)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and not (big.folder / "out").exists()
    left, = hidden(big.folder)
    assert not (left / INDEX).exists() and not (left / "model.safetensors").exists()
    out, _ = export(big)  # another export is not disturbed; the left folder is too new to be removed
    assert len(read_all(out)[0]) == 4 and hidden(big.folder) == [left]
    os.utime(left, (1, 1))
    export(big, "--overwrite")
    assert not hidden(big.folder), "what nobody has been writing to is removed"


def test_a_folder_in_use_is_not_removed(big):
    process = stopped(big)
    left, = hidden(big.folder)
    os.utime(left, (1, 1))
    other = big.folder / "out"
    big.call("export", "--out", other)
    assert hidden(big.folder) == [left]
    shutil.rmtree(other)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=120)
    assert process.returncode == 0 and len(read_all(other)[0]) == 4


def test_interrupted(big):
    process = stopped(big)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and b"interrupted" in err
    assert not (big.folder / "out").exists() and not hidden(big.folder)


def test_full_disk(saved):
    disk = saved.folder / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=$SIZE none "$1" && shift && "$@"; code=$?; ls -A "$DISK" >&3; exit $code'
    command = ["unshare", "-m", "sh", "-c", script, "sh", disk]
    if subprocess.run([*command, "true"], stderr=subprocess.DEVNULL, env={**os.environ, "DISK": "/dev/null", "SIZE": "1M"},
                      preexec_fn=lambda: os.dup2(2, 3), pass_fds=[3]).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    # The second case fits in bytes, but not in pages, as each tensor has its own file.
    for size, room, says in [("5G", "32K", "are free on the file system"), ("1", "64K", "No space left")]:
        with open(saved.folder / "seen", "w+") as seen:
            done = subprocess.run([*command, COMMAND, "export", saved.path, "--out", disk / "out", "--max-shard-size", size],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60, env={**os.environ, "DISK": str(disk), "SIZE": room},
                                  preexec_fn=lambda: os.dup2(seen.fileno(), 3), close_fds=False)
            seen.seek(0)
            assert done.returncode == FAILED and says in done.stderr and str(disk) in done.stderr, done.stderr
            assert seen.read() == "", "something is left on the disk"


def test_damage_leaves_no_folder(saved):
    chunk = max((p for p in (saved.path / "data").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(chunk.read_bytes())
    for at in range(2000, len(content) - 2000, 500):
        content[at] ^= 1
    chunk.write_bytes(content)
    err = saved.call("export", "--out", saved.folder / "out", "--step", 1, expect=4).err
    assert "ckptdelta verify" in err and not (saved.folder / "out").exists() and not hidden(saved.folder)


def test_memory_is_limited_to_pieces(store):
    if os.environ.get("CKPTDELTA_SAN"):
        pytest.skip("sanitizers reserve address space")
    import resource
    big = np.zeros(160 << 18, np.float32)
    store.save(1, {"big": big, "small": big[:5]})
    limit = 160 << 20
    store.call("export", "--out", store.folder / "out", "--threads", 1, "--dtype", "bf16",
               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert (store.folder / "out/model.safetensors").stat().st_size > big.nbytes // 2


def test_text(saved):
    said = saved.call("export", "--out", saved.folder / "out", "--only", "weight", "--max-shard-size", "10K", "-v").out
    assert INDEX in said and "2 tensors in 3 files" in said and "3 tensors left out" in said
    assert saved.call("export", "--out", saved.folder / "other", "-q").out == ""
    assert not any(line.endswith(" ") for line in said.splitlines())


@pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="the package safetensors is not installed")
def test_the_reference_implementation_reads_it(saved):
    from safetensors.numpy import load_file
    out, _ = export(saved, "--max-shard-size", "20K")
    tensors = {}
    for path in out.glob("model-*.safetensors"):
        tensors.update(load_file(path))
    assert tensors.keys() == state(1).keys()
    assert all(tensors[n].tobytes() == a.tobytes() for n, a in state(1, 3).items())
