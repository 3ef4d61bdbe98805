"""A case or two of trainers, and agents, that are killed, stopped and damaged."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import agents  # noqa: E402

BUILD = Path(os.environ.get("CKPTDELTA_BUILD") or agents.ROOT / "build/current").resolve()
SEED = int(os.environ.get("CKD_SWEEP_SEED") or 1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return agents.Reference(BUILD, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("kind", sorted(agents.KINDS))
@pytest.mark.sampled(5)
def test_the_newest_state_survives(tmp_path, reference, kind):
    skipped, failure, _ = agents.play(reference, kind, SEED, tmp_path)
    assert failure is None, failure
    if skipped:
        pytest.skip(skipped)
