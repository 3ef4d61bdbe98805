"""Lossy blocks, after codec/FORMAT.md, "Lattice blocks". Part of the independent reader."""

import numpy as np

import ckd_adaptive
import ckd_codings
import ckd_symbols
from ckd_errors import Corrupt

F = np.float32
LEVELS, ROWS, GRID, FACTOR, EXCEPTIONS, SHARED, SYMBOLS, SHARED_ROWS = (1 << bit for bit in range(8))
STEPS, COLUMNS_FACTOR, COLUMNS_SYMBOLS = 1, 2, 4
MOST_COLUMNS, MOST_RANK, MOST_FACTOR, MOST_STEP = 2**18, 2048, 2**24, 4096
LOWEST = -2**31
MANTISSAS = np.array([0, 0x1837f0, 0x3504f3, 0x5744fd])


class Fields:
    """What stands in a payload, one after the other."""

    def __init__(self, data):
        self.data, self.at = bytes(data), 0

    def take(self, size):
        if size > len(self.data) - self.at:
            raise Corrupt("a lossy block ends early")
        self.at += size
        return self.data[self.at - size:self.at]

    def rest(self):
        return self.take(len(self.data) - self.at)

    def u8(self):
        return self.take(1)[0]

    def varint(self, least, most):
        value = 0
        for i in range(10):
            byte = self.u8()
            value |= (byte & 127) << 7 * i
            if byte < 128:
                if byte == 0 and i or not least <= value <= most:
                    raise Corrupt("a number of a lossy block")
                return value
        raise Corrupt("a number of a lossy block is too long")

    def signed(self, least, most):
        value = self.varint(0, 2**32 - 1)
        value = -(value + 1) // 2 if value % 2 else value // 2
        if not least <= value <= most:
            raise Corrupt("a number of a lossy block is out of range")
        return value

    def integers(self, count, contexts=None):
        return ckd_adaptive.decode(self.take(self.varint(0, 2**64 - 1)), count, contexts)

    def sections(self, count, contexts):
        values, width = [], self.u8()
        if width not in (1, 2, 4):
            raise Corrupt("the width of a factor's integers")
        for at in range(0, count, 2**18):
            here = contexts[at:at + 2**18]
            stream = self.take(self.varint(0, 2**64 - 1))
            values += signed(ckd_symbols.decode(stream, len(here), 8 * width, bytes(here)), width)
        return values

    def bounded(self, count, least, most):
        values = self.integers(count)
        if any(not least <= v <= most for v in values):
            raise Corrupt("a scale of a lossy block is out of range")
        return np.array(values, np.int64)

    def factor(self, rows, rank, symbols):
        if rows * rank > MOST_FACTOR:
            raise Corrupt("a factor of a lossy block is too large")
        scales = np.cumsum(self.integers(rank)) % 2**32
        if (scales > 63).any():
            raise Corrupt("a scale of a factor")
        contexts = scales.tolist() * rows
        values = self.sections(rows * rank, contexts) if symbols else self.integers(rows * rank, contexts)
        return np.array(values, np.int64).reshape(rows, rank)


class Columns:
    """What the blocks of a matrix may share."""

    def __init__(self, fields, count, max_rank):
        self.count, self.step, self.factor, self.integers = count, None, None, None
        form = fields.u8()
        if form > 7 or form & COLUMNS_SYMBOLS and not form & COLUMNS_FACTOR or form and count > MOST_COLUMNS:
            raise Corrupt("the form of a lossy block's columns")
        if form & STEPS:
            self.step = fields.bounded(count, -MOST_STEP, MOST_STEP)
        if form & COLUMNS_FACTOR:
            rank = fields.varint(1, min(MOST_RANK, max_rank))
            shift = fields.bounded(rank, 0, 24)
            self.integers = fields.factor(count, rank, form & COLUMNS_SYMBOLS)
            self.factor = self.integers.astype(object) * [1 << s for s in shift.tolist()]


def shared_columns(data):
    """The raw bytes of a side record."""
    fields = Fields(data)
    columns = Columns(fields, fields.varint(0, MOST_COLUMNS), MOST_RANK)
    if fields.rest():
        raise Corrupt("a side record goes on")
    return columns


