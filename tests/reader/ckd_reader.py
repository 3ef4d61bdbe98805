"""An independent reader of ckptdelta stores, written from codec/FORMAT.md alone: it shares no code with the library.

    ckd_reader.py STORE                     lists checkpoints, their tensors and blobs, with the SHA-256 of their bytes
    ckd_reader.py STORE RUN@STEP            one checkpoint
    ckd_reader.py STORE RUN@STEP --dump NAME   the bytes of a tensor or blob to standard output
    ckd_reader.py STORE --json              the same list for programs

Checks every hash on the way. Slow and simple on purpose. Exit status: 0, 1 if something is damaged or not supported, 2
for wrong arguments.
"""

import argparse
import hashlib
import json
import re
import struct
import sys
from pathlib import Path

import numpy as np
import xxhash
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parent))
import ckd_codings  # noqa: E402
import ckd_lattice  # noqa: E402
import ckd_steps  # noqa: E402
from ckd_errors import Corrupt, Unsupported  # noqa: E402

DTYPES = {1: ("f64", 8), 2: ("f32", 4), 3: ("f16", 2), 4: ("bf16", 2), 5: ("f8e4m3", 1), 6: ("f8e5m2", 1), 7: ("i64", 8),
          8: ("i32", 4), 9: ("i16", 2), 10: ("i8", 1), 11: ("u64", 8), 12: ("u32", 4), 13: ("u16", 2), 14: ("u8", 1),
          15: ("bool", 1)}
ROLES = {1: "weight", 2: "exp_avg", 3: "exp_avg_sq", 4: "master", 5: "other"}
BLOCK, SIDE, GROUP, BLOB, BUNDLE, MEASURES, LINK = 1, 2, 3, 4, 5, 6, 7
RECORD_MIN, RECORD_MAX, MAX_ELEMENTS, MAX_CHAIN = 74, 2**20, 2**40, 4096
MAX_DEPTH = 256
RUN_NAME = re.compile(r"[A-Za-z0-9_~][A-Za-z0-9._~-]{0,127}")
NOTE_NAME = re.compile(r"(?s)(?P<run>.+)\.(?P<step>0|[1-9][0-9]{0,18})\.(?P<generation>0|[1-9][0-9]{0,9})")


def hash64(data):
    return xxhash.xxh3_64_intdigest(data)


def hash128(data):
    return xxhash.xxh3_128_digest(data)


def content_hash(data):
    pages = (data[i:i + 4096] for i in range(0, len(data), 4096))
    return hash128(b"".join(struct.pack("<Q", hash64(p)) for p in pages))


def utf8(data):
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Corrupt("a text is not UTF-8") from None
    if "\0" in text:
        raise Corrupt("a text contains NUL")
    return text


