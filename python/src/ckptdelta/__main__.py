"""The command `ckptdelta`, which the wheel carries: also `python -m ckptdelta`."""

import os
import sys
from pathlib import Path

COMMAND = Path(__file__).resolve().parent / "bin" / "ckptdelta"


def main() -> None:
    """Imports what only Python reads; in all other cases becomes the command, with the same arguments."""
    from ._import_command import is_wanted, run
    if is_wanted(sys.argv[1:]):
        sys.exit(run(sys.argv[2:]))
    try:
        os.execv(COMMAND, ["ckptdelta", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"ckptdelta: {COMMAND} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
