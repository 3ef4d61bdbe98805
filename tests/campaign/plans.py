"""Draws the commands of a campaign. The mode, which is drawn too, determines which commands there are, and
how often."""

import random

import states
from model import TRASH

UNDO = ["0s", "0s", "60s", "1h", "1h", "24h"]

# The frequency of each command, by mode. Each mode stresses something else.
MODES = {
    "lossy": {"save": 50, "compact": 16, "delete": 6, "restore": 6, "prune": 3, "copy": 5, "load": 6, "empty": 2, "wait": 2},
    "branches": {"save": 50, "rename": 4, "compact": 10, "delete": 6, "restore": 4, "prune": 5, "copy": 3, "load": 6, "empty": 2, "wait": 2,
                 "pin": 3, "tag": 4, "tell": 3},
    "copies": {"save": 40, "rename": 4, "compact": 8, "delete": 8, "restore": 8, "prune": 3, "copy": 25, "load": 4, "empty": 3, "wait": 2, "tag": 3},
    "steps": {"save": 60, "compact": 10, "delete": 5, "restore": 3, "prune": 4, "copy": 4, "load": 6, "empty": 2, "wait": 2},
    "policies": {"save": 60, "rename": 3, "policy": 8, "compact": 8, "prune": 8, "delete": 3, "restore": 4, "pin": 4, "tag": 4, "wait": 6, "empty": 3},
    "catalogs": {"save": 50, "rename": 4, "catalog": 14, "rebuild": 6, "compact": 8, "delete": 6, "restore": 4, "prune": 4, "copy": 6, "pin": 2,
                 "tag": 2, "tell": 6, "load": 4},
    "damage": {"save": 45, "rename": 2, "damage": 9, "repair": 5, "parity": 5, "compact": 8, "prune": 5, "delete": 5, "restore": 5, "empty": 3,
               "copy": 3, "load": 4, "wait": 2, "tell": 2, "policy": 1},
    "losses": {"save": 26, "ranks": 4, "loss": 6, "repair": 3, "parity": 2, "compact": 16, "prune": 10, "delete": 10, "restore": 4, "empty": 3, "copy": 8, "load": 2,
               "wait": 2, "tell": 2, "pin": 1, "rename": 2, "rebuild": 2},
    "ranks": {"save": 20, "ranks": 35, "compact": 10, "prune": 3, "delete": 5, "restore": 4, "copy": 6, "load": 8, "empty": 2, "parity": 2,
              "wait": 2, "pin": 1},
    "faults": {"ranks": 6, "save": 45, "rename": 5, "compact": 12, "prune": 5, "delete": 6, "restore": 5, "empty": 4, "copy": 9, "parity": 4, "repair": 2,
               "rebuild": 3, "catalog": 2, "pin": 2, "tag": 2, "load": 3, "wait": 2},
}
MODES["manifests"] = {**MODES["damage"], "manifest": 5}

FAULTS = ["kill"] * 6 + ["EIO", "EIO", "EIO+", "ENOSPC", "ENOSPC+", "EINTR", "short", "short", "size"]
FAULTY = {"save", "ranks", "compact", "prune", "delete", "restore", "empty", "copy", "parity", "repair", "rebuild", "pin", "tag", "rename"}


