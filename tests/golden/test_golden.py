"""Golden stores: the command and an independent reader give what is known to be in them, and refuse the same things.

tests/golden/v1/ is kept for good: every later version must read it. The handmade stores come from tests/golden/make_handmade.py,
which does not use the library; `library` was written by the library's first version through tests/golden/make_library.py,
`library-2` by the first one that writes framed streams, through make_frames() there, `library-steps` by the first one that
predicts optimizer steps, through make_steps(), `library-gradients` by the first one that stores gradients, through make_gradients(), `library-runs` by the first one
that writes run streams, through make_runs(), `library-changes` by the first one that writes change streams, through make_changes(), `library-lossy` by the first one that writes lossy blocks, through tests/golden/make_lossy.py, `bundles` and `lossy` by the
first ones that write bundles and measures, through tests/golden/make_bundles.py, `cells` by the first one that cuts lossy matrices into
cells, through tests/golden/make_cells.py, `links` by the last one that writes links and manifests of own files only, through tests/golden/make_links.py.
What they contain is in the .json files beside them.
"""

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import ckd_reader
import ckd_symbols
import make_cells
import make_handmade
import make_library
import make_lossy
from ckd_errors import Corrupt, Unsupported

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOLDEN = HERE / "v1"
READER = HERE.parent / "reader" / "ckd_reader.py"
SAFETENSORS = {"f8e4m3": "F8_E4M3", "f8e5m2": "F8_E5M2"}


def expected_stores():
    out = {}
    for path in sorted(GOLDEN.glob("*.json")):
        out.update(json.loads(path.read_text(encoding="utf-8")))
    return out


EXPECTED = expected_stores()
CHECKPOINTS = [(store, key) for store, entry in EXPECTED.items() for key in entry["checkpoints"]]
UNSUPPORTED = [(store, key, tensor, number) for store, entry in EXPECTED.items()
               for key, tensors in entry.get("unsupported", {}).items() for tensor, number in tensors.items()]


def command():
    path = os.environ.get("CKPTDELTA")
    if not path:
        pytest.skip("CKPTDELTA does not name the command")
    return path


def ckptdelta(*args):
    return subprocess.run([command(), *map(str, args)], capture_output=True, timeout=120, check=False)


def split(key):
    run, _, step = key.rpartition("@")
    return run, int(step)


@pytest.fixture
def store(request, tmp_path):
    """A copy: reading must not change a store, but a bug might."""
    copy = tmp_path / request.param
    shutil.copytree(GOLDEN / request.param, copy)
    return copy


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read_safetensors(path):
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]])
            for name, t in header.items()}


# --- the independent reader

@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.sampled(3)
def test_reader_gives_what_is_expected(name):
    opened = ckd_reader.Store(GOLDEN / name)
    found = ckd_reader.describe(opened, opened.manifests)
    expected = EXPECTED[name]
    unsupported = expected.get("unsupported", {})
    assert {k: v for k, v in found["checkpoints"].items() if v["tensors"]} == expected["checkpoints"]
    assert set(found["checkpoints"]) == set(expected["checkpoints"]) | set(unsupported)
    assert len(found["errors"]) == sum(map(len, unsupported.values())) + len(expected.get("unlisted", []))


@pytest.mark.parametrize("name,key,tensor,number", UNSUPPORTED)
def test_reader_names_what_it_does_not_know(name, key, tensor, number):
    opened = ckd_reader.Store(GOLDEN / name)
    with pytest.raises(Unsupported, match=re.escape(number)):
        opened.checkpoint(*split(key)).tensor(tensor)


def test_reader_finds_every_changed_byte_of_a_chunk_file(tmp_path):
    """The reader holds the library to account only if it looks at everything itself."""
    shutil.copytree(GOLDEN / "example", tmp_path / "s")
    path = next((tmp_path / "s/data/c").iterdir())
    data = path.read_bytes()
    assert read_example(tmp_path / "s") == struct.pack("<4f", 1.0, -2.0, 0.5, 3.0)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1:])
        with pytest.raises(Corrupt):
            read_example(tmp_path / "s")
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(Corrupt):
            read_example(tmp_path / "s")