class Cursor:
    """Reads fields; refuses to read beyond the end."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def left(self):
        return len(self.data) - self.at

    def take(self, size):
        if size > self.left():
            raise Corrupt("a structure ends early")
        self.at += size
        return self.data[self.at - size:self.at]

    def u8(self):
        return self.take(1)[0]

    def u16(self):
        return int.from_bytes(self.take(2), "little")

    def u32(self):
        return int.from_bytes(self.take(4), "little")

    def u64(self):
        return int.from_bytes(self.take(8), "little")

    def f64(self):
        return struct.unpack("<d", self.take(8))[0]

    def id(self):
        return self.take(16)

    def nonzero_id(self):
        value = self.id()
        if not any(value):
            raise Corrupt("an identity is zero")
        return value

    def varint(self, limit=2**64 - 1):
        value = 0
        for i in range(10):
            byte = self.u8()
            value |= (byte & 127) << 7 * i
            if byte < 128:
                if byte == 0 and i > 0 or value > limit:
                    raise Corrupt("a number is too large or not in its shortest form")
                return value
        raise Corrupt("a number is too long")

    def string(self, limit):
        size = self.u16()
        if size > limit:
            raise Corrupt("a text is too long")
        return utf8(self.take(size))

    def name(self):
        size = self.varint(1023)
        if size == 0:
            raise Corrupt("a name is empty")
        return utf8(self.take(size))

    def array(self, size, read):
        count = self.u32()
        if count * size > self.left():
            raise Corrupt("an array is longer than its file")
        return [read(self) for _ in range(count)]

    def end(self):
        if self.left():
            raise Corrupt("there are bytes that mean nothing")


# --- notes

STORE, MANIFEST, TOMBSTONE = 1, 2, 3


def open_note(path, kind, store=None):
    """(store id, generation, required features, cursor over the payload)"""
    data = path.read_bytes()
    if not 48 <= len(data) <= 64 << 20 or data[:8] != b"\x89CKN\r\n\x1a\n":
        raise Corrupt(f"{path}: not a note")
    if int.from_bytes(data[-8:], "little") != hash64(data[:-8]):
        raise Corrupt(f"{path}: checksum")
    head = Cursor(data)
    head.take(8)
    version, found, features, of_store = head.u16(), head.u16(), head.u32(), head.id()
    generation, size = head.u32(), head.u32()
    if version != 1:
        raise Unsupported(f"{path}: note version {version}")
    if found != kind:
        raise Unsupported(f"{path}: a note of kind {found} instead of {kind}")
    if features & ~(7 if kind == MANIFEST else 0):
        raise Unsupported(f"{path}: required features {features:#x}")
    if store is not None and of_store != store:
        raise Corrupt(f"{path}: belongs to another store")
    if size != len(data) - 48:
        raise Corrupt(f"{path}: size")
    return of_store, generation, features, Cursor(head.take(size))


class File:
    def __init__(self, c):
        self.id, self.rank, self.size, self.root = c.nonzero_id(), c.u32(), c.u64(), c.take(16)


class Manifest:
    def __init__(self, path, store):
        _, self.generation, features, c = open_note(path, MANIFEST, store)
        self.id, self.parent, self.resumed, self.origin = c.nonzero_id(), c.id(), c.id(), c.id()
        self.run, self.step = c.string(128), c.u64()
        if not RUN_NAME.fullmatch(self.run) or self.step >= 2**63:
            raise Corrupt(f"{path}: run or step")
        self.kind, self.fidelity = c.u16(), c.u16()
        if self.kind not in (1, 2, 3) or self.fidelity not in (1, 2, 3):
            raise Unsupported(f"{path}: checkpoint kind {self.kind}, fidelity {self.fidelity}")
        if features & 1 != (self.fidelity != 1):
            raise Corrupt(f"{path}: fidelity {self.fidelity} with required features {features:#x}")
        self.lossy_resumes, self.depth, self.world = c.u32(), c.u32(), c.u32()
        self.tensors, self.raw, self.stored, self.cost = c.u64(), c.u64(), c.u64(), c.f64()
        self.created, self.metric, self.metric_name = c.u64(), c.f64(), c.string(31)
        self.dependencies = c.array(16, Cursor.nonzero_id)
        self.own = c.array(44, File)
        self.totals = c.array(28, lambda c: (c.u32(), c.u64(), c.u64(), c.u64()))
        self.own_only = bool(self.dependencies) and not features & 2
        self.files = self.own + (c.array(44, File) if features & 2 else [])
        if len({f.id for f in self.files}) != len(self.files) and features & 2:
            raise Corrupt(f"{path}: a chunk file twice")
        self.suspect = c.u32() if features & 4 else 0
        if features & 4 and not self.suspect:
            raise Corrupt(f"{path}: suspect for no reason")
        c.end()


# --- records

class Region:
    """offsets and lengths of a box, or start and count of a flat range; `kind` 0 is the whole tensor."""

    def __init__(self, c, ndim):
        self.kind = c.varint(65535)
        if self.kind > 2:
            raise Unsupported(f"region kind {self.kind}")
        self.offsets = [c.varint() for _ in range(ndim if self.kind == 1 else 0)]
        self.lengths = [c.varint() for _ in range(ndim if self.kind == 1 else 0)]
        self.start, self.count = (c.varint(), c.varint()) if self.kind == 2 else (0, 0)
        self.key = (self.kind, tuple(self.offsets), tuple(self.lengths), self.start, self.count)

    def elements(self, shape):
        """How many elements of a tensor of this shape; Corrupt if it does not lie inside."""
        total = product(shape)
        if self.kind == 0:
            return total
        if self.kind == 2:
            if self.start + self.count > total:
                raise Corrupt("a flat range does not lie inside its tensor")
            return self.count
        if len(shape) != len(self.offsets) or any(o + n > s for o, n, s in zip(self.offsets, self.lengths, shape)):
            raise Corrupt("a box does not lie inside its tensor")
        return product(self.lengths)

    def positions(self, shape):
        """The places in the tensor's row-major order of the region's elements, in the region's order."""
        count = self.elements(shape)
        if self.kind == 0:
            return np.arange(count)
        if self.kind == 2:
            return np.arange(self.start, self.start + count)
        places = np.zeros(1, dtype=np.int64)
        for offset, length, size in zip(self.offsets, self.lengths, shape):
            places = (places[:, None] * size + np.arange(offset, offset + length)[None, :]).reshape(-1)
        return places


def product(shape):
    """Elements of a shape; the limit holds without the dimensions of size 0."""
    total = capped = 1
    for size in shape:
        total *= size
        capped *= size or 1
    if capped > MAX_ELEMENTS:
        raise Corrupt("a tensor is too large")
    return total