class Block:
    def __init__(self, data, count, wide, shared, rows):
        fields = Fields(data)
        self.count, self.columns, self.phase = count, count, 0
        self.row = self.own = self.factor = None
        form = fields.u8()
        if form & SYMBOLS and not form & FACTOR or form & (ROWS | FACTOR | SHARED) and not form & GRID or form & FACTOR and form & LEVELS:
            raise Corrupt("the form of a lossy block")
        self.levels = bool(form & LEVELS)
        if self.levels:
            self.step, self.birth = fields.signed(1, 4096), fields.signed(1, 2039)
        else:
            self.step, self.exponent = fields.signed(-400, 400), fields.signed(-120, 120)
            self.offsets = np.array([0, *fields.take(3)], F) / F(256)
        if form & GRID:
            self.columns = fields.varint(1, 2**40)
            self.phase = fields.varint(0, self.columns - 1)
            self.read_columns(fields, form, shared)
        self.rows = (self.phase + count + self.columns - 1) // self.columns
        if bool(form & SHARED_ROWS) != (rows is not None):
            raise Corrupt("rows that are shared or not")
        if rows is not None:
            self.check_rows(form, rows)
        if form & ROWS:
            self.row = fields.bounded(self.rows, -MOST_STEP, MOST_STEP) if rows is None else rows.step
        if form & FACTOR:
            self.low_exponent = fields.signed(-64, 64)
            self.factor = fields.factor(self.rows, self.own.factor.shape[1], form & SYMBOLS) if rows is None else rows.integers
        self.exceptions = self.read_exceptions(fields, wide) if form & EXCEPTIONS else {}
        self.q = np.array(self.read_q(fields), np.int64)

    def read_columns(self, fields, form, shared):
        if form & SHARED:
            if shared is None or shared.count != self.columns:
                raise Corrupt("a lossy block's columns are those of nothing")
            self.own = shared
        else:
            self.own = Columns(fields, self.columns, self.columns)
        has = self.own.factor is not None
        if form & FACTOR and not has or has and not form & (FACTOR | SHARED):
            raise Corrupt("one factor of two")

    def check_rows(self, form, rows):
        """Those of a side record."""
        ranks = [x.integers.shape[1] if x.integers is not None else 0 for x in (self.own, rows)] if form & SHARED else [0, 1]
        if (not form & SHARED or form & SYMBOLS or not form & (ROWS | FACTOR) or rows.count != self.rows or
                form & ROWS and rows.step is None or form & FACTOR and ranks[0] != ranks[1]):
            raise Corrupt("the rows that a lossy block shares")

    def read_exceptions(self, fields, wide):
        out, place = {}, -1
        for _ in range(fields.varint(1, self.count)):
            place += 1 + fields.varint(0, self.count)
            bits = int.from_bytes(fields.take(4), "little")
            if place >= self.count or not wide and bits > 0xffff:
                raise Corrupt("an exception of a lossy block")
            out[place] = bits
        return out

    def read_q(self, fields):
        self.how, count = fields.u8(), self.count
        how = self.how
        if how == 0:
            if fields.rest():
                raise Corrupt("a lossy block goes on")
            return [0] * count
        if how in (1, 2, 4):
            values = signed(ckd_symbols.decode(fields.rest(), count, 8 * how, None), how)
            lowest = -1 << 8 * how - 1
            return [LOWEST if v == lowest else v for v in values] if self.levels else values
        if how == 8:
            return ckd_adaptive.decode_plane(fields.rest(), count, self.columns, self.phase)
        if how == 16 and not self.levels:
            return self.read_masks(fields)
        raise Corrupt("the integers of a lossy block")

    def read_masks(self, fields):
        masks = ckd_symbols.decode(fields.take(fields.varint(0, 2**64 - 1)), (self.count + 7) // 8, 8, None)
        bits = [byte >> j & 1 for byte in masks for j in range(8)]
        if any(bits[self.count:]):
            raise Corrupt("a mask of what there is not")
        values = signed(ckd_symbols.decode(fields.rest(), sum(bits), 8, None), 1)
        if 0 in values:
            raise Corrupt("a zero among those that are none")
        following = iter(values)
        return [next(following) if bit else 0 for bit in bits[:self.count]]

    def places(self):
        at = self.phase + np.arange(self.count)
        return at // self.columns, at % self.columns

    def column_step(self):
        return None if self.own is None else self.own.step

    def products(self, rows, columns):
        """P of each element; None without a factor."""
        if self.factor is None:
            return None
        left, right = self.factor.astype(object), self.own.factor
        if (abs(left).max(axis=0) * abs(right).max(axis=0)).sum() >= 2**24:
            raise Corrupt("a low-rank part is too large")
        return (left.astype(float) @ right.astype(float).T)[rows, columns].astype(F)

    def linear(self, before):
        rows, columns = self.places()
        step = power(self.step + (self.row[rows] if self.row is not None else np.zeros(self.count, np.int64)))
        if self.column_step() is not None:
            step = step * power(self.column_step()[columns])
        size = np.abs(self.q.astype(F))
        size = size - self.offsets[np.minimum(np.abs(self.q), 3)]
        own = units(np.where(self.q < 0, -size, size) * step)
        products = self.products(rows, columns)
        low = 0 if products is None else units(products * F(2.0**self.low_exponent) * step)
        more = wrapped(low + own)
        unit = F(2.0**self.exponent)
        moved = wrapped(units(before * (F(1) / unit)) + more).astype(F) * unit
        return np.where(more == 0, before.view("<u4"), moved.view("<u4"))

    def level(self, before, has_parent):
        rows, columns = self.places()
        shift = np.zeros(self.count, np.int64)
        if self.row is not None:
            shift += self.row[rows]
        if self.column_step() is not None:
            shift += self.column_step()[columns]
        start = level_of(before) if has_parent else np.full(self.count, self.birth)
        q = np.where((start == 0) & (self.q > 0), self.q - 1, self.q)
        level = wrapped(np.where(start == 0, self.birth, start) + shift + q * self.step)
        level = np.clip(level, 1, 2039)
        level[(self.q == LOWEST) | (start == 0) & (self.q == 0)] = 0
        bits = (level << 20).astype("<u4")
        if has_parent:
            bits = np.where((self.q == 0) & (shift == 0), before.view("<u4"), bits)
        return bits


def signed(values, width):
    half = 1 << 8 * width - 1
    return [(v ^ half) - half for v in values]


def wrapped(values):
    return (np.asarray(values, np.int64) + 2**31) % 2**32 - 2**31


def power(k):
    inside = np.clip(k, -480, 480)
    mantissa = np.where(inside == k, MANTISSAS[inside % 4], 0)
    return ((inside // 4 + 127 << 23) + mantissa).astype("<u4").view("<f4")


def units(x):
    inside = np.abs(x) < F(2.0**30)
    return np.rint(np.where(inside, x, F(0))).astype(np.int64)


def level_of(x):
    bits = x.view("<u4").astype(np.int64)
    level = np.clip(bits + 2**19 >> 20, 1, 2039)
    return np.where((bits == 0) | (bits >= 0x7f800000), 0, level)


def widened(dtype, bits):
    if dtype == ckd_codings.F32:
        return bits.view("<f4")
    if dtype == ckd_codings.BF16:
        return (bits.astype("<u4") << np.uint32(16)).view("<f4")
    return bits.view("<f2").astype("<f4")


def decode(payload, dtype, count, before, shared, rows=None):
    """The values' bits. before: those of the dependency, or None; shared, rows: columns and rows of side records, or None."""
    if dtype not in (ckd_codings.F32, ckd_codings.F16, ckd_codings.BF16):
        raise Corrupt("a lossy block of a dtype that is always exact")
    wide = dtype == ckd_codings.F32
    block = Block(payload, count, wide, shared, rows)
    parent = np.zeros(count, "<f4") if before is None else widened(dtype, before)
    with np.errstate(all="ignore"):
        bits = block.level(parent, before is not None) if block.levels else block.linear(parent)
    if not wide:
        bits = ckd_codings.rounded(ckd_codings.F32, dtype, bits)
    for place, exception in block.exceptions.items():
        bits[place] = exception
    return bits
