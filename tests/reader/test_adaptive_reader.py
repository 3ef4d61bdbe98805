"""The independent reader's adaptive streams: it decodes what the library wrote, and refuses what is damaged."""

from pathlib import Path

import pytest

import ckd_adaptive
from ckd_errors import Corrupt, Unsupported


def known():
    """tests/codec/entropy/test_adaptive_known.c says what a line is."""
    out = {}
    for line in (Path(__file__).resolve().parents[1] / "golden" / "adaptive.txt").read_text(encoding="ascii").splitlines():
        name, *numbers, stream = line.split(" ")
        start, columns, phase, count, *rest = map(int, numbers)
        extra = rest[count:]
        assert len(extra) in (1, count), name
        out[name] = start, columns, phase, rest[:count], None if extra == [-1] else extra, bytes.fromhex(stream)
    return out


KNOWN = known()


def decode(name, stream):
    start, columns, phase, values, extra, _ = KNOWN[name]
    if start == 2:
        return ckd_adaptive.decode_plane(stream, len(values), columns, phase, extra)
    return ckd_adaptive.decode(stream, len(values), extra)


@pytest.mark.parametrize("name", KNOWN)
def test_known_streams(name):
    values, stream = KNOWN[name][3], KNOWN[name][5]
    assert decode(name, stream) == values
    with pytest.raises(Corrupt):
        decode(name, stream + b"\0")
    with pytest.raises(Corrupt):
        decode(name, b"")


def test_all_modes_are_known():
    first = [entry[5][0] for entry in KNOWN.values() if entry[0] == 2]
    assert {byte >> 4 & 3 for byte in first} == {0, 1, 2, 3}


def test_kinds():
    for decoder, streams in ((ckd_adaptive.decode, ("c0", "80")), (lambda s, n: ckd_adaptive.decode_plane(s, n, 1), ("c0", "00", "40"))):
        for stream in streams:
            with pytest.raises(Unsupported):
                decoder(bytes.fromhex(stream) + b"\1\2\3", 3)
    with pytest.raises(Corrupt):
        ckd_adaptive.decode_plane(bytes.fromhex("bff80000"), 3, 1)
    assert ckd_adaptive.decode(b"", 0) == [] == ckd_adaptive.decode_plane(b"", 0, 1)
    with pytest.raises(Corrupt):
        ckd_adaptive.decode(b"\0", 0)
