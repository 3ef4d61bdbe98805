"""Sessions of models in FullyShardedDataParallel (FSDP1). Skipped where torch is not installed, or was built without gloo."""

import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch

HAS_GLOO = torch is not None and torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [needs_package, needs_torch,
              pytest.mark.skipif(torch is not None and not HAS_GLOO, reason="this torch was built without gloo")]
if HAS_GLOO and ckptdelta is not None:
    import support_fsdp1


def test_the_losses_after_a_restore_are_those_of_an_uninterrupted_run(tmp_path):
    """Two strategies, with use_orig_params and without; then other numbers of ranks, and FSDP2."""
    support_fsdp1.launch("resumes", 2, tmp_path)
    support_fsdp1.launch("elsewhere", 3, tmp_path)
    support_fsdp1.launch("elsewhere", 1, tmp_path)


def test_replicas_of_shards(tmp_path):
    support_fsdp1.launch("hybrid", 4, tmp_path)


def test_lossy_saves_restore_on_all_ranks_what_one_process_loads(tmp_path):
    support_fsdp1.launch("lossy", 2, tmp_path)


def test_parts_that_nothing_tells_the_places_of_are_refused(tmp_path):
    support_fsdp1.launch("refused", 2, tmp_path)
