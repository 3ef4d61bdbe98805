"""Symbol streams, after codec/FORMAT.md, "Symbol streams". Part of the independent reader."""

import ckd_adaptive
from ckd_errors import Corrupt, Unsupported

CLASS, SPLIT = 0, 1
MAX_COUNT = 2**18


class Bits:
    """Bit fields from the lowest bit of the first byte up."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        value = 0
        for i in range(count):
            byte = self.at >> 3
            if byte >= len(self.data):
                raise Corrupt("a symbol stream's header ends early")
            value |= (self.data[byte] >> (self.at & 7) & 1) << i
            self.at += 1
        return value


class Table:
    def __init__(self, bits, mode, log, width):
        self.centre = self.floor = 0
        if mode == CLASS:
            if bits.take(1):
                self.centre = bits.take(width)
                if self.centre == 0:
                    raise Corrupt("a centre of 0 is spelled out")
            self.floor = bits.take(6)
            if self.floor > width - 2:
                raise Corrupt("a floor is too high")
        self.first, self.last = bits.take(8), bits.take(8)
        if self.last < self.first:
            raise Corrupt("a table's symbols end before they begin")
        self.counts = self.read_counts(bits, log)

    def read_counts(self, bits, log):
        left, expected, counts, symbol = 1 << log, log // 2, {}, self.first
        while symbol < self.last:
            ones = 0
            while bits.take(1):
                ones += 1
            length = expected + (ones + 1) // 2 if ones % 2 else expected - ones // 2
            if not 0 <= length <= log:
                raise Corrupt("the bit length of a count")
            if length:
                counts[symbol] = (1 << length - 1) + bits.take(length - 1)
                expected = length
                left -= counts[symbol]
                if left <= 0:
                    raise Corrupt("counts are more than there are states")
                symbol += 1
                continue
            if symbol == self.first:
                raise Corrupt("the first symbol has no states")
            zeros = 0
            while not bits.take(1):
                zeros += 1
                if zeros > 7:
                    raise Corrupt("a run of symbols without states is too long")
            symbol += 1 + (1 << zeros) + bits.take(zeros) - 1
            if symbol > self.last:
                raise Corrupt("a run of symbols without states goes beyond the last one")
        counts[self.last] = left
        return counts


class Header:
    def __init__(self, data, width):
        bits = Bits(data)
        self.width, self.mode, self.contexts = width, bits.take(1), bits.take(1)
        self.lanes, self.log = 1 << bits.take(2), bits.take(3) + 5
        if bits.take(1):
            raise Unsupported(f"a symbol stream of kind {data[0]:#x}")
        tables = bits.take(4) + 1 if self.contexts else 1
        self.ends = ascending([bits.take(8) for _ in range(tables - 1)])
        self.fine = bits.take(2) if self.mode == CLASS else 0
        self.k = bits.take(6) if self.mode == SPLIT else 0
        if self.k >= width:
            raise Corrupt("more low bits than an integer has")
        self.bias = bits.take(width - self.k) if self.mode == SPLIT else 0
        self.tables = [Table(bits, self.mode, self.log, width) for _ in range(tables)]
        if bits.take(-bits.at % 8):
            raise Corrupt("the bits behind a symbol stream's header are not zero")
        self.size = bits.at // 8
        self.states = [self.spread(table) for table in self.tables]

    def size_of(self, m):
        if m < 1 << self.fine:
            return m
        length = m.bit_length()
        return (length - self.fine << self.fine) + (m >> length - 1 - self.fine & (1 << self.fine) - 1)

    def meaning(self, table, symbol):
        """(base, low)"""
        if self.mode == SPLIT:
            return self.bias + symbol << self.k, self.k
        flip = 1 << self.width - 1 if symbol >= 128 else 0
        index = 255 - symbol if symbol >= 128 else symbol
        start = table.centre + flip
        if index == 0:
            return start - (1 << table.floor - 1 if table.floor else 0), table.floor
        z = (index + 1) // 2 + (self.size_of(1 << table.floor - 1) - 1 if table.floor else 0)
        e = z >> self.fine
        low = e - 1 if e >= 2 else 0
        if low > self.width - 2:
            raise Corrupt("a symbol has more low bits than an integer")
        h = (1 << self.fine) + z % (1 << self.fine) << low if e >= 1 else z
        return (start + h if index % 2 else start + 1 - h - (1 << low)), low

    def spread(self, table):
        """For each state: (base, low bits, next state, bits to add to it)."""
        total = 1 << self.log
        owner, p = [None] * total, 0
        for symbol in sorted(table.counts):
            for _ in range(table.counts[symbol]):
                owner[p] = symbol
                p = (p + total // 2 + total // 8 + 3) % total
        meaning = {s: self.meaning(table, s) for s in table.counts}
        given, out = dict(table.counts), []
        for symbol in owner:
            x = given[symbol]
            given[symbol] += 1
            more = self.log - (x.bit_length() - 1)
            out.append((*meaning[symbol], (x << more) - total, more))
        return out

    def table_of_contexts(self):
        return [number for number, (start, end) in enumerate(ranges(self.ends)) for _ in range(start, end + 1)]


def ascending(ends):
    if any(b <= a for a, b in zip(ends, ends[1:])) or 255 in ends:
        raise Corrupt("ranges of contexts do not ascend")
    return ends


def ranges(ends):
    """(first, last) context of each range."""
    return list(zip([0] + [e + 1 for e in ends], ends + [255]))


def decode_dense(data, count, width, context):
    header = Header(data, width)
    payload = data[header.size:]
    if not payload or payload[-1] == 0:
        raise Corrupt("a symbol stream has no end mark")
    if header.contexts and context is None:
        raise Corrupt("a symbol stream needs contexts where there are none")
    number = int.from_bytes(payload, "little")
    position = number.bit_length() - 1
    mask = (1 << width) - 1
    words = Words(number)
    tables = header.states
    table_of = header.table_of_contexts() if header.contexts else None
    lanes, out = [], []
    for _ in range(header.lanes):
        position -= header.log
        lanes.append(words.at(position, header.log))
    for i in range(count):
        lane = i % header.lanes
        states = tables[table_of[context[i]]] if header.contexts else tables[0]
        base, low, following, more = states[lanes[lane]]
        position -= low
        out.append(base + words.at(position, low) & mask)
        position -= more
        lanes[lane] = following + words.at(position, more)
    if position or any(lanes):
        raise Corrupt("a symbol stream does not end where it should")
    return out


class Words:
    """Bits of a large number, by position."""

    def __init__(self, number):
        self.data = number.to_bytes((number.bit_length() + 7) // 8 + 16, "little")

    def at(self, position, count):
        if position < 0:
            raise Corrupt("a symbol stream ends early")
        window = int.from_bytes(self.data[position >> 3:(position >> 3) + 16], "little")
        return window >> (position & 7) & (1 << count) - 1


def take_varint(data, at):
    value = 0
    for i in range(10):
        if at + i >= len(data):
            break
        byte = data[at + i]
        value |= (byte & 127) << 7 * i
        if byte < 128:
            if byte == 0 and i > 0 or value >= 2**64:
                break
            return value, at + i + 1
    raise Corrupt("a number in a sparse, framed or change stream")


def decode_sparse(data, count, width, context):
    if len(data) < 2 or data[1] > 15:
        raise Corrupt("ranges of a sparse stream")
    number, at = data[1] + 1, 2
    if len(data) < at + number - 1:
        raise Corrupt("a sparse stream ends early")
    parts = ranges(ascending(list(data[at:at + number - 1])))
    at += number - 1
    if number > 1 and context is None:
        raise Corrupt("a sparse stream needs contexts where there are none")
    pairs = []
    for _ in range(number):
        value, at = take_varint(data, at)
        pairs.append(value)
    total = sum(pairs)
    if total > count // 4:
        raise Corrupt("a sparse stream has too many values")
    if total == 0:
        if at != len(data):
            raise Corrupt("bytes behind an empty sparse stream")
        return [0] * count
    inner_context = [c for r, m in enumerate(pairs) for _ in range(m) for c in (r, 16 + r)]
    inner = decode_dense(data[at:], 2 * total, width, inner_context)
    out, taken = [0] * count, 0
    for (first, last), m in zip(parts, pairs):
        members = range(count) if number == 1 else [i for i in range(count) if first <= context[i] <= last]
        place = 0
        for i in range(taken, taken + m):
            place += inner[2 * i]
            if place >= len(members):
                raise Corrupt("a gap leads beyond the last element")
            out[members[place]] = inner[2 * i + 1]
            place += 1
        taken += m
    return out


def framed_grid(data, at, count):
    """(columns, phase, rows, size of the levels' stream, where that begins); all zero but the last without levels."""
    columns, at = take_varint(data, at)
    if columns == 0:
        return 0, 0, 0, 0, at
    phase, at = take_varint(data, at)
    size, at = take_varint(data, at)
    rows = (phase + count + columns - 1) // columns
    if columns > count // 8 or phase >= columns or rows + columns > count // 8:
        raise Corrupt("rows and columns of a framed stream")
    return columns, phase, rows, size, at


def decode_framed(data, count, width):
    if len(data) < 2 or data[1] >= width:
        raise Corrupt("the number of shared bits of a framed stream")
    shift = data[1]
    shared, at = take_varint(data, 2)
    if shared >> shift:
        raise Corrupt("the shared bits of a framed stream")
    columns, phase, rows, size, at = framed_grid(data, at, count)
    context = None
    if columns:
        if size > len(data) - at:
            raise Corrupt("a framed stream ends in its levels")
        levels = decode_dense(data[at:at + size], rows + columns, 8, None)
        places = [divmod(i, columns) for i in range(phase, phase + count)]
        context = [min(levels[row] + levels[rows + column], 255) for row, column in places]
    mask = (1 << width) - 1
    return [(x << shift) + shared & mask for x in decode_dense(data[at + size:], count, width, context)]


def decode_runs(data, count, width):
    if width == 64:
        raise Corrupt("a run stream of integers of 64 bits")
    number, paces = ckd_adaptive.Number(data[1:]), (64, 1024)
    negative = ckd_adaptive.Model(128 << 16, 30, paces)
    gaps, values = ckd_adaptive.Sizes(205, 30, paces), ckd_adaptive.Sizes(48, 4, paces)
    plain, out = number.plain(4), []
    while len(out) < count:
        gap = gaps.read(number, plain)
        if gap > count - len(out):
            raise Corrupt("a gap leads beyond the last element")
        out += [0] * gap
        if len(out) < count:
            sign = negative.bit(number)
            value = values.read(number, 0)
            if value >= (1 << width - 1) - 1 + sign:
                raise Corrupt("an integer of a run stream is too large")
            out.append(-value - 1 & (1 << width) - 1 if sign else value + 1)
    number.end()
    return out


class Places:
    """Numbers in Golomb-Rice codes, and the places that they mean, from a change stream."""

    def __init__(self, data, at):
        self.data, self.at = data, at

    def numbers(self, count):
        if self.at >= len(self.data) or self.data[self.at] > 17:
            raise Corrupt("the low bits of a change stream")
        low = self.data[self.at]
        size, at = take_varint(self.data, self.at + 1)
        lows, self.at = at + (count * low + 7) // 8, at + (count * low + 7) // 8 + size
        if self.at > len(self.data):
            raise Corrupt("a change stream ends early")
        small = int.from_bytes(self.data[at:lows], "little")
        unary = int.from_bytes(self.data[lows:self.at], "little")
        out, begin = [], 0
        for i in range(count):
            rest = unary >> begin
            if rest == 0:
                raise Corrupt("numbers of a change stream are missing")
            high = (rest & -rest).bit_length() - 1
            begin += high + 1
            out.append(high << low | small >> i * low & (1 << low) - 1)
            if out[-1] >= MAX_COUNT:
                raise Corrupt("a number of a change stream is too large")
        if unary >> begin or (begin + 7) // 8 != size or small >> count * low:
            raise Corrupt("bits are left in a change stream")
        return out

    def places(self, count, limit):
        kind, self.at = self.data[self.at] if self.at < len(self.data) else 0, self.at + 1
        out, place = [], 0
        if kind == 1:
            for gap in self.numbers(count):
                out.append(place + gap)
                place += gap + 1
        elif kind == 2:
            runs, self.at = take_varint(self.data, self.at)
            if not 1 <= runs <= count:
                raise Corrupt("the number of runs of a change stream")
            gaps = self.numbers(runs)
            for number, (gap, length) in enumerate(zip(gaps, self.numbers(runs))):
                place += gap + (number > 0)
                out += range(place, place + length + 1)
                place += length + 1
        else:
            raise Corrupt("an unknown kind of places in a change stream")
        if len(out) != count or place > limit:
            raise Corrupt("the places of a change stream")
        return out


def decode_changes(data, count, width, context):
    if len(data) < 2 or not 1 <= data[1] <= 3 or len(data) < data[1] + 1:
        raise Corrupt("the lists of a change stream")
    lists = data[1]
    if lists > 1 and context is None:
        raise Corrupt("a change stream needs contexts where there are none")
    ends = ascending(list(data[2:lists + 1]))
    places, where, which = Places(data, lists + 1), [], []
    for first, last in [(0 if i == 0 else ends[i - 1] + 1, end) for i, end in enumerate(ends)] + [(0, 255)]:
        members = range(count) if last == 255 else [i for i in range(count) if first <= context[i] <= last]
        changes, places.at = take_varint(data, places.at)
        if len(where) + changes > count // 2:
            raise Corrupt("a change stream has too many changes")
        if changes:
            own = places.places(changes, len(members))
            others, places.at = take_varint(data, places.at)
            if others > changes:
                raise Corrupt("a change stream has too many others")
            which += [len(where) + i for i in (places.places(others, changes) if others else [])]
            where += [members[i] for i in own]
    at = places.at + (len(where) + 7) // 8
    if at > len(data):
        raise Corrupt("a change stream ends in its signs")
    sign = int.from_bytes(data[places.at:at], "little")
    if sign >> len(where) or not which and at != len(data):
        raise Corrupt("a change stream does not end where it should")
    values = [1] * len(where)
    if which:
        inner = [context[where[i]] for i in which] if context is not None else None
        for i, value in zip(which, decode_dense(data[at:], len(which), width, inner)):
            values[i] = value
    out = [0] * count
    for i, (place, value) in enumerate(zip(where, values)):
        out[place] = -value & (1 << width) - 1 if sign >> i & 1 else value
    return out


def decode(data, count, width, context):
    """`count` integers of `width` bits. context: a byte for each, or None."""
    if count > MAX_COUNT:
        raise Corrupt("a symbol stream of too many integers")
    if count == 0:
        if data:
            raise Corrupt("a symbol stream of no integers is not empty")
        return []
    if not data:
        raise Corrupt("a symbol stream is empty")
    if data[0] > 0x83:
        raise Unsupported(f"a symbol stream of kind {data[0]:#x}")
    if data[0] == 0x83:
        return decode_changes(data, count, width, context)
    if data[0] == 0x82:
        return decode_runs(data, count, width)
    if data[0] == 0x81:
        return decode_framed(data, count, width)
    if data[0] == 0x80:
        return decode_sparse(data, count, width, context)
    return decode_dense(data, count, width, context)
