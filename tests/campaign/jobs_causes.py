"""What happens to the jobs of a campaign: processes that are killed or stopped, and supervisors that die. jobs_states.py has the rest."""

import re
import signal
import time

from jobs_case import LIMIT, shell
from jobs_rules import GAVE_UP, is_done
from jobs_support import Skip, check, kill, wait_for
from jobs_trainers import STEPS

BUSY = 1  # the exit status of a command that finds something in use


def healthy(job):
    """Nothing happens, and nothing is taken for a hang."""
    job.finish(job.start(hang=("--hang-floor", "3s")))
    check(len(job.attempts()) == 1, "more than one attempt")


# ---------------------------------------------------------------------------------------------------------- kills


def kill_and_look(job, victims, expected):
    """Kills processes of the attempt that runs. The journal then has its end as (exit, signal)."""
    number = len(job.attempts())
    hit = any([kill(pid) for pid in victims])
    wait_for(lambda: job.attempts()[number - 1]["end"], "the end of the attempt in the journal")
    a = job.attempts()[number - 1]
    if not hit or is_done(a):
        job.figures["too_late"] = job.figures.get("too_late", 0) + 1
        return
    noticed = expected == job.trainer.killed_rank and job.said("has died or left before it")
    check((a["exit"], a["signal"]) in (expected, job.trainer.noticed_rank if noticed else None), f"attempt {number} ended with exit {a['exit']}, signal {a['signal']}, not {expected}")


def kill_some(job, choose):
    """Kills what `choose` returns at one to three moments, each of them some steps after the one before."""
    supervisor = job.start(max_futile=job.draw.choice([3, 20]))
    for _ in range(job.draw.randint(1, 3)):
        first = job.trained(supervisor) + 1
        pid = job.moment(supervisor, first, first + 15)
        if pid is None:
            break
        kill_and_look(job, *choose(pid))
    job.finish_as_ruled(supervisor)


def killed_rank(job):
    """One process that trains. Before there is one, the command."""
    def choose(pid):
        ranks = job.ranks()
        return ([job.draw.choice(ranks)], job.trainer.killed_rank) if ranks else ([pid], (None, 9))
    kill_some(job, choose)


def killed_all(job):
    """The command and all below it, as when a machine runs out of patience."""
    kill_some(job, lambda pid: (job.below(pid), (None, 9)))


def killed_command(job):
    """The launcher alone. What it leaves running is ended as well."""
    kill_some(job, lambda pid: ([pid], (None, 9)))


def resident(pid):
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1])
    except OSError:
        return 0


def out_of_memory_killed(job):
    """As the kernel does it: SIGKILL to the process that trains and has the most memory."""
    def choose(pid):
        ranks = sorted(job.ranks(), key=resident)
        return (ranks[-1:], job.trainer.killed_rank) if ranks else ([pid], (None, 9))
    kill_some(job, choose)


def restart_limit(job):
    """More failures than --max-restarts allows, each after a newer checkpoint."""
    limit, kills = job.draw.randint(1, 2), 0
    supervisor = job.start(max_restarts=limit, max_futile=20)
    while kills <= limit:
        a = wait_for(lambda: job.attempts()[-1:], "an attempt")[0]
        step = (a["first_step"] or 0) + job.plan.every
        wait_for(lambda: f"/gpt.{step}." in names_of(job) or supervisor.poll() is not None, f"a checkpoint of step {step}")
        pid = job.running()
        if pid is None:
            break
        kill(pid)
        kills += 1
        wait_for(lambda: len(job.attempts()) > kills or supervisor.poll() is not None, "the next attempt")
    if job.finish(supervisor, 0, 1):
        check(len(job.attempts()) == limit + 1, f"{len(job.attempts())} attempts, {limit} restarts allowed")
        job.finish(job.start(max_restarts=100))


def names_of(job):
    """The manifests of the run. Each begins with a slash."""
    folder = job.store / "data/m"
    return "".join(f"/{path.name}" for path in folder.iterdir()) if folder.exists() else ""


# ---------------------------------------------------------------------------------------------------------- hangs


