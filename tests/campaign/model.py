"""What must be readable: the model with which a campaign compares stores.

A store is a set of checkpoints. Each is listed, in the trash, or gone. A command may move some of them; all
others must stay where they are. The values of a checkpoint are known by its id, in any store.
"""

import hashlib
import time

import numpy as np

import states

LISTED, TRASH, GONE = "listed", "trash", "gone"
PERIODS = {"daily": lambda t: t // 86400, "weekly": lambda t: (t // 86400 + 3) // 7, "monthly": lambda t: time.gmtime(t)[:2]}
SLACK = 6  # seconds: the clock of a command may advance by five


class Failure(Exception):
    """A store differs from the model. A shrunk script must fail with the same kind."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Entry:
    def __init__(self, id, run, step, metric, saved, suspect=False):
        self.id, self.run, self.step, self.metric, self.saved = id, run, step, metric, saved
        self.suspect = suspect  # as the store says; it never changes
        self.place, self.until = LISTED, None

    @property
    def name(self):
        return f"{self.run}@{self.step}"

    def may_expire(self, now):
        return self.until <= now + SLACK


class Content:
    """The values of a checkpoint: those that were saved, and for lossy ones those of the first load."""

    def __init__(self, flavour, line, step, fidelities):
        self.flavour, self.line, self.step, self.fidelities = flavour, line, step, fidelities
        self.first = None

    @property
    def exact(self):
        return set(self.fidelities.values()) <= {"exact"}

    def check(self, name, loaded):
        """Compares the loaded tensors, {tensor: (dtype, shape, bytes)}."""
        saved = states.tensors(self.flavour, self.line, self.step)
        if loaded.keys() != saved.keys():
            raise Failure("tensors", f"{name} has other tensors: {sorted(loaded.keys() ^ saved.keys())}")
        for tensor, (dtype, shape, data) in loaded.items():
            if (dtype, list(shape)) != (saved[tensor][0], list(saved[tensor][1])):
                raise Failure("tensors", f"{name}: {tensor} has another dtype or shape")
            if self.exact_tensor(tensor, dtype) and data != saved[tensor][2]:
                raise Failure("bits", f"{name}: {tensor} has other bits than were saved")
            if not self.exact_tensor(tensor, dtype):
                check_near(name, tensor, dtype, saved[tensor][2], data)
        found = {tensor: hashlib.sha256(value[2]).hexdigest() for tensor, value in loaded.items()}
        if self.first is None:
            self.first = found
        elif self.first != found:
            other = [t for t in found if self.first[t] != found[t]]
            raise Failure("bits", f"{name}: {other} have other bits than the first load gave")

    def exact_tensor(self, tensor, dtype):
        if dtype not in ("F32", "BF16", "F16") or tensor.startswith("odd."):
            return not tensor.startswith("odd.") or dtype not in ("F32", "BF16", "F16") or self.exact
        role = "exp_avg_sq" if tensor.startswith("exp_avg_sq.") else "exp_avg" if tensor.startswith("exp_avg.") else \
            "master" if tensor.startswith("master.") else "weight"
        return self.fidelities.get(role, self.fidelities[""]) == "exact"


def floats(dtype, data):
    if dtype == "F16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float32)


def check_near(name, tensor, dtype, saved, loaded):
    """Lossy values may be coarse, but not far off. A second moment must not become negative, or 0 if it was
    not."""
    a, b = floats(dtype, saved), floats(dtype, loaded)
    with np.errstate(invalid="ignore", over="ignore"):
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            raise Failure("values", f"{name}: {tensor} is not finite where it was, or the other way round")
        if tensor.startswith("odd."):
            return
        norm, error = float(np.linalg.norm(a)), float(np.linalg.norm(a - b))
    if not error <= 0.5 * norm + 1e-30 and not tensor.startswith("exp_avg"):
        raise Failure("values", f"{name}: {tensor} is off by {error:g} of {norm:g}")
    if tensor.startswith("exp_avg_sq.") and ((b < 0).any() or ((a > 0) & (b == 0)).any()):
        raise Failure("values", f"{name}: {tensor} is below 0, or 0 where it was not")


class Store:
    def __init__(self, name):
        self.name, self.entries = name, {}
        self.pins, self.tags, self.policies = set(), {}, {}
        self.exists = False
        self.hurt = False  # something may be unreadable until a repair
        self.beyond = False  # and a repair may not bring all of it back
        self.lost, self.tried = set(), set()  # ids that cannot be loaded since the last damage, and ids for which this is known

    def heal(self):
        self.hurt = self.beyond = False
        self.lost, self.tried = set(), set()

    def may_be_lost(self, id):
        """If a load reports damage. Only the first load after the damage may, as no command may lose more."""
        if not self.hurt or id in self.tried - self.lost:
            return False
        self.tried.add(id)
        self.lost.add(id)
        return True

    def at(self, place):
        return sorted((e for e in self.entries.values() if e.place == place), key=lambda e: (e.run, e.step, e.id))

    def listed(self, run=None):
        return [e for e in self.at(LISTED) if run is None or e.run == run]

    def runs(self):
        return sorted({e.run for e in self.listed()})

    def find(self, name):
        return next((e for e in self.listed() if e.name == name), None)

    def marked(self):
        return self.pins | set(self.tags.values())

    def must_stay(self, run, keep, now, safety=True):
        """The ids that a policy must keep of a run; a second set has those that it may keep."""
        every = sorted(self.listed(run), key=lambda e: e.step)
        stay = {e.id for e in every if e.id in self.marked()}
        mine = [e for e in every if not e.suspect]  # rules count no others
        stay |= {e.id for e in every[-1:] if e.suspect}
        maybe = set()
        if safety:
            stay |= {e.id for e in mine[-2:]}
        if keep.get("last"):
            stay |= {e.id for e in mine[-keep["last"]:]}
        if keep.get("every"):
            stay |= {e.id for e in mine if e.step % keep["every"] == 0}
        if keep.get("first"):
            stay |= {e.id for e in mine[:1]}
        if keep.get("best"):
            measured = sorted((e.metric if not keep.get("highest") else -e.metric, e.step, e.id) for e in mine if e.metric is not None)
            chosen = measured[:keep["best"]]
            ties = {m for m, _, _ in measured[keep["best"]:]} & {m for m, _, _ in chosen}
            stay |= {i for m, _, i in chosen if m not in ties}
            maybe |= {i for m, _, i in measured if m in ties}
        if keep.get("newer"):
            stay |= {e.id for e in mine if e.saved > now - keep["newer"] + SLACK}
            maybe |= {e.id for e in mine if now - keep["newer"] - 2 <= e.saved <= now - keep["newer"] + SLACK}
        if keep.get("within") and mine:
            newest = min(mine[-1].saved, now)
            stay |= {e.id for e in mine if e.saved > newest - keep["within"] + SLACK}
            maybe |= {e.id for e in mine if newest - keep["within"] - SLACK <= e.saved <= newest - keep["within"] + SLACK}
        for rule, period in PERIODS.items():
            if keep.get(rule):
                # The command may have saved a few seconds later, in the next period.
                if any(period(e.saved) != period(e.saved + SLACK) for e in mine):
                    maybe |= {e.id for e in mine}
                else:
                    highest = {period(e.saved): e.id for e in mine}
                    stay |= {highest[p] for p in sorted(highest, reverse=True)[:keep[rule]]}
        return stay, maybe - stay


class World:
    """All stores, and the values of each id."""

    def __init__(self, names):
        self.stores = {name: Store(name) for name in names}
        self.contents = {}
        self.clock = 0
