"""ckptdelta run and ckptdelta attempts, with real processes: trainers that save by the command, fail, and are killed."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from support_cli import COMMAND, CORRUPT, DOC, FAILED, NOT_FOUND, USAGE, check_documented, run, stop
from support_run import GAVE_UP, STOPPED, exists, job, until  # noqa: F401

# --------------------------------------------------------------------------------------------------- restarts


def test_a_command_that_succeeds(job):
    out, err = job.run("sh", "-c", 'echo "$CKPTDELTA_RUN $CKPTDELTA_ATTEMPT ${CKPTDELTA_STEP-none} ${CKPTDELTA_CHECKPOINT-none} $CKPTDELTA_STORE"')
    assert out == f"gpt 1 none none {job.store}\n"
    assert "attempt 1 starts without a checkpoint" in err
    attempt, = job.attempts()
    assert (attempt["exit"], attempt["status"], attempt["verdict"], attempt["checkpoint"]) == (0, 0, "done", None)


def test_it_goes_on_from_the_newest_checkpoint(job):
    trainer = job.trainer("train(min(2, 7 - step)); sys.exit(step < 7)")
    job.run(*trainer)
    assert job.starts() == ["1 None", "2 gpt@2", "3 gpt@4", "4 gpt@6"]
    assert job.steps() == [("gpt", n) for n in range(1, 8)]
    attempts = job.attempts()
    assert [(a["attempt"], a["exit"], a["first_step"], a["last_step"]) for a in attempts] == [(1, 1, None, 2), (2, 1, 2, 4), (3, 1, 4, 6), (4, 0, 6, 7)]
    assert [a["steps_lost"] for a in attempts] == [None, 0, 0, 0]
    for a in attempts:
        assert 0 < a["first_save_s"] <= a["seconds"] and a["host"] == os.uname().nodename and a["pid"] > 0
    # The same command again: it is a new attempt, and nothing is left to do.
    job.run(*trainer)
    assert job.starts()[4:] == ["5 gpt@7"] and job.attempts()[-1]["attempt"] == 5


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"])
def test_kills(job, end):
    """Of the command, and of the process between the supervisor and the command."""
    job.run(*job.trainer(f"""
        train(2)
        if step < 5:
            {end}
    """))
    assert job.starts() == ["1 None", "2 gpt@2", "3 gpt@4"]
    assert [a["signal"] for a in job.attempts()] == [6 if "abort" in end else 9] * 2 + [None]


def test_exit_1_in_a_loop(job):
    out, err = job.run("sh", "-c", "exit 1", expect=GAVE_UP)
    assert "ckptdelta: gpt: gave up: exit status 1 twice before the first checkpoint\n" in err
    assert [(a["exit"], a["status"]) for a in job.attempts()] == [(1, None), (1, GAVE_UP)]
    job.run(*job.trainer("train(1)"))
    # It has begun anew after giving up. Now there is a checkpoint.
    out, err = job.run("sh", "-c", "exit 1", expect=GAVE_UP)
    assert "twice at the same checkpoint, step 1" in err
    assert [a["checkpoint"] for a in job.attempts()] == [None] * 3 + ["gpt@1"] * 2


def test_killed_again_and_again(job):
    job.run("sh", "-c", "kill -9 $$", expect=GAVE_UP)
    assert len(job.attempts()) == 3 and "no newer checkpoint in 3 attempts" in job.attempts()[-1]["verdict"]
    job.run("sh", "-c", "kill -9 $$", expect=GAVE_UP, options=["--max-futile", "5"])
    assert len(job.attempts()) == 8


def test_max_restarts(job):
    out, err = job.run(*job.trainer("train(1); sys.exit(1)"), expect=FAILED, options=["--max-restarts", "2"])
    assert "restarted 2 times, as --max-restarts allows" in err and len(job.attempts()) == 3


@pytest.mark.parametrize("command, status", [(["./absent"], 127), (["absent-program"], 127), (["/etc/passwd"], 126), (["sh", "-c", "exit 2"], 2),
                                             (["sh", "absent.sh"], None), ([sys.executable, "absent.py"], 2)])
def test_a_wrong_command_is_not_tried_again(job, command, status):
    status = subprocess.run(["sh", "absent.sh"], stderr=subprocess.DEVNULL).returncode if status is None else status
    out, err = job.run(*command, expect=status)
    attempt, = job.attempts()
    assert attempt["status"] == status and "not tried again" in err and attempt["verdict"].endswith("not tried again")
    assert (f"cannot start '{command[0]}'" in attempt["reason"]) == (len(command) == 1)


def test_pauses_grow(job):
    begin = time.monotonic()
    job.run("sh", "-c", "kill -9 $$", expect=GAVE_UP, options=["--pause", "1s"])
    assert 1.5 <= time.monotonic() - begin < 30  # two pauses: at least half of 1 s and half of 2 s
    process = job.begin("sh", "-c", "kill -9 $$", options=["--pause", "1h", "--max-pause", "1h"])
    assert until(lambda: "restarts in" in (job.attempts()[-1]["verdict"] or "") and job.attempts()[-1]["attempt"] == 4)
    process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED)


# ------------------------------------------------------------------------------------------------- checkpoints


def test_a_damaged_newest_checkpoint(job):
    trainer = job.trainer("train(3)")
    job.run(*trainer)
    job.damage(3)
    out, err = job.run(*trainer)
    assert "gpt@3 is damaged and passed over" in err
    assert job.starts() == ["1 None", "2 gpt@2"]
    assert job.attempts()[-1]["steps_lost"] == 0  # the damaged one is of no use to anybody
    assert {("gpt~2", 3), ("gpt~2", 5)} <= set(job.steps())
    # The branch is the newest now.
    job.run(*trainer)
    assert job.starts()[-1] == "3 gpt~2@5"


def test_damage_that_no_load_meets_is_passed_on(job):
    """A record's header is in its file twice. If one of them is damaged, the checkpoint can be loaded, as verify says."""
    job.run(*job.trainer("train(1)"))
    file, = (job.store / "data/c").iterdir()
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        result = json.loads(subprocess.run([COMMAND, "verify", job.store, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
        if result["damage"] and not any(d["checkpoints"] for d in result["damage"]):
            break
    else:
        pytest.fail("no such place in the file")
    out, err = job.run(*job.trainer("train(1)"))
    assert "passed over" not in err and job.starts()[-1] == "2 gpt@1"


def test_a_damaged_checkpoint_is_no_progress(job):
    job.run(*job.trainer("train(3)"))
    job.damage(3)
    job.run("sh", "-c", "kill -9 $$", expect=GAVE_UP)
    attempts = job.attempts()[1:]
    assert [(a["checkpoint"], a["first_step"], a["last_step"]) for a in attempts] == [("gpt@2", 2, 2)] * 2 + [("gpt@1", 2, 2)]


def test_without_a_whole_checkpoint_nothing_is_started(job):
    job.run(*job.trainer("train(2)"))
    job.damage(2)
    job.damage(1)
    out, err = job.run("touch", "started", expect=CORRUPT)
    assert "none of the 2 checkpoints of gpt is whole" in err and not (job.folder / "started").exists()
    job.run("true", run_name="other")


def test_quick_looks_at_stored_bytes(job):
    job.run(*job.trainer("train(2)"))
    job.damage(2)
    job.run("true", options=["--quick"])
    assert job.attempts()[-1]["checkpoint"] == "gpt@1"


def test_after_two_failures_it_goes_back(job):
    """State that is whole and bad: every attempt from step 3 dies."""
    trainer = job.trainer("""
        if start == "gpt@3":
            os.kill(os.getpid(), signal.SIGKILL)
        train(3 if step == 0 else 2)
        sys.exit(step < 4)
    """)
    out, err = job.run(*trainer)
    assert job.starts() == ["1 None", "2 gpt@3", "3 gpt@3", "4 gpt@2"]
    assert [a["steps_lost"] for a in job.attempts()] == [None, 0, 0, 1]
    # This trainer reports no steps, so nobody knows how many followed the last save.
    assert [row.split("gpt@")[-1].split()[2] for row in run("attempts", job.store).out.splitlines()[2:]] == ["-", "-", "1+"]
    assert job.steps()[-1] == ("gpt~2", 4) or ("gpt~2", 3) in job.steps()


def test_the_same_exit_after_going_back(job):
    job.run(*job.trainer("train(3)"))
    out, err = job.run(*job.trainer("sys.exit(7)"), expect=GAVE_UP, options=["--max-futile", "10"])
    assert [a["checkpoint"] for a in job.attempts()[1:]] == ["gpt@3", "gpt@3", "gpt@2"]
    assert "exit status 7 twice at the same checkpoint, step 3" in err


# ----------------------------------------------------------------------------------------------------- signals

SAVES_AND_STOPS = """
    def stop(number, frame):
        if number != signal.SIGUSR1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may come again meanwhile
        train(1)
        open(f"stopped{number}", "w").close()
        if number != signal.SIGUSR1:
            sys.exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, stop)
    open("ready", "w").close()
    while True:
        time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_means_save_and_stop(job, number):
    process = job.begin(*job.trainer(SAVES_AND_STOPS))
    assert until(exists(job.folder / "ready"))
    process.send_signal(number)
    out, err = job.finish(process, 128 + number)
    assert f"{number.name} is passed on to attempt 1" in err and f"gpt: stopped by {number.name}" in err
    attempt, = job.attempts()
    assert (attempt["exit"], attempt["stopped_by"], attempt["status"], attempt["last_step"]) == (0, number, 128 + number, 1)


def test_sigusr1_is_passed_on(job):
    process = job.begin(*job.trainer(SAVES_AND_STOPS))
    assert until(exists(job.folder / "ready"))
    process.send_signal(signal.SIGUSR1)
    assert until(exists(job.folder / f"stopped{int(signal.SIGUSR1)}")) and process.poll() is None
    process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED)
    assert job.attempts()[0]["last_step"] == 2


@pytest.mark.parametrize("trap, saved", [("trap '' TERM USR1;", [("gpt", 1)]), ("", [])])
def test_a_shell_script_protects_what_it_has_started(job, trap, saved):
    """As docs/run.md says: the signal reaches the programs of the script, which a trap of the shell does not protect."""
    st_file = job.folder / "state.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    st_file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    save = f'touch ready; sleep 1 && "$COMMAND" save "$CKPTDELTA_STORE" --run gpt --step 1 {st_file}'
    process = job.begin("sh", "-c", f"trap 'told=yes' TERM; ({trap} {save})")
    assert until(exists(job.folder / "ready"))
    process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED)
    assert job.steps() == saved


def test_a_command_that_hangs(job):
    """It ends well when it is told to, and is not done."""
    out, err = job.run(*job.trainer("""
        train(2)
        if attempt == 1:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            time.sleep(600)
    """), options=["--hang", "2s"])
    assert "attempt 1 is hung: it has made no checkpoint for 2 s" in err
    assert [(a["hung"], a["reason"], a["status"]) for a in job.attempts()] == [(True, "hung: exit status 0", None), (False, "exit status 0", 0)]
    assert job.starts() == ["1 None", "2 gpt@2"]


def test_a_hung_command_that_ignores_signals(job):
    out, err = job.run(*job.trainer(STUBBORN + "\n    time.sleep(600)"), options=["--hang", "1s", "--grace", "1s", "--max-futile", "1"], expect=GAVE_UP)
    assert job.attempts()[0]["reason"] == "hung: killed by SIGTERM"


def test_a_slow_command_does_not_hang(job):
    job.run(*job.trainer("""
        for _ in range(6):
            time.sleep(0.7)
            train(1)
    """), options=["--hang", "3s"])
    attempt, = job.attempts()
    assert attempt["seconds"] > 3.5 and not attempt["hung"]


def test_a_stopped_command_hangs(job):
    out, err = job.run(*job.trainer("train(1); attempt > 1 or os.kill(os.getpid(), signal.SIGSTOP)"), options=["--hang", "1s"])
    assert [a["hung"] for a in job.attempts()] == [True, False]


STUBBORN = """
    import subprocess
    ignores = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; open(f'up{sys.argv[1]}', 'w').close(); time.sleep(600)"
    ignores = "import sys; " + ignores
    for i in range(3):  # one of the group, one of another group, one of another session that is orphaned
        subprocess.Popen([sys.executable, "-c", ignores, str(i)], start_new_session=i > 0)
    while not all(os.path.exists(f"up{i}") for i in range(3)):
        time.sleep(0.02)
"""


@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "open('ready', 'w').close(); time.sleep(600)"])
def test_nothing_is_left_of_a_group_that_ignores_signals(job, end):
    process = job.begin(*job.trainer(STUBBORN + f"\n    {end}"), options=["--grace", "1s", "--max-futile", "1"])
    if "ready" in end:
        assert until(exists(job.folder / "ready"))
        process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED if "ready" in end else GAVE_UP if "kill" in end else 0)
    assert job.attempts()[0]["seconds"] >= 1


def test_a_stopped_command_is_ended_too(job):
    process = job.begin("sh", "-c", "touch ready; kill -STOP $$")
    assert until(exists(job.folder / "ready"))
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED)


@pytest.mark.parametrize("mode", ["group", "mixed"])
def test_who_gets_a_signal(job, mode):
    child = "trap 'touch child' TERM; touch ready; while [ ! -e told ]; do sleep 0.02; done; sleep 0.5; sleep 0.1; touch finished"
    process = job.begin("sh", "-c", f"trap 'touch told' TERM; sh -c \"{child}\" & wait; wait", options=["--kill-mode", mode])
    assert until(exists(job.folder / "ready"))
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED)
    assert (job.folder / "finished").exists() and (job.folder / "child").exists() == (mode == "group")


def test_what_the_command_leaves_running_is_asked_to_end_once_it_has_ended(job):
    child = "trap 'touch child; exit' TERM; touch ready; while :; do sleep 0.02; done"
    process = job.begin("sh", "-c", f"trap 'touch told; exit' TERM; sh -c \"{child}\" & while :; do sleep 0.02; done", options=["--kill-mode", "mixed"])
    assert until(exists(job.folder / "ready"))
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED)
    assert (job.folder / "told").exists() and (job.folder / "child").exists() and not job.left()


def test_an_ignored_signal_stays_ignored(job):
    process = subprocess.Popen(["nohup", COMMAND, "run", job.store, "gpt", "--", "sh", "-c", "touch ready; sleep 1"], env=job.env, cwd=job.folder,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert until(exists(job.folder / "ready"))
    process.send_signal(signal.SIGHUP)
    job.finish(process)


@pytest.mark.parametrize("attempts", [0, 1])
def test_a_signal_while_the_agent_is_waited_for(job, attempts):
    """Before or after an attempt, the agent takes the connection and does not answer."""
    path = f"/tmp/{job.marker}"  # short enough for a socket
    job.env.update(CKPTDELTA_AGENT=path, CKPTDELTA_AGENT_WAIT="600")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(path)
        try:
            agent.listen()
            agent.settimeout(60)
            process = job.begin("false")
            for _ in range(attempts):
                agent.accept()[0].close()
            waits = agent.accept()[0]
            process.send_signal(signal.SIGTERM)
            out, err = job.finish(process, STOPPED)
        finally:
            os.unlink(path)
        waits.close()
    assert "no longer waits" in err and err.count("the agent: ") == attempts
    assert [a["reason"] for a in job.attempts()] == ["exit status 1"] * attempts


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_nobody_reads_what_it_says(job, stream):
    """As with `2>&1 | head -1`: the job goes on, and SIGPIPE means to the command what it meant before."""
    script = "while [ ! -e closed ]; do sleep 0.05; done; grep -E 'Sig(Blk|Ign)' /proc/self/status >>signals; [ $CKPTDELTA_ATTEMPT = 2 ] || exit 7"
    process = job.begin("sh", "-c", script)
    getattr(process, stream).close()
    (job.folder / "closed").touch()
    process.wait(timeout=120)
    assert [a["reason"] for a in job.attempts()] == ["exit status 7", "exit status 0"] and job.left() == []
    masks = [int(line.split()[1], 16) for line in (job.folder / "signals").read_text().splitlines()]
    assert len(masks) == 4 and not any(mask >> (signal.SIGPIPE - 1) & 1 for mask in masks)
    assert process.returncode == 0


# ------------------------------------------------------------------------------------------- a supervisor's end


def test_a_supervisor_that_is_killed_and_started_again(job):
    trainer = job.trainer("""
        if attempt == 1:
            train(2)
            open("ready", "w").close()
            time.sleep(600)
        train(1)
    """)
    process = job.begin(*trainer)
    assert until(exists(job.folder / "ready"))
    process.kill()
    process.communicate(timeout=60)
    assert job.attempts()[0]["reason"] is None
    out, err = job.run(*trainer)
    assert "attempt 1 has no end in the journal: its supervisor died" in err
    first, second = job.attempts()
    assert (first["reason"], first["exit"], first["signal"], first["last_step"]) == ("supervisor died", None, None, 2)
    assert (second["attempt"], second["checkpoint"], second["status"]) == (2, "gpt@2", 0)


def test_the_next_supervisor_waits_for_the_last_one_s_command(job):
    """The command takes its time to save; meanwhile nothing else is started."""
    trainer = job.trainer("""
        if attempt == 1:
            def stop(number, frame):
                time.sleep(1)
                train(1)
                sys.exit(0)
            signal.signal(signal.SIGTERM, stop)
            open("ready", "w").close()
            while True:
                time.sleep(0.05)
        train(1)
    """)
    process = job.begin(*trainer)
    assert until(exists(job.folder / "ready"))
    process.kill()
    process.wait()
    out, err = job.run(*trainer)
    assert "waiting for the previous supervisor's command to end" in err
    assert job.starts() == ["1 None", "2 gpt@1"]
    process.communicate(timeout=60)


def test_the_command_is_told_when_the_supervisor_and_its_keeper_are_killed(job):
    """As by `pkill -9 -f 'ckptdelta run'`. Nobody is left to end what ignores SIGTERM."""
    process = job.begin(*job.trainer(SAVES_AND_STOPS))
    assert until(exists(job.folder / "ready"))
    keeper, = open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()
    stop(process)  # it must not end the command in its keeper's place
    os.kill(int(keeper), signal.SIGKILL)
    process.kill()
    process.communicate(timeout=60)
    assert until(lambda: not job.left())
    assert job.steps() == [("gpt", 1)]


def kill_with_keeper(process):
    keeper, = map(int, open(f"/proc/{process.pid}/task/{process.pid}/children").read().split())
    death = os.pidfd_open(keeper)
    stop(process)
    os.kill(keeper, signal.SIGKILL)
    process.kill()
    process.wait(timeout=60)  # its command still has the pipes
    assert select.select([death], [], [], 60)[0]  # its locks are free
    os.close(death)


def test_a_command_that_outlives_its_supervisor_and_keeper_is_not_started_twice(job):
    trainer = job.trainer("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if attempt == 1:
            open("ready", "w").close()
            while not os.path.exists("again"):
                time.sleep(0.02)
            time.sleep(1)
        train(1)
    """)
    process = job.begin(*trainer)
    assert until(exists(job.folder / "ready"))
    kill_with_keeper(process)
    second = job.begin(*trainer, options=["--grace", "0s"])
    assert "waiting for attempt 1, which still runs as process" in second.stderr.readline()
    (job.folder / "again").touch()
    out, err = job.finish(second)
    assert job.starts() == ["1 None", "2 gpt@1"]
    assert job.attempts()[0]["reason"] == "supervisor died"


def test_a_command_that_does_not_end_is_named(job):
    process = job.begin("sh", "-c", "trap '' TERM; touch ready; sleep 600 & echo $! >pid; wait; sleep 600")
    assert until(exists(job.folder / "pid"))
    kill_with_keeper(process)
    out, err = job.begin("touch", "started", options=["--grace", "0s"]).communicate(timeout=60)
    assert "attempt 1 of gpt still runs as process" in err and "end that process first" in err
    assert not (job.folder / "started").exists()
    for pid in [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 1]:
        try:
            if job.marker.encode() in open(f"/proc/{pid}/environ", "rb").read():
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass


def test_one_supervisor_for_a_run(job):
    process = job.begin(*job.trainer(SAVES_AND_STOPS))
    assert until(exists(job.folder / "ready"))
    second = job.begin("true")
    out, err = second.communicate(timeout=60)
    assert second.returncode == FAILED and f"gpt is already supervised, by process {process.pid}" in err
    other = job.begin("true", run_name="other")
    assert other.communicate(timeout=60) and other.returncode == 0
    process.send_signal(signal.SIGTERM)
    job.finish(process, STOPPED)


@pytest.mark.parametrize("end", ["true", "kill -9 $PPID; sleep 60"])
def test_children_of_the_shell_that_became_the_supervisor_are_left_alone(job, end):
    stranger = job.folder / "stranger"
    script = f'{sys.executable} -c "import time; time.sleep(600)" & echo $! >{stranger}; exec "$@"'
    done = subprocess.run(["sh", "-c", script, "sh", COMMAND, "run", job.store, "gpt", "-q", "--max-futile", "1", "--", "sh", "-c", end], env=job.env,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
    assert done.returncode == (GAVE_UP if "kill" in end else 0)
    assert len(job.left()) == 1
    os.kill(int(stranger.read_text()), signal.SIGKILL)


# ----------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("case, status, requeued", [("done", 0, False), ("refused", USAGE, False), ("signal", 0, True)])
def test_the_script_for_slurm(job, shell, case, status, requeued):
    """That of docs/run.md, with stand-ins for the programs of Slurm."""
    text = (DOC.parent / "run.md").read_text()
    script = textwrap.dedent(text[text.index("    #!/bin/sh\n    #SBATCH"):].split("\n\n")[0])
    (job.folder / "job.sh").write_text(script.replace("/shared/ckpts", str(job.store)))
    program = {"done": "exit 0", "refused": "exit 2", "signal": "trap 'touch saved; exit 0' TERM; touch ready; while :; do sleep 0.1; done"}[case]
    for name, content in (("srun", program), ("scontrol", f"echo $* >{job.folder}/requeued")):
        (job.folder / name).write_text(f"#!/bin/sh\n{content}\n")
        (job.folder / name).chmod(0o755)
    env = dict(job.env, PATH=f"{job.folder}:{os.path.dirname(COMMAND)}:{os.environ['PATH']}", SLURM_JOB_ID="17")
    process = subprocess.Popen([shell, "job.sh"], env=env, cwd=job.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if case == "signal":
        assert until(exists(job.folder / "ready"))
        process.send_signal(signal.SIGTERM)
    job.finish(process, status)
    assert (job.folder / "saved").exists() == requeued
    assert ((job.folder / "requeued").read_text() if requeued else None) == ("requeue 17\n" if requeued else None)


# ----------------------------------------------------------------------------------------------------- journal


def test_the_journal_survives(job):
    job.run(*job.trainer("train(2); sys.exit(step < 4)"))
    before = (job.store / "attempts.jsonl").read_bytes()
    for words in (["verify"], ["rebuild"], ["prune", "--keep-last", "1"], ["trash", "--empty", "--all"], ["gc"], ["parity", "--group", "2+1"],
                  ["repair"], ["scrub"], ["verify"], ["list"]):
        assert subprocess.run([COMMAND, words[0], job.store, *words[1:], "-q"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60).returncode \
            in (0, USAGE if words[0] == "trash" else 0), words
    assert (job.store / "attempts.jsonl").read_bytes() == before
    run("copy", job.store, job.folder / "copy", "-q")
    assert not (job.folder / "copy/attempts.jsonl").exists()
    assert run("attempts", job.folder / "copy").out == ""


def test_each_line_is_an_object(job):
    job.run("true")
    start, end = job.lines()
    assert (start["event"], end["event"], start["command"], start["run"], start["attempt"]) == ("start", "end", ["true"], "gpt", 1)
    assert start["time"].endswith("Z") and start["pid"] > 0 and start["supervisor"] > 0


def test_a_torn_line_is_left_alone(job):
    job.run("true")
    journal = job.store / "attempts.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"event":"start","run":"gpt","att')
    assert len(job.attempts()) == 1
    job.run("true")
    assert journal.read_bytes().startswith(whole + b'{"event":"start","run":"gpt","att\n{"event":"start"')
    done = subprocess.run([COMMAND, "attempts", job.store], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("exit status 0") == 2
    assert done.stderr == f"ckptdelta: 1 line of {job.store}/attempts.jsonl is damaged and left out\n"


@pytest.mark.parametrize("line", ["[]", "1", "{}", '{"event":"start","run":1,"attempt":1}', '{"event":"end","run":"gpt","attempt":9}',
                                  '{"event":"start","run":"gpt","attempt":-1}', "x" * 3000000, "[" * 100000, "\0\0", '{"event":"end","run":"gpt","attempt":1,"end":77}',
                                  '{"event":"start","run":"' + "r" * 500 + '","attempt":1}', '{"event":"new","run":"gpt","attempt":1}'],
                         ids=lambda line: line[:40])
def test_hostile_lines(job, line):
    job.run("true")
    with open(job.store / "attempts.jsonl", "a") as journal:
        journal.write(line + "\n")
    done = subprocess.run([COMMAND, "attempts", job.store, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and len(json.loads(done.stdout)["attempts"]) == 1
    job.run("true")
    assert sum(line.startswith('{"event":"end"') and '"status":0' in line for line in open(job.store / "attempts.jsonl")) == 2


def test_attempts(job):
    job.run(*job.trainer("train(2); sys.exit(step < 4)"))
    job.run("true", run_name="other")
    rows = run("attempts", job.store).out.splitlines()
    assert rows[0].split() == ["RUN", "ATTEMPT", "STARTED", "TOOK", "FROM", "LAST", "STEP", "LOST", "END"]
    assert [row.split()[:2] for row in rows[1:]] == [["gpt", "1"], ["gpt", "2"], ["other", "1"]]
    assert "gpt@2" in rows[2] and rows[2].endswith("exit status 0")
    assert run("attempts", job.store, "other").out.splitlines()[1:] == rows[3:] or "other" in run("attempts", job.store, "other").out
    verbose = run("attempts", job.store, "-v").out
    assert "restarts in" in verbose and all(f" {a['pid']} " in verbose for a in job.attempts())
    assert "no attempts of run 'third'" in run("attempts", job.store, "third", expect=NOT_FOUND).err
    run("attempts", job.folder / "absent", expect=NOT_FOUND)


def test_json(job):
    process = job.begin("sh", "-c", "exit 3", options=["--json"])
    out, err = job.finish(process, GAVE_UP)
    result = json.loads(out)
    check_documented(result, "run")
    assert (result["attempts"], result["exit_status"], result["newest"]) == (2, GAVE_UP, None)
    messages = [json.loads(line) for line in err.splitlines()]
    check_documented(messages, "list of `message`")
    assert [m["exit_status"] for m in messages if m["level"] == "error"] == [GAVE_UP]


def test_quiet(job):
    assert job.run("true", options=["-q"]) == ("", "")
    assert job.run("sh", "-c", "exit 3", options=["-q"], expect=GAVE_UP)[1] == "ckptdelta: gpt: gave up: exit status 3 twice before the first checkpoint\n"


@pytest.mark.parametrize("args", [["run"], ["run", "s"], ["run", "s", "--", "true"], ["run", "s", "gpt"], ["run", "s", "gpt", "--"], ["run", "s", "gpt", "--", ""],
                                  ["run", "s", "gpt", "true"], ["run", "s", "gpt", "x", "--", "true"], ["run", "s", "gpt", "--grace", "1", "--", "true"],
                                  ["run", "s", "gpt", "--max-futile", "0", "--", "true"], ["run", "s", "gpt", "--max-restarts", "x", "--", "true"], ["run", "s", "gpt", "--kill-mode", "x", "--", "true"],
                                  ["run", "s", "gpt", "--pause", "999999d", "--", "true"], ["run", "s", "a/b", "--", "true"], ["attempts"], ["attempts", "s", "a", "b"]])
def test_wrong_usage(tmp_path, args):
    refused = run(*args, expect=USAGE, cwd=tmp_path)
    assert "help" in refused.err or "run name" in refused.err or "name" in refused.err
    assert not list(tmp_path.iterdir())


def test_a_full_disk(job):
    """On a small file system of its own, where that is allowed."""
    disk = job.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("cannot mount a file system")
    try:
        job.store = disk / "store"
        out, err = job.run("sh", "-c", f"head -c 5500000 /dev/zero > {disk}/filler; exit 1", expect=FAILED)
        assert "gpt: the disk is full" in err and len(job.attempts()) == 1
    finally:
        subprocess.run(["umount", disk], check=True)
