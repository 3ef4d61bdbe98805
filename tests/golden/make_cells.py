"""Writes a golden store whose lossy matrices are cut into cells: make_cells.py TEST_CELLS COMMAND FOLDER

TEST_CELLS is the built tests/test_block_grid, which can make cells of small matrices, COMMAND the built `ckptdelta`. Run once; FOLDER must not exist.
What it contains is what the library loads from it, and recorded in FOLDER.json. Fails unless rows and their factors are shared.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parent / "reader")]
import ckd_reader  # noqa: E402
import make_library  # noqa: E402
import make_lossy  # noqa: E402

PARTS = {"levels", "rows", "steps", "factor", "shared", "shared factor", "shared rows", "shared rows' factor", "exceptions"}


def make(writer, command, folder):
    """{"run@step": tensors}, as the command loads them."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([writer, scratch], check=True)
        shutil.move(Path(scratch) / "store", folder)
    return {f"run@{step}": make_lossy.load(command, folder, "run", step) for step in range(4)}


def main(argv):
    writer, command, folder = str(Path(argv[1]).resolve()), str(Path(argv[2]).resolve()), Path(argv[3])
    make_library.write_golden(command, folder, lambda *_: make(writer, command, folder))
    parts = make_lossy.coverage(ckd_reader.Store(folder))[0]
    print("parts:", sorted(parts))
    assert parts >= PARTS, "not every part of a cell was used"


if __name__ == "__main__":
    main(sys.argv)
