"""The built Python package, for the tests of tests/python/."""

import importlib
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current").resolve()
FOLDER = BUILD / "python"


def _load():
    """(package, None), or (None, why it is not there)."""
    if (FOLDER / "why_not").exists():
        return None, "the Python package was not built: " + (FOLDER / "why_not").read_text().strip()
    sys.path.insert(0, str(FOLDER))
    return importlib.import_module("ckptdelta"), None


def _torch():
    try:
        return importlib.import_module("torch"), None
    except ImportError as error:
        return None, f"torch cannot be imported here: {error}"


ckptdelta, WHY_NOT = _load()
torch, WHY_NO_TORCH = _torch()
needs_package = pytest.mark.skipif(ckptdelta is None, reason=WHY_NOT or "-")
needs_torch = pytest.mark.skipif(torch is None, reason=WHY_NO_TORCH or "-")


def environment(**more):
    """For processes that import the package."""
    return {**os.environ, "PYTHONPATH": str(FOLDER), **more}
