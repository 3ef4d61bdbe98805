"""Plays a script of commands one after the other, and fails if a store differs from the model.

A command is a dictionary with everything it needs, so that it can be played after any others. A script can
therefore be shrunk by leaving commands out. The model follows what happened; only results that must not
happen are failures.
"""

import shlex
import shutil
import signal
import time

import numpy as np

import commands
import states
import support_safetensors as st
import together
from look import Looker
from model import GONE, LISTED, TRASH, Content, Failure

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DAY = 86400


def seconds(text):
    return int(text[:-1]) * UNITS[text[-1]]


class Player(Looker):
    def play(self, op):
        """Plays one command."""
        self.number += 1
        self.pass_time(10)
        getattr(self, "do_" + op["op"])(op)

    def input(self, flavour, line, step):
        key = repr((flavour, line, step))
        if key not in self.files:
            path = self.folder / f"in{len(self.files)}.safetensors"
            st.write(path, states.tensors(flavour, line, step))
            self.files[key] = path.name
        return self.files[key]

    def do_save(self, op):
        store, world = op["store"], self.world
        model = world.stores[store]
        result = self.run_op({**op, "file": self.input(op["flavour"], op["line"], op["step"])})
        there = model.find(f"{op['run']}@{op['step']}")
        if not model.hurt:
            fine = not there or "branch" in op.get("args", [])
            missing = [a for a in op.get("args", []) if "@" in a and not model.find(a)]
            self.expect(result, *([3] if missing and fine else [0] if fine and not missing else [0, 1, 3]), fault=op.get("fault"))
        saved = None
        # a failure to print the result does not undo the save
        if result.code == 0 and (result.out or not op.get("fault")):
            c = result.json()["checkpoints"][0]
            saved = (c["run"], c["step"], c["id"])
        self.look_saved(op, saved, there)
        if result.code == 0 and not saved and "branch" not in op.get("args", []) and not model.find(f"{op['run']}@{op['step']}"):
            raise Failure("lost", f"a save of {op['run']}@{op['step']} ended with 0, and {store} does not list it")

    def look_saved(self, op, saved, there=None):
        """Checks that a saved checkpoint is there and loads. `saved` has run, step and id; None if the save
        failed."""
        store, world = op["store"], self.world
        model = world.stores[store]
        model.exists = model.exists or (self.folder / store / "data/store").exists()
        content, new = Content(op["flavour"], op["line"], op["step"], op["fidelity"]), [(op["run"], op["step"])]
        if "branch" in op.get("args", []):
            new += [(f"{op['run'].split('~')[0]}~{i}", op["step"]) for i in range(2, 100)]
        if saved:
            new = [saved[:2]]
            if not (there and saved[2] == there.id):
                world.contents[saved[2]] = content
        known = set(model.entries)
        self.look(store, self.after_save, new)
        for id in set(model.entries) - known:
            world.contents.setdefault(id, content)
            model.entries[id].saved = world.clock
            self.load(store, model.entries[id], show=False)
        if saved and saved[2] not in model.entries:
            raise Failure("lost", f"{saved[0]}@{saved[1]} was saved, and {store} does not list it")

    def do_ranks(self, op):
        """Several processes save a checkpoint together; one of them may die."""
        if not self.ranks:
            return
        op = {**op, "group": f"g{self.number}"}
        model = self.world.stores[op["store"]]
        there = model.find(f"{op['run']}@{op['step']}")
        self.script.append(together.text(op))

        tensors = states.tensors(op["flavour"], op["line"], op["step"])
        results = together.save(self.ranks, op, tensors, self.folder, self.environment, (signal.SIGKILL, signal.SIGXFSZ) if op.get("fault") else ())
        for result in results:
            if not model.hurt:
                self.expect(result, *([1] if there else [0]), fault=op.get("fault"))
        id = next((r.out.strip() for r in results if r.out.strip()), None)
        self.look_saved(op, (op["run"], op["step"], id) if id else None, there)
        if any(r.code == 0 for r in results) and not there and not model.find(f"{op['run']}@{op['step']}"):
            raise Failure("lost", f"ranks were told that {op['run']}@{op['step']} is saved, and {op['store']} does not list it")

    def after_save(self, model):
        """The places that checkpoints may have after automatic policies were applied."""
        allowed = {}
        for run in model.runs():
            policy = model.policies.get(run, model.policies.get(None))
            if policy and policy.get("auto"):
                stay, _ = model.must_stay(run, policy["keep"], self.world.clock)
                for e in model.listed(run):
                    if e.id not in stay:
                        allowed[e.id] = self.dropped(e, policy["undo"]) | {LISTED}
        return allowed

    def dropped(self, entry, undo):
        """The places that a checkpoint may have after its deletion."""
        entry.until = self.world.clock + seconds(undo or "24h")
        return {TRASH} if seconds(undo or "24h") else {GONE, TRASH}

    def do_delete(self, op):
        store, model = op["store"], self.world.stores[op["store"]]
        if not model.exists:
            return
        entries = [model.find(n) for n in op["names"]]
        result = self.run_op(op)
        missing, marked = None in entries, any(e and e.id in model.marked() for e in entries)
        if not model.hurt:
            self.expect(result, *([3] if missing else [1] if marked else [0, 1]), fault=op.get("fault"))
        allowed = {}
        for e in entries:
            if e and not missing and not marked and (result.code != 1 or op.get("fault")):
                allowed[e.id] = self.dropped(e, op["undo"]) | ({LISTED} if result.code != 0 else set())
        self.look(store, allowed)
        self.verify(store)

    def do_prune(self, op):
        store, model = op["store"], self.world.stores[op["store"]]
        if not model.exists:
            return
        keep, undo = op.get("keep"), op.get("undo")
        result = self.run_op(op)
        allowed, stay, maybe = self.policy_effect(model, op.get("run"), keep, undo)
        if not model.hurt:
            rules = keep or None in model.policies or (op["run"] in model.policies if op.get("run") else model.policies)
            self.expect(result, *([2] if not rules else [0] if not op.get("run") or op["run"] in model.runs() else [0, 3]), fault=op.get("fault"))
        if result.code == 0 and (result.out or not op.get("fault")):
            self.check_decisions(model, result.json(), stay, maybe, allowed)
        before = model.listed()
        self.look(store, {i: p if result.code == 0 else p | {LISTED} for i, p in allowed.items()})
        self.verify(store)
        self.check_newest(model, before)

    def check_newest(self, model, before):
        """Rules delete nothing of a run unless the two newest checkpoints that stay can be loaded. Suspect ones do not count."""
        for run in {e.run for e in before if e.place != LISTED}:
            lost = [e.name for e in [e for e in model.listed(run) if not e.suspect][-2:] if e.id in model.lost]
            if lost:
                raise Failure("policy", f"rules deleted checkpoints of {run}, and {lost} cannot be loaded")

    def policy_effect(self, model, run, keep, undo, safety=True):
        """Returns ({id: places that it may have}, the ids that stay, the ids that may stay) after a deletion
        by rules."""
        allowed, stay, maybe = {}, set(), set()
        for r in [run] if run else model.runs():
            policy = {"keep": keep, "undo": undo} if keep else model.policies.get(r, model.policies.get(None))
            if not policy:
                stay |= {e.id for e in model.listed(r)}
                continue
            kept, perhaps = model.must_stay(r, policy["keep"], self.world.clock, safety)
            stay, maybe = stay | kept, maybe | perhaps
            for e in model.listed(r):
                if e.id not in kept:
                    allowed[e.id] = self.dropped(e, undo or policy["undo"])
        return allowed, stay, maybe

    def check_decisions(self, model, told, stay, maybe, allowed):
        for d in told["checkpoints"]:
            entry = model.find(d["checkpoint"])
            if not entry:
                raise Failure("policy", f"prune tells of {d['checkpoint']}, which is not listed")
            if d["deleted"] and entry.id in stay:
                raise Failure("policy", f"prune deletes {d['checkpoint']}, which must stay")
            if d["deleted"]:
                continue
            if entry.id not in stay | maybe:
                raise Failure("policy", f"prune keeps {d['checkpoint']} as {d['kept_as']}")
            allowed[entry.id] = {LISTED}

    def do_compact(self, op):
        store, model = op["store"], self.world.stores[op["store"]]
        if not model.exists:
            return
        keep, undo = op.get("keep"), op.get("undo")
        result = self.run_op(op)
        if not model.hurt:
            self.expect(result, *([0] if not op.get("run") or op["run"] in model.runs() else [0, 3]), fault=op.get("fault"))
        allowed, maybe = {}, set()
        if (keep or op.get("fold")) and not {"--plan", "--dry-run"} & set(op.get("args", [])):
            allowed, _, maybe = self.policy_effect(model, op.get("run"), keep, undo)
        before = model.listed()
        self.look(store, {i: p | ({LISTED} if result.code != 0 or i in maybe else set()) for i, p in allowed.items()})
        self.verify(store)
        self.check_newest(model, before)

    def do_policy(self, op):
        store, model = op["store"], self.world.stores[op["store"]]
        if not model.exists:
            return
        result = self.run_op(op)
        self.expect(result, 0, *([3] if op.get("clear") else []))
        if op.get("clear"):
            model.policies.pop(op.get("run"), None)
        else:
            model.policies[op.get("run")] = {"keep": op["keep"], "undo": op["undo"], "auto": op["auto"]}
        self.look(store)

    def do_restore(self, op):
        store, model = op["store"], self.world.stores[op["store"]]
        if not model.exists:
            return
        result = self.run_op(op)
        can = [e for e in model.at(TRASH) if not op["names"] or e.name in op["names"]]
        # Of a name that was deleted twice, only the later checkpoint comes back; of one that is listed, none.
        blocked = not op["names"] and any(sum(o.name == e.name for o in can) > 1 or model.find(e.name) for e in can)
        if not model.hurt:
            self.expect(result, 0, 1, *([3] if not can or any(e.may_expire(self.world.clock) for e in can) else []), *([4] if blocked else []),
                        fault=op.get("fault"))
        allowed = {e.id: {LISTED} if result.code == 0 and not e.may_expire(self.world.clock) else {LISTED, TRASH} for e in can}
        for e in can:
            if result.code == 0 and sum(o.name == e.name for o in can) > 1:
                allowed[e.id] = {LISTED, TRASH}
            if e.may_expire(self.world.clock):
                allowed[e.id] |= {GONE}
        self.look(store, allowed)
        self.verify(store)

    def do_empty(self, op):
        store, model = op["store"], self.world.stores[op["store"]]
        if not model.exists:
            return
        result = self.run_op(op)
        if not model.hurt:
            self.expect(result, 0, fault=op.get("fault"))
        for e in model.at(TRASH):
            # a command that was interrupted continues later
            e.until = min(e.until, self.world.clock) if op["all"] else e.until
        self.look(store, {e.id: {TRASH, GONE} for e in model.at(TRASH) if e.may_expire(self.world.clock)})
        self.verify(store)

    def do_pin(self, op):
        model = self.world.stores[op["store"]]
        entry = model.find(op["name"])
        if not model.exists:
            return
        result = self.run_op(op)
        if not model.hurt:
            self.expect(result, *([0] if entry and (not op["off"] or entry.id in model.pins) else [0, 1, 3]), fault=op.get("fault"))
        pins = set(model.pins)
        if entry:
            (pins.discard if op["off"] else pins.add)(entry.id)
        self.look_marks(op, result, (pins, dict(model.tags)))

    def do_tag(self, op):
        model = self.world.stores[op["store"]]
        entry = model.find(op["name"]) if op.get("name") else None
        if not model.exists:
            return
        tags, fine = dict(model.tags), entry if op.get("name") else op["tag"] in model.tags
        if entry:
            tags[op["tag"]] = entry.id
        elif not op.get("name"):
            tags.pop(op["tag"], None)
        result = self.run_op(op)
        if not model.hurt:
            self.expect(result, *([0] if fine else [0, 1, 3]), fault=op.get("fault"))
        self.look_marks(op, result, (set(model.pins), tags))

    def do_rename(self, op):
        """The next writer completes a rename that was interrupted, or the rename never began."""
        store, model, old, new = op["store"], self.world.stores[op["store"]], op["run"], op["to"]
        if not model.exists:
            return
        result = self.run_op(op)
        policies = old in model.policies and new in model.policies
        if not model.hurt:
            self.expect(result, *([3] if old not in model.runs() else [1] if new in model.runs() or policies else [0]), fault=op.get("fault"))
        ids = {e.id for e in model.listed(old)}
        if result.code != 0 and (op.get("fault") or model.hurt):
            self.run("trash", store, "--empty", show=False)
        renamed = new not in model.runs() and self.has_run(store, new, ids)
        if not model.hurt and renamed != (result.code == 0) and (result.code == 0 or not op.get("fault")):
            raise Failure("rename", f"{shlex.join(result.args)}: exit status {result.code}, but renamed is {renamed}")
        if renamed:
            for e in model.listed(old):
                e.run = new
            if old in model.policies:
                model.policies[new] = model.policies.pop(old)
        self.look(store)
        self.verify(store)

    def has_run(self, store, run, ids):
        listing = self.run("list", store, "--json", show=False)
        self.expect(listing, 0)
        return any(c["run"] == run and c["id"] in ids for c in listing.json()["checkpoints"])

    def look_marks(self, op, result, after):
        """Checks that pins and tags are as after the command, or as before if the command may have failed."""
        model = self.world.stores[op["store"]]
        before = (set(model.pins), dict(model.tags))
        self.look(op["store"], marks=[after] if result.code == 0 else [before, after] if op.get("fault") else [before])

    def do_copy(self, op):
        source, target = self.world.stores[op["from"]], self.world.stores[op["to"]]
        if not source.exists:
            return
        result = self.run_op(op)
        target.exists = target.exists or (self.folder / op["to"] / "data/store").exists()
        asked = self.asked(source, op)
        names = {e.name: e.id for e in target.listed()}
        conflict = any(names.get(e.name, e.id) != e.id for e in source.listed())
        # what the copy restores from the target's trash comes back under the name that it has there: a rename may have given it another one
        ids = {e.id for e in source.listed()}
        conflict |= any(e.id in ids and any(o.name == e.name and o.id != e.id for o in source.listed()) for e in target.at(TRASH))
        conflict |= "--tags" in op["args"] and any(target.tags.get(t, i) != i for t, i in source.tags.items())
        if not source.hurt and not target.hurt:
            trash = target.at(TRASH)
            blocked = any(e.id in ids and (sum(o.name == e.name for o in trash) > 1 or e.name in names) for e in trash)
            self.expect(result, *([0] if asked and not conflict else [0, 1, 3]), *([4] if blocked else []), fault=op.get("fault"))
        new = {e.id for e in source.listed()}
        allowed = {i: {TRASH, LISTED} for i in new if i in target.entries and target.entries[i].place == TRASH}
        if result.code == 0:
            allowed.update({i: {LISTED} for i in asked if i in target.entries})
        # the copy of a checkpoint whose deadline in the trash was over has the name that it has in the source
        for e in source.listed():
            if e.id in allowed and target.entries[e.id].place == TRASH and self.has_run(op["to"], e.run, {e.id}):
                target.entries[e.id].run = e.run
        pins, tags = set(target.pins), dict(target.tags)
        known = {e.id for e in target.listed()}
        self.look(op["to"], allowed, new, marks=self.copied_tags(source, asked, pins, tags) if "--tags" in op["args"] else None)
        for e in source.listed():
            if e.id in target.entries:
                target.entries[e.id].saved = e.saved
        arrived = {e.id for e in target.listed()} - known
        missing = [source.entries[i].name for i in asked if i not in target.entries]
        if result.code == 0 and missing:
            raise Failure("lost", f"{shlex.join(result.args)} ended with 0, and {missing} are not there")
        self.look(op["from"])
        if source.hurt or target.hurt:
            self.check_hurt_copy(target, arrived)
        self.verify(op["to"])

    def check_hurt_copy(self, target, arrived):
        """Packs are copied as they are, but a checkpoint that damage concerns is not. A copy may mend the target."""
        if target.exists and not target.hurt and self.run("verify", target.name, "-q", show=False).code == 4:
            target.hurt = target.beyond = True
            target.tried = {e.id for e in target.listed()}
        target.tried |= arrived

    def copied_tags(self, source, copied, pins, tags):
        """Tags of the selected checkpoints are copied, also if the target has these already."""
        both = {**tags, **{t: i for t, i in source.tags.items() if i in source.entries and i in copied}}
        return [(pins, tags), (pins, both)]

    def asked(self, source, op):
        args, found = op.get("args", []), source.listed(op.get("run"))
        if "--step" in args:
            first, _, last = args[args.index("--step") + 1].partition(":")
            if first == "latest":
                found = found[-1:]
            else:
                found = [e for e in found if int(first or 0) <= e.step <= int(last or first)]
        return {e.id for e in found}

    def do_load(self, op):
        entry = self.world.stores[op["store"]].find(op["name"])
        if entry:
            if op.get("cold"):
                self.remove_copies(op["store"])
            self.load(op["store"], entry)

    def do_region(self, op):
        """Parts of tensors equal those of the whole load."""
        entry = self.world.stores[op["store"]].find(op["name"])
        if not entry:
            return
        # a load that fails because of damage leaves no file, and that of another checkpoint must not stay
        (self.folder / "out.safetensors").unlink(missing_ok=True)
        self.load(op["store"], entry, show=False)
        whole = st.read(self.folder / "out.safetensors")[0] if (self.folder / "out.safetensors").exists() else {}
        chosen = [n for n, (dtype, shape, _) in whole.items() if shape and dtype in NUMPY and all(n > 0 for n in shape[:len(op["cut"])])]
        if not chosen:
            return
        name = chosen[op["which"] % len(chosen)]
        dtype, shape, data = whole[name]
        cut = [sorted(int(x * n) for x in pair) for pair, n in zip(op["cut"], shape)]
        text = ",".join(f"{a}:{max(b, a + 1)}" for a, b in cut)
        result = self.run("load", op["store"], "--run", entry.run, "--step", entry.step, "--out", "part.safetensors", "--force", "-q",
                          "--region", f"{name}=[{text}]")
        if result.code == 4 and self.world.stores[op["store"]].may_be_lost(entry.id):
            return
        self.expect(result, 0)
        self.loads += 1
        part = st.read(self.folder / "part.safetensors")[0]
        want = np.frombuffer(data, NUMPY[dtype]).reshape(shape)[tuple(slice(a, max(b, a + 1)) for a, b in cut)]
        if list(part) != [name] or part[name][1] != list(want.shape) or part[name][2] != want.tobytes():
            raise Failure("region", f"{entry.name} of {op['store']}: elements {text} of {name} are not those of the whole load")

    def do_parity(self, op):
        store, model = op["store"], self.world.stores[op["store"]]
        if not model.exists or model.hurt and "--off" in op["args"]:
            return
        result = self.run_op(op)
        if not model.hurt:
            self.expect(result, 0, *([] if op["args"] else [3]), fault=op.get("fault"))
        self.look(store)
        self.verify(store)

    def do_damage(self, op):
        """Covers all files with parity, then damages no more files than it can repair."""
        store, model = op["store"], self.world.stores[op["store"]]
        if not model.exists or model.hurt:
            return
        self.expect(self.run("parity", store, "--group", op["group"], "-q"), 0)
        data = self.folder / store / "data"
        files, noticed = sorted((data / "c").iterdir()) + sorted((data / "p").glob("*.ckp")), False
        for which, how, at in op["files"][:int(op["group"].partition("+")[2])]:
            if files:
                path = files.pop(int(which * len(files)))
                damage(path, how, at)
                self.script.append(f"# {path.relative_to(self.folder)}: {how} at {at:.2f} of its size")
                model.heal()
                model.hurt = True
                # nothing names a parity file, so that a lost one is not noticed
                noticed |= path.suffix != ".ckp" or how != "lose"
        # This runs before anything is opened for writing, as a collection may replace damaged parity.
        # Checkpoints that can no longer be restored are not verified.
        over = any(e.may_expire(self.world.clock) for e in model.at(TRASH))
        if noticed and not over and self.run("verify", store, "-q", show=False).code != 4:
            raise Failure("not noticed", f"verify of {store} says that nothing is damaged")
        self.look(store)
        self.sweep(store)

    def do_loss(self, op):
        """Damages chunk files, whether parity covers them or not."""
        store, model = op["store"], self.world.stores[op["store"]]
        if not model.exists:
            return
        data = self.folder / store / "data"
        files = sorted(p for p in (data / "c").iterdir() if p.is_file())
        for which, how, at in op["files"]:
            if files:
                path = files.pop(int(which * len(files)))
                damage(path, how, at)
                self.script.append(f"# {path.relative_to(self.folder)}: {how} at {at:.2f} of its size")
                model.heal()
                model.hurt = model.beyond = True
        self.look(store)
        self.verify(store)

    def do_manifest(self, op):
        """A manifest is lost, or is damaged and then removed. The catalog is intact, so the checkpoint can be
        restored."""
        store, model = op["store"], self.world.stores[op["store"]]
        listed = model.listed() if model.exists and not model.hurt else []
        if not listed:
            return
        entry = listed[int(op["which"] * len(listed))]
        here, deleted = ([p for p in (self.folder / store / "data" / kind).iterdir() if p.name.rpartition(".")[0] == f"{entry.run}.{entry.step}"]
                         for kind in "mt")
        last = max((int(p.suffix[1:]) for p in deleted), default=-1)
        found = [p for p in here if int(p.suffix[1:]) > last]
        if len(found) != 1:  # the checkpoint has several generations
            return
        self.script.append(f"# {found[0].relative_to(self.folder)}: {op['how']}")
        damage(found[0], op["how"], op["at"])
        self.expect(self.run("verify", store, "-q", show=False), 4)
        if op["how"] != "lose":
            found[0].unlink()
            self.expect(self.run("verify", store, "-q", show=False), 4)
        self.do_repair({"op": "repair", "store": store})
        self.load(store, entry, show=False)

    def do_repair(self, op):
        store, model = op["store"], self.world.stores[op["store"]]
        if not model.exists:
            return
        result = self.run_op(op)
        if not op.get("fault") and result.code == 4 and not model.beyond:
            raise Failure("not repaired", f"{store}: {commands.reported_errors(result)}{result.err}")
        self.expect(result, 0, *([4] if model.beyond else []), fault=op.get("fault"))
        if result.code == 0:
            model.heal()
        self.look(store)
        self.verify(store)

    def do_sweep(self, op):
        self.sweep(op["store"])

    def do_wait(self, op):
        self.script.append(f"# {op['seconds']} s later")
        self.pass_time(op["seconds"])

    def pass_time(self, seconds):
        """Advances the clock. Without the preloaded library it is the real one."""
        self.world.clock = self.world.clock + seconds if self.shim else int(time.time())

    def do_tell(self, op):
        """Commands that only read."""
        if self.world.stores[op["store"]].exists:
            result = self.run_op(op)
            self.expect(result, 0, *([4] if self.world.stores[op["store"]].hurt else []), *([3] if not self.world.stores[op["store"]].listed() else []))
            if result.code == 0 or result.out:  # diff of damaged checkpoints prints nothing
                result.json()

    def do_rebuild(self, op):
        model = self.world.stores[op["store"]]
        if model.exists:
            result = self.run_op(op)
            if not model.hurt:
                self.expect(result, 0, fault=op.get("fault"))
            self.look(op["store"])
            self.verify(op["store"])

    def do_catalog(self, op):
        """The catalog is removed, saved for later, or replaced by the saved one: it is only a cache."""
        store = self.folder / op["store"]
        if not self.world.stores[op["store"]].exists:
            return
        kept = self.folder / f"{op['store']}.catalog"
        self.script.append(f"# the catalog of {op['store']}: {op['what']}")
        if op["what"] == "keep" and (store / "catalog.db").exists():
            shutil.copy(store / "catalog.db", kept)
        elif op["what"] == "remove" or kept.exists():
            for extra in ("catalog.db", "catalog.db-wal", "catalog.db-shm", "catalog.db-journal"):
                (store / extra).unlink(missing_ok=True)
            if op["what"] == "older":
                shutil.copy(kept, store / "catalog.db")
        self.look(op["store"])

    def finish(self):
        """After all commands: a week later, when unfinished files can be removed, a writer opens each store.
        Then everything is as the model says, and no files are left over."""
        self.pass_time(8 * DAY)
        for store, model in self.world.stores.items():
            if not model.exists:
                continue
            if model.hurt:
                self.do_repair({"op": "repair", "store": store})
            if model.hurt:
                self.finish_hurt(store, model)
                continue
            self.run("trash", store, "--empty", show=False)
            self.look(store, {e.id: {TRASH, GONE} for e in model.at(TRASH) if e.may_expire(self.world.clock)})
            self.verify(store)
            self.sweep(store)
            self.check_catalog(store)
            self.check_files(store)

    def finish_hurt(self, store, model):
        """What cannot be loaded is deleted. All other checkpoints load, before and after a compaction: `verify` looks."""
        lost = [e.name for e in model.listed() if e.id in model.lost and e.id not in model.marked()]
        if lost:
            self.do_delete({"op": "delete", "store": store, "names": lost, "undo": "0s"})
        self.do_compact({"op": "compact", "store": store, "args": ["--max-depth", "1"]})


NUMPY = {"F32": np.float32, "I64": np.int64, "BF16": np.uint16, "F16": np.uint16, "F64": np.float64, "U8": np.uint8}


def damage(path, how, at):
    """Damages a file: `flip` a bit, `zero` a page, `cut` it, `lose` it, or replace it by a `folder`."""
    size = path.stat().st_size
    where = min(int(at * size), max(size - 1, 0))
    if how in ("lose", "folder"):
        path.unlink()
        if how == "folder":
            path.mkdir()
        return
    with open(path, "r+b") as f:
        if how == "cut":
            f.truncate(where)
        else:
            f.seek(where)
            old = f.read(4096 if how == "zero" else 1)
            f.seek(where)
            f.write(bytes(b ^ 255 for b in old) if how == "zero" and not any(old) else bytes(len(old)) if how == "zero" else bytes([old[0] ^ 16]))
