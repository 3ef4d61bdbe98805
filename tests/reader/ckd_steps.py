"""Group records and optimizer steps, after codec/FORMAT.md. Part of the independent reader."""

import struct

import numpy as np

from ckd_errors import Corrupt, Unsupported

F, D = np.float32, np.float64
COEFFICIENTS = ("beta1", "rest1", "beta2", "rest2", "keep", "decay", "rate", "root", "eps", "bias1", "bias2", "lr",
                "weight_decay", "momentum", "undamped")


class Group:
    def __init__(self, data):
        if len(data) < 4:
            raise Corrupt("a group record is too short")
        self.kind, self.rule = struct.unpack_from("<HH", data)
        if self.kind not in (1, 2, 3) or inputs(self.rule) is None:
            raise Unsupported(f"optimizer kind {self.kind}, rule {self.rule}")
        if len(data) != 192 or struct.unpack_from("<I", data, 4)[0] > 1:
            raise Corrupt("a group record of another size, or with unknown flags")
        self.coefficients = dict(zip(COEFFICIENTS, (D(x) for x in struct.unpack_from("<15d", data, 72))))


def inputs(rule):
    """Value dependencies besides the first; None for an unknown rule."""
    if 1 <= rule <= 10 or 17 <= rule <= 22 or 35 <= rule <= 36:
        return 2
    if 65 <= rule <= 69:
        return 2
    if 49 <= rule <= 56:
        return 0  # the payload has the gradient
    return 1 if 33 <= rule <= 34 else None


def to_bf16(x):
    bits = x.astype("<f4").view("<u4")
    rounded = ((bits.astype("<u8") + 0x7fff + (bits >> 16 & 1)) & 0xffff0000).astype("<u4")
    nan = (bits & 0x7fffffff) > 0x7f800000
    return np.where(nan, 0x7fc00000, rounded).astype("<u4").view("<f4")


def moment(c, f, k, m0, h):
    g = h * f["rate"]  # the scale
    if k == 0:
        return m0 + f["rest1"] * (g - m0)
    if k == 1:
        return D(m0) + D(f["rest1"]) * D(g - m0)
    if k == 2:
        return f["beta1"] * m0 + f["rest1"] * g
    if k == 3:
        return D(f["beta1"] * m0) + D(f["rest1"]) * D(g)
    if k == 4:
        return D(f["beta1"]) * D(m0) + D(f["rest1"] * g)
    if k == 5:
        return c["beta1"] * D(m0) + c["rest1"] * D(g)
    if k == 6:
        return f["momentum"] * m0 + f["undamped"] * g
    return D(f["momentum"] * m0) + D(f["undamped"]) * D(g)


def square(c, f, k, v0, m1, m0):
    if k >= 10:  # the gradient was bf16
        g = to_bf16(((D(m1) - c["beta1"] * D(m0)) / c["rest1"] / c["rate"]).astype(F)) * f["rate"]
    elif k < 5:
        g = (m1 - m0) / f["rest1"] + m0
    else:
        g = (m1 - f["beta1"] * m0) / f["rest1"]
    kept = v0 * f["beta2"]
    if k % 5 == 0:
        return kept + (f["rest2"] * g) * g
    if k % 5 == 1:
        return kept + f["rest2"] * (g * g)
    if k % 5 == 2:
        return D(kept) + D(f["rest2"] * g) * D(g)
    if k % 5 == 3:
        return D(kept) + D(f["rest2"]) * D(g * g)
    return c["beta2"] * D(v0) + (c["rest2"] * D(g)) * D(g)


def adam(c, f, k, w0, m1, v1):
    if k == 4:
        direction = (m1 / f["bias1"]) / (np.sqrt(v1 / f["bias2"]) + f["eps"])
        return w0 - f["lr"] * (direction + f["weight_decay"] * w0)
    if k == 5:
        return c["keep"] * D(w0) - (c["rate"] * D(m1)) / (D(np.sqrt(v1)) / c["root"] + c["eps"])
    below = np.sqrt(v1) / f["root"]
    if k == 3:
        return F(D(w0) - c["decay"] * D(w0)) - (f["rate"] * m1) / F(D(below) + c["eps"])
    below = below + f["eps"]
    if k == 0:
        return w0 * f["keep"] - (f["rate"] * m1) / below
    if k == 1:
        return w0 * f["keep"] - f["rate"] * (m1 / below)
    return D(w0 * f["keep"]) - D(f["rate"]) * D(m1 / below)


def sgd(f, k, w0, u):
    return w0 - f["lr"] * u if k == 0 else D(w0) - D(f["lr"]) * D(u)


def predict(group, x0, a, b):
    """f32 arrays in, the bits of the prediction out. b is None for rules with one input. Of rules 49 to 56, a is the gradient."""
    c = group.coefficients
    with np.errstate(all="ignore"):
        f = {name: F(value) for name, value in c.items()}
        rule = group.rule
        if rule <= 10:
            out = square(c, f, rule - 1, x0, a, b)
        elif rule <= 22:
            out = adam(c, f, rule - 17, x0, a, b)
        elif rule <= 34:
            out = sgd(f, rule - 33, x0, a)
        elif rule >= 65:
            out = square(c, f, 10 + rule - 65, x0, a, b)
        elif rule >= 49:
            out = moment(c, f, rule - 49, x0, a)
        else:
            out = sgd(f, rule - 35, x0, (a - f["momentum"] * b) / f["undamped"] + f["momentum"] * a)
        bits = out.astype("<f4").view("<u4")
    return np.where((bits & 0x7fffffff) > 0x7f800000, 0x7fc00000, bits).astype("<u4")
