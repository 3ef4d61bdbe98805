"""Lossy blocks made by hand from codec/FORMAT.md: what they mean, worked out on paper, and what is refused, by the command and by the
independent reader."""

import os
import re
import struct
import subprocess
from pathlib import Path

import pytest

import ckd_reader
import make_handmade
import support_safetensors
from ckd_errors import Corrupt, Unsupported
from make_handmade import Tensor, content_hash, dense_stream, dependency, floats, record, varint, varints

ROOT = Path(__file__).resolve().parents[2]
LATTICE, SIDE_KIND = 6, 2
ROWS, GRID, FACTOR, EXCEPTIONS, SHARED, SYMBOLS, SHARED_ROWS = 2, 4, 8, 16, 32, 64, 128
NAN, INF = float("nan"), float("inf")
SIDE = varint(4) + b"\0"  # of a matrix of four columns, without steps or factor
ROW_SIDE = bytes.fromhex("02010112")  # of two rows with steps: 4 quarter octaves, which double what the integers mean, and 0
# Spacing 1/2, steps of one unit. Offsets 0, 1/4 and 1/2: 0, 1, 2, 3 and 5 are 0, 1, 1.75, 2.5 and 4.5, to even 0, 1, 2, 2 and 4.
FRONT = bytes([0, 1, 0, 64, 128])
INTEGERS = (0, 1, 2, 3, 5, 0, 1, 1)
ALONE = (0, 0.5, 1, 1, 2, 0, 0.5, 1024)  # the last one is an exception
EXCEPTION = varints(1, 7) + struct.pack("<f", 1024)
# What moves is brought to the lattice first: 0.75 is 1.5 units, to even 2, and 1.25 is 2.5, to even 2; what does not stays as it is.
BEFORE = (0.3, 0.75, 1.25, NAN, INF, -0.0, 1e30, -3)
AFTER = (0.3, 1.5, 2, 1, 2, -0.0, 0.5, 1024)
# Levels with steps of two: 2^-10 is level 8 (127 - 10) = 936, born at 1016, which is 1. A zero that becomes 1 is at 1 as well.
LEVELS = bytes([1, 4]) + varint(2 * 1016)
SQUARES = (2.0**-10, 2.0**-10, 0, 0, NAN, 1, -0.0, 2.0**-149)
SQUARED = (2.0**-10, 2.0**-10 * 1.25, 1.25, 1.5, 2, 1, 1, 2.0**-126 * 1.625)  # the last one goes from level 1 to 13


def block(front=FRONT, form=GRID | SHARED | EXCEPTIONS, columns=varints(4, 0), more=EXCEPTION, q=INTEGERS, end=b""):
    return bytes([form]) + front + columns + more + b"\1" + dense_stream(q, 8, 7) + end


def shared(content=content_hash(SIDE), tensor=None, checkpoint=None, kind=SIDE_KIND):
    return dependency(content, kind=kind, tensor=tensor, checkpoint=checkpoint)


def scene(folder, alone=block(), delta=block(), on=None, side=True, values=(ALONE, AFTER), before=BEFORE, dtype="f32", required=0, rows=None,
          **more):
    """Step 1 holds what is built on; in step 2 `w` is a delta on it, and `x` stands alone. Everything but what is asked for is right."""
    store = make_handmade.Store(folder, "lossy")
    ids = store.new_id("step 1"), store.new_id("step 2")
    bits = [floats(*v).reshape(2, 4).view("<i4" if dtype == "i32" else "<u4") for v in (before, *values)]
    first = Tensor(ids[0], "w", dtype, bits[0])
    w, x = Tensor(ids[1], "w", dtype, bits[2]), Tensor(ids[1], "x", dtype, bits[1])
    in_w = [shared(content_hash(rows))] if rows else []
    of_w = [dependency(content_hash(first.bits()), checkpoint=ids[0]), *in_w, shared()] if on is None else on(first, ids)
    records = [w.block(payload=delta, coding=LATTICE, dependencies=of_w, depth=1, **{"predictor": 1, **more}),
               x.block(payload=alone, coding=LATTICE, dependencies=[shared(tensor="w")] if alone[0] & SHARED else [])]
    for raw in [SIDE] * side + [rows] * bool(rows):
        records.append(record(ids[1], "w", raw, content_hash(raw), len(raw), kind=SIDE_KIND, dtype=2, shape=(2, 4), count=8))
    store.publish(ids[0], "run", 1, [store.chunk("before", [first.block()], compressed=False)], tensors=1, raw=32)
    store.publish(ids[1], "run", 2, [store.chunk("after", records, compressed=False, required=required)], parent=ids[0], kind=2, fidelity=2, depth=1, tensors=2,
                  raw=64, dependencies=[ids[0]])
    return ckd_reader.Store(folder)


