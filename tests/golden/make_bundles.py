"""Writes a golden store with bundles with the library: make_bundles.py COMMAND TOOL FOLDER [lossy]

COMMAND is the built `ckptdelta`, TOOL the built tests/test_bundled_store, which puts a store's small records into bundles and, for
`lossy`, makes its checkpoints ones of fidelity near, with measures. Run once each (v1/bundles, v1/lossy); FOLDER must not exist. What went
in is recorded in FOLDER.json, from the arrays themselves.

A base and two deltas whose tensors have all dtypes, copies, rounded copies and a blob; one tensor is too large for a bundle.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import make_library  # noqa: E402
from make_library import Model, Saver  # noqa: E402


class Mixed(Model):
    """The small model, and a tensor of noise that no bundle takes."""

    def tensors(self):
        out = super().tensors()
        noise = self.rng.bytes(6000)
        return {"first": out.pop("seen"), "large": ("u8", [6000], noise), **out}


def measures(number):
    """What the tool tells of the tensor with this number; None: nothing."""
    if number % 5 == 3:
        return None
    n = number + 1
    return {"error_squares": n / 1024, "value_squares": 8 + n, "max_error": 0.01 * n,
            "direction_change": None if number % 2 else n / 64, "movement": 0.5, "nonfinite": number % 3}


def make(command, tool, folder, *how):
    saver, model = Saver(command, folder), Mixed(7, small=True)
    saver.save("run", 10, model)
    for step, scale in ((20, 1e-5), (30, 1e-3)):
        model.move(scale)
        saver.save("run", step, model)
    subprocess.run([tool, folder, *how], check=True)
    return saver.saved


def ordered(tensors):
    """As the command saves them: masters first, then as in the file, by the offset of the data."""
    return [n for n in tensors if n.startswith("master.")] + [n for n in tensors if not n.startswith("master.")]


def main(argv):
    command, tool, folder = (Path(a).resolve() for a in argv[1:4])
    if folder.exists():
        sys.exit(f"{folder} exists; golden stores are written once")
    saved = make(command, tool, folder, *argv[4:])
    make_library.clean(folder)
    make_library.describe(folder, saved)
    if argv[4:]:
        told = {key: {name: measures(i) for i, name in enumerate(ordered(tensors))} for key, tensors in saved.items()}
        path = folder.with_suffix(".json")
        listed = json.loads(path.read_text())
        listed[folder.name]["measures"] = told
        path.write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n")
    store = make_library.ckd_reader.Store(folder)
    for run, step in store.manifests:
        records = [r for f in store.manifests[run, step].files for r in store.chunk(f).records]
        bundled = [r for r in records if hasattr(r, "bundle")]
        print(f"{run}@{step}: {len(bundled)} of {len(records)} records in bundles")
        assert len(bundled) > 20 and len(bundled) < len(records)
        assert 0 < list(store.checkpoint(run, step).tensors).index("large") < 30  # though it stands before them in the file


if __name__ == "__main__":
    main(sys.argv)