def test_reader_finds_every_changed_byte_of_a_bundle(tmp_path):
    shutil.copytree(GOLDEN / "bundles", tmp_path / "s")
    path = next((tmp_path / "s/data/c").iterdir())
    data = path.read_bytes()
    opened = ckd_reader.Store(tmp_path / "s")
    run, step = next(k for k, m in opened.manifests.items() if m.files[0].id.hex() == path.stem)
    record = next(r.bundle for r in opened.checkpoint(run, step).tensors["first"].blocks)
    first, heads = record.at, record.stored_size - sum(
        r.stored_size for r in opened.chunk(opened.manifests[run, step].files[0]).records if hasattr(r, "bundle"))
    assert 500 < heads < 3000
    for at in range(first, first + heads, 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1:])
        with pytest.raises(Corrupt):
            ckd_reader.Store(tmp_path / "s").checkpoint(run, step)
    path.write_bytes(data)
    ckd_reader.Store(tmp_path / "s").checkpoint(run, step)


def test_order_of_tensors_in_bundles():
    """The reader's and the command's: that in which they were saved."""
    opened = ckd_reader.Store(GOLDEN / "bundles")
    for run, step in opened.manifests:
        shown = ckptdelta("show", GOLDEN / "bundles", "--run", run, "--step", step, "--json")
        assert shown.returncode == 0, shown.stderr
        names = [t["name"] for t in json.loads(shown.stdout)["tensors"]]
        assert names == list(opened.checkpoint(run, step).tensors)


def near(value):
    """As closely as measures are stored."""
    return pytest.approx(value, rel=1 / 128)


def test_measures():
    """The reader's, shard by shard, and the command's, by tensor, are what was told when the store was made."""
    opened = ckd_reader.Store(GOLDEN / "lossy")
    for run, step in opened.manifests:
        assert opened.manifests[run, step].fidelity == 2
        told = EXPECTED["lossy"]["measures"][f"{run}@{step}"]
        assert 20 < sum(t is not None for t in told.values()) < len(told)
        found = {name: figures for (name, _), figures in opened.checkpoint(run, step).measures().items()}
        assert found.keys() == {name for name, figures in told.items() if figures}
        for name, figures in found.items():
            for key, value in told[name].items():
                assert figures[key] == near(value) if value is not None else figures[key] != figures[key], (name, key)
        out = ckptdelta("show", GOLDEN / "lossy", "--run", run, "--step", step, "--json")
        assert out.returncode == 0, out.stderr
        shown = json.loads(out.stdout)
        assert shown["checkpoints"][0]["fidelity"] == "near"
        for tensor in shown["tensors"]:
            figures = told[tensor["name"]] or {"error_squares": 0, "value_squares": 1, "max_error": 0, "direction_change": 0,
                                              "nonfinite": 0}
            assert tensor["rel_l2"] == near((figures["error_squares"] / figures["value_squares"]) ** 0.5)
            assert tensor["max_error"] == near(figures["max_error"]) and tensor["max_error"] >= figures["max_error"]
            assert tensor["direction_change"] == (None if figures["direction_change"] is None
                                                  else near(figures["direction_change"]))
            assert tensor["nonfinite"] == figures["nonfinite"]