def stop_and_look(job, choose, options, moments, expected):
    """Stops processes. How long it took until this was noticed, and how long it had to be silent, become figures."""
    supervisor = job.start(hang=options, grace=job.draw.choice([1, 3]), max_futile=20)
    pid = job.moment(supervisor, 16, 24, moments)
    if pid is None:
        job.figures["too_late"] = 1
        return job.finish_as_ruled(supervisor)
    victims, number = choose(pid), len(job.attempts())
    stopped = [victim for victim in victims if kill(victim, signal.SIGSTOP)]
    since = time.monotonic()
    if not stopped or job.trained(supervisor) > 34:
        for victim in stopped:
            kill(victim, signal.SIGCONT)
        job.figures["too_late"] = 1
        return job.finish_as_ruled(supervisor)
    wait_for(lambda: job.said(f"attempt {number} is hung") or supervisor.poll() is not None, "the hang")
    took = time.monotonic() - since
    job.finish_as_ruled(supervisor)
    a = job.attempts()[number - 1]
    check(a["hung"] and re.search(expected, a["hang"]), f"attempt {number} was not noticed, or with another reason: {a['hang']}")
    check([x["attempt"] for x in job.attempts() if x["hung"]] == [number], "an attempt was taken for a hang in which nothing was stopped")
    limit = int(re.search(r"(\d+) s are allowed|for (\d+) s$", a["hang"])[1] or re.search(r"for (\d+) s$", a["hang"])[1])
    job.figures |= {"hang": a["hang"], "detected_s": round(took, 2), "limit_s": limit, "ratio": round(took / limit, 2)}
    named = re.findall(r"\(process (\d+)\)", a["hang"])
    if named and len(victims) == 1:
        job.figures["named_right"] = str(victims[0]) in named
    return None


SILENT = r"has made no step|has waited|saving|evaluat|process"


def hang_of_a_rank(job):
    floor = job.draw.choice([1, 2])
    stop_and_look(job, lambda pid: [job.draw.choice(job.ranks() or [pid])], ("--hang-floor", f"{floor}s"), ("step",), SILENT)


def hang_of_all(job):
    """The launcher stands still as well, and does not answer SIGTERM."""
    floor = job.draw.choice([1, 2])
    stop_and_look(job, lambda pid: job.below(pid), ("--hang-floor", f"{floor}s"), ("step",), SILENT)


def hang_without_checkpoints(job):
    """--hang TIME: whatever stands still, and at any moment."""
    seconds = int(3 + 4 * job.trainer.start_s)
    stop_and_look(job, lambda pid: [job.draw.choice(job.below(pid))], ("--hang", f"{seconds}s"), ("start", "step", "save"),
                  f"it has made no checkpoint for {seconds} s$")


def short_pause(job):
    """Processes stand still for less than the limit, and go on. That is no hang."""
    supervisor = job.start(hang=("--hang-floor", "4s"))
    for _ in range(2):
        first = job.trained(supervisor) + 1
        pid = job.moment(supervisor, first, first + 12)
        stopped = [victim for victim in (job.ranks() if pid else []) if kill(victim, signal.SIGSTOP)]
        time.sleep(job.draw.random() * 1.5)
        for victim in stopped:
            kill(victim, signal.SIGCONT)
    job.finish(supervisor)
    check(len(job.attempts()) == 1 and not job.last()["hung"], "a pause was taken for a hang")


# ---------------------------------------------------------------------------------------------------- supervisors


def stopped(job):
    """A signal that asks to stop, and the same command line again."""
    for _ in range(job.draw.randint(1, 2)):
        supervisor = job.start(grace=job.draw.choice([5, 20]))
        pid = job.moment(supervisor, 1, 20)
        number = job.draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        kill(supervisor.pid, number)
        status = job.finish(supervisor, 0, 128 + number)
        check(pid is None or status == 0 or job.last()["stopped_by"] == number, f"journal: {job.last()}")
    job.finish(job.start())


