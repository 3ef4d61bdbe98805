"""Safetensors files, each of which breaks one rule of the format. Each is refused with status 4 and a message
that names it, and nothing is stored."""

import csv
import io
import json
import os
import struct
import subprocess

import numpy as np
import pytest

import support_safetensors as st
from support_cli import COMMAND, CORRUPT, FAILED, run, state, store  # noqa: F401


def entry(dtype="U8", shape=(1,), begin=0, end=1, **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def without(field):
    value = entry()
    del value[field]
    return value


# name: (header as an object or as bytes, data, what the message says)
CASES = {
    "not JSON": (b"{oops}", b"", "JSON"),
    "a list": (b"[]      ", b"", "'{'"),
    "empty": (b"", b"", "'{'"),
    "cut JSON": (b'{"a":', b"", "JSON"),
    "something behind it": (b"{} {}", b"", "JSON"),
    "NUL behind it": (b"{}\0\0", b"", "JSON"),
    "a tensor twice": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                       b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"xy", "duplicate"),
    "metadata key twice": (b'{"__metadata__":{"k":"1","k":"1"}}', b"", "duplicate"),
    "not UTF-8": (b'{"\xff\xfe":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", "JSON"),
    "NUL in a name": (b'{"a\\u0000b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", "JSON"),
    "half a surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", "JSON"),
    "metadata a list": ({"__metadata__": []}, b"", "__metadata__"),
    "metadata a number": ({"__metadata__": {"epoch": 3}}, b"", "'epoch'"),
    "metadata nested": ({"__metadata__": {"deep": {"k": "v"}}}, b"", "'deep'"),
    "no name": ({"": entry()}, b"x", "name"),
    "a long name": ({"n" * 1024: entry()}, b"x", "1024 bytes"),
    "entry a list": ({"a": []}, b"", "object"),
    "unknown field": ({"a": entry(scale=2)}, b"x", "'scale'"),
    "no dtype": ({"a": without("dtype")}, b"x", "dtype"),
    "dtype a number": ({"a": entry(dtype=1)}, b"x", "dtype"),
    "unknown dtype": ({"layer.w": entry(dtype="F8_E8M0")}, b"x", "F8_E8M0 of tensor 'layer.w'"),
    "four-bit dtype": ({"layer.w": entry(dtype="F4", shape=[2])}, b"x", "F4 of tensor 'layer.w'"),
    "complex dtype": ({"layer.w": entry(dtype="C64", end=8)}, bytes(8), "C64 of tensor 'layer.w'"),
    "no shape": ({"a": without("shape")}, b"x", "shape"),
    "negative length": ({"a": entry(shape=[-1])}, b"x", "shape"),
    "fractional length": ({"a": entry(shape=[1.0])}, b"x", "shape"),
    "length of 2^64": ({"a": entry(shape=[2 ** 64])}, b"x", "JSON"),
    "17 dimensions": ({"a": entry(shape=[1] * 17)}, b"x", "17 dimensions"),
    "2^40 + 1 elements": ({"a": entry(shape=[2 ** 40 + 1])}, b"x", "2^40"),
    "a product of 2^64": ({"a": entry(shape=[2 ** 32, 2 ** 32], end=0)}, b"", "2^40"),
    "a product of 2^64 + 1": ({"a": entry(shape=[641, 6700417, 4294967297])}, b"x", "2^40"),
    "no offsets": ({"a": without("data_offsets")}, b"x", "data_offsets"),
    "one offset": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"x", "data_offsets"),
    "negative offset": ({"a": entry(begin=-1, end=0)}, b"x", "data_offsets"),
    "offsets reversed": ({"a": entry(begin=1, end=0)}, b"x", "before they begin"),
    "end behind the file": ({"a": entry(shape=[2], end=2)}, b"x", "cut off"),
    "end far behind the file": ({"a": entry(shape=[2 ** 39], end=2 ** 39)}, b"x", "cut off"),
    "size of another dtype": ({"a": entry(dtype="F32", shape=[1], end=1)}, b"x", "shape and dtype need 4"),
    "size of another shape": ({"a": entry(shape=[2], end=1)}, b"x", "shape and dtype need 2"),
    "an overlap": ({"a": entry(shape=[2], end=2), "b": entry(shape=[2], begin=1, end=3)}, b"xyz", "overlap"),
    "the same data twice": ({"a": entry(), "b": entry()}, b"x", "overlap"),
    "an empty one inside": ({"a": entry(shape=[2], end=2), "b": entry(shape=[0], begin=1, end=1)}, b"xy", "overlap"),
    "a hole": ({"a": entry(), "b": entry(begin=2, end=3)}, b"xyz", "hole"),
    "a hole at the start": ({"a": entry(begin=1, end=2)}, b"xy", "hole"),
    "data at the end": ({"a": entry()}, b"xyz", "2 bytes after"),
    "data and no tensor": ({}, b"x", "1 bytes after"),
}


def save(store, path, **options):
    return run("save", store.path, "--run", "a", "--step", 1, path, **options)


@pytest.mark.parametrize("case", CASES)
def test_each_rule(store, case):
    header, data, says = CASES[case]
    path = store.folder / "bad.safetensors"
    path.write_bytes(st.header_bytes(header, pad=False) + data)
    refused = save(store, path, expect=CORRUPT)
    assert says in refused.err and str(path) in refused.err
    assert "\xff" not in refused.err
    assert not store.path.exists()