def test_errors_of_lossy_checkpoints_are_listed():
    out = ckptdelta("list", GOLDEN / "lossy", "--json")
    assert out.returncode == 0, out.stderr
    listed = json.loads(out.stdout)
    assert [e["checkpoint"] for e in listed["errors"]] == [f"{c['run']}@{c['step']}" for c in listed["checkpoints"]]
    for error, checkpoint in zip(listed["errors"], listed["checkpoints"]):
        told = {n: t for n, t in EXPECTED["lossy"]["measures"][error["checkpoint"]].items() if t}
        worst = max(told, key=lambda n: told[n]["error_squares"] / told[n]["value_squares"])
        assert error["worst_tensor"] == worst and error["fidelity"] == "near"
        assert error["rel_l2"] == near((told[worst]["error_squares"] / told[worst]["value_squares"]) ** 0.5)
        assert error["max_error"] == near(max(t["max_error"] for t in told.values()))
        assert error["nonfinite"] == sum(t["nonfinite"] for t in told.values())
        assert error["direction_change"] == near(max(t["direction_change"] or 0 for t in told.values()))
        shapes = [t["shape"] for t in EXPECTED["lossy"]["checkpoints"][error["checkpoint"]]["tensors"].values()]
        assert error["bits_per_element"] == pytest.approx(
            8 * checkpoint["stored_bytes"] / sum(map(ckd_reader.product, shapes)))
    text = ckptdelta("show", GOLDEN / "lossy").stdout.decode()
    assert "near, lossy resumes before it: 0" in text and "REL L2" in text and "DIRECTION" in text
    assert "REL L2" not in ckptdelta("show", GOLDEN / "bundles").stdout.decode()


def read_example(folder):
    return ckd_reader.Store(folder).checkpoint("demo", 7).tensor("w").tobytes()


def test_reader_command(tmp_path):
    run = subprocess.run([sys.executable, READER, GOLDEN / "handmade", "hand.made@1", "--dump", "config"],
                         capture_output=True, check=False)
    assert (run.returncode, run.stdout) == (0, b'{"width": 4}')
    run = subprocess.run([sys.executable, READER, GOLDEN / "example"], capture_output=True, check=False)
    assert run.returncode == 0
    assert hashlib.sha256(struct.pack("<4f", 1.0, -2.0, 0.5, 3.0)).hexdigest().encode() in run.stdout
    run = subprocess.run([sys.executable, READER, GOLDEN / "needs-coding"], capture_output=True, check=False)
    assert run.returncode == 1 and b"coding 77" in run.stderr
    run = subprocess.run([sys.executable, READER, tmp_path], capture_output=True, check=False)
    assert run.returncode == 1


def test_examples_in_the_document_are_the_golden_files():
    text = (ROOT / "codec/FORMAT.md").read_text(encoding="utf-8")
    listed = {}
    for line in text[text.index("\n## Examples"):].splitlines():
        heading = re.fullmatch(r"`(data/.+)`", line)
        fields = re.match(r" {4}([0-9a-f]{4})  ((?:[0-9a-f]{2} ?){1,16})(?: |$)", line)
        if heading:
            current = listed.setdefault(heading[1], bytearray())
        elif fields:
            assert int(fields[1], 16) == len(current), line
            current += bytes.fromhex(fields[2])
    assert {name: bytes(data) for name, data in listed.items()} == snapshot(GOLDEN / "example")


def test_example_streams_in_the_document():
    text = (ROOT / "codec/FORMAT.md").read_text(encoding="utf-8")
    text = text[text.index("\n## Payload codings"):text.index("\n## Adaptive streams")]
    blocks = [re.findall(r"^ {4}((?:[0-9a-f]{2}(?: (?! )|(?=  )|$))+)", part, re.MULTILINE)
              for part in text.split("integers of 16 bits")[1:]]
    dense, sparse, framed = (bytes.fromhex("".join(lines)) for lines in (blocks[0][:1], *blocks[1:]))
    assert ckd_symbols.decode(dense, 8, 16, None) == [0, 1, 0, 65535, 0, 0, 5, 0]
    values = ckd_symbols.decode(sparse, 4096, 16, None)
    assert {i: v for i, v in enumerate(values) if v} == {1000: 7, 1001: 1, 4000: 65535}
    places = [divmod(i, 16) for i in range(4, 4 + 272)]
    assert ckd_symbols.decode(framed, 272, 16, None) == [1 + 4 * ((row >= 9) + (column >= 8)) for row, column in places]
    assert framed == make_handmade.FRAME_EXAMPLE


