"""Runs the command as a user would, and checks what docs/cli.md promises."""

import itertools
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import support_safetensors as st

COMMAND = os.environ.get("CKPTDELTA") or str(Path(__file__).resolve().parents[2] / "build/current/ckptdelta")
DOC = Path(__file__).resolve().parents[2] / "docs/cli.md"
DONE, FAILED, USAGE, NOT_FOUND, CORRUPT = 0, 1, 2, 3, 4


class Result:
    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    def json(self):
        value = json.loads(self.out, object_pairs_hook=st.reject_duplicates)
        assert value["schema"] == 1
        return value


def run(*args, expect=DONE, **options):
    """Runs the command. Standard error must be empty on success, unless expect_message is given, and must not
    be on failure."""
    said = options.pop("expect_message", None)
    done = subprocess.run([COMMAND, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=600, **options)
    result = Result(done)
    assert result.code == expect, f"{args}: exit status {result.code}\n{result.out}{result.err}"
    if expect not in (DONE, CORRUPT):
        assert result.out == "", "messages belong on standard error"
    if "--json" in args:
        messages = [json.loads(line) for line in result.err.splitlines()]
        result.messages = messages
        check_documented(messages, "list of `message`")
        errors = [m for m in messages if m["level"] == "error"]
        assert all(m["exit_status"] == result.code for m in errors), result.err
        assert len(errors) == 1 if expect not in (DONE, CORRUPT) else len(errors) <= 1, result.err
        result.err = "".join(f"ckptdelta: {m['message']}\n" for m in messages)
    elif expect != DONE:
        assert result.err.startswith("ckptdelta"), result.err
    if said is None and expect == DONE:
        assert result.err == "", result.err
    if said is not None:
        assert said in result.err, result.err
    return result


def stop(process):
    """Stops a child. After the signal alone it may go on for a moment."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


class Store:
    """A store below a folder, with short methods for the commands on it."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "store"
        self.count = 0

    def file(self, tensors, metadata=None):
        self.count += 1
        return st.write(self.folder / f"in{self.count}.safetensors", tensors, metadata)

    def save(self, step, tensors, *args, run_name="a", metadata=None, **options):
        return run("save", self.path, "--run", run_name, "--step", step, *args, self.file(tensors, metadata), **options)

    def load(self, *args):
        """Loads a checkpoint. Returns (tensors, metadata)."""
        out = self.folder / "out.safetensors"
        run("load", self.path, "--out", out, "--force", *args)
        return st.read(out)

    def call(self, command, *args, **options):
        return run(command, self.path, *args, **options)

    def json(self, command, *args, **options):
        return self.call(command, "--json", *args, **options).json()

    def checkpoints(self):
        return self.json("list")["checkpoints"]

    def files(self):
        return {p.relative_to(self.path): p for p in sorted(self.path.rglob("*")) if p.is_file()}

    def temporary_files(self):
        return [p for p in self.folder.iterdir() if ".tmp-" in p.name]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def state(seed, step=0, width=64):
    """A state of a training run: weights, both moments, a master copy, a counter. Each step changes it a
    little."""
    noise, drift = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    weight = noise.standard_normal((width, width)).astype(np.float32)
    bias = noise.standard_normal(width).astype(np.float32)
    for _ in range(step):
        weight[:] += (1e-4 * drift.standard_normal(weight.shape)).astype(np.float32)
        bias[:1] += np.float32(1e-3)
    return {
        "layers.0.weight": weight, "layers.0.bias": bias,
        "exp_avg.layers.0.weight": (weight * np.float32(0.1)), "exp_avg_sq.layers.0.weight": weight * weight,
        "step": np.array(step, dtype=np.int64),
    }


def fault_library():
    """The library of tests/campaign/faults.c, to preload."""
    if os.environ.get("CKPTDELTA_SAN"):
        pytest.skip("nothing can be preloaded under a sanitizer")
    shim = Path(os.environ.get("CKPTDELTA_BUILD") or "build/current").resolve() / "tests/libcampaign_faults.so"
    assert shim.exists()
    return str(shim)


def failures_downwards(begin):
    """`begin()` prepares a command, and returns its arguments. It cannot reach any file from its nth call on. Gives the
    results, from the first n without an effect downwards."""
    shim = fault_library()

    def result(n):
        env = dict(os.environ, LD_PRELOAD=shim, CAMPAIGN_FAULT=f"EIO+:{n}")
        return subprocess.run([COMMAND, *map(str, begin())], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    whole = result(1 << 40)
    same = lambda done: (done.returncode, done.stderr) == (whole.returncode, whole.stderr)  # noqa: E731
    first = next(n for n in itertools.count(16, 16) if same(result(n)))
    return (result(n) for n in range(first, 0, -1))


# ---------------------------------------------------------------------------------------------- docs/cli.md

def documented():
    """{object: {field: type}} from the tables of docs/cli.md."""
    objects, names = {}, []
    for line in DOC.read_text().splitlines():
        if line.startswith("### "):
            names = re.findall(r"`([^`]+)`", line)
            objects.update({name: {} for name in names})
        elif line.startswith("## ") or line.startswith("# "):
            names = []
        field = re.match(r"\| `(\w+)` \| ([^|]+) \|", line)
        if field and names:
            for name in names:
                assert field[1] not in objects[name], f"{name}.{field[1]} stands twice in docs/cli.md"
                objects[name][field[1]] = field[2].strip()
    return objects


SIMPLE = {"string": str, "integer": int, "boolean": bool, "number": (int, float)}


def check_documented(value, type_text, objects=None, where="", seen=None):
    """Asserts that a JSON value has the documented type; objects exactly the documented fields."""
    objects = objects or documented()
    if type_text.endswith(" or null"):
        if value is None:
            return
        type_text = type_text[:-len(" or null")]
    if type_text.startswith("list of "):
        assert isinstance(value, list), where
        for i, item in enumerate(value):
            check_documented(item, type_text[len("list of "):], objects, f"{where}[{i}]", seen)
    elif type_text in SIMPLE:
        assert isinstance(value, SIMPLE[type_text]), f"{where} is {value!r}, not {type_text}"
        assert isinstance(value, bool) == (type_text == "boolean"), where
    else:
        fields = objects[type_text.strip("`")]
        assert isinstance(value, dict) and fields, where
        assert value.keys() == fields.keys(), f"{where}: {value.keys() ^ fields.keys()}"
        if seen is not None:
            seen.add(type_text.strip("`"))
        for name, field_type in fields.items():
            check_documented(value[name], field_type, objects, f"{where}.{name}", seen)
