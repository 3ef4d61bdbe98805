"""Sessions of several ranks: what is told, what is refused, where a run begins, and exports. Skipped where torch is not installed."""

import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch

HAS_GLOO = torch is not None and torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [needs_package, needs_torch,
              pytest.mark.skipif(torch is not None and not HAS_GLOO, reason="this torch was built without gloo")]
if HAS_GLOO and ckptdelta is not None:
    import support_ranked
    import support_ranked_told


def test_dcp_reads_what_is_exported(tmp_path):
    """On the ranks, and in one process without a group."""
    support_ranked.launch("exported", 2, tmp_path)
    content = torch.load(tmp_path / "content.pt", weights_only=False)
    training = support_ranked.Training("none", 0, None, seed=4)
    support_ranked.load_export(training, tmp_path / "exported")
    for key in ("model", "optimizer"):
        assert training.content()[key] == content[key]


@pytest.mark.parametrize("what", ["notices", "branches", "parts_that_look_whole", "unpaired"])
def test_what_is_told_once_and_where_a_run_begins(tmp_path, what):
    support_ranked_told.launch(what, 2, tmp_path)