def test_example_run_stream_in_the_document():
    text = (ROOT / "codec/FORMAT.md").read_text(encoding="utf-8")
    text = text[text.index("\n#### Run streams"):text.index("\n#### Example\n")]
    stream, = re.findall(r"^ {4}((?:[0-9a-f]{2} ?)+)$", text, re.MULTILINE)
    assert ckd_symbols.decode(bytes.fromhex(stream), 20, 8, None) == [0, 0, 1, 0, 0, 254] + [0] * 14


@pytest.mark.parametrize("making", [make_library.make, make_library.make_frames, make_library.make_steps, make_library.make_gradients,
                                    make_library.make_runs, make_library.make_changes, make_lossy.make])
@pytest.mark.sampled(3)
def test_reader_reads_what_the_command_writes_now(tmp_path, making):
    """Other values than in the golden stores, so that the document describes the encoder of today as well."""
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    saved = making(command(), tmp_path / "store", seed)
    opened = ckd_reader.Store(tmp_path / "store")
    assert {f"{run}@{step}" for run, step in opened.manifests} == set(saved)
    for (run, step) in opened.manifests:
        checkpoint = opened.checkpoint(run, step)
        assert set(checkpoint.tensors) == set(saved[f"{run}@{step}"])
        for name, (_, shape, data) in saved[f"{run}@{step}"].items():
            assert checkpoint.tensor(name).tobytes() == data, name
            assert list(checkpoint.tensors[name].shape) == shape
    if making is make_library.make_steps:
        assert make_library.rules(opened) >= {1, 17, 35}
    if making is make_library.make_gradients:
        assert make_library.rules(opened) >= make_library.GRADIENT_RULES
    if making is make_library.make_frames:
        assert make_library.FRAMES <= make_library.coverage(opened)[1]
    if making is make_library.make_runs:
        assert "runs" in make_library.coverage(opened)[1]
    if making is make_library.make_changes:
        assert make_library.CHANGES <= make_library.coverage(opened)[1]
    if making is make_lossy.make:
        assert {"levels", "rows", "steps", "factor", "shared", "exceptions"} <= make_lossy.coverage(opened)[0]


def test_golden_stores_use_every_kind_of_stream():
    """Those that the library wrote, and of framed ones as many in the handmade store."""
    of = {name: make_library.coverage(ckd_reader.Store(GOLDEN / name))[1]
          for name in ("library", "library-2", "library-runs", "library-changes", "frames")}
    assert make_library.STREAMS <= of["library"] | of["library-2"]
    assert make_library.FRAMES <= of["library-2"] and "runs" in of["library-runs"]
    assert make_library.CHANGES <= of["library-changes"]
    parts = ("", ", shared bits", ", levels", ", shared bits, levels", ", shared bits, levels, phase")
    assert {"framed" + part for part in parts} <= of["frames"]


def test_golden_store_uses_every_part_of_lossy_blocks():
    parts, integers, kinds = make_lossy.coverage(ckd_reader.Store(GOLDEN / "library-lossy"))
    assert parts == make_lossy.PARTS and integers >= make_lossy.INTEGERS
    assert kinds >= {(predictor, dtype) for predictor in (0, 1) for dtype in (2, 3, 4)}


def test_golden_store_of_cells_shares_rows():
    assert make_lossy.coverage(ckd_reader.Store(GOLDEN / "cells"))[0] >= make_cells.PARTS


def test_handmade_stores_are_what_their_script_writes(tmp_path):
    """Compressed bytes may differ with another zstd, and so may hashes over them; what is in them may not."""
    subprocess.run([sys.executable, HERE / "make_handmade.py", tmp_path], check=True)
    for listed in ("handmade.json", "frames.json", "steps.json"):
        made = json.loads((tmp_path / listed).read_text(encoding="utf-8"))
        assert made == json.loads((GOLDEN / listed).read_text(encoding="utf-8"))
        for name in made:
            assert set(snapshot(tmp_path / name)) == set(snapshot(GOLDEN / name))


# --- optimizer steps that cannot be what they say: (what is wrong, "corrupt" or "unsupported")

