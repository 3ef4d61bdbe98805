"""What happens to the jobs of a campaign: no memory, no room, damaged checkpoints, values that become NaN."""

import json
import os
import signal
import subprocess

from jobs_case import shell
from jobs_rules import GAVE_UP, is_done
from jobs_support import Skip, check, kill, wait_for

# ------------------------------------------------------------------------------------------------ memory and room


def memory_limit(job):
    """RLIMIT_AS is too small, in the first attempts or in all of them, and sometimes only just."""
    attempts, job.may_hang = job.draw.choice([1, 2, 99]), True
    kib = int(job.trainer.memory_kib * (0.2 + job.draw.random()))
    command = shell(f'if [ "$CKPTDELTA_ATTEMPT" -le {attempts} ]; then ulimit -v {kib}; fi; exec "$@"', *job.command)
    # A rank without memory may leave the others waiting before they have made a step.
    status = job.finish(job.start(command, hang=("--hang", f"{int(5 + 5 * job.trainer.start_s)}s"), grace=2), 0, GAVE_UP, 2, 126, 127)
    job.figures["limit_kib"] = kib
    if status:
        job.finish(job.start())


def full_disk(job):
    """A small file system fills up in the middle. There is room again when somebody has cleaned up."""
    disk = job.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={job.trainer.disk}", "tmpfs", disk], stderr=subprocess.DEVNULL).returncode != 0:
        raise Skip("cannot mount a file system")
    try:
        job.store = disk / "store"
        job.command = job.trainer.command(job.plan, job.store, job.losses)
        supervisor = job.start(max_futile=20)
        job.moment(supervisor, 1, 25)
        subprocess.run(["dd", "if=/dev/zero", f"of={disk}/filler", "bs=64k"], stderr=subprocess.DEVNULL)
        status = job.wait(supervisor)
        attempts = job.attempts()
        check(status in (0, 1), f"exit status {status} on a full disk")
        check(status == 0 or job.said("disk is full") or job.said("No space left"), "it does not say that the disk is full")
        if attempts and attempts[-1]["end"]:
            check(attempts[-1]["status"] == status, f"journal: {attempts[-1]}")
        else:
            job.figures["journal_full"] = True
        (disk / "filler").unlink()
        job.finish(job.start())
        job.check_end()
    finally:
        subprocess.run(["umount", disk], check=True)
    job.is_checked = True


def no_space_calls(job):
    """From a system call on, a trainer of the first attempt finds no room or cannot write, and nobody else does."""
    shim = job.build / "tests/libcampaign_faults.so"
    fault, call = job.draw.choice(["ENOSPC", "ENOSPC+", "EIO", "EIO+"]), job.draw.randint(1, 400)
    script = f'if [ "$CKPTDELTA_ATTEMPT" = 1 ]; then export LD_PRELOAD={shim} CAMPAIGN_FAULT={fault}:{call}; fi; exec "$@"'
    command = job.trainer.preloaded(job.command, script)
    if not shim.exists() or os.environ.get("CKPTDELTA_SAN") or not command:
        raise Skip("nothing can be preloaded here")
    job.may_hang = True  # ranks that wait for the one that has failed
    job.finish_as_ruled(job.start(command, hang=("--hang", "20s"), grace=2))


# --------------------------------------------------------------------------------------------------------- damage


def damage(job, path):
    how = job.draw.choice(["flip", "cut", "remove"])
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:job.draw.randrange(len(content))])
    else:
        content[job.draw.randrange(len(content))] ^= 1 << job.draw.randrange(8)
        path.write_bytes(content)
    return how


def files_of(job, ref):
    """The chunk files that this checkpoint alone needs. A manifest has the numbers of those that a load reads."""
    manifests = {path: path.read_bytes() for path in (job.store / "data/m").iterdir()}
    own = job.store / "data/m" / (ref.replace("@", ".") + ".0")
    others = [content for path, content in manifests.items() if path != own]
    ids = [(path, bytes.fromhex(path.stem)) for path in (job.store / "data/c").glob("*.ckd")]
    return [path for path, number in ids if number in manifests[own] and not any(number in other for other in others)]


