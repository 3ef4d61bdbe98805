"""Processes that are the ranks of a job on this machine."""

import socket
import subprocess
import sys
import tempfile
import time

from support_python import environment


def run_ranks(script, *arguments, world=2, seconds=180):
    """Runs a script once for each rank, with what torch.distributed and DeepSpeed want to know. All must succeed; if one fails, the others end."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    with tempfile.TemporaryFile("w+") as output:
        ranks = [subprocess.Popen([sys.executable, str(script), *map(str, arguments)], stdout=output, stderr=subprocess.STDOUT,
                                  env=environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                                                  MASTER_PORT=port, DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", OMP_NUM_THREADS="1"))
                 for rank in range(world)]
        end = time.monotonic() + seconds
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks) and time.monotonic() < end:
                time.sleep(0.1)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        output.seek(0)
        assert all(rank.returncode == 0 for rank in ranks), output.read()[-5000:]