def save_now(job):
    """SIGUSR1: the command saves, and goes on."""
    if not job.trainer.takes_signals:
        raise Skip("this trainer ends by SIGUSR1")
    supervisor = job.start()
    if job.moment(supervisor, 1, 30, ("step",)):
        kill(supervisor.pid, signal.SIGUSR1)
    job.finish(supervisor)
    check(len(job.attempts()) == 1, "the command ended by SIGUSR1")


def kill_supervisor(job, supervisor):
    supervisor.kill()
    supervisor.wait()


def killed_supervisor(job):
    """Once or twice, and the same command line at once or a little later."""
    for _ in range(job.draw.randint(1, 2)):
        supervisor = job.start(grace=10, max_futile=20)
        running = job.moment(supervisor, 1, 20) is not None
        number = len(job.attempts())
        kill_supervisor(job, supervisor)
        time.sleep(job.draw.choice([0, 0, 1]) * job.draw.random())
        again = job.start(grace=10, max_futile=20)
        wait_for(lambda: len(job.attempts()) > number or again.poll() is not None, "the next attempt")
        reason = job.attempts()[number - 1]["reason"]
        check(not running or reason in ("supervisor died", "exit status 0"), f"attempt {number} ended for {reason}")
        job.finish(again)
        if job.trained(again) == 0:
            break


def killed_keeper(job):
    """Everything below it is killed at once, and the attempt counts as killed."""
    def choose(pid):
        keeper = job.keeper(job.supervisors[-1])
        return [keeper] if keeper and keeper != pid else [pid], (None, 9)
    kill_some(job, choose)


def killed_both(job):
    """Supervisor and keeper in any order. The same command line waits for what they have left behind."""
    supervisor = job.start(grace=10, max_futile=20)
    job.moment(supervisor, 1, 20)
    keeper = job.running() and job.keeper(supervisor)
    both = [supervisor.pid, keeper] if keeper else [supervisor.pid]
    for pid in job.draw.sample(both, len(both)):
        kill(pid)
    supervisor.wait()
    job.finish(job.start(grace=10, max_futile=20))


def second_supervisor(job):
    """The same command line while the first one lives. It is refused, and disturbs nothing."""
    first = job.start(max_futile=20)
    pid = job.moment(first, 1, 20)
    second = job.start(grace=1)
    status = second.wait(60)
    if pid and first.poll() is None:
        check(status == BUSY and job.said(f"already supervised, by process {first.pid}"), f"the second one ended with {status}")
    job.finish(first)
    check(len(job.attempts()) <= 2, "there was an attempt too many")


def everything(job):
    """Kills of ranks, the command, the keeper and supervisors in a row."""
    options = {"grace": 10, "max_futile": 50}
    supervisor = job.start(**options)
    for _ in range(job.draw.randint(2, 5)):
        first = job.trained(supervisor) + 1
        pid = job.moment(supervisor, first, first + 12)
        if pid is None:
            break
        victim = job.draw.choice([pid, job.keeper(supervisor), supervisor.pid, *job.ranks()[:1]])
        if victim == supervisor.pid:
            kill_supervisor(job, supervisor)
            supervisor = job.start(**options)
        elif victim:
            kill(victim)
    job.finish_as_ruled(supervisor)


def stopped_between(job):
    """A signal, or SIGKILL, while the supervisor waits before the next attempt."""
    supervisor = job.start(shell('"$@"; exit 1', *job.command, "--steps", job.draw.randint(1, 20)), pause="30s")
    wait_for(lambda: job.attempts() and job.attempts()[0]["end"], "the end of an attempt")
    number = job.draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
    kill(supervisor.pid, number)
    status, expected = job.wait(supervisor), -number if number == signal.SIGKILL else 128 + number
    check(status == expected, f"exit status {status} instead of {expected}")
    check(len(job.attempts()) == 1 and job.last()["verdict"].startswith("restarts in"), f"journal: {job.attempts()}")
    job.finish(job.start(pause="0s"))
    check(len(job.attempts()) == 2, "there was an attempt too many")


