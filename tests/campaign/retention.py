#!/usr/bin/env python3
"""Saves a run under a policy, and compares the checkpoints that stay with a fresh store of the same ones.

    tests/campaign/retention.py COMMAND SAVES FIDELITY POLICY [--json]

FIDELITY is exact, near or coarse. POLICY has prune's --keep options in one argument, such as "--keep-last 3
--keep-every 100". The policy is stored with `policy --auto --undo 0s`, and the steps 1 to SAVES are saved one
after the other. Then the listed checkpoints are saved into another store in the same way. The exit status is
1 if the listed checkpoints are not those of the policy, or if a store does not verify.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import states  # noqa: E402
import support_safetensors as st  # noqa: E402

FLAVOUR = {"kind": "adamw", "moved": 1.0, "scale": 1e-3, "rest": 0.0,
           "shapes": [["a.weight", [128, 96]], ["b.weight", [64, 100]], ["b.bias", [64]]]}
LINE = [[1, 0]]
SAFE = 2  # no policy deletes the newest two


def kept(policy, saves):
    """The steps of 1 to `saves` that stay. Deleted checkpoints never return, so the rules hold at the end as
    after each save."""
    words = dict(re.findall(r"--keep-(\w+) *(\d*)", policy))
    unknown = set(words) - {"last", "every", "first"}
    if unknown or not words:
        raise ValueError(f"this model of policies has --keep-last, --keep-every and --keep-first, not '{policy}'")
    newest = max(SAFE, int(words.get("last", 0)))
    steps = set(range(max(1, saves - newest + 1), saves + 1))
    if "every" in words:
        steps |= set(range(int(words["every"]), saves + 1, int(words["every"])))
    return sorted(steps | ({1} if "first" in words else set()))


class Store:
    def __init__(self, command, path, fidelity):
        self.command, self.path, self.fidelity = command, path, fidelity

    def call(self, command, *args):
        done = subprocess.run([self.command, command, self.path, *map(str, args)], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"{command} {args}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def save(self, step):
        file = self.path.parent / "state.safetensors"
        st.write(file, states.tensors(FLAVOUR, LINE, step))
        self.call("save", "--run", "a", "--step", step, "--fidelity", self.fidelity, "-q", file)

    def steps(self):
        return [c["step"] for c in json.loads(self.call("list", "--json"))["checkpoints"]]

    def sizes(self):
        """Bytes by folder of `data`, and of the files beside it."""
        sizes = {}
        for p in self.path.rglob("*"):
            if p.is_file():
                parts = p.relative_to(self.path).parts
                name = parts[1] if parts[0] == "data" and len(parts) > 2 else parts[-1]
                sizes[name] = sizes.get(name, 0) + p.stat().st_size
        return {k: sizes[k] for k in sorted(sizes) if sizes[k]}


def measure(command, saves, fidelity, policy, folder, compact):
    store, fresh = (Store(command, folder / name, fidelity) for name in ("store", "fresh"))
    peak = 0
    for step in range(1, saves + 1):
        store.save(step)
        if step == 1:
            store.call("policy", *policy.split(), "--auto", "--undo", "0s", *compact, "-q")
        peak = max(peak, sum(store.sizes().values()))
    listed = store.steps()
    for step in listed:
        fresh.save(step)
    sizes, alone = store.sizes(), fresh.sizes()
    files = len(list(store.path.glob("data/c/**/*.ckd")))
    verified = json.loads(store.call("verify", "--json"))["ok"]
    return {"saves": saves, "fidelity": fidelity, "policy": policy, "listed": listed, "as_policy_says": listed == kept(policy, saves),
            "verified": verified, "chunk_files": files, "bytes": sum(sizes.values()), "largest": peak, "fresh_bytes": sum(alone.values()),
            "factor": sum(sizes.values()) / sum(alone.values()), "by_folder": sizes, "fresh_by_folder": alone}


def print_table(r):
    print(f"{r['saves']} saves, {r['fidelity']}, {r['policy']}: {len(r['listed'])} listed, "
          f"{'as' if r['as_policy_says'] else 'NOT as'} the policy says; {'verified' if r['verified'] else 'DAMAGED'}")
    print(f"  {'':>14} {'store':>10} {'fresh':>10}")
    for name in sorted(set(r["by_folder"]) | set(r["fresh_by_folder"])):
        print(f"  {name:>14} {r['by_folder'].get(name, 0):>10} {r['fresh_by_folder'].get(name, 0):>10}")
    print(f"  {'all':>14} {r['bytes']:>10} {r['fresh_bytes']:>10}   factor {r['factor']:.2f}, at its largest {r['largest'] / r['fresh_bytes']:.2f}")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("command")
    p.add_argument("saves", type=int)
    p.add_argument("fidelity", choices=["exact", "near", "coarse"])
    p.add_argument("policy")
    p.add_argument("--json", action="store_true")
    p.add_argument("--compact", metavar="PERCENT", help="the policy's --compact; without it the command's default")
    p.add_argument("--folder", type=Path, help="where the stores are made and removed (a temporary folder)")
    a = p.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="retention-", dir=a.folder))
    try:
        found = measure(a.command, a.saves, a.fidelity, a.policy, folder, [f"--compact={a.compact}"] if a.compact else [])
    finally:
        shutil.rmtree(folder)
    if a.json:
        print(json.dumps(found))
    else:
        print_table(found)
    return 0 if found["as_policy_says"] and found["verified"] else 1


if __name__ == "__main__":
    sys.exit(main())