def command(*args):
    path = os.environ.get("CKPTDELTA")
    if not path:
        pytest.skip("CKPTDELTA does not name the command")
    return subprocess.run([path, *map(str, args)], capture_output=True, timeout=120, check=False)


def loaded(folder, name):
    out = folder.parent / f"{name}.safetensors"
    run = command("load", folder, "--step", 2, "--out", out, f"--tensor={name}")
    return run, support_safetensors.read(out)[0][name][2] if run.returncode == 0 else None


def check(folder, name, values):
    opened = ckd_reader.Store(folder)
    assert opened.checkpoint("run", 2).tensor(name).tobytes() == floats(*values).tobytes()
    run, data = loaded(folder, name)
    assert run.returncode == 0, run.stderr
    assert data == floats(*values).tobytes()


def test_what_is_worked_out_by_hand(tmp_path):
    scene(tmp_path / "s")
    check(tmp_path / "s", "x", ALONE)
    check(tmp_path / "s", "w", AFTER)
    run = command("verify", tmp_path / "s")
    assert run.returncode == 0, run.stdout + run.stderr


def test_levels(tmp_path):
    q = (0, 1, 2, 3, 5, 0, 1, 6)
    born = (1.0, 1.25, 1.5, 1.75, 2.5, 1.0, 1.25, 3.0)
    scene(tmp_path / "s", alone=bytes([1]) + LEVELS[1:] + b"\1" + dense_stream(q, 8, 7), before=SQUARES, values=(born, SQUARED),
          delta=bytes([1]) + LEVELS[1:] + b"\1" + dense_stream(q, 8, 7))
    check(tmp_path / "s", "x", born)
    check(tmp_path / "s", "w", SQUARED)


def test_integers_that_say_nothing(tmp_path):
    """Without a parent zeros come of them, with one its values, bit for bit."""
    scene(tmp_path / "s", alone=bytes([0]) + FRONT + b"\0", delta=bytes([0]) + FRONT + b"\0", values=((0,) * 8, BEFORE))
    check(tmp_path / "s", "x", (0,) * 8)
    check(tmp_path / "s", "w", BEFORE)


def test_example_in_the_document(tmp_path):
    text = (ROOT / "codec/FORMAT.md").read_text(encoding="utf-8")
    text = text[text.index("\n### Example of a lattice block"):]
    payload = bytes.fromhex("".join(re.findall(r"^ {4}((?:[0-9a-f]{2} )+) ", text, re.MULTILINE)))
    assert payload == block(form=EXCEPTIONS, columns=b"")
    scene(tmp_path / "s", alone=payload, delta=payload)
    check(tmp_path / "s", "x", ALONE)
    check(tmp_path / "s", "w", AFTER)


# Rows in a side record: the first row's steps are twice as long, so that its integers are 0, 2, 3.5 and 5 units, to even 0, 2, 4 and 5.
ROWS_FORM = GRID | SHARED | EXCEPTIONS | ROWS | SHARED_ROWS
ROWS_AFTER = (0.3, 2, 3, 2.5, 2, -0.0, 0.5, 1024)


def rows_scene(folder, form=ROWS_FORM, rows=ROW_SIDE, required=2, **more):
    return scene(folder, **{"delta": block(form=form), "values": (ALONE, ROWS_AFTER), "rows": rows, "required": required, **more})


def test_rows_in_a_side_record(tmp_path):
    rows_scene(tmp_path / "s")
    check(tmp_path / "s", "w", ROWS_AFTER)
    check(tmp_path / "s", "x", ALONE)
    run = command("verify", tmp_path / "s")
    assert run.returncode == 0, run.stdout + run.stderr


def test_shared_rows_need_their_feature(tmp_path):
    """Whoever does not know them would call the block corrupt: the file says it first."""
    with pytest.raises(Corrupt):
        rows_scene(tmp_path / "s", required=0).checkpoint("run", 2)
    run, _ = loaded(tmp_path / "s", "w")
    assert run.returncode == 4 and b"shares its rows" in run.stderr, run.stderr