def damaged_newest(job):
    """The newest checkpoint is damaged between two attempts, once or twice."""
    pause = "15s" if job.trainer.name == "torch" else "4s"  # the file is damaged before the supervisor looks at it
    supervisor, bad = job.start(max_futile=20, pause=pause), []
    for _ in range(job.draw.randint(1, 2)):
        number = len(job.attempts()) or 1
        wait_for(lambda: len(saved(job, bad)) >= 2 or supervisor.poll() is not None, "two checkpoints")
        pid = job.running()
        if pid is None:
            break
        for victim in job.below(pid):
            kill(victim)
        a = wait_for(lambda: job.attempts()[number - 1]["end"] and job.attempts()[number - 1], "the end of the attempt")
        if is_done(a):
            break
        kill(supervisor.pid, signal.SIGSTOP)
        ref = saved(job, bad)[0]
        files = files_of(job, ref)
        how = damage(job, job.draw.choice(files)) if files else None
        if files:
            job.figures.setdefault("damage", []).append(how)
        spoiled = how in ("cut", "remove") or (how == "flip" and not loads(job, ref))
        if spoiled:
            bad.append(ref)
        kill(supervisor.pid, signal.SIGCONT)
        wait_for(lambda: len(job.attempts()) > number or supervisor.poll() is not None, "the next attempt")
        if spoiled:
            started = job.attempts()[number]["checkpoint"]
            check(job.said(f"{ref} is damaged and passed over"), f"nobody says that {ref} is damaged")
            check(started not in bad, f"attempt {number + 1} started from {started}, which is damaged")
    job.damaged = "damage" in job.figures
    job.finish(supervisor)


def loads(job, ref):
    """A flip in one of two copies of a header spoils nothing. The end of the job shows whether the values were right."""
    return subprocess.run([job.build / "ckptdelta", "load", job.store, ref, "--force", "-q", "-o", job.folder / "loaded"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def saved(job, but=()):
    """The checkpoints, the newest first."""
    done = subprocess.run([job.build / "ckptdelta", "list", job.store, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found = json.loads(done.stdout)["checkpoints"] if done.returncode == 0 else []
    refs = [(c["created"], c["step"], f"{c['run']}@{c['step']}") for c in found]
    return [ref for _, _, ref in sorted(refs, reverse=True) if ref not in but]


# ------------------------------------------------------------------------------------------------------------ NaN


def nan_step(job):
    """A step that is saved, with healthy checkpoints before it."""
    every = job.plan.every
    return every * job.draw.randint(2, 30 // every)


def spoiled(job, step, attempts):
    """The command, in whose first attempts a weight becomes NaN in a step."""
    job.spoiled = True
    fault = " ".join(job.trainer.nan(step))
    return shell(f'if [ "$CKPTDELTA_ATTEMPT" -le {attempts} ]; then exec "$@" {fault}; fi; exec "$@"', *job.command)


def nan_once(job):
    """The attempt after it starts from a healthy checkpoint before it: the Kth with --rewind-on-nan K."""
    step, how, back = nan_step(job), job.draw.choice(["mark", "rewind"]), job.draw.choice([1, 1, 2])
    command = spoiled(job, step, 1)
    job.finish(job.start(command, on_anomaly=how, rewind=back))
    first = job.attempts()[0]
    check(first["anomaly"] == f"gpt@{step}" or first["alarm"], f"nobody has noticed NaN in step {step}: {first}")
    if len(job.attempts()) == 1:
        check(how == "mark", "training went on with NaN, and was done")
        job.finish(job.start(command, on_anomaly=how, rewind=back))
    second, healthy = job.attempts()[1], [s for s in range(job.plan.every, step, job.plan.every)]
    expected = healthy[-back] if back <= len(healthy) else healthy[0]
    check(second["checkpoint"] == f"gpt@{expected}", f"NaN in step {step}: attempt 2 started from {second['checkpoint']}, not from step {expected}")


def nan_always(job):
    """Each attempt meets it again. It gives up, and does not count what it has saved as progress."""
    step, how = nan_step(job), job.draw.choice(["rewind", "stop"])
    job.finish(job.start(spoiled(job, step, 99), on_anomaly=how), GAVE_UP)
    attempts = job.attempts()
    check(how != "stop" or len(attempts) == 1, f"--on-anomaly stop has made {len(attempts)} attempts")
    check(all(int(a["checkpoint"].partition("@")[2]) < step for a in attempts[1:]), f"an attempt started from a suspect checkpoint: {attempts}")
    job.finish(job.start())


CAUSES = [memory_limit, full_disk, no_space_calls, damaged_newest, nan_once, nan_always]
