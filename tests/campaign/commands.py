"""The command lines of a campaign's commands, and how they are run."""

import json
import os
import resource
import shlex
import signal
import subprocess
import time

from model import Failure

# Seconds in which a command must end or have used the processor: one that computes on a busy machine does not hang.
TIME_LIMIT, TIME_LIMIT_BUSY = 180, 1800


class Result:
    def __init__(self, args, code, out, err):
        self.args, self.code, self.out, self.err = args, code, out, err

    def json(self):
        try:
            value = json.loads(self.out)
        except ValueError:
            raise Failure("json", f"{shlex.join(self.args)} printed no JSON: {self.out[:200]!r}") from None
        if value.get("schema") != 1:
            raise Failure("json", f"{shlex.join(self.args)} printed another schema")
        return value


def reported_errors(result):
    """The reasons of a failure in a command's JSON."""
    return "".join(f"{line.strip()}\n" for line in result.out.splitlines() if '"error": "' in line or '"why": "' in line or '"what": "' in line)


def environment(shim, fault=None, clock=0, now=None, random=None):
    """`clock` is the error of the clock, and `now` its time when the command begins."""
    env = dict(os.environ, LC_ALL="C.UTF-8")
    for name in [n for n in env if n.startswith("CAMPAIGN_")]:
        del env[name]
    if shim:
        env.update(LD_PRELOAD=str(shim), CAMPAIGN_CLOCK=str(clock))
        if now is not None:
            env["CAMPAIGN_NOW"] = str(now)
        if random is not None:
            env["CAMPAIGN_RANDOM"] = str(random)
        if fault and not fault.startswith("size"):
            env["CAMPAIGN_FAULT"] = fault
    return env


def limits(fault):
    """For `size:N`: no file grows beyond N bytes, as on a full disk."""
    if not fault or not fault.startswith("size"):
        return None
    most = int(fault.partition(":")[2])
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def start(command, args, folder, env, fault=None):
    return subprocess.Popen([command, *map(str, args)], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, preexec_fn=limits(fault))


def processor_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
        fields = f.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def output_of(process, args):
    """Waits for the end of a command, and kills one that hangs."""
    begun, used = time.monotonic(), 0
    while True:
        try:
            return process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            used, before = processor_seconds(process.pid), used
            waited = time.monotonic() - begun
            if used - before < 1 or waited > TIME_LIMIT_BUSY:
                process.kill()
                process.communicate()
                raise Failure("hang", f"{shlex.join(args)} did not end within {waited:.0f} s, of which it computed {used:.0f} s") from None


def finish(process, args, may_die=()):
    """Waits for the end of a command. Raises a Failure for crashes, hangs and sanitizer reports."""
    out, err = output_of(process, args)
    result = Result(args, process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))
    if result.code < 0 and -result.code not in may_die:
        raise Failure("crash", f"{shlex.join(args)} was ended by {signal.Signals(-result.code).name}\n{result.err}")
    if "Sanitizer" in result.err or "runtime error" in result.err:
        raise Failure("sanitizer", f"{shlex.join(args)}\n{result.err}")
    return result


# ---------------------------------------------------------------------------------------------- command lines

def keep_args(keep):
    args = []
    for option in ("last", "every", "best", "daily", "weekly", "monthly", "tag"):
        if keep.get(option):
            args += [f"--keep-{option}", str(keep[option])]
    for option in ("newer", "within"):
        if keep.get(option):
            args += [f"--keep-{option}", f"{keep[option]}s"]
    return args + ["--keep-first"] * bool(keep.get("first")) + ["--highest-is-best"] * bool(keep.get("highest"))


def fidelity_text(fidelity):
    return ",".join([f"{role}={name}" for role, name in fidelity.items() if role] + [fidelity[""]])


def of_run(op):
    return ["--run", op["run"]] if op.get("run") else []


def undo(op):
    return ["--undo", op["undo"]] if op.get("undo") else []


def save(op):
    return ["save", op["store"], "--run", op["run"], "--step", op["step"], "--fidelity", fidelity_text(op["fidelity"]), "--threads", 1,
            "--json", *op.get("args", []), op["file"]]


def delete(op):
    return ["delete", op["store"], *op["names"], *undo(op)]


def prune(op):
    return ["prune", op["store"], *of_run(op), *keep_args(op.get("keep") or {}), *undo(op), "--json"]


def compact(op):
    keep = keep_args(op["keep"]) if op.get("keep") else ["--fold"] if op.get("fold") else []
    return ["compact", op["store"], *([op["run"]] if op.get("run") else []), *keep, *undo(op), *op.get("args", []), "--threads", 1, "--json"]


def policy(op):
    if op.get("clear"):
        return ["policy", op["store"], "--clear", *of_run(op)]
    return ["policy", op["store"], *of_run(op), *keep_args(op["keep"]), *undo(op), *(["--auto"] if op["auto"] else [])]


def restore(op):
    return ["trash", op["store"], "--restore", *op["names"]]


def empty(op):
    return ["trash", op["store"], "--empty", *(["--all"] if op["all"] else [])]


def pin(op):
    return ["pin", op["store"], *(["--delete"] if op["off"] else []), op["name"]]


def tag(op):
    return ["tag", op["store"], *([op["tag"], op["name"], "--move"] if op.get("name") else ["--delete", op["tag"]])]


def rename(op):
    return ["rename", op["store"], op["run"], op["to"], "--json"]


def copy(op):
    stores = ["pull", op["to"], op["from"]] if op.get("pull") else ["push", op["from"], op["to"]]
    return [*stores, *of_run(op), *op.get("args", []), "--json"]


def parity(op):
    return ["parity", op["store"], *op["args"], "--json"]


def repair(op):
    return ["repair", op["store"], "--json", *op.get("args", [])]


def rebuild(op):
    return ["rebuild", op["store"]]


def tell(op):
    return [op["args"][0], op["store"], *op["args"][1:], "--json"]


LINES = {f.__name__: f for f in (save, delete, prune, compact, policy, restore, empty, pin, tag, rename, copy, parity, repair, rebuild, tell)}


def line(op):
    """The arguments of a command that needs one call."""
    return [str(a) for a in LINES[op["op"]](op)]
