"""Runs PyTorch's own tests of torch.distributed.checkpoint on a store instead of files.

    dcp_upstream_run.py FILE... [-- ARGUMENT OF UNITTEST...]

FILE is a test of test/distributed/checkpoint/ in a checkout of PyTorch of the version that is installed. Nothing is fetched: the
tests do not come with torch, and their text is not part of this project. test_python_dcp_upstream.py has their cases in words of our own,
and runs with all other tests; this program is for a look at the originals after an update of torch.

In all processes of a test FileSystemWriter and FileSystemReader, and so every `checkpoint_id` that is a path, stand for a store in
the folder PATH/store. A save to a path that has a checkpoint already is the next step of the run, as a writer of files would overwrite.
Tests of what is about files fail: extensions, names of files, .metadata. Tests that want GPUs are skipped, as without this program.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN = "run"


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

        def reset(self, checkpoint_id=None):
            if checkpoint_id is not None:
                self._store = store_in(checkpoint_id)

        def prepare_global_plan(self, plans):
            with ckptdelta.open(self._store) as store:
                self.step = max((c.step for c in store.checkpoints(RUN)), default=0) + 1
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


def main(arguments):
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        # Each process of a test starts with this, whoever starts it.
        Path(folder, "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(HERE)!r})\nimport dcp_upstream_run\ndcp_upstream_run.replace()\n")
        paths = [folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        for file in arguments[:cut]:
            done = subprocess.run([sys.executable, "-W", "ignore", file, *arguments[cut + 1:]],
                                  env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}, cwd=folder)
            failed += [file] if done.returncode else []
    print(f"{cut - len(failed)} of {cut} files passed{': failed: ' if failed else ''}{', '.join(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
