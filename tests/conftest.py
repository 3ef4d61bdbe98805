"""Modules that tests share, and which cases of a test run at which level (tests/README.md)."""

import collections
import os
import signal
import sys
import zlib
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent / folder) for folder in ("support", "reader", "golden")]

# A shell has jobs in the background ignore SIGINT, and so would the commands that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.addinivalue_line("markers", "sampled(n, full=1): one in n of its cases runs at the quick level, one in `full` at the full level, or in CKD_FULL_EVERY if that is more, drawn by CKD_SWEEP_SEED")


def pytest_collection_modifyitems(config, items):
    level = os.environ.get("CKD_TEST_LEVEL")
    if level not in ("quick", "full"):
        return
    seed = int(os.environ.get("CKD_SWEEP_SEED") or 0)
    sanitized = 2 if os.environ.get("CKPTDELTA_SAN") and level == "quick" else 1  # as in support/level.c
    sampled = [(item, item.get_closest_marker("sampled"), item.nodeid.split("[")[0]) for item in items]
    cases = collections.Counter(test for _, mark, test in sampled if mark)
    seen, out = collections.Counter(), []
    for item, mark, test in sampled:
        if mark:
            full = max(mark.kwargs.get("full", 1), min(mark.args[0], int(os.environ.get("CKD_FULL_EVERY") or 1)))
            every = min((mark.args[0] if level == "quick" else full) * sanitized, cases[test])
            if (seen[test] + seed + zlib.crc32(test.encode())) % every:
                out.append(item)
            seen[test] += 1
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


# Looking for leaks takes the address sanitizer a quarter of the time of a short command.
LEAKS_IN = 4


@pytest.fixture(autouse=True)
def leaks(request, monkeypatch):
    """At the quick level the commands of one test in LEAKS_IN are checked for leaks, drawn by CKD_SWEEP_SEED."""
    if "address" in os.environ.get("CKPTDELTA_SAN", "") and os.environ.get("CKD_TEST_LEVEL") == "quick":
        drawn = zlib.crc32(f"{os.environ.get('CKD_SWEEP_SEED')} {request.node.nodeid}".encode()) % LEAKS_IN == 0
        if not drawn:
            monkeypatch.setenv("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0")