class Dependency:
    """As it stands in a record's header; in bundles the same fields come one by one."""

    def __init__(self, c, record):
        self.read_kind(c)
        self.read_flags(c)
        self.read_checkpoint(c, record)
        self.read_tensor(c, record)
        self.read_span(c, record)
        self.content = c.take(16)
        self.check(record)

    def read_kind(self, c):
        self.kind = c.varint(65535)

    def read_flags(self, c):
        self.flags = c.u8()
        if self.flags > 7:
            raise Corrupt("a dependency has unknown flags")

    def read_checkpoint(self, c, record):
        self.checkpoint = c.nonzero_id() if self.flags & 1 else record.checkpoint

    def read_tensor(self, c, record):
        self.tensor = c.name() if self.flags & 2 else record.name

    def read_span(self, c, record):
        self.own_span = not self.flags & 4
        if self.flags & 4:
            self.region, self.first, self.count = Region(c, len(record.shape)), c.varint(), c.varint()

    def check(self, record):
        flags = self.flags
        if flags & 4:
            self.check_span()
        else:
            self.region, self.first, self.count = record.region, record.first, record.count
        if (flags & 1 and self.checkpoint == record.checkpoint or flags & 2 and self.tensor == record.name or
                flags & 4 and (self.region.key, self.first, self.count) ==
                (record.region.key, record.first, record.count)):
            raise Corrupt("a dependency says what is as in its record")

    def check_span(self):
        limit = MAX_ELEMENTS
        if self.region.kind == 1:
            product([o + n for o, n in zip(self.region.offsets, self.region.lengths)])
            limit = product(self.region.lengths)
        elif self.region.kind == 2:
            limit = self.region.count
            if self.region.start + limit > MAX_ELEMENTS:
                raise Corrupt("a dependency's range is too large")
        if self.first + self.count > limit:
            raise Corrupt("a dependency's elements do not lie inside its region")


class Record:
    """A record header, from a cursor that stands on it."""

    def __init__(self, c):
        start = c.at
        if c.left() < RECORD_MIN or c.take(4) != b"CKDR":
            raise Corrupt("no record header")
        size = c.u32()
        if not RECORD_MIN <= size <= RECORD_MAX:
            raise Corrupt("size of a record header")
        c.at = start
        self.header = c.take(size)
        if int.from_bytes(self.header[-8:], "little") != hash64(self.header[:-8]):
            raise Corrupt("checksum of a record header")
        self.read_fields(Cursor(self.header[8:-8]))
        self.check()

    def read_fields(self, c):
        self.kind, self.coding, self.predictor = c.varint(65535), c.varint(65535), c.varint(65535)
        self.role, self.dtype, ndim = c.varint(65535), c.varint(65535), c.varint(16)
        self.shape = tuple(c.varint() for _ in range(ndim))
        self.region = Region(c, ndim)
        self.first, self.count, self.raw_size, self.stored_size = c.varint(), c.varint(), c.varint(), c.varint()
        self.checksum, self.content, self.checkpoint = c.u64(), c.take(16), c.nonzero_id()
        self.depth, self.chain_stored = c.varint(2**32 - 1), c.varint()
        self.chain_work, self.base_stored = c.varint(), c.varint()
        self.name = c.name()
        count = c.varint(1024)
        if count * 18 > c.left():
            raise Corrupt("more dependencies than there is room for")
        self.dependencies = [Dependency(c, self) for _ in range(count)]
        c.end()

    def check(self):
        elements = self.region.elements(self.shape)
        if self.first + self.count > elements:
            raise Corrupt("elements do not lie inside their region")
        limit = {SIDE: 2**26, GROUP: 2**20, BLOB: 2**30, BUNDLE: 2**24, MEASURES: 2**24}.get(self.kind, 2**64)
        if self.raw_size > limit or BLOCK <= self.kind <= LINK and self.stored_size > self.raw_size:
            raise Corrupt("sizes of a record")
        names = {BUNDLE: "bundle", MEASURES: "measures"}
        if self.kind in names and (
                (self.role, self.dtype, self.shape, self.region.kind, self.name) != (5, 0, (), 0, names[self.kind]) or
                self.predictor or self.first or self.count or self.dependencies):
            raise Corrupt(f"header of {names[self.kind]}")
        if self.kind == BUNDLE and (self.stored_size != self.raw_size or any((
                self.coding, self.depth, self.chain_stored, self.chain_work, self.base_stored))):
            raise Corrupt("header of a bundle")
        if self.kind not in (BLOCK, LINK):
            return
        if self.dtype not in DTYPES or self.role not in ROLES:
            raise Unsupported(f"tensor {self.name}: dtype {self.dtype}, role {self.role}")
        if self.count > 2**18 or (self.count == 0) != (elements == 0):
            raise Corrupt("number of elements of a block")
        if self.raw_size != self.count * DTYPES[self.dtype][1]:
            raise Corrupt("raw size of a block")
        if self.predictor in (1, 2, 3, 4) and not self.dependencies:
            raise Corrupt("a predicted block names no dependency")
        if self.predictor in (2, 3) and (self.stored_size or self.coding):
            raise Corrupt("a copy has a payload")


def hint(low, high):
    code = low | high << 8
    if code > 14591:
        raise Corrupt("a hint is too large")
    return code if code < 512 else (256 + code % 256) << code // 256 - 1


class Bundled(Record):
    """A record of a bundle; its fields are filled in column by column."""

    def __init__(self, bundle):
        self.bundle, self.checkpoint, self.chunk, self.at = bundle, bundle.checkpoint, bundle.chunk, None

    def complete(self):
        elements = self.region.elements(self.shape)
        self.count = elements - self.first - self.left
        if self.kind == BUNDLE or self.count < 0:
            raise Corrupt("kind or elements of a record in a bundle")
        if self.kind == BLOCK:
            self.raw_size = self.count * DTYPES[self.dtype][1] if self.dtype in DTYPES else self.stored_size
        self.chain_stored, self.base_stored = self.hints[0] + self.stored_size, self.hints[2] + self.stored_size
        self.chain_work = self.hints[1]
        for d in self.dependencies:
            d.check(self)
        self.check()


