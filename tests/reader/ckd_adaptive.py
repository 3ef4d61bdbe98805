"""Adaptive streams, after codec/FORMAT.md, "Adaptive streams". Part of the independent reader."""

from ckd_errors import Corrupt, Unsupported

UNIT = 1 << 24
# For start 1: the probability of not being zero, then of being larger than 0 ... 13, in 1/256.
SCALED = """
1 8 8 8 8 8 8 8 8 8 8 8 8 8 8
1 8 8 8 8 8 8 8 8 8 8 8 8 8 8
1 8 8 8 8 8 8 8 8 8 8 8 8 8 8
1 8 8 8 8 8 8 8 8 8 8 8 8 8 8
1 8 8 8 8 8 8 8 8 8 8 8 8 8 8
1 8 8 8 8 8 8 8 8 8 8 8 8 8 8
1 8 8 8 8 8 8 8 8 8 8 8 8 8 8
4 8 8 8 8 8 8 8 8 8 8 8 8 8 8
12 8 8 8 8 8 8 8 8 8 8 8 8 8 8
24 8 8 8 8 8 8 8 8 8 8 8 8 8 8
40 8 8 8 8 8 8 8 8 8 8 8 8 8 8
60 8 8 8 8 8 8 8 8 8 8 8 8 8 8
81 8 8 8 8 8 8 8 8 8 8 8 8 8 8
103 8 8 8 8 8 8 8 8 8 8 8 8 8 8
123 18 8 8 8 8 8 8 8 8 8 8 8 8 8
141 35 10 8 8 8 8 8 8 8 8 8 8 8 8
158 55 24 10 8 8 8 8 8 8 8 8 8 8 8
173 79 44 23 12 8 8 8 8 8 8 8 8 8 8
185 102 68 44 28 18 11 8 8 8 8 8 8 8 8
196 124 94 70 51 37 26 19 13 10 8 8 8 8 8
205 145 119 97 78 62 50 39 31 24 19 15 12 9 8
213 162 142 123 106 91 77 66 56 47 40 34 28 24 20
220 177 162 147 132 119 106 95 85 76 67 60 53 47 42
226 190 179 167 155 144 134 124 114 105 97 89 82 76 70
231 201 192 184 175 166 158 149 141 134 126 119 113 106 100
235 210 204 197 191 184 178 171 165 159 152 147 141 135 130
238 218 213 208 204 199 194 189 184 179 174 170 165 161 156
241 224 221 217 214 210 207 203 199 196 192 189 185 182 178
243 204 196 187 178 169 161 152 144 137 129 122 115 109 102
245 213 206 200 193 187 180 174 167 161 155 149 143 137 132
247 220 215 210 205 201 196 191 186 181 176 172 167 162 158
248 225 222 219 215 212 208 204 201 197 194 190 186 183 179
"""
SCALED = [[int(number) for number in row.split()] for row in SCALED.strip().split("\n")]


