"""One case of a campaign of jobs: a store, a trainer, supervisors one after the other, and what is checked in the end."""

import dataclasses
import json
import os
import random
import shutil
import subprocess
import time

import jobs_rules
from jobs_support import Failure, check, kill, losses_of, marked, tree_below, wait_for, words_of
from jobs_trainers import STEPS, values_of

MARKER = "CKD_TEST_JOB"
LIMIT = 900  # seconds after which a supervisor is stuck


@dataclasses.dataclass
class Options:
    """Those of `ckptdelta run`, and the defaults that docs/run.md names."""
    grace: int = 60
    max_futile: int = 3
    max_restarts: int = 100
    on_anomaly: str = "mark"
    rewind: int = 1
    pause: str = "0s"
    hang: tuple = ("--hang-floor", "5s")

    def line(self):
        words = ["--pause", self.pause, *self.hang]
        for name, value in (("--grace", f"{self.grace}s"), ("--max-futile", self.max_futile), ("--max-restarts", self.max_restarts),
                            ("--on-anomaly", self.on_anomaly), ("--rewind-on-nan", self.rewind)):
            words += [name, value]
        return words


class Job:
    def __init__(self, trainer, folder, draw, plan=None):
        self.trainer, self.build, self.folder, self.draw = trainer, trainer.build, folder, draw
        self.plan = plan or trainer.plan(draw)
        self.store, self.losses = folder / "store", folder / "losses"
        self.mark = MARKER, os.getpid(), folder.name.replace("-", "_"), ""
        self.env = {**trainer.environment(), "_".join(map(str, self.mark)): "1"}  # a name that shells keep
        self.command = trainer.command(self.plan, self.store, self.losses)
        self.output, self.seen, self.supervisors, self.figures = folder / "output", 0, [], {}
        self.options, self.more = Options(), draw.choice([(), (), ("--quick",), ("--kill-mode", "mixed")])
        self.is_checked = False
        self.may_hang = False      # not only where processes were stopped
        self.damaged = False       # a checkpoint was damaged on purpose
        self.spoiled = False       # values became NaN on purpose

    # ------------------------------------------------------------------------------------------------ supervisors

    def start(self, command=None, run="gpt", **options):
        """Starts `ckptdelta run` with the options of the case, some of them changed. Returns its process."""
        self.options = dataclasses.replace(self.options, **options)
        words = [self.build / "ckptdelta", "run", self.store, "--run", run, *self.options.line(), *self.more, "--", *(command or self.command)]
        before, lines = len(self.attempts()), len(losses_of(self.losses))
        with open(self.output, "ab") as out:
            supervisor = subprocess.Popen(list(map(str, words)), cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        supervisor.before, supervisor.lines = before, lines
        self.supervisors.append(supervisor)
        return supervisor

    def wait(self, supervisor):
        """Its exit status. Nothing that it has started is left then."""
        try:
            status = supervisor.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise Failure(f"the supervisor has not ended after {LIMIT} s") from None
        left = {pid: " ".join(words_of(pid))[:200] for pid in self.left()}
        check(not left, f"exit status {status}, and processes are left: {left}")
        return status

    def finish(self, supervisor, *expect):
        """Waits for the end. The exit status is one of these [0], and that of the journal, whose attempts are as documented."""
        status = self.wait(supervisor)
        check(status in (expect or (0,)), f"exit status {status} instead of {' or '.join(map(str, expect or (0,)))}")
        jobs_rules.check_attempts(self.attempts(), supervisor.before, self.options, status)
        return status

    def finish_as_ruled(self, supervisor):
        """For failures whose attempts decide whether it gives up. If it has, the command is started again, and is done."""
        status = self.finish(supervisor, 0, jobs_rules.GAVE_UP)
        if status:
            self.figures["gave_up"] = True
            self.finish(self.start())

    # ---------------------------------------------------------------------------------------------------- looking

    def attempts(self):
        done = subprocess.run([self.build / "ckptdelta", "attempts", self.store, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        found = [a for a in json.loads(done.stdout)["attempts"] if a["run"] == "gpt"] if done.returncode == 0 else []
        self.seen = max(self.seen, len(found))
        return found

    def last(self):
        return self.attempts()[-1]

    def running(self):
        """The process of the attempt that runs now; None: none does."""
        attempts = self.attempts()
        return attempts[-1]["pid"] if attempts and not attempts[-1]["end"] else None

    def left(self):
        """The processes below the supervisors, by a mark in their environment."""
        ours = {s.pid for s in self.supervisors if s.poll() is None}
        return [pid for pid in marked(*self.mark) if pid not in ours]

    def below(self, pid):
        return tree_below(pid, self.left())

    def ranks(self):
        return [pid for pid in self.left() if self.trainer.is_rank(pid)]

    def keeper(self, supervisor):
        return next(iter(self.below(supervisor.pid)[1:2]), None)

    def said(self, text):
        return text in self.output.read_text(errors="replace")

    # ---------------------------------------------------------------------------------------------------- moments

    def trained(self, supervisor):
        """Steps since this supervisor was started."""
        return len(losses_of(self.losses)) - supervisor.lines

    def moment(self, supervisor, first=1, last=STEPS - 2, kinds=("start", "step", "step", "save")):
        """
        Waits until a drawn moment of an attempt: soon after its start, a step, or a save that is under way. Returns the
        process of the attempt; None: the supervisor ended before.
        """
        kind, step = self.draw.choice(kinds), self.draw.randint(first, last)
        ended = lambda: supervisor.poll() is not None  # noqa: E731
        wait_for(lambda: len(self.attempts()) > supervisor.before or ended(), "an attempt")
        if kind == "start":
            time.sleep(self.draw.random() * self.trainer.start_s)
        else:
            wait_for(lambda: self.trained(supervisor) >= step or ended(), f"step {step}")
        if kind == "save":
            wait_for(lambda: any(self.intents()) or ended(), "a save")
        self.figures.setdefault("moments", []).append(kind if kind != "step" else f"step {step}")
        return None if ended() else self.running()

    def intents(self):
        """Files of saves that are under way."""
        folder = self.store / "data/i"
        return list(folder.iterdir()) if folder.exists() else []

    # --------------------------------------------------------------------------------------------------- the end

    def check_losses(self):
        """Each step was trained with the loss of a training without failures. Returns the steps."""
        expected, _ = self.trainer.reference(self.plan.kind)
        seen = losses_of(self.losses)
        for step, loss in seen:
            if not (self.spoiled and "nan" in loss):
                check(expected.get(step) == loss, f"step {step}: loss {loss} instead of {expected.get(step)}")
        attempts = self.attempts()
        made = jobs_rules.steps_made(attempts)  # a process that is killed may have told of a step in one place only
        check(made is None or abs(made - len(seen)) <= len(attempts), f"the journal knows of {made} steps, {len(seen)} were made")
        return {step for step, _ in seen}

    def check_end(self):
        """Every step was trained, and the losses and the final values are those of an undisturbed training."""
        if self.is_checked:
            return
        hung = [a["hang"] for a in self.attempts() if a["hung"]]
        self.figures["false_alarms"] = max(0, len(hung) - ("ratio" in self.figures)) if not self.may_hang else 0
        check(not self.figures["false_alarms"], f"nothing was stopped, but an attempt was taken for one that hangs: {hung}")
        steps = self.check_losses()
        expected, values = self.trainer.reference(self.plan.kind)
        check(steps == set(expected), f"steps are missing: {sorted(set(expected) - steps, key=int)}")
        done = subprocess.run([self.build / "ckptdelta", "list", self.store, "--json"], stdout=subprocess.PIPE, check=True)
        final = [c for c in json.loads(done.stdout)["checkpoints"] if c["step"] == STEPS and not c["suspect"] and c["run"].partition("~")[0] == "gpt"]
        check(final, f"there is no checkpoint of step {STEPS}")
        newest = max(final, key=lambda c: c["created"])
        found = values_of(self.build / "ckptdelta", self.store, f"{newest['run']}@{STEPS}")
        different = sorted(n for n in values.keys() | found.keys() if values.get(n) != found.get(n))
        check(not different, f"the values of {len(different)} tensors differ from those of an undisturbed training: {different[:5]}")
        whole = subprocess.run([self.build / "ckptdelta", "verify", self.store, "-q"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        check((whole.returncode != 0) == self.damaged, f"verify ends with {whole.returncode}: {whole.stdout.decode(errors='replace')[-500:]}")

    def clean_up(self):
        for supervisor in self.supervisors:
            if supervisor.poll() is None:
                supervisor.kill()
                supervisor.wait()
        for pid in self.left():
            kill(pid)


def shell(script, *words):
    """A command that runs a script of the shell, whose arguments are these."""
    return ["sh", "-c", script, "sh", *map(str, words)]


def make(trainer, top, cause, seed):
    folder = top / f"{trainer.name}-{cause}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return Job(trainer, folder, random.Random(f"{trainer.name} {cause} {seed}"))
