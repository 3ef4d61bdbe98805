"""Prints what this Python lacks to build the package, nothing if it can: can_build.py [--wheel] [--debian]

--wheel: to make a wheel as well. --debian: names of Debian packages, for scripts.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path


def lacking(wheel: bool) -> list[tuple[str, str]]:
    """(what, Debian package) of all that is missing."""
    found = []
    modules = [("cffi", "python3-cffi"), *([("setuptools", "python3-setuptools"), ("wheel", "python3-wheel")] if wheel else [])]
    found += [(module, package) for module, package in modules if importlib.util.find_spec(module) is None]
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        found.append(("Python.h", "python3-dev"))
    return found


if __name__ == "__main__":
    missing = lacking("--wheel" in sys.argv)
    if "--debian" in sys.argv:
        print(*(package for _, package in missing))
    elif sys.version_info < (3, 10):
        print(f"Python {sys.version.split()[0]} is older than 3.10")
    elif missing:
        print(f"{sys.executable} has no {' and no '.join(what for what, _ in missing)} (Debian: {' '.join(package for _, package in missing)})")