def two_runs(job):
    """Two runs of one store, each with a supervisor. One of them loses its command; the other one hears nothing of it."""
    other = [word.replace("gpt", "other") if word == "gpt" else word for word in job.command]
    other[other.index("--losses") + 1] = str(job.folder / "other")
    beside = job.start(other, run="other")
    supervisor = job.start(max_futile=20)
    if (pid := job.moment(supervisor, 1, 20)) is not None:
        kill_and_look(job, [pid], (None, 9))
    check(beside.wait(LIMIT) == 0, "the other run has failed")
    job.finish_as_ruled(supervisor)
    check(job.folder.joinpath("other").exists(), "the other run has trained nothing")


def deaf(job):
    """Neither the command nor a process that has left its group listens to SIGTERM. The grace period is theirs, then SIGKILL."""
    script = """trap '' TERM INT HUP; setsid sh -c "trap '' TERM INT HUP; while :; do sleep 1; done" & "$@"; while :; do sleep 1; done"""
    supervisor = job.start(shell(script, *job.command), grace=2)
    job.moment(supervisor, 1, 20)
    kill(supervisor.pid, signal.SIGTERM)
    job.finish(supervisor, 128 + signal.SIGTERM)
    check(job.last()["signal"] == signal.SIGKILL, f"journal: {job.last()}")
    job.finish(job.start())


def leftovers(job):
    """The command ends well, and leaves processes in its group and outside it."""
    deaf_one = """setsid sh -c "trap '' TERM; while :; do sleep 1; done" & """ if job.draw.random() < 0.5 else ""
    job.finish(job.start(shell(f'sleep 600 & setsid sleep 600 & {deaf_one}"$@"', *job.command), grace=1))
    check(len(job.attempts()) == 1 and job.last()["exit"] == 0, f"journal: {job.attempts()}")


# ------------------------------------------------------------------------------------------------ exit statuses


def exit_loop(job):
    """Training ends, but the command fails: the same exit without a newer checkpoint."""
    status = job.draw.choice([1, 3, 42])
    job.finish(job.start(shell(f'"$@"; exit {status}', *job.command)), GAVE_UP)
    a = job.last()
    check(a["exit"] == status and a["last_step"] == STEPS, f"journal: {a}")


def exit_at_a_step(job):
    """Each attempt ends at the same step. Then somebody has mended the program."""
    step, status = job.draw.randint(1, 30), job.draw.choice([1, 3, 139])
    job.finish(job.start(shell(f'"$@"; exit {status}', *job.command, "--steps", step)), GAVE_UP)
    check(job.last()["exit"] == status and job.last()["last_step"] == step, f"journal: {job.last()}")
    job.finish(job.start())


def exit_at_the_start(job):
    status = job.draw.choice([1, 5, 42])
    job.finish(job.start(shell(f"exit {status}")), GAVE_UP)
    check([a["exit"] for a in job.attempts()] == [status, status], f"attempts: {job.attempts()}")
    job.finish(job.start())


def usage_error(job):
    status = job.draw.choice([2, 126, 127])
    job.finish(job.start(shell(f"exit {status}")), status)
    check(len(job.attempts()) == 1, "tried again")
    job.finish(job.start())


def missing_program(job):
    """No such program, or one that cannot be executed."""
    name = job.draw.choice(["no-such-program", "/no/such/program", job.folder / "data"])
    (job.folder / "data").write_text("no program\n")
    status = 126 if name == job.folder / "data" else 127
    job.finish(job.start([name]), status)
    check(len(job.attempts()) == 1 and job.last()["reason"].startswith(f"cannot start '{name}'"), f"journal: {job.attempts()}")
    job.finish(job.start())


CAUSES = [healthy, killed_rank, killed_all, killed_command, out_of_memory_killed, restart_limit, hang_of_a_rank, hang_of_all, hang_without_checkpoints,
          short_pause, stopped, save_now, killed_supervisor, killed_keeper, killed_both, second_supervisor, everything, stopped_between,
          two_runs, deaf, leftovers, exit_loop, exit_at_a_step, exit_at_the_start, usage_error, missing_program]
