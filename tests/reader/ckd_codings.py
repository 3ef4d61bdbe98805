"""Payload codings and transformations of values, after codec/FORMAT.md. Part of the independent reader."""

import lz4.block
import numpy as np
import zstandard

import ckd_symbols
from ckd_errors import Corrupt, Unsupported

F64, F32, F16, BF16 = 1, 2, 3, 4
FLOATS = range(1, 7)
SIGNED = range(7, 11)
EXPONENT = {F32: (23, 8), F16: (10, 5), BF16: (7, 8), 5: (3, 4), 6: (2, 5)}  # bits below it, bits of it


def unzstd(data, size):
    """Exactly one frame of `size` bytes, whose header says so."""
    if data[:4] != b"\x28\xb5\x2f\xfd":
        raise Corrupt("not a zstd frame")
    try:
        if zstandard.get_frame_parameters(data).content_size != size:
            raise Corrupt("a zstd frame does not declare the raw size")
        out = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"zstd: {error}") from None
    if len(out) != size:
        raise Corrupt("a zstd frame has another size than declared")
    return out


def unlz4(data, size):
    try:
        out = lz4.block.decompress(data, uncompressed_size=size)
    except lz4.block.LZ4BlockError as error:
        raise Corrupt(f"LZ4: {error}") from None
    if len(out) != size:
        raise Corrupt("an LZ4 block gives another size")
    return out


def from_planes(data, width):
    count = len(data) // width
    return np.frombuffer(data, np.uint8).reshape(width, count).T.tobytes()


def decode(coding, payload, size, width, context):
    """Payload to `size` bytes: integers of `width` bytes."""
    if coding == 0:
        if len(payload) != size:
            raise Corrupt("a raw payload of another size")
        return payload
    if coding == 1:
        return unzstd(payload, size)
    if coding == 2:
        return unlz4(payload, size)
    if coding == 3:
        return from_planes(unzstd(payload, size), width)
    if coding == 4:
        return from_planes(unlz4(payload, size), width)
    if coding == 5:
        values = ckd_symbols.decode(payload, size // width, 8 * width, context)
        return b"".join(v.to_bytes(width, "little") for v in values)
    raise Unsupported(f"coding {coding}")


# --- transformations

def applied(previous, residual):
    return previous + residual


def unrotated(bits):
    one, rest = np.array(1, bits.dtype), np.array(8 * bits.itemsize - 1, bits.dtype)
    return bits >> one | bits << rest


def context(dtype, bits):
    """One byte for each element, from the values that the block builds on."""
    if dtype == F64:
        exponent = (bits >> np.array(52, bits.dtype) & np.array(2047, bits.dtype)).astype(np.int64) - 896
        return np.clip(exponent, 0, 255).astype(np.uint8)
    if dtype in EXPONENT:
        below, width = EXPONENT[dtype]
        return (bits >> np.array(below, bits.dtype) & np.array((1 << width) - 1, bits.dtype)).astype(np.uint8)
    size = 8 * bits.itemsize
    lengths = []
    for value in bits.tolist():
        if dtype in SIGNED and value >> (size - 1):
            value = (1 << size) - value
        lengths.append(value.bit_length())
    return np.array(lengths, dtype=np.uint8)


def rounded(source, target, bits):
    """Floats to a narrower float dtype, to nearest even."""
    if (source, target) == (F32, BF16):
        nan = (bits & 0x7fffffff) > 0x7f800000
        wide = bits.astype(np.uint64)
        near = wide + 0x7fff + (wide >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)
        return np.where(nan, 0x7fc0, near).astype("<u2")
    with np.errstate(over="ignore", invalid="ignore"):
        if (source, target) == (F32, F16):
            values = bits.view("<f4")
            return np.where(np.isnan(values), 0x7e00, values.astype("<f2").view("<u2")).astype("<u2")
        if (source, target) == (F64, F32):
            values = bits.view("<f8")
            return np.where(np.isnan(values), 0x7fc00000, values.astype("<f4").view("<u4")).astype("<u4")
    raise Corrupt(f"dtype {source} cannot be rounded to {target}")
