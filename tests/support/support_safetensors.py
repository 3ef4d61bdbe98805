"""Writes and reads the safetensors format independently of the command under test. Needs numpy only for
arrays.

A tensor is (dtype, shape, bytes). The dtype has the name that the format uses. Bytes are the elements in
little endian, row-major."""

import json
import struct

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
         "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
NUMPY = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8",
         "<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|b1": "BOOL"}


def tensor(array):
    """Converts a numpy array."""
    return NUMPY[array.dtype.str], list(array.shape), array.tobytes()


def header_bytes(header, pad=True):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if pad:
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write(path, tensors, metadata=None):
    """Writes tensors in the order of the dictionary. Numpy arrays are converted."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, value in tensors.items():
        dtype, shape, raw = value if isinstance(value, tuple) else tensor(value)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    path.write_bytes(header_bytes(header) + data)
    return path


def reject_duplicates(pairs):
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys), f"a key twice: {keys}"
    return dict(pairs)


def read(path):
    """Returns (tensors, metadata or None). Asserts everything that the format requires."""
    content = path.read_bytes()
    length, = struct.unpack("<Q", content[:8])
    assert length % 8 == 0 and 8 + length <= len(content)
    text = content[8:8 + length].decode()
    assert text.startswith("{") and text.rstrip(" ").endswith("}")
    header = json.loads(text, object_pairs_hook=reject_duplicates)
    data = content[8 + length:]
    metadata = header.pop("__metadata__", None)
    if metadata is not None:
        assert all(isinstance(k, str) and isinstance(v, str) for k, v in metadata.items())
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert set(entry) == {"dtype", "shape", "data_offsets"}
        size = SIZES[entry["dtype"]]
        begin, stop = entry["data_offsets"]
        assert begin == end, "a hole or an overlap"
        assert (8 + length + begin) % size == 0, "not aligned"
        elements = 1
        for n in entry["shape"]:
            elements *= n
        assert stop - begin == elements * size
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:stop])
        end = stop
    assert end == len(data)
    return tensors, metadata


def same(a, b):
    """Returns whether two sets of tensors are equal, in any order. Arrays are converted."""
    def plain(tensors):
        return {n: (v[0], list(v[1]), v[2]) if isinstance(v, tuple) else tensor(v) for n, v in tensors.items()}
    a, b = plain(a), plain(b)
    assert a.keys() == b.keys()
    for name in a:
        assert tuple(map(str, a[name][:2])) == tuple(map(str, b[name][:2])), name
        assert a[name][2] == b[name][2], f"{name}: other bits"
    return True
