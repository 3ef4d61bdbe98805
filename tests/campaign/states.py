"""The states that a campaign saves. They are random walks that depend only on their seeds, so that a command
determines its state.

A flavour determines the tensors and how they change. A line is a list of [seed, first step]: a branch has its
parent's entries and one of its own. `tensors(flavour, line, step)` always returns the same.
"""

import collections
import random

import numpy as np

ODD_DTYPES = ["F64", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"]
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
         "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
KEPT = 400  # states that are cached, so that the next step of a line needs one update
BETA1, BETA2, EPSILON, DECAY, RATE = np.float32(0.9), np.float32(0.999), np.float32(1e-8), np.float32(0.01), np.float32(1e-3)
REST1, REST2 = np.float32(1 - 0.9), np.float32(1 - 0.999)


def flavour(rng, kind):
    """A random flavour: kind is `plain`, `tied`, `adamw` or `odd`. clip: gradients were bf16, and then multiplied by it; 0: they
    are f32."""
    made = {"kind": kind, "shapes": [["a.weight", [rng.choice([64, 96, 128]), rng.choice([64, 96])]],
                                     ["b.weight", [rng.choice([32, 64]), rng.choice([100, 200])]], ["b.bias", [64]]],
            "moved": rng.choice([0.02, 0.3, 0.3, 1.0]), "scale": rng.choice([1e-4, 1e-3, 1e-3, 1e-2]),
            "rest": rng.choice([0.0, 0.0, 0.3, 0.6])}
    if kind == "adamw":
        made["moved"], made["rest"] = 1.0, 0.0
        made["clip"] = random.Random(repr(made)).choice([0.0, 1.0, 0.7])
    if rng.random() < 0.3:
        made["shapes"].append(["embed.weight", [256, 32]])
    return made


class Walk:
    """The weights of a line at a step, and, with AdamW, the moments."""

    def __init__(self, flavour, line):
        self.weights, self.m, self.v = {}, {}, {}
        noise = np.random.default_rng([line[0][0], 1 << 20])
        for name, shape in flavour["shapes"]:
            self.weights[name] = (noise.standard_normal(shape) * 0.02).astype(np.float32)
            self.m[name] = np.zeros(shape, np.float32)
            self.v[name] = np.zeros(shape, np.float32)

    def next(self, flavour, seed, step):
        after = Walk.__new__(Walk)
        after.weights, after.m, after.v = dict(self.weights), dict(self.m), dict(self.v)
        noise = np.random.default_rng([seed, step])
        for name, shape in flavour["shapes"]:
            if flavour["kind"] == "adamw":
                gradient = noise.standard_normal(shape).astype(np.float32) * np.float32(0.1)
                if flavour.get("clip"):
                    gradient = (bf16(gradient).astype(np.uint32) << 16).view(np.float32) * np.float32(flavour["clip"])
                after.update(name, gradient, step)
            elif noise.random() >= flavour["rest"]:
                moved = noise.random(shape) < flavour["moved"]
                after.weights[name] = (after.weights[name] + moved * noise.standard_normal(shape) * flavour["scale"]).astype(np.float32)
        return after

    def update(self, name, gradient, step):
        m = BETA1 * self.m[name] + REST1 * gradient
        v = BETA2 * self.v[name] + REST2 * gradient * gradient
        first, second = np.float32(1 - 0.9**step), np.float32(1 - 0.999**step)
        moved = self.weights[name] * (1 - RATE * DECAY) - RATE * (m / first) / (np.sqrt(v / second) + EPSILON)
        self.weights[name], self.m[name], self.v[name] = (a.astype(np.float32) for a in (moved, m, v))


walks = collections.OrderedDict()


def walk(flavour, line, step):
    key = (repr(flavour), repr([s for s in line if s[1] <= step]), step)
    if key not in walks:
        if step == 0:
            found = Walk(flavour, line)
        else:
            seed = [s for s, first in line if first <= step][-1]
            found = walk(flavour, line, step - 1).next(flavour, seed, step)
        walks[key] = found
        if len(walks) > KEPT:
            walks.popitem(last=False)
    walks.move_to_end(key)
    return walks[key]


def raw(dtype, array):
    return dtype, list(array.shape), array.tobytes()


def bf16(array):
    """The upper half of each float, which is its value in bf16, rounded towards zero."""
    return (array.view(np.uint32) >> 16).astype(np.uint16)


def tensors(flavour, line, step):
    """{name: (dtype, shape, bytes)}"""
    at = walk(flavour, line, step)
    made = {}
    for name, weight in at.weights.items():
        m, v = (at.m[name], at.v[name]) if flavour["kind"] == "adamw" else (weight * np.float32(0.1), weight * weight * np.float32(0.01))
        if flavour["kind"] == "tied" and weight.ndim == 2:
            made["master." + name] = raw("F32", weight)
            made[name] = ("BF16", list(weight.shape), bf16(weight).tobytes())
        else:
            made[name] = raw("F32", weight)
        made["exp_avg." + name] = raw("F32", m.astype(np.float32))
        made["exp_avg_sq." + name] = raw("F32", v.astype(np.float32))
    if flavour["kind"] == "tied":
        made["head.weight"] = made["a.weight"]  # a second name for the same values
    made["ids"] = raw("I64", np.arange(step, step + 64, dtype=np.int64))
    if flavour["kind"] == "odd":
        made.update(odd_tensors(line, step))
    return made


def odd_tensors(line, step):
    """Every dtype, scalars, empty tensors, and tensors that exist only at some steps."""
    made = {}
    for i, dtype in enumerate(ODD_DTYPES):
        noise = random.Random(f"{line[0][0]} {dtype} {step // 3}")
        shape = noise.choice([[], [0], [1], [7], [40, 9], [3, 0, 2], [300]])
        elements = int(np.prod(shape, dtype=np.int64))
        data = bytes(noise.getrandbits(1) for _ in range(elements)) if dtype == "BOOL" else noise.randbytes(elements * SIZES[dtype])
        if (step // 2 + i) % 5:
            made[f"odd.{dtype}.{step // 4 % 2 if i % 3 == 0 else 0}"] = (dtype, shape, data)
    return made
