"""ckptdelta run --device-wait: memory of GPUs that is still held when the next attempt could start. nvidia-smi only pretends."""

import os
import re
import signal
import time

import pytest

from support_cli import USAGE, run
from support_run import STOPPED, exists, job, until  # noqa: F401

# A command that uses a GPU once, and works at the second attempt. `gpu` has what nvidia-smi prints.
COMMAND = ("sh", "-c", 'cat gpu >>seen; [ $CKPTDELTA_ATTEMPT = 2 ] || { echo "$$, 512 MiB" >>gpu; exit 1; }')


@pytest.fixture
def gpu(job):  # noqa: F811
    """Frees the memory of the command when nvidia-smi was asked so many times."""
    (job.folder / "bin").mkdir()
    (job.folder / "gpu").write_text("")
    job.env["PATH"] = f"{job.folder}/bin:{job.env['PATH']}"

    def install(asked=0, script=""):
        path = job.folder / "bin/nvidia-smi"
        path.write_text(f"""#!/bin/sh
echo "$*" >>asked
[ $(wc -l <asked) != {asked} ] || : >gpu
cat gpu
{script}
""")
        path.chmod(0o755)
        return job
    return install


def asked(job):  # noqa: F811
    return (job.folder / "asked").read_text().splitlines()


def test_it_waits_until_the_memory_is_free(gpu):
    job = gpu(asked=4)  # noqa: F811
    begun = time.monotonic()
    out, err = job.run(*COMMAND)
    assert time.monotonic() - begun >= 1 and len(asked(job)) == 4
    assert asked(job)[0] == "--query-compute-apps=pid,used_memory --format=csv,noheader"
    pid = job.attempts()[0]["pid"]
    assert err.count(f"waiting for process {pid}, which has ended, to give back 512 MiB of a device") == 1 and "anyway" not in err
    assert (job.folder / "seen").read_text() == ""


def test_it_does_not_wait_for_ever(gpu):
    job = gpu()  # noqa: F811
    out, err = job.run(*COMMAND, options=["--device-wait", "1s"])
    assert f"process {job.attempts()[0]['pid']} still holds 512 MiB of a device after 1 s; starts anyway" in err
    # What it did not wait for then is no reason to wait later.
    out, err = job.run("sh", "-c", "exit $((4 - $CKPTDELTA_ATTEMPT))", options=["--device-wait", "1s"])
    assert len(job.attempts()) == 4 and "waiting" not in err


@pytest.mark.parametrize("options", [["--device-wait", "0s"], []])
def test_nothing_is_asked(gpu, options):
    job = gpu() if options else gpu(script="echo trouble >&2; exit 9")  # noqa: F811
    out, err = job.run(*COMMAND, options=options)
    assert "device" not in err and "trouble" not in err and (job.folder / "asked").exists() == (not options)


def test_without_nvidia_smi(job):  # noqa: F811
    (job.folder / "gpu").write_text("")
    out, err = job.run(*COMMAND)
    assert all(line.startswith("ckptdelta: attempt ") for line in err.splitlines())


@pytest.mark.parametrize("line", ["{living}, 512 MiB", "99999999, 0 MiB", "[N/A], 1 MiB", "", "No running processes found", "-1, 5 MiB", "99999999999, 5 MiB"])
def test_who_is_not_waited_for(gpu, line):
    """Processes of others live; nothing else holds memory."""
    job = gpu()  # noqa: F811
    line = line.format(living=os.getpid())
    out, err = job.run("sh", "-c", f'echo "{line}" >gpu; [ $CKPTDELTA_ATTEMPT = 2 ]')
    assert "device" not in err


def test_those_who_were_there_before_are_not_waited_for(gpu):
    """In a container, numbers of processes of others name nobody."""
    job = gpu()  # noqa: F811
    (job.folder / "gpu").write_text("99999999, 512 MiB\n")
    out, err = job.run("sh", "-c", "[ $CKPTDELTA_ATTEMPT = 2 ]")
    assert "device" not in err


def test_memory_that_is_not_told(gpu):
    job = gpu(asked=3)  # noqa: F811
    out, err = job.run("sh", "-c", 'echo "99999999, [N/A]" >gpu; [ $CKPTDELTA_ATTEMPT = 2 ]')
    assert re.search(r"waiting for process 99999999, which has ended, to give back \[N/A\] of a device", err)


def test_a_signal_ends_the_wait(gpu):
    job = gpu(script="[ $(wc -l <asked) -lt 2 ] || touch waits")  # noqa: F811
    process = job.begin(*COMMAND)
    assert until(exists(job.folder / "waits"))
    process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED)
    assert len(job.attempts()) == 1


def test_wrong_options(job):  # noqa: F811
    run("run", job.store, "--run", "gpt", "--device-wait", "long", "--", "true", expect=USAGE)