@pytest.mark.parametrize("length", [3, 100_000_000, 100_000_001, 2 ** 63, 2 ** 64 - 1])
def test_header_length(store, length):
    path = store.folder / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    assert f"header of {length} bytes" in save(store, path, expect=CORRUPT).err


@pytest.mark.parametrize("size", range(0, 8))
def test_files_too_short_for_a_header_length(store, size):
    path = store.folder / "bad.safetensors"
    path.write_bytes(bytes(size))
    assert f"{size} bytes" in save(store, path, expect=CORRUPT).err


def test_every_prefix_is_refused(store):
    """Every prefix of a good file is refused."""
    whole = st.write(store.folder / "good", {"a": ("F32", [2], bytes(8)), "b": ("I8", [1], b"x")}, {"k": "v"}).read_bytes()
    path = store.folder / "cut.safetensors"
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        save(store, path, expect=CORRUPT)
    path.write_bytes(whole + b"x")
    save(store, path, expect=CORRUPT)
    path.write_bytes(whole)
    save(store, path)


def test_terminal_escapes_in_names_are_not_printed(store):
    path = store.folder / "bad.safetensors"
    path.write_bytes(st.header_bytes({"\x1b[2J\x07": entry(dtype="F4")}) + b"x")
    refused = save(store, path, expect=CORRUPT)
    assert "\x1b" not in refused.err and "\x07" not in refused.err and "\\x1b[2J" in refused.err


def test_deep_nesting(store):
    path = store.folder / "bad.safetensors"
    path.write_bytes(st.header_bytes(b'{"a":' + b"[" * 1_000_000))
    save(store, path, expect=CORRUPT)


@pytest.mark.parametrize("start", [b"PK\3\4", b"\x80\2}", b"\x80\4"], ids=["zip", "pickle 2", "pickle 4"])
def test_a_file_of_torch_save(store, start):
    path = store.folder / "model.pt"
    path.write_bytes(start + bytes(range(100, 164)))
    assert "ckptdelta import" in save(store, path, expect=CORRUPT).err


def test_not_a_regular_file(store):
    fifo = store.folder / "fifo"
    os.mkfifo(fifo)
    assert "too short" in save(store, fifo, expect=CORRUPT).err  # no process writes to it
    assert "neither a regular file nor a pipe" in save(store, "/dev/null", expect=FAILED).err
    assert "a folder, not a safetensors file" in save(store, store.folder, expect=FAILED).err


def test_unusual_but_good(store):
    """Tensors in any order of names, with padding or without, an empty header, offsets of empty tensors at
    any boundary."""
    path = store.folder / "good.safetensors"
    path.write_bytes(st.header_bytes({"z": entry(begin=1, end=2), "a": entry(), "e": entry(shape=[0], begin=1, end=1),
                                      "s": entry(shape=[], begin=2, end=3)}, pad=False) + b"xyz")
    save(store, path)
    tensors, metadata = store.load()
    assert metadata is None
    assert {n: t[2] for n, t in tensors.items()} == {"z": b"y", "a": b"x", "e": b"", "s": b"z"}


NAMES = ["=cmd|'/c calc'!A1", "+1", "-1", "@SUM(A1)", "\u202eRTL", "line\u2028end", "\x9b31m", "\u200bhidden", "plain=1", "new\nline", "\U000e0041tag", "gr\u00f6\u00dfe"]


def test_names_are_no_terminal_escapes_or_formulas(store):
    tensors = {name: np.arange(96, dtype="f4") + i for i, name in enumerate(NAMES)}
    store.save(1, tensors)
    store.save(2, {name: values + 1 for name, values in tensors.items()})
    texts = [store.call("show", "-v"), store.call("diff", "a@1", "a@2", "-v"), store.call("report", "-v"),
             store.call("load", "--explain", "-v"), store.call("report", "--csv")]
    for result in texts:
        assert not any(c in result.out for c in "\u202e\u2028\x9b\u200b\x1b"), result.out
        assert "\\xe2\\x80\\xaeRTL" in result.out and "\\xc2\\x9b31m" in result.out
    shown = store.call("show", "--json")
    assert not any(c in shown.out for c in "\u202e\u2028\x9b\u200b\x1b") and "gr\u00f6\u00dfe" in shown.out
    assert {t["name"] for t in shown.json()["tensors"]} == set(NAMES)
    rows = list(csv.reader(io.StringIO(store.call("report", "--csv").out, newline=""), strict=True))
    cells = [cell for row in rows for cell in row]
    assert not any(cell[:1] in ("=", "+", "-", "@", "\t", "\r") for cell in cells if cell)
    for name in NAMES[:4]:
        assert "'" + name in cells
    assert "plain=1" in cells


def test_escapes_in_arguments_and_prices_are_not_printed(store, tmp_path):
    store.save(1, state(1, 1))
    evil = "\x1b[31m\u202e"
    for args in (["--step", evil], ["--" + evil], ["--run", evil]):
        failed = subprocess.run([COMMAND, "show", str(store.path), *args], capture_output=True, text=True, timeout=60)
        assert failed.returncode != 0
        assert "\x1b" not in failed.stderr and "\u202e" not in failed.stderr and failed.stderr.count("\\x1b[31m") >= 1
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"name": "n\x1b[2J", "date": "2026-01-01", "currency": "=E\x07", "per_gb_month": 0.02}))
    for args in ([], ["--csv"], ["-v"]):
        out = store.call("report", "--prices", prices, *args).out
        assert "\x1b" not in out and "\x07" not in out and "=E\\x07" in out
    assert "'=E\\x07" in store.call("report", "--prices", prices, "--csv").out
