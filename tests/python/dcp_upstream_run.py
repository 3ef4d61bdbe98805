"""Runs PyTorch's own tests of torch.distributed.checkpoint on a store instead of files.

    dcp_upstream_run.py [--files] [--gpus] [--fork] FILE... [-- ARGUMENT OF UNITTEST...]

FILE is a test of test/distributed/checkpoint/ in a checkout of PyTorch, best of the version that is installed. Nothing is fetched: the
tests do not come with torch, and their text is not part of this project. test_python_dcp_upstream.py has their cases in words of our own,
and runs with all other tests; this program is for a look at the originals after an update of torch.

In all processes of a test FileSystemWriter and FileSystemReader, and so every `checkpoint_id` that is a path, stand for a store in
the folder PATH/store. A save to a path that has a checkpoint already is the next step of the run, as a writer of files would overwrite;
with overwrite=False it is the same step, which is an error.
Tests of what is about files fail: extensions, names of files, .metadata.

    --files   leaves DCP's writer and reader in place: what fails here as well is not about the store
    --gpus    leaves GPUs and NCCL in the tests, which skips most of them on a machine without. Otherwise copies of the tests run on the
              processor and gloo: each mention of a GPU is replaced (WITHOUT_GPUS)
    --fork    ranks are copies of the process that runs a file, which saves the time of their imports

The last lines say for each file which tests passed, failed and were skipped, with the last line of each failure.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN = "run"
OUTCOMES = "DCP_UPSTREAM_OUTCOMES"
WITHOUT_GPUS = [
    (r"^ *@(skip_if_lt_x_gpu|requires_nccl|requires_accelerator_dist_backend|with_comms_gpu_only)\b.*$", ""),
    (r"\.cuda\([^()]*(\([^()]*\))?[^()]*\)", ""),
    (r"/cuda:(\d+|\{\w+\})", "/cpu"),
    (r"f([\"'])cuda:.*?\1", "'cpu'"),
    (r"([\"'])cpu:gloo,cuda:nccl\1", "'gloo'"),
    (r"([\"'])cuda(:\d+)?\1", "'cpu'"),
    (r"([\"'])nccl\1", "'gloo'"),
    (r"\bdevice=(dist\.get_rank\(\)|self\.rank)(?=[,)])", "device='cpu'"),
    (r"torch\.cuda\.device_count\(\)", "4"),
    (r"torch\.cuda\.current_device\(\)", "torch.device('cpu')"),
    (r"@with_comms\(init_rpc=False\)", "@with_comms(init_rpc=False, backend='gloo')"),
    (r"\bFSDP\((?!\))", "FSDP(device_id=__import__('torch').device('cpu'), module="),
]


def watch():
    """In the process that runs a file: notes the outcome of each test."""
    def noting(name, kind):
        method = getattr(unittest.TestResult, name)

        def add(result, test, *why):
            text = str(why[0][1] if kind == "failed" else why[0]).strip() if why else ""
            with open(os.environ[OUTCOMES], "a") as out:
                print(json.dumps([test.id().removeprefix("__main__."), kind, text.split("\n")[-1]]), file=out)
            return method(result, test, *why)
        setattr(unittest.TestResult, name, add)

    for name, kind in [("addSuccess", "passed"), ("addFailure", "failed"), ("addError", "failed"), ("addSkip", "skipped")]:
        noting(name, kind)


def replace():
    """In each process of a test, before it imports anything: see main()."""
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.filesystem as filesystem

    import ckptdelta
    from ckptdelta.dcp import StorageReader, StorageWriter

    def store_in(path):
        return os.path.join(os.fspath(path), "store")

    class FileSystemWriter(StorageWriter):
        def __init__(self, path, *args, **options):
            super().__init__(store_in(path), RUN, step=0)
            self._overwrites = options.get("overwrite", True)

        def reset(self, checkpoint_id=None):
            if checkpoint_id is not None:
                self._store = store_in(checkpoint_id)

        def prepare_global_plan(self, plans):
            with ckptdelta.open(self._store) as store:
                self.step = max((c.step for c in store.checkpoints(RUN)), default=0) + self._overwrites
            return super().prepare_global_plan(plans)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id):
            return isinstance(checkpoint_id, (str, os.PathLike)) and "://" not in str(checkpoint_id)

    class FileSystemReader(StorageReader):
        def __init__(self, path, *args, **options):
            super().__init__(store_in(path), RUN)

        def reset(self, checkpoint_id=None):
            if checkpoint_id is not None:
                self._store = store_in(checkpoint_id)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id):
            return os.path.isdir(store_in(checkpoint_id))

    replaced = {filesystem.FileSystemWriter: FileSystemWriter, filesystem.FileSystemReader: FileSystemReader}
    for made in replaced.values():
        made.__module__, made.__qualname__ = filesystem.__name__, made.__name__  # for pickle
    for module in [m for name, m in sys.modules.items() if name.startswith(dcp.__name__)]:
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in replaced:
                setattr(module, name, replaced[value])


def fork():
    """In the process that runs a file."""
    import torch.multiprocessing as multiprocessing

    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)


def copy_of(file, folder, gpus):
    text = Path(file).read_text()
    for pattern, put in () if gpus else WITHOUT_GPUS:
        text = re.sub(pattern, put, text, flags=re.MULTILINE)
    made = Path(folder, Path(file).name)
    made.write_text(text)
    return made


def run_file(file, folder, options, arguments):
    """The outcomes of a file's tests: (test, kind, why)."""
    outcomes = Path(folder, "outcomes")
    outcomes.write_text("")
    paths = [folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0", "PYTHONPATH": os.pathsep.join(p for p in paths if p), OUTCOMES: str(outcomes)}
    done = subprocess.run([sys.executable, "-W", "ignore", copy_of(file, folder, "--gpus" in options), *arguments], env=env, cwd=folder)
    found = [json.loads(line) for line in outcomes.read_text().splitlines()]
    return found or [(Path(file).stem, "failed", f"the file ended with {done.returncode} before its first test")]


def main(arguments):
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = {a for a in arguments[:cut] if a.startswith("-")}
    files = [a for a in arguments[:cut] if a not in options]
    if not files or options - {"--files", "--gpus", "--fork"}:
        sys.exit(__doc__)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        # Each process of a test starts with this, whoever starts it.
        replaces = "" if "--files" in options else "dcp_upstream_run.replace()\n"
        replaces += "dcp_upstream_run.fork()\n" if "--fork" in options else ""
        Path(folder, "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({str(HERE)!r})\nimport dcp_upstream_run\ndcp_upstream_run.watch()\n{replaces}")
        for file in files:
            found[file] = run_file(file, folder, options, arguments[cut + 1:])
    for file, tests in found.items():
        print(f"{Path(file).name}: {', '.join(f'{sum(t[1] == k for t in tests)} {k}' for k in ('passed', 'failed', 'skipped'))}")
        for test, kind, why in tests:
            print(f"    {kind:7} {test}{f': {why}' if why else ''}")
    sys.exit(any(kind == "failed" for tests in found.values() for _, kind, _ in tests))


if __name__ == "__main__":
    main(sys.argv[1:])
