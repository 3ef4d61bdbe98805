"""The command `ckptdelta`, which the wheel carries: also `python -m ckptdelta`."""

import os
import sys
from pathlib import Path

COMMAND = Path(__file__).resolve().parent / "bin" / "ckptdelta"


def main() -> None:
    """Becomes the command, with the same arguments."""
    try:
        os.execv(COMMAND, ["ckptdelta", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"ckptdelta: {COMMAND} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
