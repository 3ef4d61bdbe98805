"""A case or two of nodes that are lost, stopped and damaged."""

import functools
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import agents  # noqa: E402
import nodes  # noqa: E402

BUILD = Path(os.environ.get("CKPTDELTA_BUILD") or agents.ROOT / "build/current").resolve()
SEED = int(os.environ.get("CKD_SWEEP_SEED") or 1)


@pytest.mark.parametrize("kind", sorted(nodes.KINDS))
@pytest.mark.sampled(4, full=4)
def test_what_was_promised_is_there(tmp_path, kind):
    skipped, failure, _ = nodes.play(functools.partial(nodes.Case, BUILD), kind, SEED, tmp_path)
    assert failure is None, failure
    if skipped:
        pytest.skip(skipped)