class Plan:
    """Draws the next command for the present state of the model."""

    def __init__(self, seed, mode):
        self.rng, self.mode = random.Random(f"{seed} {mode}"), mode
        rng = self.rng
        kinds = {"lossy": ["plain", "plain", "tied"], "branches": ["plain", "tied"], "steps": ["adamw"]}.get(mode, ["plain", "plain", "tied", "odd", "adamw"])
        self.flavours = [states.flavour(rng, rng.choice(kinds)) for _ in range(2)]
        self.runs = rng.choice({"lossy": [1], "losses": [1, 1, 2], "branches": [1, 2]}.get(mode, [1, 1, 2, 3]))
        lossy = {"lossy": 1.0, "branches": 0.5, "steps": 0.1}.get(mode, 0.4)
        self.fidelity = {f"r{i}": rng.choice(["near", "coarse", "coarse"]) if rng.random() < lossy else "exact" for i in range(self.runs)}
        self.lines = {f"r{i}": [[rng.randrange(1 << 30), 0]] for i in range(self.runs)}
        self.flavour_of = {f"r{i}": rng.choice(self.flavours) for i in range(self.runs)}
        self.next_step = {}
        self.branches = {"branches": 0.12, "lossy": rng.choice([0.0, 0.1])}.get(mode, 0.03)
        self.stride = rng.choice([1, 1, 1, 2, 5])
        self.tags = self.saves = 0
        self.soon = []  # the commands to draw next

    def draw(self, world):
        weights = MODES[self.mode]
        # only eight or more checkpoints of a run can be packed
        if len(world.stores["A"].listed()) < (9 if self.mode == "losses" else 1) and self.saves < 40:
            self.saves += 1
            return self.draw_save(world)
        for _ in range(20):
            what = self.soon.pop(0) if self.soon else self.rng.choices(list(weights), list(weights.values()))[0]
            op = getattr(self, "draw_" + what)(world)
            if op:
                return self.with_fault(op)
        return self.draw_save(world)

    def with_fault(self, op):
        """Some commands are killed, or one of their system calls fails."""
        often = {"faults": 0.4, "ranks": 0.1, "losses": 0.08}.get(self.mode, 0.0)
        if op["op"] in FAULTY and self.rng.random() < often:
            fault = self.rng.choice(FAULTS)
            at = self.rng.choice([60, 250, 800]) * self.rng.random()
            op["fault"] = f"{fault}:{int(at * (300 if fault == 'size' else 1)) + 1}"
        return op

    def store(self, world):
        """Mostly store A."""
        there = [s for s in "ABC" if world.stores[s].listed()]
        return self.rng.choice(["A"] * 3 + there)

    def entry(self, world, store):
        return self.rng.choice(world.stores[store].listed())

    def keep(self):
        rng, keep = self.rng, {}
        if rng.random() < 0.7:
            keep["last"] = rng.choice([1, 2, 3, 4, 6])
        if rng.random() < 0.5 or not keep:
            keep["every"] = rng.choice([2, 3, 5, 10, 1000])
        if rng.random() < 0.15:
            keep["first"] = True
        if rng.random() < 0.15:
            keep["best"], keep["highest"] = rng.choice([1, 2]), rng.random() < 0.5
        if rng.random() < 0.1:
            keep["newer"] = rng.choice([30, 120, 3600])
        if rng.random() < 0.15:
            keep["within"] = rng.choice([60, 3600, 86400, 604800])
        for period in ("daily", "weekly", "monthly"):
            if rng.random() < 0.15:
                keep[period] = rng.choice([1, 2, 3, 7])
        if len(keep) > 1 and rng.random() < 0.1:
            keep = {"tag": "any"}
        return keep

    def draw_save(self, world):
        rng, run = self.rng, f"r{self.rng.randrange(self.runs)}"
        model, args = world.stores["A"], []
        mine = sorted({r for r in model.runs() if r.split("~")[0] == run})
        of = rng.choice(mine) if mine else run
        listed = model.listed(of)
        step = (max((e.step for e in listed), default=rng.choice([-1, -1, 20])) if listed or of in self.next_step else -1) + self.stride
        step = max(step, self.next_step.get(of, 0))
        op = {"op": "save", "store": "A", "run": of, "flavour": self.flavour_of[run], "line": self.lines.get(of, self.lines[run]), "step": step}
        if listed and rng.random() < self.branches:
            e = rng.choice(listed)
            op["step"] = e.step + self.stride * (rng.random() < 0.7)
            args += ["--on-duplicate", "branch"]
            op["line"] = op["line"] + [[rng.randrange(1 << 30), op["step"]]]
            branch = next(f"{run}~{i}" for i in range(2, 99) if f"{run}~{i}" not in self.lines)
            self.lines[branch] = op["line"]
        elif listed and rng.random() < 0.05:
            args += ["--parent", rng.choice(listed).name]
            if not int(args[-1].rpartition("@")[2]) < step:
                args = []
        else:
            self.next_step[of] = step + 1
        fidelity = self.fidelity[run]
        op["fidelity"] = {"": fidelity}
        if fidelity != "exact":
            if rng.random() < 0.05:
                op["fidelity"][rng.choice(["weight", "exp_avg", "exp_avg_sq"])] = rng.choice(["exact", "near"])
            if rng.random() < 0.1:
                args += rng.choice([["--effort", "1"], ["--effort", "9"], ["--step-scale", "2"], ["--max-error", "0.05"]])
        if rng.random() < 0.04 and "--parent" not in args:
            args += ["--base"]
        if rng.random() < 0.4:
            args += ["--newest-load-cost", rng.choice(["1", "1.5", "2"])]
        if rng.random() < 0.2:
            args += ["--metric", f"loss={rng.randrange(40) / 8}"]
        if self.flavour_of[run]["kind"] == "adamw" and step > 0 and rng.random() < 0.85:
            args += ["--adamw", f"lr=1e-3,step={step}"]
        op["args"] = args
        return op

    def draw_ranks(self, world):
        """A save by several ranks, without the options that only the command has."""
        op = self.draw_save(world)
        if "--on-duplicate" in op["args"]:
            return op
        world_size = self.rng.choice([2, 2, 3, 4])
        return {**op, "op": "ranks", "args": [], "fidelity": {"": op["fidelity"][""]}, "world": world_size,
                "cut": self.rng.choice(["rows", "columns", "mixed"]), "victim": self.rng.randrange(world_size)}

    def draw_compact(self, world):
        rng, store = self.rng, self.store(world)
        op = {"op": "compact", "store": store, "args": []}
        if self.mode == "losses" and rng.random() < 0.5:
            self.soon = rng.choice([[], ["delete", "delete", "loss", "prune"]])
            return {**op, "args": ["--max-depth", "8", "--pack-below", "8M"]}
        if rng.random() < 0.3:
            op["run"] = rng.choice(world.stores[store].runs() or ["r0"])
        if rng.random() < 0.6:
            op["keep"], op["undo"] = self.keep(), rng.choice(UNDO)
        elif rng.random() < 0.2 and world.stores[store].policies:
            op["fold"] = True
        if rng.random() < 0.5 or "keep" not in op:
            op["args"] += ["--max-depth", rng.choice(["1", "1", "2", "2", "4", "8"])]
        if rng.random() < 0.2:
            op["args"] += rng.choice([["--recode-but", "1"], ["--recode-but", "3"], ["--recode-older", "1h"]])
        if rng.random() < (0.8 if self.mode == "losses" else 0.3):
            op["args"] += ["--pack-below", rng.choice(["0", "20K", "1M", "8M"])]
        if rng.random() < 0.1:
            op["args"] += ["--max-load-cost", rng.choice(["1", "2", "10"])]
        if rng.random() < 0.06:
            op["args"] += [rng.choice(["--plan", "--dry-run"])]
        return op

    def draw_prune(self, world):
        rng, store = self.rng, self.store(world)
        op = {"op": "prune", "store": store}
        if rng.random() < 0.75 or not world.stores[store].policies:
            op["keep"], op["undo"] = self.keep(), rng.choice(UNDO)
        if rng.random() < 0.3:
            op["run"] = rng.choice(world.stores[store].runs() or ["r0"])
        return op

    def draw_delete(self, world):
        rng, store = self.rng, self.store(world)
        listed = world.stores[store].listed()
        if not listed:
            return None
        newest = rng.random() < 0.4
        chosen = [listed[-1]] if newest else rng.sample(listed, min(len(listed), rng.choice([1, 1, 2, 4])))
        undo = rng.choice(UNDO)
        if self.mode == "losses" and rng.random() < 0.7:
            # leaves records of deleted checkpoints in packs, or only packed checkpoints, which the newest four never are
            n, undo = rng.choice([1, 2, 4, 5]), "0s"
            chosen = listed[-n:] if rng.random() < 0.5 else listed[:n]
        return {"op": "delete", "store": store, "names": [e.name for e in chosen], "undo": undo}

    def draw_restore(self, world):
        rng, store = self.rng, self.store(world)
        can = world.stores[store].at(TRASH)
        if not can:
            return None
        names = [] if rng.random() < 0.5 else sorted({e.name for e in rng.sample(can, min(len(can), rng.choice([1, 1, 3])))})
        return {"op": "restore", "store": store, "names": names}

    def draw_empty(self, world):
        return {"op": "empty", "store": self.store(world), "all": self.rng.random() < 0.4}

    def draw_copy(self, world):
        rng = self.rng
        source, target = rng.choice([("A", "B")] * 4 + [("A", "C"), ("B", "C"), ("B", "A"), ("C", "A")])
        if not world.stores[source].listed():
            return None
        op = {"op": "copy", "from": source, "to": target, "pull": rng.random() < 0.3, "args": []}
        if rng.random() < 0.4:
            e = self.entry(world, source)
            op["run"] = e.run
            if rng.random() < 0.5:
                op["args"] += ["--step", rng.choice([str(e.step), "latest", f"{e.step}:{e.step + 4 * self.stride}"])]
        if rng.random() < 0.2:
            op["args"] += ["--tags"]
        return op

    def draw_load(self, world):
        store = self.store(world)
        if self.rng.random() < 0.15:
            return {"op": "sweep", "store": store}
        if not world.stores[store].listed():
            return None
        if self.rng.random() < 0.3:
            cut = [[self.rng.random(), self.rng.random()] for _ in range(2)]
            return {"op": "region", "store": store, "name": self.entry(world, store).name, "which": self.rng.randrange(100), "cut": cut}
        return {"op": "load", "store": store, "name": self.entry(world, store).name, "cold": self.rng.random() < 0.5}

    def draw_wait(self, world):
        return {"op": "wait", "seconds": self.rng.choice([70, 4000, 4000, 90000, 700000])}

    def draw_pin(self, world):
        store = self.store(world)
        model = world.stores[store]
        pinned = [e for e in model.listed() if e.id in model.pins]
        if pinned and self.rng.random() < 0.5:
            return {"op": "pin", "store": store, "name": self.rng.choice(pinned).name, "off": True}
        return {"op": "pin", "store": store, "name": self.entry(world, store).name, "off": False} if model.listed() else None

    def draw_tag(self, world):
        store = self.store(world)
        model = world.stores[store]
        if model.tags and self.rng.random() < 0.5:
            return {"op": "tag", "store": store, "tag": self.rng.choice(sorted(model.tags))}
        return {"op": "tag", "store": store, "tag": f"t{self.rng.randrange(3)}", "name": self.entry(world, store).name} if model.listed() else None

    def draw_rename(self, world):
        rng, store = self.rng, self.store(world)
        runs = world.stores[store].runs()
        if not runs:
            return None
        old, new = rng.choice(runs), rng.choice(["m0", "m1", "m2", "r0", rng.choice(runs)])
        return {"op": "rename", "store": store, "run": old, "to": new} if old != new else None

    def draw_policy(self, world):
        rng, store = self.rng, "A"
        run = rng.choice([None, None] + world.stores[store].runs())
        if run in world.stores[store].policies and rng.random() < 0.4:
            return {"op": "policy", "store": store, "run": run, "clear": True}
        return {"op": "policy", "store": store, "run": run, "keep": self.keep(), "undo": rng.choice(UNDO), "auto": rng.random() < 0.6}

    def draw_catalog(self, world):
        return {"op": "catalog", "store": self.store(world), "what": self.rng.choice(["keep", "remove", "older"])}

    def draw_parity(self, world):
        args = self.rng.choice([[], [], ["--group", "4+1"], ["--group", "3+2"], ["--off"]])
        return {"op": "parity", "store": self.store(world), "args": args}

    def draw_damage(self, world):
        rng, store = self.rng, self.store(world)
        files = [[rng.random(), rng.choice(["flip", "flip", "flip", "zero", "cut", "lose", "lose", "folder"]), rng.random()] for _ in range(rng.choice([1, 2, 2]))]
        return {"op": "damage", "store": store, "group": rng.choice(["4+1", "2+1", "8+1", "3+2", "6+2"]), "files": files}

    def draw_loss(self, world):
        rng, store = self.rng, self.store(world)
        files = [[rng.random(), rng.choice(["flip"] * 6 + ["zero", "cut", "lose", "folder"]), rng.random()] for _ in range(rng.choice([1, 1, 2]))]
        return {"op": "loss", "store": store, "files": files}

    def draw_manifest(self, world):
        rng = self.rng
        return {"op": "manifest", "store": self.store(world), "which": rng.random(), "how": rng.choice(["lose", "lose", "flip", "cut"]), "at": rng.random()}

    def draw_repair(self, world):
        return {"op": "repair", "store": self.store(world), "args": ["--purge"] if self.rng.random() < 0.3 else []}

    def draw_rebuild(self, world):
        return {"op": "rebuild", "store": self.store(world)}

    def draw_tell(self, world):
        store = self.store(world)
        if not world.stores[store].listed():
            return None
        e = self.entry(world, store)
        return {"op": "tell", "store": store, "args": self.rng.choice([
            ["list"], ["report"], ["timeline"], ["show", "--run", e.run, "--step", str(e.step)], ["verify", "--quick"],
            ["verify", "--sample", "30", "--seed", "1"], ["diff", "--run", e.run, str(e.step), str(e.step)],
            ["load", "--run", e.run, "--step", str(e.step), "--explain"], ["prune", "--keep-last", "1", "--dry-run"],
            ["scrub", "--rate", "max", "--older-than", "0s"], ["parity", "--status"]])}
