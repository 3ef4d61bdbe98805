"""Plain values come back with their types, from a record that JSON holds; what cannot be stored is named by its path."""

import collections
import enum
import io
import json
import math
import random
import struct

import numpy as np
import pytest

from support_python import ckptdelta, needs_package

pytestmark = needs_package

VALUES = {
    "none": None, "true": True, "zero": 0, "negative": -5, "largest": 2**63 - 1, "huge": 2**200 + 1, "minus huge": -(2**63) - 1,
    "float": 0.1, "tiny": 5e-324, "minus zero": -0.0, "infinity": float("inf"), "whole": 3.0, "complex": complex(1.5, -0.0),
    "empty": "", "text": "gr\u00fc\u00df \U0001f600 \"quoted\"", "half a pair": "\ud800", "bytes": bytes(range(256)), "bytearray": bytearray(b"ab"),
    "list": [1, [2.0, None], []], "tuple": (1, (2,), ()), "range": range(3, 30, 4), "set": {1, 2, "c"}, "frozenset": frozenset({(1, 2)}),
    "dict": {"a": {"b": []}, "": 0, "with.dots": 1}, "other keys": {1: "a", None: "b", (1, "x"): "c", 2.5: "d", True: "e", b"k": "f"},
    "ordered": collections.OrderedDict([("z", 1), ("a", 2)]), "counter": collections.Counter({3: 2, 5: 1}),
    "deque": collections.deque([1, 2, 3], maxlen=5), "int32": np.int32(-7), "float16": np.float16(0.5), "complex64": np.complex64(1 + 2j),
    "bool_": np.bool_(True), "str_": np.str_("word"), "bytes_": np.bytes_(b"raw"), "date": np.datetime64("2024-05-06", "D"),
    "like a tag": {"tensor": {"name": "x"}}, "python's generator": random.Random(5).getstate(),
    "numpy's generator": np.random.default_rng(3).bit_generator.state,
}


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