def read_bundle(bundle, data, outside, least):
    """[(records outside of bundles before it, record)] of a bundle's payload."""
    c = Cursor(data)
    count, raw_size, stored, hash_count = c.u32(), c.u32(), c.u32(), c.u32()
    if not 1 <= count <= 4096 or raw_size > 2**24 or stored > raw_size or not count <= hash_count <= 2**18:
        raise Corrupt("numbers in front of a bundle")
    heads, hashes = c.take(stored), [c.take(16) for _ in range(hash_count)]
    covered = c.at
    if c.u64() != hash64(data[:covered]):
        raise Corrupt("checksum of a bundle's heads")
    columns = Cursor(heads if stored == raw_size else ckd_codings.unzstd(heads, raw_size))
    records = [Bundled(bundle) for _ in range(count)]
    read_columns(columns, records, hash_count - count)
    dependencies = [d for r in records for d in r.dependencies]
    for r, content in zip(records + dependencies, hashes):
        r.content = content
    before, out = 0, []
    for r in records:
        before += r.place
        if not least <= before <= outside:
            raise Corrupt("the place of a record of a bundle")
        r.at = bundle.at + c.at
        r.checksum = hash64(c.take(r.stored_size))  # what is found: damage shows in the content hash
        r.complete()
        out.append((before, r))
    c.end()
    return out


def read_columns(c, records, dependency_count):
    def column(field, read):
        for r in records:
            setattr(r, field, read(r))

    column("place", lambda r: c.varint())
    for field in ("kind", "coding", "predictor", "role", "dtype"):
        column(field, lambda r: c.varint(65535))
    column("ndim", lambda r: c.varint(16))
    column("shape", lambda r: tuple(c.varint() for _ in range(r.ndim)))
    column("region", lambda r: Region(c, r.ndim))
    column("first", lambda r: c.varint())
    column("left", lambda r: c.varint())
    column("raw_size", lambda r: None if r.kind == BLOCK else c.varint())
    column("stored_size", lambda r: c.varint())
    column("depth", lambda r: c.varint(2**32 - 1))
    bytes_of = [[c.u8() for _ in records] for _ in range(6)]
    for i, r in enumerate(records):
        r.hints = [hint(bytes_of[k][i], bytes_of[k + 1][i]) for k in (0, 2, 4)]
    column("name", lambda r: c.name())
    column("dependencies", lambda r: [Dependency.__new__(Dependency) for _ in range(c.varint(1024))])
    if sum(len(r.dependencies) for r in records) != dependency_count:
        raise Corrupt("number of dependencies in a bundle")
    for read in (lambda d, r: d.read_kind(c), lambda d, r: d.read_flags(c), lambda d, r: d.read_checkpoint(c, r),
                 lambda d, r: d.read_tensor(c, r), lambda d, r: d.read_span(c, r)):
        for r in records:
            for d in r.dependencies:
                read(d, r)
    c.end()


# --- chunk files