class Number:
    """The arithmetic decoder."""

    def __init__(self, data):
        self.data, self.at = data, 0
        self.range, self.code, self.window = 2**32 - 1, 0, 0
        for _ in range(4):
            self.shift()

    def shift(self):
        byte = self.data[self.at] if self.at < len(self.data) else 0
        self.at += 1
        if self.at > len(self.data) + 4:
            raise Corrupt("an adaptive stream ends early")
        self.code = self.code << 8 | byte
        self.window = (self.window << 8 | byte) & 0xffffffff

    def bit(self, probability):
        bound = self.range * probability >> 16
        one = self.code < bound
        if one:
            self.range = bound
        else:
            self.code -= bound
            self.range -= bound
        self.normalise()
        return int(one)

    def normalise(self):
        while self.range < UNIT:
            self.range <<= 8
            self.shift()

    def plain(self, count):
        value = 0
        while count:
            few = min(count, 12)
            each = self.range >> few
            part = min(self.code // each, (1 << few) - 1)
            self.code -= part * each
            self.range = each
            self.normalise()
            value = value << few | part
            count -= few
        return value

    def end(self):
        low = (self.window - self.code) % 2**32
        for zeros in range(4, -1, -1):
            unit = 256**zeros
            number = -(-low // unit) * unit
            if number < low + self.range:
                break
        if number % 2**32 != self.window or self.at - zeros != len(self.data):
            raise Corrupt("an adaptive stream does not end where it should")


class Model:
    def __init__(self, mean, count, paces):
        self.means, self.count, self.paces = [mean, mean], count, paces

    @property
    def probability(self):
        return sum(self.means) >> 9 | 1

    def bit(self, number):
        bit = number.bit(self.probability)
        for i, pace in enumerate(self.paces):
            share = 65536 // min(self.count + 2, pace)
            mean = self.means[i]
            self.means[i] = mean + ((UNIT - mean) * share >> 16) if bit else mean - (mean * share >> 16)
        self.count = min(self.count + 1, max(self.count, self.paces[1]))
        return bit


class Sizes:
    def __init__(self, probability, count, paces):
        def model(p):
            return Model(p << 16, count, paces)
        self.more = [model(probability) for _ in range(14)]
        self.longer = [model(probability) for _ in range(32)]
        self.top = [[model(128) for _ in range(4)] for _ in range(32)]

    def read(self, number, plain):
        j = 0
        while j < 14 and self.more[j].bit(number):
            j += 1
        if j == 14:
            length = 0
            while self.longer[length].bit(number):
                length += 1
                if length == 32:
                    raise Corrupt("an integer of an adaptive stream is too long")
            x = tree = 1
            left = length
            while left and tree < 4:
                bit = self.top[length][tree].bit(number)
                x, tree, left = 2 * x + bit, 2 * tree + bit, left - 1
            x = (x << left) + number.plain(left)
            j = 13 + x
        return (j << plain) + number.plain(plain)


def signed(negative, size):
    value = -size - 1 if negative else size + 1
    if not -2**31 <= value < 2**31:
        raise Corrupt("an integer of an adaptive stream has more than 32 bits")
    return value


class Context:
    PACES = 64, 1024

    def __init__(self, start, context):
        self.start, self.plain = start, 0
        self.negative = Model(128 << 16, 0, self.PACES)
        if start == 0:
            self.nonzero = Model(128 << 16, 0, self.PACES)
            self.sizes = Sizes(128, 0, self.PACES)
            return
        row = SCALED[context if context < 32 else 28 + context % 4]
        beyond = 0
        if context >= 28:
            self.plain, beyond = (context - 24) // 4, (context - 28) // 4
        self.nonzero = Model(256 - max(1, 256 - row[0] >> beyond) << 16, 30, self.PACES)
        self.sizes = Sizes(96, 7, self.PACES)
        self.sizes.more = [Model(p << 16, 30, self.PACES) for p in row[1:]]

    def read(self, number):
        if not self.nonzero.bit(number):
            return 0
        negative = number.plain(1) if self.start else self.negative.bit(number)
        return signed(negative, self.sizes.read(number, self.plain))


def begin(data, kinds):
    if not data:
        raise Corrupt("an adaptive stream is empty")
    number = Number(data)
    kind = number.plain(2)
    if kind not in kinds:
        raise Unsupported(f"an adaptive stream of kind {kind}")
    return number, kind


def nothing(data):
    if data:
        raise Corrupt("an adaptive stream of no integers is not empty")
    return []


def decode(data, count, contexts=None):
    """`count` integers; contexts: 0 ... 63 for each, or None."""
    if count == 0:
        return nothing(data)
    number, start = begin(data, (0, 1))
    models, out = {}, []
    for i in range(count):
        context = contexts[i] if contexts else 0
        if context not in models:
            models[context] = Context(start, context)
        out.append(models[context].read(number))
    number.end()
    return out


def log(x):
    whole = x.bit_length() - 1
    return 16 * whole + (16 * (x - (1 << whole)) >> whole)


def exp(y):
    return (16 + y % 16 << y // 16) >> 4


class Plane:
    WEIGHTS = {1: 32, 2: 12, 3: 4}

    def __init__(self, data, count, columns, phase, hints):
        self.number, _ = begin(data, (2,))
        self.count, self.columns, self.phase, self.hints = count, columns, phase, hints
        self.mode, density = self.number.plain(2), self.number.plain(7)
        if density > 72:
            raise Corrupt("the density of an adaptive stream")
        self.density = 4 + density % 4 << 5 + density // 4
        self.column_activity, self.values = {}, []
        self.active, self.expected = 2 * UNIT, 2 * UNIT
        self.nonzero, self.negative, self.sizes = {}, {}, {}

    def neighbour(self, up, left):
        """The value so many rows and columns away, or 0."""
        i = len(self.values)
        column = (self.phase + i) % self.columns - left
        at = i - up * self.columns - left
        return self.values[at] if 0 <= column < self.columns and at >= 0 else 0

    def level(self, activity):
        estimate = log(activity) + log(self.active) - log(self.expected)
        if self.mode:
            weight = self.WEIGHTS[self.mode]
            around = sum(times * min(abs(self.neighbour(up, left)), 2) for times, up, left in
                         ((2, 0, 1), (1, 0, 2), (1, 1, 1), (2, 1, 0), (1, 2, 0), (1, 1, -1)))
            alone = 8 * exp(min(max(estimate, 0), 511))
            estimate += log((around + weight) * UNIT) - log(alone + weight * UNIT)
        return min(max((estimate - 112) // 8, 0), 63)

    def read_nonzero(self, probability):
        signs = tuple((v > 0) - (v < 0) for v in (self.neighbour(0, 1), self.neighbour(1, 0)))
        sign = self.negative.setdefault(signs, Model(128 << 16, 40, (1024, 4096)))
        negative = sign.bit(self.number)
        number = log(probability) // 16 if probability < 32768 else 30 - log(65536 - probability) // 16
        return signed(negative, self.sizes.setdefault(number, Sizes(64, 2, (32, 512))).read(self.number, 0))

    def read(self):
        i = len(self.values)
        column = (self.phase + i) % self.columns
        if i and column == 0:
            ratio = min(256 * self.active // self.expected, 4096)
            self.active, self.expected = UNIT + (UNIT * ratio >> 8), 2 * UNIT
        activity = self.column_activity.get(column, self.density)
        key = self.hints[i] if self.hints else 0, self.level(activity)
        if key not in self.nonzero:
            start = exp(116 + 8 * key[1])
            self.nonzero[key] = Model(UNIT * start // (start + UNIT), 32, (512, 8192))
        probability = self.nonzero[key].probability
        value = self.read_nonzero(probability) if self.nonzero[key].bit(self.number) else 0
        active = min(abs(value), 2) * UNIT
        self.active += active
        self.expected += activity
        step = 65536 // (min(i // self.columns, 100) + max(3, UNIT // self.density) + 1)
        self.column_activity[column] = activity * (65536 - step) + active * step >> 16 | 1
        self.values.append(value)


def decode_plane(data, count, columns, phase=0, hints=None):
    """`count` integers of a matrix, the first one in column `phase`; hints: 0 ... 15 for each, or None."""
    if count == 0:
        return nothing(data)
    plane = Plane(data, count, columns, phase, hints)
    for _ in range(count):
        plane.read()
    plane.number.end()
    return plane.values
