"""A short case of a store in a bucket: another seed in each commit."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import buckets  # noqa: E402
from support_s3 import make_bucket, seaweed, without_backend  # noqa: E402

BUILD = Path(os.environ.get("CKPTDELTA_BUILD") or buckets.ROOT / "build/current").resolve()
SEED = int(os.environ.get("CKD_SWEEP_SEED") or 1)
pytestmark = pytest.mark.skipif(without_backend() is not None, reason=str(without_backend()))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = seaweed(tmp_path_factory.mktemp("seaweed"))
    try:
        make_bucket(server.endpoint, "bucket")
        yield server
    finally:
        server.stop()


def test_what_was_saved_is_there(server, tmp_path):
    done, failure = buckets.play(BUILD, server, SEED, tmp_path, 8)
    assert failure is None, failure
    assert done["saves"] > 0 and done["loads at the end"] > 0


@pytest.mark.parametrize("wrong, said", [
    ('[ "$1" != save ] || [ "$4$6" != a3 ] || exit 0', "a', 3"),                   # it says that it has saved
    ('[ "$1" != load ] || [ "$4" != a ] || set -- load "$2" --run a --step 0 --out "$8" --force', "other values"),
    ('[ "$1" != verify ] || exit 4', "new: verify"),
], ids=["save", "load", "verify"])
@pytest.mark.sampled(3)
def test_a_command_that_is_wrong_is_found(server, tmp_path, wrong, said):
    (tmp_path / "build").mkdir()
    command = tmp_path / "build/ckptdelta"
    command.write_text(f'#!/bin/sh\n{wrong}\nexec "{BUILD}/ckptdelta" "$@"\n')
    command.chmod(0o755)
    seed = next(seed for seed in range(2, 100) if not buckets.draws(seed)["server_kills"])
    assert said in str(buckets.play(tmp_path / "build", server, seed, tmp_path, 8)[1])