class Chunk:
    def __init__(self, path, store, expected):
        if not path.is_file():
            raise Corrupt(f"{path}: missing")
        self.path, self.data = path, path.read_bytes()
        try:
            self.read_header(store, expected)
            self.read_footer(expected)
        except (Corrupt, Unsupported) as error:
            raise type(error)(f"{path}: {error}") from None

    def read_header(self, store, expected):
        data = self.data
        if len(data) < 160 or data[:8] != b"\x89CKD\r\n\x1a\n":
            raise Corrupt("not a chunk file")
        c = Cursor(data)
        c.take(8)
        major, _, size, required, _ = c.u16(), c.u16(), c.u32(), c.u64(), c.u64()
        of_store, file, _ = c.id(), c.id(), c.id()
        if size == 88 and c.u64() != hash64(data[:80]):
            raise Corrupt("checksum of the file header")
        if major != 1:
            raise Unsupported(f"format version {major}")
        if size != 88:
            raise Corrupt("size of the file header")
        if required & ~3:
            raise Unsupported(f"required features {required & ~3:#x}")
        self.has_bundles, self.has_rows = required & 1, required & 2
        if of_store != store or file != expected.id or len(data) != expected.size:
            raise Corrupt("not the file that the manifest names")

    def read_footer(self, expected):
        c = Cursor(self.data[-72:])
        offset, stored, raw_size, count = c.u64(), c.u64(), c.u64(), c.u64()
        root, index_hash, coding = c.take(16), c.u64(), c.u32()
        if c.take(4) != b"CKDF" or c.u64() != hash64(self.data[-72:-8]):
            raise Corrupt("footer")
        area = offset - 88
        if area < 0 or offset + stored != len(self.data) - 72 or count > area // RECORD_MIN or raw_size > 2**31 or \
                not 75 * count <= raw_size <= area + 3 * count or coding > 1 or \
                not (stored < raw_size if coding else stored == raw_size):
            raise Corrupt("numbers in the footer")
        index = self.data[offset:offset + stored]
        if hash64(index) != index_hash:
            raise Corrupt("checksum of the index")
        raw = ckd_codings.unzstd(index, raw_size) if coding else index
        if hash128(raw) != root or root != expected.root:
            raise Corrupt("root hash")
        self.read_records(Cursor(raw), count, offset)

    def read_records(self, index, count, end):
        self.records, at = [], 88
        for _ in range(count):
            gap = index.varint(65535)
            record = Record(index)
            header = at + gap
            record.at = header + len(record.header)
            if record.at + record.stored_size > end:
                raise Corrupt("a record goes beyond the records area")
            if any(self.data[at:header]) or self.data[header:record.at] != record.header:
                raise Corrupt("a record's header differs from its copy in the index, or a gap is not zero")
            record.chunk = self
            self.records.append(record)
            at = record.at + record.stored_size
        index.end()
        if at != end:
            raise Corrupt("records do not end where the index begins")
        self.unpack_bundles()

    def unpack_bundles(self):
        """Puts what is in bundles in its place among the records."""
        placed, outside, least = [], 0, 0
        for record in self.records:
            if record.kind != BUNDLE:
                placed.append((outside, 1, record))
                outside += 1
                continue
            if not self.has_bundles:
                raise Corrupt("a bundle in a file that says that it has none")
            inside = read_bundle(record, self.data[record.at:record.at + record.stored_size], outside, least)
            least = inside[-1][0]
            placed += [(before, 0, r) for before, r in inside]
        self.records = [r for _, _, r in sorted(placed, key=lambda p: p[:2])]
        for record in self.records:
            if record.kind in (BLOCK, LINK) and [on.kind for on in record.dependencies[-2:]] == [2, 2] and not self.has_rows:
                raise Corrupt("shared rows in a file that says that it has none")

    def payload(self, record):
        data = self.data[record.at:record.at + record.stored_size]
        if hash64(data) != record.checksum:
            raise Corrupt(f"{self.path}: checksum of a payload of {record.name}")
        return data


def read_measures(record):
    """[(shard, {figure: value})]"""
    raw = ckd_codings.decode(record.coding, record.chunk.payload(record), record.raw_size, 1, None)
    if content_hash(raw) != record.content or record.coding > 1:
        raise Corrupt("content hash of measures")
    c = Cursor(raw)
    count, size = c.varint(2**20), c.u8()
    more, size = size >> 4, size & 15
    if count == 0 or not 2 <= size <= 4:
        raise Corrupt("numbers in front of measures")
    shards, last = [], -1
    for _ in range(count):
        last += 1 + c.varint()
        shards.append(last)
    entries = [{"nonfinite": c.varint()} for _ in range(count)]
    names = ["error_squares", "value_squares", "max_error", "direction_change", "movement", "update_given", "update"]
    for name in (names + [None] * more)[:5 + more]:
        planes = [c.take(count) for _ in range(size)] + [bytes(count)] * (4 - size)
        for i, entry in enumerate(entries):
            if planes[0][i] & 0x80:
                raise Corrupt("a figure is negative")
            if name:
                entry[name] = struct.unpack(">f", bytes(p[i] for p in planes))[0]
    c.end()
    return list(zip(shards, entries))


# --- checkpoints

sys.setrecursionlimit(max(sys.getrecursionlimit(), 8 * MAX_DEPTH))

class Tensor:
    """The blocks of one name in one checkpoint, which must tile it unless it is seen within another one."""

    def __init__(self, name, blocks, within=False):
        if within:
            first = {}
            for block in blocks:
                first.setdefault((block.region.key, block.first, block.count), block)
            blocks = list(first.values())
        self.name, self.blocks = name, blocks
        first = blocks[0]
        self.dtype, self.role, self.shape = first.dtype, first.role, first.shape
        if any((b.dtype, b.role, b.shape) != (self.dtype, self.role, self.shape) for b in blocks):
            raise Corrupt(f"{name}: blocks with different dtype, role or shape")
        self.size = DTYPES[self.dtype][1]
        self.elements = product(self.shape)
        self.places = []  # of each block, in the tensor's row-major order
        seen = np.zeros(self.elements, dtype=bool)
        held = 0
        for block in blocks:
            places = block.region.positions(self.shape)[block.first:block.first + block.count]
            self.places.append(places)
            seen[places] = True
            held += len(places)
        if not within and (held != self.elements or not seen.all()) or held != seen.sum():
            raise Corrupt(f"{name}: regions overlap or leave something out")


