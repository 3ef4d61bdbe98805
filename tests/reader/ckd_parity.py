"""An independent reader of parity files, written from codec/FORMAT.md alone ("Parity"): it shares no code with the library.

    ckd_parity.py STORE                checks each parity file against its group's chunk files, byte by byte
    ckd_parity.py STORE --rebuild HEX  the bytes of a chunk file, from the others of its group, to standard output

Exit status: 0, 1 if something is damaged or does not fit, 2 for wrong arguments.
"""

import re
import struct
import sys
from pathlib import Path

import numpy as np
import xxhash

NAME = re.compile(r"([0-9a-f]{32})\.(0|[1-9][0-9]*)\.ckp")


def hash64(data):
    return xxhash.xxh3_64_intdigest(bytes(data))


class Corrupt(Exception):
    pass


def _field():
    exp, log, x = [0] * 510, [0] * 256, 1
    for i in range(255):
        exp[i] = exp[i + 255] = x
        log[x] = i
        x = x << 1 ^ (0x11d if x & 128 else 0)
    return exp, log


EXP, LOG = _field()


def mul(a, b):
    return EXP[LOG[a] + LOG[b]] if a and b else 0


def div(a, b):
    return EXP[LOG[a] + 255 - LOG[b]] if a else 0


def coefficient(row, column):
    return div(16 + column, row ^ (16 + column))


def times(factor, piece):
    return np.array([mul(factor, b) for b in range(256)], dtype=np.uint8)[piece]


class Row:
    """One parity file: what its notes say, and its stripes."""

    def __init__(self, path, store):
        self.path, self.data = path, path.read_bytes()
        group, row = NAME.fullmatch(path.name).groups()
        size = struct.unpack_from("<I", self.data, 36)[0] + 48
        self.note = self.data[:size]
        tail = self.data[-16:]
        if tail != struct.pack("<I", size) + b"CKDP" + struct.pack("<Q", hash64(tail[:8])) or self.data[-16 - size:-16] != self.note:
            raise Corrupt(f"{path}: the two copies of its note")
        if self.note[:8] != b"\x89CKN\r\n\x1a\n" or struct.unpack_from("<Q", self.note, size - 8)[0] != hash64(self.note[:-8]):
            raise Corrupt(f"{path}: note")
        version, kind, features = struct.unpack_from("<HHI", self.note, 8)
        if (version, kind, features) != (1, 11, 0) or self.note[16:32] != store:
            raise Corrupt(f"{path}: not a parity group of this store")
        self.group, self.rows, self.row, self.piece, self.created, count = struct.unpack_from("<16sHHIQI", self.note, 40)
        if self.group.hex() != group or self.row != int(row) or self.row >= self.rows or not 1 <= self.rows <= 16 or not 1 <= count <= 128:
            raise Corrupt(f"{path}: group or row")
        if size != 48 + 36 + 44 * count:
            raise Corrupt(f"{path}: members")
        self.members = [struct.unpack_from("<I16sQ16s", self.note, 76 + 44 * i) for i in range(count)]
        columns = [m[0] for m in self.members]
        if columns != sorted(set(columns)) or columns[-1] > 127:
            raise Corrupt(f"{path}: columns")
        self.longest = max(m[2] for m in self.members)
        self.read_stripes(size)

    def read_stripes(self, at):
        self.stripes = []
        for number in range(-(-self.longest // self.piece)):
            size = min(self.piece, self.longest - number * self.piece)
            end = at + size + 8 * len(self.members) + 32
            stripe = self.data[at:end]
            if struct.unpack_from("<16sIIQ", stripe, len(stripe) - 32) != (self.group, number, self.row, hash64(stripe[:-8])):
                raise Corrupt(f"{self.path}: stripe {number}")
            hashes = struct.unpack_from(f"<{len(self.members)}Q", stripe, size)
            self.stripes.append((np.frombuffer(stripe[:size], dtype=np.uint8), hashes))
            at = end
        if at != len(self.data) - 16 - len(self.note):
            raise Corrupt(f"{self.path}: size")

    def part(self, data, number):
        """A member's piece in a stripe, and the same continued with zeros."""
        own = np.frombuffer(data, dtype=np.uint8)[number * self.piece:(number + 1) * self.piece]
        return own, np.pad(own, (0, len(self.stripes[number][0]) - len(own)))

    def check(self, files):
        for number, (piece, hashes) in enumerate(self.stripes):
            total = np.zeros_like(piece)
            for (column, file, size, root), expected in zip(self.members, hashes):
                if len(files[file]) != size or files[file][-40:-24] != root:
                    raise Corrupt(f"{self.path}: it is about another {file.hex()}")
                own, whole = self.part(files[file], number)
                if hash64(own) != expected:
                    raise Corrupt(f"{self.path}: piece {number} of {file.hex()}")
                total ^= times(coefficient(self.row, column), whole)
            if not np.array_equal(total, piece):
                raise Corrupt(f"{self.path}: piece {number} is not that of its members")

    def rebuild(self, lost, files):
        """One member, from this row and all other members."""
        out, (own_column, _, size, _) = b"", next(m for m in self.members if m[1] == lost)
        for number, (piece, _) in enumerate(self.stripes):
            total = piece.copy()
            for column, file, _, _ in self.members:
                if file != lost:
                    total ^= times(coefficient(self.row, column), self.part(files[file], number)[1])
            out += times(div(1, coefficient(self.row, own_column)), total).tobytes()
        return out[:size]


def rows_of(store):
    identity = (store / "data/store").read_bytes()[16:32]
    folder = store / "data/p"
    return [Row(p, identity) for p in sorted(folder.iterdir()) if NAME.fullmatch(p.name)] if folder.is_dir() else []


def main(argv):
    if len(argv) not in (1, 3) or (len(argv) == 3 and argv[1] != "--rebuild"):
        print(__doc__, file=sys.stderr)
        return 2
    store = Path(argv[0])
    files = {bytes.fromhex(p.name[:32]): p.read_bytes() for p in (store / "data/c").iterdir() if p.suffix == ".ckd"}
    try:
        rows = rows_of(store)
        if len(argv) == 3:
            lost = bytes.fromhex(argv[2])
            row = next(r for r in rows if any(m[1] == lost for m in r.members))
            sys.stdout.buffer.write(row.rebuild(lost, files))
            return 0
        for row in rows:
            row.check(files)
            print(f"{row.path.name}: row {row.row} of {row.rows}, {len(row.members)} members, {len(row.stripes)} stripes")
    except Corrupt as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
