"""A case of nodes that are lost while the example GPT trains on four ranks."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import agents  # noqa: E402
import gpt_nodes  # noqa: E402
import nodes  # noqa: E402
from jobs_trainers import has_mpi  # noqa: E402

BUILD = Path(os.environ.get("CKPTDELTA_BUILD") or agents.ROOT / "build/current").resolve()
SEED = int(os.environ.get("CKD_SWEEP_SEED") or 1)
STEPS = 400

pytestmark = [pytest.mark.skipif(not has_mpi(BUILD), reason="train_mpi was not built, or there is no mpirun"),
              pytest.mark.skipif(os.environ.get("CKD_TEST_LEVEL") == "quick", reason="it takes a quarter of a minute: full level only")]


@pytest.fixture(scope="module")
def make_case(tmp_path_factory):
    return gpt_nodes.prepare(BUILD, tmp_path_factory.mktemp("reference"), STEPS)


@pytest.mark.parametrize("kind", sorted(gpt_nodes.KINDS))
@pytest.mark.sampled(10, full=5)
def test_losses_are_those_without_failures(tmp_path, make_case, kind):
    _, failure, _ = nodes.play(make_case, kind, SEED, tmp_path, gpt_nodes.KINDS)
    assert failure is None, failure