class Checkpoint:
    """A checkpoint; or, with a root, what the files of that checkpoint's manifest hold of an older one."""

    def __init__(self, store, manifest, root=None, own=None):
        self.store, self.manifest, self.root, self.id = store, manifest, root or self, own or manifest.id
        self.others = {}
        blocks, self.blobs, self.groups, self.sides, self.links = {}, {}, {}, {}, {}
        for file in manifest.files if root else manifest.own:
            chunk = store.chunk(file)
            for record in chunk.records:
                if record.checkpoint != self.id:
                    continue
                if record.kind == BLOCK:
                    blocks.setdefault(record.name, []).append(record)
                elif record.kind == GROUP:
                    self.groups[record.content] = record
                elif record.kind == SIDE:
                    self.sides[record.content] = record
                elif record.kind == LINK:
                    self.links.setdefault((record.content, record.dtype, record.count), record)
                elif record.kind == BLOB:
                    if record.name in self.blobs:
                        raise Corrupt(f"two blobs {record.name}")
                    self.blobs[record.name] = record
        self.tensors = {name: Tensor(name, b, bool(root)) for name, b in blocks.items()}

    def other(self, wanted):
        """The checkpoint with this id, as the root's files hold it."""
        root = self.root
        if wanted == root.id:
            return root
        if root.manifest.own_only:
            return self.store.by_id(wanted)
        if wanted not in root.others:
            root.others[wanted] = Checkpoint(self.store, root.manifest, root, wanted)
        return root.others[wanted]

    def measures(self):
        """{(tensor, region): figures} of the entries of all files."""
        out = {}
        for file in self.manifest.own:
            records = [r for r in self.store.chunk(file).records if r.checkpoint == self.manifest.id]
            shards = [r for r in records if r.kind == BLOCK and r.first == 0]
            tables = [r for r in records if r.kind == MEASURES]
            if len(tables) > 1:
                raise Corrupt("measures twice in one file")
            for table in tables:
                for number, figures in read_measures(table):
                    if number >= len(shards):
                        raise Corrupt("measures of a shard that is not there")
                    out[shards[number].name, shards[number].region.key] = figures
        return out

    def blob(self, name):
        record = self.blobs[name]
        data = ckd_codings.decode(record.coding, record.chunk.payload(record), record.raw_size, 1, None)
        if content_hash(data) != record.content:
            raise Corrupt(f"blob {name}: content hash")
        return data

    def tensor(self, name, budget=None):
        """All elements as unsigned integers of the dtype's width."""
        tensor = self.tensors[name]
        out = np.zeros(tensor.elements, dtype=f"<u{tensor.size}")
        for block, places in zip(tensor.blocks, tensor.places):
            out[places] = self.block(tensor, block, budget or [MAX_CHAIN, MAX_DEPTH])
        return out

    def block(self, tensor, block, budget):
        budget[0] -= 1
        if min(budget) < 0:
            raise Corrupt(f"{tensor.name}: the chain is too long or runs in a circle")
        cached = self.store.values.get(id(block))
        if cached is not None:
            return cached
        budget[1] -= 1
        values = self.decode(tensor, block, budget)
        budget[1] += 1
        if content_hash(values.tobytes()) != block.content:
            raise Corrupt(f"{block.chunk.path}: content hash of {tensor.name} at element {block.first} of its region")
        self.store.values[id(block)] = values
        return values

    def decode(self, tensor, block, budget):
        floating = block.dtype <= 6
        where = f"{block.chunk.path}: {tensor.name}"
        if block.predictor > 4:
            raise Unsupported(f"{where}: predictor {block.predictor}")
        if block.coding == 6 and block.predictor > 1:
            raise Unsupported(f"{where}: coding 6 with predictor {block.predictor}")
        if block.coding == 7 and block.predictor != 4:
            raise Unsupported(f"{where}: coding 7 with predictor {block.predictor}")
        before = self.dependency(block, budget) if block.predictor else None
        if block.coding == 7:
            return self.by_gradient(block, before[0], where)
        if block.predictor == 4:
            before = self.step(block, before[0], budget), block.dtype
        if block.predictor == 2:
            return before[0]
        if block.predictor == 3:
            return ckd_codings.rounded(before[1], block.dtype, before[0])
        if block.coding == 6:
            return self.lossy(block, before, where)
        payload = block.chunk.payload(block)
        context = ckd_codings.context(block.dtype, before[0]) if block.predictor else None
        try:
            data = ckd_codings.decode(block.coding, payload, block.raw_size, tensor.size, context)
        except (Corrupt, Unsupported) as error:
            raise type(error)(f"{where}: {error}") from None
        integers = np.frombuffer(data, f"<u{tensor.size}")
        if block.predictor in (1, 4):
            return ckd_codings.applied(before[0], integers)
        return ckd_codings.unrotated(integers) if block.coding == 5 and floating else integers

    def lossy(self, block, before, where):
        on, shared, rows = block.dependencies, None, None
        try:
            if on and on[-1].kind == 2:
                shared = self.side(block, on[-1])
                rows = self.side(block, on[-2]) if len(on) > 1 and on[-2].kind == 2 else None
            return ckd_lattice.decode(block.chunk.payload(block), block.dtype, block.count,
                                      before[0] if before else None, shared, rows)
        except (Corrupt, Unsupported) as error:
            raise type(error)(f"{where}: {error}") from None

    def side(self, block, on):
        """The columns or rows that a block shares with others."""
        record = self.sides.get(on.content)
        if record is None or on.checkpoint != self.id:
            raise Corrupt(f"{block.name}: the columns that it shares are missing")
        data = ckd_codings.decode(record.coding, record.chunk.payload(record), record.raw_size, 1, None)
        if content_hash(data) != record.content:
            raise Corrupt(f"{block.name}: content hash of a side record")
        return ckd_lattice.shared_columns(data)

    def link(self, block, on, budget):
        """Values that are there only for what builds on them."""
        other = self if on.checkpoint == self.id else self.other(on.checkpoint)
        record = other.links.get((on.content, block.dtype, block.count))
        if record is None or on.flags & ~1:
            raise Corrupt(f"{block.name}: the link that it builds on is missing")
        tensor = other.tensors.get(record.name)
        if tensor is None:
            raise Corrupt(f"{block.name}: a link of a tensor that is not there")
        return other.block(tensor, record, budget), record.dtype

    def group(self, block):
        on = block.dependencies[-1]
        if block.dtype != ckd_codings.F32 or on.kind != 3 or on.checkpoint != self.id or \
                on.content not in self.groups:
            raise Corrupt(f"{block.name}: no optimizer, or not f32")
        record = self.groups[on.content]
        data = ckd_codings.decode(record.coding, record.chunk.payload(record), record.raw_size, 1, None)
        if content_hash(data) != record.content:
            raise Corrupt("a group record: content hash")
        return ckd_steps.Group(data)

    def step(self, block, before, budget):
        """What an optimizer step is expected to give."""
        group = self.group(block)
        count = ckd_steps.inputs(group.rule)
        if not count or len(block.dependencies) != count + 2:
            raise Corrupt(f"{block.name}: rule {group.rule} needs other inputs")
        others = [self.dependency(block, budget, i + 1)[0].view("<f4") for i in range(count)]
        return ckd_steps.predict(group, before.view("<f4"), others[0], others[1] if count == 2 else None)

    def by_gradient(self, block, before, where):
        """A first moment whose payload has the gradient."""
        group, payload = self.group(block), block.chunk.payload(block)
        if ckd_steps.inputs(group.rule) != 0 or len(block.dependencies) != 2:
            raise Corrupt(f"{where}: rule {group.rule} takes no gradient")
        size = int.from_bytes(payload[:4], "little")
        if len(payload) < 4 or size > len(payload) - 4:
            raise Corrupt(f"{where}: the gradient's stream is too long")
        try:
            data = ckd_codings.decode(5, payload[4:4 + size], 2 * block.count, 2, None)
            bits = ckd_codings.unrotated(np.frombuffer(data, "<u2")).astype("<u4") << 16
            predicted = ckd_steps.predict(group, before.view("<f4"), bits.astype("<u4").view("<f4"), None)
            if len(payload) == 4 + size:
                return predicted
            context = ckd_codings.context(block.dtype, predicted)
            rest = ckd_codings.decode(5, payload[4 + size:], block.raw_size, 4, context)
        except (Corrupt, Unsupported) as error:
            raise type(error)(f"{where}: {error}") from None
        return ckd_codings.applied(predicted, np.frombuffer(rest, "<u4"))

    def dependency(self, block, budget, index=0):
        """(values, dtype) of one of a block's dependencies, the first unless said otherwise."""
        on = block.dependencies[index]
        if on.kind == 4 and index == 0 and block.predictor == 1:
            return self.link(block, on, budget)
        if on.kind != 1:
            raise Corrupt(f"{block.name}: dependency {index} is not of values")
        other = self if on.checkpoint == self.id else self.other(on.checkpoint)
        source = other.tensors.get(on.tensor)
        if source is None:
            raise Corrupt(f"{block.name}: depends on {on.tensor}, which is not there")
        if on.count != block.count or on.own_span and source.shape != block.shape or \
                block.predictor != 3 and source.dtype != block.dtype:
            raise Corrupt(f"{block.name}: depends on values of another shape or dtype")
        if on.first + on.count > on.region.elements(source.shape):
            raise Corrupt(f"{block.name}: depends on elements outside a region")
        wanted = on.region.positions(source.shape)[on.first:on.first + on.count]
        out = np.zeros(len(wanted), dtype=f"<u{source.size}")
        for part, places in zip(source.blocks, source.places):
            common = np.isin(wanted, places)
            if common.any():
                order = np.argsort(places)
                values = other.block(source, part, budget)
                out[common] = values[order[np.searchsorted(places, wanted[common], sorter=order)]]
        if content_hash(out.tobytes()) != on.content:
            raise Corrupt(f"{block.name}: the values it depends on have another content hash")
        return out, source.dtype


