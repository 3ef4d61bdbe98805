"""Runs commands, and compares the stores with the model."""

import json
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import commands  # noqa: E402
import support_safetensors as st  # noqa: E402
from model import GONE, LISTED, TRASH, Entry, Failure, World  # noqa: E402


class Looker:
    """The stores of one script, in a folder of their own, and their model."""

    def __init__(self, settings, folder, seed=0):
        self.command, self.shim, self.ranks = settings.command, settings.shim, settings.ranks
        self.folder, self.seed = Path(folder), seed
        self.folder.mkdir(parents=True, exist_ok=True)
        self.world = World("ABCD")
        self.world.clock = int(time.time())
        self.script = []  # the commands that were run, as text
        self.files, self.number, self.calls = {}, 0, 0
        self.loads = self.verifies = 0

    # ------------------------------------------------------------------------------------------- running

    def run(self, *args, fault=None, show=True):
        """Runs the command once in the folder of this script."""
        args = [str(a) for a in args]
        if show:
            self.script.append((f"CAMPAIGN_FAULT={fault} " if fault else "") + "ckptdelta " + shlex.join(args))
        env = self.environment(fault)
        may_die = (signal.SIGKILL, signal.SIGXFSZ) if fault else ()
        return commands.finish(commands.start(self.command, args, self.folder, env, fault), args, may_die)

    def environment(self, fault=None):
        self.calls += 1
        return commands.environment(self.shim, fault, now=self.world.clock, random=self.seed * 1000003 + self.calls)

    def run_op(self, op):
        return self.run(*commands.line(op), fault=op.get("fault"))

    def expect(self, result, *codes, fault=None):
        if fault:
            codes = (0, 1, 3, 4, -signal.SIGKILL, -signal.SIGXFSZ)
        if result.code not in codes:
            raise Failure(f"status {result.code} of {result.args[0]}", f"{shlex.join(result.args)}: exit status {result.code}\n{commands.reported_errors(result)}{result.err}")

    def counts(self):
        return {"commands": self.calls, "loads": self.loads, "verifies": self.verifies}

    # ----------------------------------------------------------------------------------------- comparing

    def look(self, store, allowed=None, new=(), marks=None):
        """Compares what a store lists with the model, and updates the model. `allowed` has the places that
        each id may have now, or is a function of the store that returns them, for ids that are new in the
        model."""
        model = self.world.stores[store]
        if not model.exists:
            return
        listing = self.run("list", store, "--json", show=False)
        self.expect(listing, 0)
        listing = listing.json()
        can = self.run("trash", store, "--json", show=False)
        if can.code == 4 and model.hurt:
            can = None
        else:
            self.expect(can, 0)
            can = [c["checkpoint"] for c in can.json()["checkpoints"]]
        listed = {c["id"]: c for c in listing["checkpoints"]}
        if len(listed) != len(listing["checkpoints"]):
            raise Failure("listed twice", f"{store} lists an id twice")
        self.follow_new(model, listed, new)
        allowed = (allowed(model) if callable(allowed) else allowed) or {}
        for entry in sorted(model.entries.values(), key=lambda e: -(e.until or 0)):
            self.follow(model, entry, listed, can, allowed)
        if can:
            raise Failure("trash", f"{store}: in the trash, but never deleted: {can}")
        self.follow_marks(model, listing, marks)

    def follow_new(self, model, listed, new):
        for id, c in listed.items():
            if id in model.entries:
                continue
            if id not in new and (c["run"], c["step"]) not in new:
                raise Failure("came from nowhere", f"{model.name} lists {c['run']}@{c['step']}, which nothing brought there")
            model.entries[id] = Entry(id, c["run"], c["step"], c["metric"], self.world.clock, bool(c["suspect"]))
            content = self.world.contents.get(id)
            if content and content.exact != (c["fidelity"] == "exact"):
                raise Failure("fidelity", f"{model.name} lists {c['run']}@{c['step']} as {c['fidelity']}")

    def follow(self, model, entry, listed, can, allowed):
        places = set(allowed.get(entry.id, {entry.place}))
        if entry.place == TRASH and entry.may_expire(self.world.clock):
            places |= {GONE}
        if entry.id in listed:
            c = listed[entry.id]
            if (c["run"], c["step"], c["metric"], bool(c["suspect"])) != (entry.run, entry.step, entry.metric, entry.suspect):
                raise Failure("changed", f"{model.name}: {entry.name} is {c['run']}@{c['step']} now, metric {c['metric']}, suspect {c['suspect']}")
            place = LISTED
        elif can is None:
            place = TRASH if TRASH in places else GONE
        elif entry.name in can and (TRASH in places or GONE not in places):
            can.remove(entry.name)
            place = TRASH
        else:
            place = GONE
        if place not in places:
            kind = "lost" if place != LISTED else "not deleted" if entry.place == LISTED else "came back"
            raise Failure(kind, f"{model.name}: {entry.name} is {place} and must be {' or '.join(sorted(places))}")
        entry.place = place
        if place == GONE:
            del model.entries[entry.id]

    def follow_marks(self, model, listing, marks):
        pins, tags = {p["id"] for p in listing["pins"]}, {t["tag"]: t["id"] for t in listing["tags"]}
        may = marks or [(model.pins, model.tags)]
        if (pins, tags) not in may:
            raise Failure("marks", f"{model.name}: pins {pins} and tags {tags} instead of one of {may}")
        model.pins, model.tags = pins, tags

    def verify(self, store, again=False):
        """Everything is intact, unless something was damaged and not repaired."""
        model = self.world.stores[store]
        if not model.exists:
            return
        self.verifies += 1
        if model.hurt:
            self.sweep(store)
        result = self.run("verify", store, "--json", show=False)
        if model.hurt:
            self.expect(result, 0, 4)
            self.check_named(model, result.json())
            return
        if result.code == 4 and all(d["file"].endswith("catalog.db") for d in result.json()["damage"]) and not again:
            # the catalog is a cache: the next writer rebuilds it
            self.run("trash", store, "--empty", show=False)
            self.verify(store, again=True)
            return
        if result.code == 4:
            raise Failure("damaged", f"verify of {store}: {json.dumps(result.json()['damage'], indent=1)}")
        self.expect(result, 0)
        if result.json()["checkpoints"] != len(model.listed()):
            raise Failure("verify", f"verify of {store} looked at {result.json()['checkpoints']} checkpoints of {len(model.listed())}")

    def check_named(self, model, told):
        """Damage names every checkpoint that cannot be loaded."""
        named = {name for d in told["damage"] for name in d["checkpoints"]}
        lost = {e.name for e in model.listed() if e.id in model.lost}
        if lost - named:
            raise Failure("not named", f"verify of {model.name} does not say that {sorted(lost - named)} cannot be loaded")
        for name in told["newest_intact"]:
            if model.find(name).id in model.lost:
                raise Failure("verify", f"verify of {model.name} calls {name} intact")

    def load(self, store, entry, show=True):
        """Loads a checkpoint and compares its values."""
        self.loads += 1
        model = self.world.stores[store]
        if model.hurt and entry.id not in model.tried:
            self.remove_copies(store)
        result = self.run("load", store, "--run", entry.run, "--step", entry.step, "--out", "out.safetensors", "--force", "-q", show=show)
        if result.code == 4 and model.may_be_lost(entry.id):
            return
        if result.code != 0:
            raise Failure("load", f"{entry.name} of {store} cannot be loaded, exit status {result.code}\n{result.err}")
        model.tried.add(entry.id)
        self.world.contents[entry.id].check(f"{entry.name} of {store}", st.read(self.folder / "out.safetensors")[0])

    def remove_copies(self, store):
        """Removes materialized copies, which nothing may need."""
        shutil.rmtree(self.folder / store / "data/k", ignore_errors=True)

    def sweep(self, store):
        """Loads all checkpoints without materialized copies. One that was lost may be back."""
        model = self.world.stores[store]
        self.remove_copies(store)
        lost, model.lost = model.lost, set()
        model.tried -= lost
        for entry in model.listed():
            self.load(store, entry, show=False)

    def check_catalog(self, store):
        before = self.run("list", store, "--json", show=False).json()
        self.expect(self.run("rebuild", store, show=False), 0)
        after = self.run("list", store, "--json", show=False).json()
        if before != after:
            raise Failure("catalog", f"{store}: the catalog made anew differs: {difference(before, after)}")

    def check_files(self, store):
        """Every file is named by another one: chunk files by manifests, and manifests by the trash."""
        data = self.folder / store / "data"
        left = [str(p.relative_to(data)) for p in data.rglob("*") if p.is_file() and (".tmp" in p.name or p.parent.name in ("i", "x"))]
        if left:
            raise Failure("left over", f"{store}: {left}")
        named = named_files(data)
        stored = {p.name for p in (data / "c").iterdir()}
        if stored != named:
            raise Failure("left over", f"{store}: named by no manifest: {sorted(stored - named)}; not there: {sorted(named - stored)}")


def named_files(data):
    """The chunk files that manifests name, according to the independent reader."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "reader"))
    import ckd_reader
    named = set()
    store = ckd_reader.open_note(data / "store", ckd_reader.STORE)[0]
    for path in (data / "m").iterdir():
        named |= {file.id.hex() + ".ckd" for file in ckd_reader.Manifest(path, store).files}
    return named


def difference(a, b):
    for key in a:
        if a[key] != b.get(key):
            if isinstance(a[key], list) and isinstance(b[key], list):
                return [(x, y) for x, y in zip(a[key], b[key]) if x != y][:1] or f"{len(a[key])} and {len(b[key])} {key}"
            return key
    return None
