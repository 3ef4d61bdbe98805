"""Shows that two revisions compile to the same code, so that what was played on the older one counts for the newer one, too.

    same_code.py OLD NEW

A name that becomes a better one changes the sources, but not the programs. Both revisions are built from clones. The programs and libraries that
scripts run must then be equal byte for byte, but for symbols and debug information. If they are, their sources are added to same_code.json.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import record

FLAGS = ["WERROR=1", "CUDA=0"]
BUILT = ["ckptdelta", "libckptdelta.so", "libckptdelta_mpi.so", "tests/campaign_ranks"]


def run(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


class Revision:
    def __init__(self, folder, name):
        self.folder = folder
        run("git", "clone", "-q", str(record.ROOT), str(folder))
        run("git", "checkout", "-q", name, cwd=folder)
        build = run("make", "-s", "print-build-dir", *FLAGS, cwd=folder).strip()
        self.build = folder / build
        run("make", f"-j{os.cpu_count()}", *FLAGS, "programs", f"{build}/tests/campaign_ranks", cwd=folder)

    def code(self, built):
        """All that is loaded when it runs. The build ID depends on debug information."""
        stripped = self.folder / "stripped"
        run("strip", "--strip-all", "-R", ".note.gnu.build-id", "-o", str(stripped), str(self.build / built))
        return stripped.read_bytes()


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        old, new = (Revision(Path(folder) / name, revision) for name, revision in zip(("old", "new"), sys.argv[1:]))
        for built in BUILT:
            size = len(old.code(built))
            if old.code(built) != new.code(built):
                sys.exit(f"{built} differs")
            print(f"{built}: {size} bytes, equal")
        sources = [record.hash_of_tree(revision.folder) for revision in (new, old)]
        if sources[0] != sources[1]:
            same = {**json.loads(record.SAME_CODE.read_text()), sources[0]: sources[1]}
            record.SAME_CODE.write_text(json.dumps(same, indent=1) + "\n")
        print(f"sources {sources[0]} compile to the code of {sources[1]}")


if __name__ == "__main__":
    main()