def odd_group(change):
    data = bytearray(make_handmade.group_payload(17))
    return bytes(change(data))


def put_u16(data, at, value):
    data[at:at + 2] = struct.pack("<H", value)
    return data


ODD_GROUPS = {"no rule": (odd_group(lambda d: put_u16(d, 2, 0)), "unsupported"),
              "rule 11": (odd_group(lambda d: put_u16(d, 2, 11)), "unsupported"),
              "rule 37": (odd_group(lambda d: put_u16(d, 2, 37)), "unsupported"),
              "kind 0": (odd_group(lambda d: put_u16(d, 0, 0)), "unsupported"),
              "kind 4": (odd_group(lambda d: put_u16(d, 0, 4)), "unsupported"),
              "newer and longer": (odd_group(lambda d: put_u16(d, 2, 99) + b"more"), "unsupported"),
              "flags": (odd_group(lambda d: put_u16(d, 4, 2)), "corrupt"),
              "short": (odd_group(lambda d: d[:-1]), "corrupt"),
              "long": (odd_group(lambda d: d + b"x"), "corrupt"),
              "nearly nothing": (odd_group(lambda d: d[:3]), "corrupt"),
              "another rule's inputs": (odd_group(lambda d: put_u16(d, 2, 33)), "corrupt")}
ODD_BLOCKS = {"no group": lambda on: on[:-1], "only values": lambda on: on[:-1] + on[:1], "no inputs": lambda on: on[:1] + on[-1:],
              "too many": lambda on: on[:2] + on[1:], "nothing": lambda on: on[-1:], "a group first": lambda on: on[::-1],
              "itself": lambda on: on[:1] + [make_handmade.dependency(bytes(16))] + on[2:],
              "another's group": lambda on: on[:-1] + [make_handmade.dependency(
                  make_handmade.content_hash(make_handmade.group_payload(17)), kind=3, checkpoint=bytes(15) + b"1",
                  tensor="optimizer")],
              "a group that is missing": lambda on: on[:-1] + [make_handmade.dependency(bytes(16), kind=3, tensor="optimizer")]}


def odd_step(folder, group, change=None, dtype="f32"):
    """A step whose group or dependencies are changed; everything else, hashes included, is right."""
    store = make_handmade.Store(folder, "odd")
    ids, first, second, _ = make_handmade.step_scene(store)
    v = make_handmade.Tensor(ids[1], "exp_avg_sq.even", "f32", make_handmade.floats(4, 16, 1, 4, 4, 0), "exp_avg_sq")
    expected = make_handmade.floats(2, 6, 0.375, -3, 0.25, float("-inf"))
    after = make_handmade.Tensor(ids[1], "w", dtype, expected if dtype == "f32" else expected.view("<i4"))
    values = [(first["w"], ids[0], None), (second["exp_avg.w"], None, "exp_avg.w"), (v, None, v.name)]
    on = [make_handmade.dependency(make_handmade.content_hash(t.bits()), checkpoint=c, tensor=n) for t, c, n in values]
    on.append(make_handmade.dependency(make_handmade.content_hash(group), kind=3, tensor="optimizer"))
    more = {"dependencies": change(on)} if change else {}
    block = make_handmade.step_block(after, after.array, first["w"], [second["exp_avg.w"], v], group, **more)
    records = [second["exp_avg.w"].block(), v.block(), block, make_handmade.group_record(ids[1], group)]
    make_handmade.publish_steps(store, ids, first, records, [second["exp_avg.w"], v, after])


def check_refused(folder, how):
    opened = ckd_reader.Store(folder)
    with pytest.raises(Unsupported if how == "unsupported" else Corrupt):
        opened.checkpoint("run", 3).tensor("w")
    out = folder.parent / "out.safetensors"
    run = ckptdelta("load", folder, "--step", 3, "--out", out, "--tensor=w")
    assert run.returncode == 4, run.stderr
    assert ("newer" in run.stderr.decode()) == (how == "unsupported")
    assert not out.exists()
    assert ckptdelta("load", folder, "--step", 3, "--out", out, "--tensor=exp_avg*").returncode == 0