def types(value):
    """The value's types, through all its members."""
    if isinstance(value, dict):
        return type(value), [(types(k), types(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), [types(v) for v in value]
    return type(value)


def back(store, value, step=1):
    store.save({"value": value}, run="a", step=step)
    return store.state_dict(run="a", step=step)["value"]


def test_all_values_come_back_with_their_types(store):
    found = back(store, VALUES)
    assert found == VALUES
    assert types(found) == types(VALUES)
    assert math.copysign(1, found["minus zero"]) == -1 and found["deque"].maxlen == 5
    assert list(found["ordered"]) == ["z", "a"] and list(found) == list(VALUES)


def random_state(rng, depth):
    """A state of random shape, and an equal one whose arrays are zeros and whose plain values are others."""
    kind = rng.randrange(9 if depth else 3)
    if kind == 0:
        array = np.frombuffer(rng.randbytes(4 * rng.randrange(7)), "i4").copy()
        return array, np.zeros_like(array)
    if kind < 3:
        value = rng.choice([None, True, -1, 2**70, 0.5, "x.y", b"", (1, "a"), {1, 2}, {}, [], np.int8(4), {"k": 1, 2: "z"}])
        return value, rng.choice([None, 5, value])
    keys = rng.sample(["a", "b", "a.b", "", "long name", "\u00e9", "~2", "c"] + [1, (2, "x"), None, 1.5], rng.randrange(1, 5))
    pairs = [random_state(rng, depth - 1) for _ in keys]
    if kind < 6:
        return {k: p[0] for k, p in zip(keys, pairs)}, {k: p[1] for k, p in zip(keys, pairs)}
    made = list if kind < 8 else tuple
    return made(p[0] for p in pairs), made(p[1] for p in pairs)


def equal(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, (list, tuple)) else a == b


@pytest.mark.parametrize("seed", range(60))
def test_random_states_come_back_new_and_in_place(store, seed):
    rng = random.Random(seed)
    pairs = [random_state(rng, 4) for _ in range(3)]
    state, target = ({str(i): p[n] for i, p in enumerate(pairs)} for n in (0, 1))
    store.save(state, run="a", step=seed)
    assert equal(state, store.state_dict())
    store.load(target)
    assert equal(state, target)


def test_nan_keeps_its_bits(store):
    odd = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    assert struct.pack(">d", back(store, odd)) == bytes.fromhex("fff8000000000123")


def test_a_default_dict_and_a_file_in_memory_come_back(store):
    counts = collections.defaultdict(list, {"a": [1]})
    file = io.BytesIO(b"content")
    file.seek(3)
    nested = "end"
    for _ in range(ckptdelta._record.MAX_DEPTH - 3):
        nested = {"a": nested}
    assert back(store, nested, step=2) == nested
    found, read = back(store, (counts, file))
    assert found == {"a": [1]} and found["new"] == [] and type(found) is collections.defaultdict
    assert read.getvalue() == b"content"


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")
CYCLE = []
CYCLE.append(CYCLE)
DEEP = []
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize("value, path, says", [
    (object(), "x.1", "cannot be stored"), (Colour.RED, "x.1", "Colour"), (Point(1, 2), "x.1", "Point"), (CYCLE, "x.1.0", "contains itself"),
    (lambda: 0, "x.1", "function"), (DEEP, None, "nested more than 100 deep"), ({Colour.RED: 1}, "x.1", "key of the type"),
    (collections.defaultdict(lambda: 0), "x.1", "default is made by"), (np.array([object()]), "x.1", "dtype object"),
    (np.array(["text"]), "x.1", "dtype <U4"), (np.ma.masked_array([1.0], [True]), "x.1", "MaskedArray"),
    (np.zeros(2, "f4,i4"), "x.1", "cannot be stored"), (np.longdouble(1), "x.1", "cannot be stored"),
], ids=lambda v: str(type(v).__name__)[:20])
def test_what_cannot_be_stored_is_named_by_its_path(store, value, path, says):
    with pytest.raises(ckptdelta.InvalidError, match=says) as caught:
        store.save({"fine": np.zeros(3), "x": [0, value]}, run="a", step=1)
    assert path is None or caught.value.path == path and path in str(caught.value)
    assert store.checkpoints() == []


def test_the_record_is_json_without_pickle(store, monkeypatch):
    import pickle
    monkeypatch.setattr(pickle, "dumps", None)
    monkeypatch.setattr(pickle, "loads", None)
    assert back(store, VALUES) == VALUES


@pytest.mark.parametrize("state", [
    {"surprise": 1}, {"tensor": {"name": 5, "library": "numpy"}}, {"tensor": {"name": "x", "library": "os"}}, {"tensor": "x"},
    {"float": "zz"}, {"bytes": "*"}, {"dict": [[1]]}, {"map": []}, {"numpy": ["O", "AAAAAAAAAAA="]}, {"numpy": ["<f4", ""]}, {"range": [1]},
    {"int": "0xzz"}, {"a": 1, "b": 2}, {"tensor": {"name": "missing", "library": "numpy"}},
    {"optimizer": {"ids": [[0]], "names": [], "groups": [], "state": [], "more": {}}},
    {"optimizer": {"ids": [[0]], "names": [[None]], "groups": [{"map": {}}], "state": [[0, 9, {"map": {}}]], "more": {}}},
    {"deque": [-1, []]}, {"defaultdict": ["eval", []]}, {"torch": ["dtype", "load"]}, {"scalar": ["float32", "00"]},
], ids=lambda s: json.dumps(s)[:40])
def test_a_record_that_makes_no_sense_is_an_error(store, state):
    """The record is written as another version, or somebody else, might write it."""
    from ckptdelta import _store
    keep = _store.dump
    try:
        _store.dump = lambda root: json.dumps({"format": "ckptdelta.python", "version": 1, "state": {"map": {"x": state}}}).encode()
        store.save({"x": 1}, run="a", step=1)
    finally:
        _store.dump = keep
    with pytest.raises((ckptdelta.CorruptError, ckptdelta.UnsupportedError)):
        store.state_dict(run="a", step=1)


@pytest.mark.parametrize("record, error", [
    (b"{}", "CorruptError"), (b"\xff", "CorruptError"), (b"[" * 100000, "CorruptError"), (b"[]", "CorruptError"),
    (b'{"format": "ckptdelta.python", "version": 2, "state": null}', "UnsupportedError"),
    (b'{"format": "ckptdelta.python", "version": 1, "state": ' + b"[" * 900 + b"]" * 900 + b"}", "CorruptError"),
], ids=["no fields", "no text", "unclosed", "a list", "newer", "deep"])
def test_a_damaged_record_is_an_error(record, error):
    from ckptdelta import _record
    with pytest.raises(getattr(ckptdelta, error)):
        _record.parse(record)


def test_an_error_survives_pickling():
    import pickle
    error = ckptdelta.CorruptError("damaged", path="a.b", tensor="t", file="f", offset=7, sys_errno=5)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ckptdelta.CorruptError and vars(again) == vars(error) and str(again) == "damaged (tensor t, f, byte 7)"