class Store:
    def __init__(self, folder):
        self.folder = Path(folder)
        if not (self.folder / "data/store").is_file():
            raise Corrupt(f"{folder}: no store")
        self.id, generation, _, c = open_note(self.folder / "data/store", STORE)
        self.created = c.u64()
        c.end()
        if generation or not any(self.id):
            raise Corrupt(f"{folder}: identity")
        self.chunks, self.values, self.checkpoints, self.unreadable = {}, {}, {}, []
        self.manifests = {}
        for (run, step), generations in sorted(self.names().items()):
            for number in sorted(generations, reverse=True):
                manifest = self.manifest(run, step, number)
                if manifest:
                    self.manifests[run, step] = manifest
                    break

    def names(self):
        """{(run, step): generations} of the manifests that no tombstone covers."""
        found, dead = {}, {}
        for folder, names in (("m", found), ("t", dead)):
            path = self.folder / "data" / folder
            for entry in sorted(path.iterdir()) if path.is_dir() else []:
                match = NOTE_NAME.fullmatch(entry.name)
                if not match or not RUN_NAME.fullmatch(match["run"]):
                    continue
                step, generation = int(match["step"]), int(match["generation"])
                if step < 2**63 and generation < 2**32:
                    names.setdefault((match["run"], step), []).append(generation)
        for key, numbers in dead.items():
            found[key] = [n for n in found.get(key, []) if n > max(numbers)]
        return found

    def manifest(self, run, step, generation):
        path = self.folder / f"data/m/{run}.{step}.{generation}"
        try:
            manifest = Manifest(path, self.id)
            if (manifest.run, manifest.step, manifest.generation) != (run, step, generation):
                raise Corrupt(f"{path}: stands under another name")
            return manifest
        except (Corrupt, Unsupported) as error:
            self.unreadable.append(str(error))
            return None

    def chunk(self, file):
        key = (file.id, file.size, file.root)
        if key not in self.chunks:
            self.chunks[key] = Chunk(self.folder / f"data/c/{file.id.hex()}.ckd", self.id, file)
        return self.chunks[key]

    def checkpoint(self, run, step):
        if (run, step) not in self.checkpoints:
            self.checkpoints[run, step] = Checkpoint(self, self.manifests[run, step])
        return self.checkpoints[run, step]

    def by_id(self, wanted):
        for (run, step), manifest in self.manifests.items():
            if manifest.id == wanted:
                return self.checkpoint(run, step)
        raise Corrupt(f"checkpoint {wanted.hex()} is not in the store")


