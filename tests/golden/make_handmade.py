"""Writes the handmade stores in v1/: make_handmade.py [FOLDER]

Not written by the library, and not with its help: what stands here was worked out from codec/FORMAT.md, so that the library
and the independent reader are both held against a third party. Run it only to add a store: those in v1/ are kept as they are
(the same script writes the same bytes). What the stores contain goes into v1/handmade.json, that of later ones into a file each.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path

import numpy as np
import xxhash
import zstandard

BLOCK, SIDE, GROUP, BLOB = 1, 2, 3, 4
RAW, ZSTD = 0, 1
NONE, PARENT, COPY, CAST, STEP = 0, 1, 2, 3, 4
DTYPES = {"f64": (1, 8), "f32": (2, 4), "f16": (3, 2), "bf16": (4, 2), "f8e4m3": (5, 1), "f8e5m2": (6, 1),
          "i64": (7, 8), "i32": (8, 4), "i16": (9, 2), "i8": (10, 1), "u64": (11, 8), "u32": (12, 4), "u16": (13, 2),
          "u8": (14, 1), "bool": (15, 1)}
ROLES = {"weight": 1, "exp_avg": 2, "exp_avg_sq": 3, "master": 4, "other": 5}
CREATED = 1_700_000_000_000_000_000
NAN = float("nan")


def identity(label):
    """Ids are random in life; here they must be the same each time."""
    return hashlib.sha256(b"handmade " + label.encode()).digest()[:16]


ZERO = bytes(16)


def hash64(data):
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


def hash128(data):
    return xxhash.xxh3_128_digest(data)


def content_hash(data):
    return hash128(b"".join(hash64(data[i:i + 4096]) for i in range(0, len(data), 4096)))


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def varints(*values):
    return b"".join(varint(v) for v in values)


def name(text):
    return varint(len(text.encode())) + text.encode()


def string(text):
    return struct.pack("<H", len(text.encode())) + text.encode()


# --- regions: ("whole",), ("box", offsets, lengths), ("flat", start, count)

WHOLE = ("whole",)


def region_bytes(region):
    if region[0] == "whole":
        return varint(0)
    if region[0] == "box":
        return varints(1, *region[1], *region[2])
    return varints(2, region[1], region[2])


def select(values, region):
    """The region's elements of an array, in the region's order."""
    if region[0] == "box":
        return values[tuple(slice(o, o + n) for o, n in zip(region[1], region[2]))].reshape(-1)
    flat = values.reshape(-1)
    return flat if region[0] == "whole" else flat[region[1]:region[1] + region[2]]


# --- records

def dependency(content, kind=1, checkpoint=None, tensor=None, span=None):
    flags = (checkpoint is not None) | (tensor is not None) << 1 | (span is not None) << 2
    out = varint(kind) + bytes([flags])
    out += checkpoint if checkpoint is not None else b""
    out += name(tensor) if tensor is not None else b""
    out += region_bytes(span[0]) + varints(span[1], span[2]) if span is not None else b""
    return out + content


def record(checkpoint, tensor, payload, content, raw_size, kind=BLOCK, coding=RAW, predictor=NONE, role="weight",
           dtype=0, shape=(), region=WHOLE, first=0, count=0, depth=0, dependencies=(), chain_stored=None):
    """(header, payload)"""
    fields = varints(kind, coding, predictor, ROLES[role], dtype, len(shape), *shape) + region_bytes(region)
    fields += varints(first, count, raw_size, len(payload)) + hash64(payload) + content + checkpoint
    fields += varints(depth, len(payload) if chain_stored is None else chain_stored, 1000 + raw_size, raw_size)
    fields += name(tensor) + varint(len(dependencies)) + b"".join(dependencies)
    header = b"CKDR" + struct.pack("<I", 16 + len(fields)) + fields
    return header + hash64(header), payload


def compress(data):
    return zstandard.ZstdCompressor(level=19).compress(data)


class Tensor:
    """A tensor's bits as an array of unsigned integers, and what its records say of it."""

    def __init__(self, checkpoint, tensor, dtype, array, role="weight"):
        self.checkpoint, self.name, self.dtype, self.role = checkpoint, tensor, dtype, role
        self.array = array
        self.fixed = dict(role=role, dtype=DTYPES[dtype][0], shape=array.shape)

    def bits(self, region=WHOLE, first=0, count=None):
        part = select(self.array, region)
        return part[first:len(part) if count is None else first + count].tobytes()

    def block(self, region=WHOLE, first=0, count=None, coding=RAW, payload=None, **more):
        values = self.bits(region, first, count)
        if payload is None:
            payload = compress(values) if coding == ZSTD else values
        return record(self.checkpoint, self.name, payload, content_hash(values), len(values), region=region, first=first,
                      count=len(values) // DTYPES[self.dtype][1], coding=coding, **self.fixed, **more)


def residual(current, previous):
    """Differences of the bits, as integers of the same width."""
    return (current - previous).tobytes()


def blob(checkpoint, text, data, coding=RAW):
    payload = compress(data) if coding == ZSTD else data
    return record(checkpoint, text, payload, content_hash(data), len(data), kind=BLOB, coding=coding, role="other")


# --- files

def chunk_file(store, file, writer, records, gaps=None, compressed=True, required=0, optional=0, minor=0):
    """gaps: zero bytes in front of record number i."""
    gaps = gaps or {}
    head = b"\x89CKD\r\n\x1a\n" + struct.pack("<HHIQQ", 1, minor, 88, required, optional) + store + file + writer
    out, index = bytearray(head + hash64(head)), bytearray()
    for i, (header, payload) in enumerate(records):
        gap = gaps.get(i, 0)
        index += varint(gap) + header
        out += bytes(gap) + header + payload
    stored = compress(bytes(index)) if compressed else bytes(index)
    assert not compressed or len(stored) < len(index)
    root = hash128(bytes(index))
    footer = struct.pack("<QQQQ", len(out), len(stored), len(index), len(records)) + root + hash64(stored)
    footer += struct.pack("<I", int(compressed)) + b"CKDF"
    return bytes(out) + stored + footer + hash64(footer), root


def note(kind, store, payload, generation=0, features=0):
    out = b"\x89CKN\r\n\x1a\n" + struct.pack("<HHI", 1, kind, features) + store
    out += struct.pack("<II", generation, len(payload)) + payload
    return out + hash64(out)


def manifest(store, checkpoint, run, step, files, generation=0, parent=ZERO, resumed=ZERO, origin=ZERO, kind=1, depth=0,
             world=1, tensors=0, raw=0, metric=NAN, metric_name="", dependencies=(), totals=(), features=0, fidelity=1):
    payload = checkpoint + parent + resumed + origin + string(run) + struct.pack("<Q", step)
    payload += struct.pack("<HHIII", kind, fidelity, 0, depth, world)
    payload += struct.pack("<QQQdQd", tensors, raw, sum(f[2] for f in files), 1.0 + depth, CREATED + step % 1000, metric)
    payload += string(metric_name)
    payload += struct.pack("<I", len(dependencies)) + b"".join(dependencies)
    payload += struct.pack("<I", len(files)) + b"".join(f[0] + struct.pack("<IQ", f[1], f[2]) + f[3] for f in files)
    payload += struct.pack("<I", len(totals)) + b"".join(struct.pack("<IQQQ", *t) for t in totals)
    return note(2, store, payload, generation, features | (fidelity != 1))


class Store:
    def __init__(self, folder, label):
        self.folder, self.id, self.label = folder, identity(label + " store"), label
        self.expected = {"checkpoints": {}}
        self.put("data/store", note(1, self.id, struct.pack("<Q", CREATED)))

    def put(self, path, data):
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    def new_id(self, label):
        return identity(f"{self.label} {label}")

    def chunk(self, label, records, rank=0, keep=True, **options):
        """Writes a chunk file; what a manifest says of it. keep False: names a file that is not there."""
        file = self.new_id("file " + label)
        data, root = chunk_file(self.id, file, self.new_id("writer " + label), records, **options)
        if keep:
            self.put(f"data/c/{file.hex()}.ckd", data)
        return file, rank, len(data), root

    def publish(self, checkpoint, run, step, files, generation=0, **fields):
        data = manifest(self.id, checkpoint, run, step, files, generation, **fields)
        self.put(f"data/m/{run}.{step}.{generation}", data)

    def expect(self, run, step, tensors, blobs=()):
        """What a reader must find: digests of the bytes."""
        self.expected["checkpoints"][f"{run}@{step}"] = {
            "tensors": {t.name: {"role": t.role, "dtype": t.dtype, "shape": list(t.array.shape),
                                 "sha256": hashlib.sha256(t.bits()).hexdigest()} for t in tensors},
            "blobs": {n: hashlib.sha256(d).hexdigest() for n, d in blobs}}


# --- values: fixed, with everything that floats have

def noise(count, seed):
    """32 bits each, the same with every version of everything."""
    return np.array([int.from_bytes(hashlib.sha256(f"{seed} {i}".encode()).digest()[:4], "little")
                     for i in range(count)], dtype="<u4")


def f32_bits(count, seed):
    """Magnitudes from 2^-7 to 2."""
    bits = noise(count, seed)
    bits = (bits & 0x807fffff | (120 + (bits >> 27 & 7)) << 23).astype("<u4")
    special = np.array([0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00001, 0xffa00000, 0x00000001, 0x807fffff],
                       "<u4")
    bits[:len(special[:count])] = special[:count]
    return bits


def nearby(bits, seed):
    """A little later in training: most values move by some units in the last place, some not at all."""
    moves = (noise(bits.size, seed) % 81).reshape(bits.shape)
    return (bits + moves - np.array(40, "<u4")).astype("<u4")


def bf16_of(f32):
    """To nearest even; every NaN becomes 0x7fc0."""
    wide = f32.astype("u8")
    rounded = (wide + 0x7fff + (wide >> 16 & 1)) >> 16
    nan = (wide & 0x7fffffff) > 0x7f800000
    return np.where(nan, 0x7fc0, rounded).astype("<u2")


# --- the stores

def first_step(store):
    """A base: three regions of one tensor, several blocks, everything that a reader has no use for."""
    c = store.new_id("step 1")
    embed = Tensor(c, "embed.weight", "f32", f32_bits(24, 1).reshape(6, 4))
    left, right, rows = ("box", (0, 0), (3, 1)), ("box", (0, 1), (3, 3)), ("flat", 12, 12)
    bias = Tensor(c, "bias", "bf16", np.arange(0x3f80, 0x3f85, dtype="<u2"))
    long = Tensor(c, "long", "u8", np.arange(10, dtype="u1"), "other")
    step = Tensor(c, "step", "i64", np.array(2**64 - 1, "<u8"), "other")
    empty = Tensor(c, "empty", "f32", np.zeros((0, 3), "<u4"))
    zeros = Tensor(c, "zeros", "f64", np.zeros((5, 40), "<u8"), "exp_avg")
    config, rng = b'{"width": 4}', bytes(range(100)) * 3
    parts = [
        embed.block(right),
        embed.block(left),
        bias.block(),
        record(c, "embed.weight", b"statistics", content_hash(b"statistics"), 10, kind=SIDE, dtype=2, shape=(6, 4)),
        record(c, "embed.weight", b"?", content_hash(b"two"), 3, kind=SIDE, coding=999, dtype=2, shape=(6, 4)),
        record(c, "adamw", b"0.9 0.95", content_hash(b"0.9 0.95"), 8, kind=GROUP, role="other"),
        record(c, "bias", b"from the future", identity("anything"), 2**60, kind=200, coding=300, predictor=65535,
               dtype=4, shape=(5,), count=5, dependencies=[dependency(identity("what"), kind=40, tensor="elsewhere",
                                                                      span=(("flat", 70, 7), 3, 4))]),
        embed.block(rows, 0, 5),
        embed.block(rows, 5, 7),
        long.block(first=0, count=7),
        long.block(first=7, count=3),
        step.block(),
        empty.block(),
        zeros.block(coding=ZSTD),
        blob(c, "config", config),
        blob(c, "rng/état", rng, ZSTD),
    ]
    return c, parts, [embed, bias, long, step, empty, zeros], [("config", config), ("rng/état", rng)]


def second_step(store, before):
    """A delta: on values that lie in other blocks, a copy, a rounded copy, and part of another tensor."""
    c, old = store.new_id("step 2"), {t.name: t for t in before}
    was = old["embed.weight"]
    embed = Tensor(c, "embed.weight", "f32", nearby(was.array, 2))
    master = Tensor(c, "master.head", "f32", f32_bits(12, 3).reshape(3, 4), "master")
    head = Tensor(c, "head", "bf16", bf16_of(master.array))
    slice_ = Tensor(c, "slice", "f32", nearby(was.array.reshape(-1)[9:14].copy(), 4))
    long = Tensor(c, "long", "u8", (old["long"].array * 7 + 250).astype("u1"), "other")
    bias, empty = Tensor(c, "bias", "bf16", old["bias"].array), Tensor(c, "empty", "f32", old["empty"].array)

    def parent(tensor, previous, span=None, **more):
        values = previous.bits() if span is None else previous.bits(*span)
        current = tensor.array.reshape(-1)
        payload = residual(current, np.frombuffer(values, current.dtype))
        tensor_name = None if previous.name == tensor.name else previous.name
        on = dependency(content_hash(values), checkpoint=previous.checkpoint, tensor=tensor_name, span=span)
        return tensor.block(payload=payload, predictor=PARENT, depth=1, dependencies=[on], **more)

    def same(tensor, previous, predictor):
        elsewhere = None if previous.checkpoint == tensor.checkpoint else previous.checkpoint
        tensor_name = None if previous.name == tensor.name else previous.name
        on = dependency(content_hash(previous.bits()), checkpoint=elsewhere, tensor=tensor_name)
        return tensor.block(payload=b"", predictor=predictor, dependencies=[on])

    parts = [
        parent(embed, was),
        same(bias, old["bias"], COPY),
        master.block(coding=ZSTD, payload=compress(master.bits())) if len(compress(master.bits())) < 48
        else master.block(),
        same(head, master, CAST),
        parent(slice_, was, (("flat", 8, 10), 1, 5)),
        parent(long, old["long"]),
        empty.block(),
    ]
    return c, parts, [embed, bias, master, head, slice_, long, empty]


def third_step(store, second, tensors):
    """Two ranks; the first generation's files are gone, as after a compaction."""
    c, old = store.new_id("step 3"), {t.name: t for t in tensors}
    embed = Tensor(c, "embed.weight", "f32", nearby(old["embed.weight"].array, 5))
    values = old["embed.weight"]
    blocks = []
    for region, count in ((("box", (0, 0), (6, 2)), 12), (("box", (0, 2), (6, 2)), 12)):
        now = np.frombuffer(embed.bits(region), "<u4")
        before = np.frombuffer(values.bits(region), "<u4")
        on = dependency(content_hash(before.tobytes()), checkpoint=second)
        blocks.append(embed.block(region, payload=residual(now, before), predictor=PARENT, depth=2, dependencies=[on]))
        assert len(now) == count
    gone = store.chunk("step 3 before", [embed.block()], keep=False, compressed=False)
    files = [store.chunk("step 3 rank 0", blocks[:1], 0, compressed=False),
             store.chunk("step 3 rank 1", blocks[1:], 1, compressed=False)]
    store.publish(c, "hand.made", 3, [gone], 0, tensors=1, raw=96)
    store.publish(c, "hand.made", 3, files, 1, parent=second, kind=2, depth=2, world=2, tensors=1, raw=96,
                  dependencies=[second])
    store.expect("hand.made", 3, [embed])


def make_handmade(folder):
    store = Store(folder, "handmade")
    first, parts, tensors, blobs = first_step(store)
    second, more, later = second_step(store, tensors)
    both = store.chunk("steps 1 and 2", parts + more, gaps={1: 1, 9: 64, 20: 40}, optional=1 << 63, minor=3)
    raw = sum(len(t.bits()) for t in tensors) + sum(len(d) for _, d in blobs)
    store.publish(first, "hand.made", 1, [both], tensors=len(tensors), raw=raw, metric=2.5, metric_name="val_loss",
                  totals=[(1, 4, 106, 106), (2, 1, 1600, 20), (5, 2, 18, 18)])
    store.publish(second, "hand.made", 2, [both], parent=first, kind=2, depth=1, tensors=len(later),
                  raw=sum(len(t.bits()) for t in later), dependencies=[first])
    store.expect("hand.made", 1, tensors, blobs)
    store.expect("hand.made", 2, later)
    third_step(store, second, later)

    dead = store.new_id("step 4")
    gone = store.chunk("step 4", [Tensor(dead, "x", "u8", np.zeros(3, "u1")).block()], keep=False, compressed=False)
    store.publish(dead, "hand.made", 4, [gone])
    store.put("data/t/hand.made.4.0", note(3, store.id, dead + string("hand.made") + struct.pack("<Q", 4)))

    last = store.new_id("last")
    end = Tensor(last, "every.dtype.ends", "bool", np.array([[1], [0], [255]], "u1"), "other")
    file = store.chunk("last", [end.block()], compressed=False)
    store.publish(last, "other", 2**63 - 1, [file], origin=second, resumed=second, tensors=1, raw=3)
    store.expect("other", 2**63 - 1, [end])
    store.put("data/m/.tmp-" + "0" * 32, b"left by a writer that died")
    store.put("data/m/what.is.this", b"not a manifest's name")
    return store.expected


def make_codings(folder):
    """Each coding once, in payloads that were worked out by hand; the symbol streams are the examples of FORMAT.md."""
    store = Store(folder, "codings")
    c = store.new_id("step 1")
    dense = bytes.fromhex("0012000e3efe1f0556f3a2")
    sparse = bytes.fromhex("80 00 03 00 22 00 86 3e fb 1f 68 5f 3f 1c 67 db 09 bf e8 18")
    few = np.zeros(4096, "<u2")
    few[[1000, 1001, 4000]] = 7, 1, 2**16 - 1
    # One literal, a match of 58 bytes at distance 1, five literals: 64 times `a`.
    run = bytes([0x1f]) + b"a" + bytes([1, 0, 39, 0x50]) + b"aaaaa"
    # 32 times `a`, and 32 times `b`: the planes of 32 times 0x6261.
    two = bytes([0x1f]) + b"a" + bytes([1, 0, 12, 0x1f]) + b"b" + bytes([1, 0, 7, 0x50]) + b"bbbbb"
    planes = np.arange(0x4000, 0x4100, dtype="<u2")
    tensors = {
        Tensor(c, "dense", "i16", np.array([0, 1, 0, 2**16 - 1, 0, 0, 5, 0], "<u2")): (5, dense),
        # The same integers are these bits rotated left by one.
        Tensor(c, "rotated", "bf16", np.array([0, 0x8000, 0, 2**16 - 1, 0, 0, 0x8002, 0], "<u2")): (5, dense),
        Tensor(c, "sparse", "u16", few): (5, sparse),
        Tensor(c, "nothing", "f8e5m2", np.zeros(1 << 18, "u1")): (5, bytes([0x80, 0, 0])),
        Tensor(c, "lz4", "i64", np.frombuffer(b"a" * 64, "<u8")): (2, run),
        Tensor(c, "lz4.planes", "u16", np.full(32, 0x6261, "<u2")): (4, two),
        Tensor(c, "zstd", "f16", planes): (1, compress(planes.tobytes())),
        Tensor(c, "zstd.planes", "f16", planes):
            (3, compress(planes.astype("u1").tobytes() + (planes >> 8).astype("u1").tobytes())),
    }
    blocks = [tensor.block(coding=coding, payload=payload) for tensor, (coding, payload) in tensors.items()]
    store.publish(c, "run", 1, [store.chunk("all", blocks)], tensors=len(blocks),
                  raw=sum(len(t.bits()) for t in tensors))
    store.expect("run", 1, list(tensors))
    return store.expected


# --- framed streams, of integers that need no arithmetic: a table with one symbol takes no bits

def bit_fields(fields):
    """(value, bits) each, the lowest bits first."""
    number = at = 0
    for value, bits in fields:
        assert 0 <= value < 1 << bits
        number |= value << at
        at += bits
    return number.to_bytes((at + 7) // 8, "little")


def dense_stream(values, width, k, bias=0, tables=None, contexts=None):
    """SPLIT, one lane, 32 states. tables: {last context: symbol}, for one symbol each; without contexts {255: symbol}."""
    tables = tables or {255: 0}
    ends = sorted(tables)
    fields = [(1, 1), (int(contexts is not None), 1), (0, 2), (0, 3), (0, 1)]
    if contexts is not None:
        fields += [(len(ends) - 1, 4)] + [(end, 8) for end in ends[:-1]]
    fields += [(k, 6), (bias, width - k)] + [(tables[end], 8) for end in ends for _ in range(2)]
    payload = 1 << 5  # the mark and the lane's state, from the top down; then what each integer takes
    for i, value in enumerate(values):
        symbol = tables[next(end for end in ends if contexts is None or contexts[i] <= end)]
        assert value >> k == bias + symbol, (i, value)
        payload = payload << k | value & (1 << k) - 1
    return bit_fields(fields) + payload.to_bytes(payload.bit_length() // 8 + 1 - (payload.bit_length() % 8 == 0), "little")


def frame(shift, shared, columns=0, phase=0, levels=b""):
    head = bytes([0x81, shift]) + varints(shared, columns)
    return head + varints(phase, len(levels)) + levels if columns else head


def level_contexts(count, columns, phase, rows_levels, columns_levels):
    return [min(rows_levels[i // columns] + columns_levels[i % columns], 255) for i in range(phase, phase + count)]


def wide_noise(count, seed, bits):
    words = noise(2 * count, seed).astype("u8")
    return [int(v) >> 64 - bits for v in words[::2] << np.uint64(32) | words[1::2]]


def framed(count, width, k, seed, shift=0, shared=0, bias=0, columns=0, phase=0, levels=(), tables=None, level_bits=7):
    """(payload, integers) with noise for low bits; levels: those of the rows, then those of the columns."""
    lows, contexts, stream = wide_noise(count, seed, k) if k else [0] * count, None, b""
    symbols = [0] * count
    if columns:
        rows = (phase + count + columns - 1) // columns
        contexts = level_contexts(count, columns, phase, levels[:rows], levels[rows:])
        assert len(levels) == rows + columns <= count // 8
        stream = dense_stream(levels, 8, level_bits, tables={255: 0} if max(levels) < 128 else {255: 1})
        symbols = [tables[next(end for end in sorted(tables) if c <= end)] for c in contexts]
    inner = [bias + s << k | low for s, low in zip(symbols, lows)]
    payload = frame(shift, shared, columns, phase, stream) + dense_stream(inner, width, k, bias, tables, contexts)
    mask = (1 << width) - 1
    return payload, [(x << shift | shared) & mask for x in inner]


def back(integers, width):
    """Float values of these integers: rotated right by one."""
    return [x >> 1 | (x & 1) << width - 1 for x in integers]


FRAME_EXAMPLE = bytes.fromhex("81 02 01 10 04 0a 01 01 00 00 00 ff 00 ff 01 80"
                              "03 02 10 00 00 00 00 00 04 04 08 08 00 20")


def make_frames(folder):
    """Framed streams: shared bits, levels, both, in all widths; one is the example of FORMAT.md."""
    store = Store(folder, "frames")
    c, later = store.new_id("step 1"), store.new_id("step 2")
    tensors = {}

    def put(name, dtype, payload, integers, role="weight"):
        width = 8 * DTYPES[dtype][1]
        bits = back(integers, width) if dtype in ("f64", "f32", "bf16") else integers
        tensors[Tensor(c, name, dtype, np.array(bits, f"<u{width // 8}"), role)] = payload

    def lines(rows, columns, most, seed):
        return [int(v) % (most + 1) for v in noise(rows + columns, seed)]

    put("shared.u8", "u8", *framed(40, 8, 1, "u8", 7, 0x2a))
    put("shared.bf16", "bf16", *framed(333, 16, 9, "bf16", 1, 1, bias=60))  # all of them negative
    put("shared.f32", "f32", *framed(100, 32, 9, "f32", 17, 0, bias=60))  # bf16 values
    # What does not fit 64 bits is dropped: the bias is 2^39 + 7 of 40 bits.
    put("shared.i64", "i64", *framed(77, 64, 24, "i64", 40, 0xabcdef0123, bias=2**39 + 7))
    put("shared.nothing", "u16", *framed(99, 16, 10, "u16", bias=62))
    example = level_contexts(272, 16, 4, [0] * 9 + [1] * 9, [0] * 8 + [1] * 8)
    put("levels.example", "i16", FRAME_EXAMPLE, [4 * x + 1 for x in example])
    put("levels.u8", "u8", *framed(24 * 40, 8, 3, "l8", columns=40, levels=lines(24, 40, 127, 1),
                                   tables={99: 3, 180: 8, 255: 30}))
    put("levels.f32", "f32", *framed(6000 - 11, 32, 20, "l32", 1, 0, 900, columns=60, levels=lines(100, 60, 9, 2),
                                     tables={n: 3 * n for n in range(15)} | {255: 45}), "exp_avg_sq")
    put("levels.f64", "f64", *framed(5864, 64, 47, "l64", 2, 3, 1000, 300, 129, lines(20, 300, 40, 3),
                                     {30: 0, 31: 200, 255: 7}))
    # Sums of levels of 128 to 255 are 255, which has a table of its own.
    put("levels.many", "u16", *framed(31 * 33, 16, 4, "many", columns=33, levels=[128 + v for v in lines(31, 33, 127, 4)],
                                      tables={254: 1, 255: 2}))
    blocks = [t.block(coding=5, payload=payload) for t, payload in tensors.items()]
    store.publish(c, "run", 1, [store.chunk("all", blocks)], tensors=len(blocks), raw=sum(len(t.bits()) for t in tensors))
    store.expect("run", 1, list(tensors))

    # Under a delta contexts come from the levels as well, not from the values before.
    was = next(t for t in tensors if t.name == "levels.f32")
    payload, differences = framed(was.array.size, 32, 6, "delta", columns=60, levels=lines(100, 60, 9, 5),
                                  tables={5: 0, 11: 1, 255: 2})
    now = Tensor(later, was.name, "f32", (was.array + np.array(differences, "<u4")).astype("<u4"), "exp_avg_sq")
    on = dependency(content_hash(was.bits()), checkpoint=c)
    block = now.block(coding=5, payload=payload, predictor=PARENT, depth=1, dependencies=[on])
    store.publish(later, "run", 2, [store.chunk("delta", [block], compressed=False)], parent=c, kind=2, depth=1, tensors=1,
                  raw=len(now.bits()), dependencies=[c])
    store.expect("run", 2, [now])
    return store.expected


# --- optimizer steps: numbers that make every operation exact, so that all orders of them agree

HALVES = (0.5, 0.5, 0.5, 0.5, 0.75, 0.25, 0.5, 2.0, 0.0, 0.5, 4.0, 0.25, 1.0, 0.5, 0.5)


def group_payload(rule, kind=1, flags=0, step=3, coefficients=HALVES):
    hyper = (0.25, 0.5, 0.5, 0.0, 1.0, 0.5, 0.5)
    return struct.pack("<HHIQ22d", kind, rule, flags, step, *hyper, *coefficients)


def group_record(checkpoint, payload, coding=RAW):
    stored = compress(payload) if coding == ZSTD else payload
    return record(checkpoint, "optimizer", stored, content_hash(payload), len(payload), kind=GROUP, coding=coding, role="other")


def floats(*values):
    return np.array(values, "<f4").view("<u4")


def step_block(tensor, expected, before, inputs, payload, **more):
    """before, inputs: tensors. expected: what the step is expected to give, as floats; what it does not tell is the residual."""
    def on(values):
        return dependency(content_hash(values.bits()), checkpoint=None if values.checkpoint == tensor.checkpoint else
                          values.checkpoint, tensor=None if values.name == tensor.name else values.name)

    chosen = dependency(content_hash(payload), kind=3, tensor="optimizer")
    dependencies = [on(before), *map(on, inputs), chosen]
    return tensor.block(payload=residual(tensor.array, expected), predictor=STEP, depth=1,
                        **{"dependencies": dependencies, **more})


def moved(expected, by):
    """Values that are some units in the last place from what is expected of them."""
    return (expected + np.array(by, "<i4").astype("<u4")).astype("<u4")


def step_scene(store):
    """Two checkpoints, the first of them written: (ids, tensors by name and step)."""
    ids = store.new_id("step 2"), store.new_id("step 3")
    nan, inf = float("nan"), float("inf")
    values = {"exp_avg.w": (floats(1, -2, 0, 4, nan, inf), floats(2, 0, 0, 3, 1, 1)),
              "exp_avg_sq.w": (floats(8, 2, 0, 16, 1, 1), None),
              "w": (floats(4, 8, 0.5, -2, 1, 1), None)}
    # g = (m1 - m0) / 0.5 + m0 = 3, 2, 0, 2; v = 8 / 2 + 9 / 2, ...; NaN gives NaN, infinity as well, as it is taken from itself.
    square = floats(8.5, 3, 0, 10, nan, nan)
    square[4:] = 0x7fc00000
    first = {name: Tensor(ids[0], name, "f32", before, name.split(".")[0] if "." in name else "weight")
             for name, (before, _) in values.items()}
    second = {"exp_avg.w": Tensor(ids[1], "exp_avg.w", "f32", values["exp_avg.w"][1], "exp_avg")}
    return ids, first, second, square


def publish_steps(store, ids, first, later, tensors, gaps=None):
    blocks = [t.block() for t in first.values()]
    store.publish(ids[0], "run", 2, [store.chunk("before", blocks)], tensors=len(first), raw=72)
    store.publish(ids[1], "run", 3, [store.chunk("after", later, gaps=gaps)], parent=ids[0], kind=2, depth=1,
                  tensors=len(tensors), raw=sum(len(t.bits()) for t in tensors), dependencies=[ids[0]])
    store.expect("run", 2, list(first.values()))
    store.expect("run", 3, tensors)


def make_steps(folder):
    """Every rule of optimizer steps, in numbers worked out by hand."""
    store = Store(folder, "steps")
    ids, first, second, square = step_scene(store)
    c, m1, groups = ids[1], second["exp_avg.w"], {}
    blocks, tensors = [m1.block()], [m1]

    def put(tensor, expected, before, inputs, rule):
        groups[rule] = groups.get(rule) or group_payload(rule, 3 if rule > 32 else 1 + rule % 2, int(rule > 34))
        blocks.append(step_block(tensor, expected, before, inputs, groups[rule]))
        tensors.append(tensor)

    def start(name, values, role):
        """Of a tensor that only this rule has, the values of the step before."""
        first[name] = Tensor(ids[0], name, "f32", values, role)
        return first[name]

    for rule in range(1, 11):
        name = f"exp_avg_sq.{rule}" if rule > 1 else "exp_avg_sq.w"
        before = first.get(name) or start(name, first["exp_avg_sq.w"].array, "exp_avg_sq")
        square[5] = 0x7fc00000 if rule < 6 else 0x7f800000  # g = (m1 - m0 / 2) / 0.5 takes it from something else
        after = Tensor(c, name, "f32", moved(square, (0, 1, -1, rule, 0, 5)), "exp_avg_sq")
        put(after, square, before, [m1, first["exp_avg.w"]], rule)
    # v = 4, 16, 1, 4: roots 2, 4, 1, 2, halves of them 1, 2, 0.5, 1. keep 0.75, rate 0.5: x0 0.75 - 0.5 m / half.
    v = Tensor(c, "exp_avg_sq.even", "f32", floats(4, 16, 1, 4, 4, 0), "exp_avg_sq")
    blocks.append(v.block())
    tensors.append(v)
    weights = floats(3 - 1, 6 - 0, 0.375 - 0, -1.5 - 1.5, 0.75 - 0.5, float("-inf"))
    # Rule 21: x0 - 0.25 ((m / 0.5) / sqrt(v / 4) + x0).
    apex = floats(4 - 0.25 * (4 + 4), 8 - 0.25 * 8, 0.5 - 0.25 * 0.5, -2 - 0.25 * (6 - 2), 1 - 0.25 * (2 + 1), float("-inf"))
    for rule in range(17, 23):
        name = f"w.{rule}" if rule > 17 else "w"
        before = first.get(name) or start(name, first["w"].array, "weight")
        expected = apex if rule == 21 else weights
        put(Tensor(c, name, "f32", moved(expected, (0, 1, -1, rule, 0, 0))), expected, before, [m1, v], rule)
    # SGD: x0 - 0.25 u1; Nesterov: d = (u1 - 0.5 u0) / 0.5 + 0.5 u1 = 4, 2, 0, 3.5.
    for rule, change in ((33, (2, 0, 0, 3, 1, 1)), (34, (2, 0, 0, 3, 1, 1)), (35, (4, 2, 0, 3.5, 0, 0)), (36, (4, 2, 0, 3.5, 0, 0))):
        before = start(f"w.{rule}", first["w"].array, "weight")
        expected = floats(*(x - 0.25 * d for x, d in zip((4, 8, 0.5, -2, 1, 1), change)))
        if rule > 34:
            expected[4], expected[5] = 0x7fc00000, 0x7f800000  # from a momentum of NaN and infinity before
        put(Tensor(c, f"w.{rule}", "f32", moved(expected, (0, 1, -1, rule, 7, 0))), expected, before,
            [m1, first["exp_avg.w"]] if rule > 34 else [m1], rule)
    after = [group_record(c, payload, ZSTD if rule % 3 == 0 else RAW) for rule, payload in groups.items()]
    publish_steps(store, ids, first, blocks + after, tensors, gaps={3: 5})
    return store.expected


def make_needs_coding(folder):
    """A coding and a predictor that nobody knows, in blocks that are needed; the rest can be read."""
    store = Store(folder, "needs-coding")
    c = store.new_id("step 1")
    good = Tensor(c, "good", "i32", np.arange(6, dtype="<u4"))
    odd = Tensor(c, "odd", "f32", np.arange(6, dtype="<u4"))
    strange = Tensor(c, "strange", "f32", np.arange(6, dtype="<u4"))
    file = store.chunk("all", [good.block(), odd.block(coding=77), strange.block(predictor=9)])
    store.publish(c, "run", 1, [file], tensors=3, raw=72)
    store.expect("run", 1, [good])
    store.expected["unsupported"] = {"run@1": {"odd": "77", "strange": "9"}}
    return store.expected


def make_needs_feature(folder):
    """Required features: of a chunk file, and of a manifest."""
    store = Store(folder, "needs-feature")
    good, newer, newest = store.new_id("step 1"), store.new_id("step 2"), store.new_id("step 3")
    tensor = Tensor(good, "t", "u8", np.arange(3, dtype="u1"))
    store.publish(good, "run", 1, [store.chunk("1", [tensor.block()], compressed=False)], tensors=1, raw=3)
    store.expect("run", 1, [tensor])
    tensor = Tensor(newer, "t", "u8", np.arange(3, dtype="u1"))
    store.publish(newer, "run", 2, [store.chunk("2", [tensor.block()], compressed=False, required=1 << 5)], tensors=1)
    tensor = Tensor(newest, "t", "u8", np.arange(3, dtype="u1"))
    file = store.chunk("3", [tensor.block()], compressed=False)
    store.publish(newest, "run", 3, [file], tensors=1, features=1 << 9)
    store.expected["unsupported"] = {"run@2": {"t": "0x20"}}
    store.expected["unlisted"] = ["run@3"]
    return store.expected


def make_example(folder):
    """The smallest store that means something: FORMAT.md explains its bytes."""
    store = Store(folder, "example")
    c = store.new_id("step 7")
    tensor = Tensor(c, "w", "f32", np.array([1.0, -2.0, 0.5, 3.0], "<f4").view("<u4").reshape(2, 2))
    store.publish(c, "demo", 7, [store.chunk("w", [tensor.block()], compressed=False)], tensors=1, raw=16,
                  totals=[(1, 1, 16, 16)])
    store.expect("demo", 7, [tensor])
    return store.expected


def write_expected(path, expected):
    path.write_text(json.dumps(expected, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def main(argv):
    root = Path(argv[1]) if len(argv) > 1 else Path(__file__).resolve().parent / "v1"
    expected = {}
    for label, make in (("handmade", make_handmade), ("codings", make_codings), ("needs-coding", make_needs_coding),
                        ("needs-feature", make_needs_feature), ("example", make_example)):
        expected[label] = make(root / label)
    write_expected(root / "handmade.json", expected)
    write_expected(root / "frames.json", {"frames": make_frames(root / "frames")})
    write_expected(root / "steps.json", {"steps": make_steps(root / "steps")})


if __name__ == "__main__":
    main(sys.argv)