def values_and(*more):
    return lambda first, ids: [dependency(content_hash(first.bits()), checkpoint=ids[0]), *(m(ids) if callable(m) else m for m in more)]


ODD = {
    "without its columns": dict(side=False),
    "without naming them": dict(on=values_and()),
    "values in their place": dict(on=values_and(shared(kind=1))),
    "a group in their place": dict(on=values_and(shared(kind=3))),
    "columns of other contents": dict(on=values_and(shared(content=bytes(16)))),
    "columns of the parent": dict(on=values_and(lambda ids: shared(checkpoint=ids[0]))),
    "columns in front of the values": dict(on=lambda first, ids: values_and(shared())(first, ids)[::-1]),
    "columns alone": dict(on=lambda first, ids: [shared()]),
    "another number of columns": dict(delta=block(columns=varints(5, 0))),
    "columns that it has, and says it has not": dict(delta=block(form=GRID)),
    "bytes at the end": dict(delta=block(end=b"\0")),
    "an integer too few": dict(delta=block(q=INTEGERS[:-1])),
    "an exception outside": dict(delta=block(more=varints(1, 8) + bytes(4))),
    "no exceptions": dict(delta=block(more=varints(0))),
    "a form that there is not": dict(delta=block(form=64 | GRID | SHARED | EXCEPTIONS)),
    "nothing": dict(delta=b""),
    "a form of the rows of a side record": dict(delta=block(form=ROWS_FORM)),
    "another dtype": dict(dtype="i32"),
    "other values": dict(values=(ALONE, AFTER[::-1])),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_blocks_are_refused(tmp_path, name):
    opened = scene(tmp_path / "s", **ODD[name])
    with pytest.raises(Corrupt):
        opened.checkpoint("run", 2).tensor("w")
    run, _ = loaded(tmp_path / "s", "w")
    assert run.returncode == 4 and b"newer" not in run.stderr, run.stderr
    assert command("verify", tmp_path / "s").returncode == 4


ODD_ROWS = {
    "rows that it does not say": dict(form=GRID | SHARED | EXCEPTIONS),
    "rows of nothing": dict(form=GRID | SHARED | EXCEPTIONS | SHARED_ROWS),
    "rows that it has": dict(form=GRID | SHARED | EXCEPTIONS | ROWS),
    "rows without columns": dict(form=GRID | EXCEPTIONS | ROWS | SHARED_ROWS, columns=varints(4, 0, 0)),
    "a factor that there is not": dict(form=ROWS_FORM | FACTOR, columns=varints(4, 0, 0)),
    "a factor of symbols": dict(form=ROWS_FORM | SYMBOLS),
    "another number of rows": dict(rows=varint(3) + b"\0"),
    "rows without steps": dict(rows=varint(2) + b"\0"),
    "rows that go on": dict(rows=ROW_SIDE + b"\0"),
    "rows that end": dict(rows=ROW_SIDE[:-1]),
    "rows that are missing": dict(on=values_and(shared(content=bytes(16)), shared())),
    "rows of the parent": dict(on=values_and(lambda ids: shared(content_hash(ROW_SIDE), checkpoint=ids[0]), shared())),
    "columns in front of rows": dict(on=values_and(shared(), shared(content_hash(ROW_SIDE)))),
}


@pytest.mark.parametrize("name", ODD_ROWS)
def test_odd_shared_rows_are_refused(tmp_path, name):
    more = dict(ODD_ROWS[name])
    columns = more.pop("columns", None)
    if columns is not None:
        more["delta"] = block(form=more.pop("form"), columns=columns)
    opened = rows_scene(tmp_path / "s", **more)
    with pytest.raises(Corrupt):
        opened.checkpoint("run", 2).tensor("w")
    run, _ = loaded(tmp_path / "s", "w")
    assert run.returncode == 4 and b"newer" not in run.stderr, run.stderr
    assert command("verify", tmp_path / "s").returncode == 4


@pytest.mark.parametrize("predictor", [4])
def test_unknown_pairs_of_coding_and_predictor(tmp_path, predictor):
    opened = scene(tmp_path / "s", predictor=predictor)
    with pytest.raises(Unsupported):
        opened.checkpoint("run", 2).tensor("w")
    run, _ = loaded(tmp_path / "s", "w")
    assert run.returncode == 4 and b"newer" in run.stderr, run.stderr