# --- the command

def describe(store, keys):
    """All that can be read, as plain data; what cannot is under "errors"."""
    out = {"checkpoints": {}, "errors": list(store.unreadable)}
    for run, step in keys:
        entry = out["checkpoints"][f"{run}@{step}"] = {"tensors": {}, "blobs": {}}
        try:
            checkpoint = store.checkpoint(run, step)
        except (Corrupt, Unsupported) as error:
            out["errors"].append(f"{run}@{step}: {error}")
            continue
        for name, tensor in checkpoint.tensors.items():
            try:
                digest = hashlib.sha256(checkpoint.tensor(name).tobytes()).hexdigest()
                entry["tensors"][name] = {"role": ROLES[tensor.role], "dtype": DTYPES[tensor.dtype][0],
                                          "shape": list(tensor.shape), "sha256": digest}
            except (Corrupt, Unsupported) as error:
                out["errors"].append(f"{run}@{step} {name}: {error}")
        for name in checkpoint.blobs:
            try:
                entry["blobs"][name] = hashlib.sha256(checkpoint.blob(name)).hexdigest()
            except (Corrupt, Unsupported) as error:
                out["errors"].append(f"{run}@{step} blob {name}: {error}")
    return out


def show(listing):
    for key, entry in listing["checkpoints"].items():
        print(key)
        for name, tensor in entry["tensors"].items():
            shape = "x".join(map(str, tensor["shape"])) or "scalar"
            print(f"  {tensor['sha256']}  {tensor['dtype']:7} {tensor['role']:10} {shape:12} {name}")
        for name, digest in entry["blobs"].items():
            print(f"  {digest}  blob                            {name}")
    for error in listing["errors"]:
        print(error, file=sys.stderr)


def dump(store, key, name):
    checkpoint = store.checkpoint(*key)
    if name in checkpoint.tensors:
        return checkpoint.tensor(name).tobytes()
    return checkpoint.blob(name)


def main(argv):
    parser = argparse.ArgumentParser(description="Reads a ckptdelta store without the library.")
    parser.add_argument("store")
    parser.add_argument("checkpoint", nargs="?", metavar="RUN@STEP")
    parser.add_argument("--dump", metavar="NAME", help="write the bytes of this tensor or blob")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv[1:])
    try:
        store = Store(args.store)
        keys = list(store.manifests)
        if args.checkpoint:
            run, _, step = args.checkpoint.rpartition("@")
            keys = [(run, int(step))]
            if keys[0] not in store.manifests:
                parser.error(f"no checkpoint {args.checkpoint}")
        if args.dump:
            if len(keys) != 1:
                parser.error("--dump needs RUN@STEP")
            sys.stdout.buffer.write(dump(store, keys[0], args.dump))
            return 0
    except (Corrupt, Unsupported) as error:
        print(error, file=sys.stderr)
        return 1
    listing = describe(store, keys)
    if args.json:
        print(json.dumps(listing, ensure_ascii=False, indent=1))
    else:
        show(listing)
    return 1 if listing["errors"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