def test_steps_as_they_should_be(tmp_path):
    odd_step(tmp_path / "s", make_handmade.group_payload(17), lambda on: on)
    run = ckptdelta("verify", tmp_path / "s")
    assert run.returncode == 0, run.stdout + run.stderr
    assert ckd_reader.Store(tmp_path / "s").checkpoint("run", 3).tensor("w")[0] == 0x40000000


@pytest.mark.parametrize("name", ODD_GROUPS)
def test_odd_groups_are_refused(tmp_path, name):
    group, how = ODD_GROUPS[name]
    odd_step(tmp_path / "s", group)
    check_refused(tmp_path / "s", how)


@pytest.mark.parametrize("name", ODD_BLOCKS)
def test_steps_of_other_things_are_refused(tmp_path, name):
    odd_step(tmp_path / "s", make_handmade.group_payload(17), ODD_BLOCKS[name])
    check_refused(tmp_path / "s", "corrupt")


def test_steps_of_other_dtypes_are_refused(tmp_path):
    odd_step(tmp_path / "s", make_handmade.group_payload(17), dtype="i32")
    check_refused(tmp_path / "s", "corrupt")


# --- the command

@pytest.mark.parametrize("store", EXPECTED, indirect=True)
def test_command_lists_from_manifests_alone(store):
    expected = EXPECTED[store.name]
    before = snapshot(store)
    assert "catalog.db" not in before
    run = ckptdelta("list", store, "--json")
    assert run.returncode == 0, run.stderr
    listed = {f"{c['run']}@{c['step']}" for c in json.loads(run.stdout)["checkpoints"]}
    assert listed == set(expected["checkpoints"]) | set(expected.get("unsupported", {}))
    assert snapshot(store) == before


@pytest.mark.parametrize("store,key", CHECKPOINTS, indirect=["store"])
def test_command_gives_what_is_expected(store, key):
    expected = EXPECTED[store.name]["checkpoints"][key]["tensors"]
    run_name, step = split(key)
    out = store.parent / "out.safetensors"
    wanted = [f"--tensor={name}" for name in expected] if "unsupported" in EXPECTED[store.name] else []
    run = ckptdelta("load", store, "--run", run_name, "--step", step, "--out", out, *wanted)
    assert run.returncode == 0, run.stderr
    loaded = read_safetensors(out)
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        dtype, shape, data = loaded[name]
        assert dtype == SAFETENSORS.get(tensor["dtype"], tensor["dtype"].upper())
        assert shape == tensor["shape"]
        assert hashlib.sha256(data).hexdigest() == tensor["sha256"], name


@pytest.mark.parametrize("store,key,tensor,number", UNSUPPORTED, indirect=["store"])
def test_command_names_what_it_does_not_know(store, key, tensor, number):
    run_name, step = split(key)
    out = store.parent / "out.safetensors"
    before = snapshot(store)
    run = ckptdelta("load", store, "--run", run_name, "--step", step, "--out", out, f"--tensor={tensor}")
    assert run.returncode != 0
    assert number in run.stderr.decode()
    assert not out.exists()
    assert snapshot(store) == before


@pytest.mark.parametrize("store", ["handmade", "codings", "frames", "steps", "example", "library", "library-2",
                                   "library-steps", "library-gradients", "library-changes", "library-lossy", "bundles", "lossy", "links"], indirect=True)
def test_command_verifies(store):
    run = ckptdelta("verify", store, "--json")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("store", EXPECTED, indirect=True)
def test_rebuilding_the_catalog_removes_nothing(store):
    """Not even what this version cannot read, and what only that may name."""
    before = snapshot(store)
    ckptdelta("rebuild", store)
    after = snapshot(store)
    assert "catalog.db" in after
    kept = {name: data for name, data in before.items() if "/.tmp-" not in name}
    assert {name: after.get(name) for name in kept} == kept
