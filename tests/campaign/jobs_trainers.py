"""The trainers of a campaign of jobs, and the losses and values that each must come to."""

import dataclasses
import hashlib
import json
import os
import shutil
import struct
import subprocess
import threading
from pathlib import Path

from jobs_support import ROOT, Failure, losses_of, stat_of, words_of

STEPS = 40
TORCH_RUN = Path(__file__).with_name("jobs_torch.py")


@dataclasses.dataclass
class Plan:
    """How one case trains. Only `kind` changes the values."""
    every: int
    background: str = "copy"
    kind: str = ""
    torchrun: bool = False


def values_of(command, store, ref):
    """Type, shape and hash of each tensor, as `ckptdelta load` writes them."""
    done = subprocess.run([command, "load", store, ref, "--out", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    if done.returncode:
        raise Failure(f"cannot load {ref}: {done.stderr.decode(errors='replace')}")
    size, = struct.unpack("<Q", done.stdout[:8])
    data, values = done.stdout[8 + size:], {}
    for name, tensor in json.loads(done.stdout[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            values[name] = (tensor["dtype"], tensor["shape"], hashlib.sha256(data[begin:end]).hexdigest())
    return values


class Trainer:
    """A command, and what becomes of it if nothing happens: losses and final values, for each kind of plan."""
    name, kinds = "", ("",)
    takes_signals = False  # SIGTERM and SIGUSR1 save
    has_launcher = True    # the command is not the process that trains
    killed_rank = ()       # how the command ends if a rank is killed: (exit, signal)
    noticed_rank = None    # and if another rank notices that first, which happens during a save; None: likewise
    start_s = 1            # about how long it takes to the first step
    disk, memory_kib = "16m", 100000

    def __init__(self, build, folder):
        self.build, self.folder, self.made, self.lock = Path(build), Path(folder), {}, threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)

    def reference(self, kind):
        with self.lock:
            if kind not in self.made:
                store, losses = self.folder / f"store{kind}", self.folder / f"losses{kind}"
                words = self.command(Plan(7, kind=kind), store, losses)
                subprocess.run(words, cwd=self.folder, env=self.environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
                self.made[kind] = dict(losses_of(losses)), values_of(self.build / "ckptdelta", store, f"gpt@{STEPS}")
                shutil.rmtree(store)
            return self.made[kind]

    def plan(self, draw):
        return Plan(draw.choice([1, 3, 7]), draw.choice(["copy", "lazy"]), draw.choice(self.kinds))

    def environment(self):
        return {k: v for k, v in os.environ.items() if not k.startswith("CKPTDELTA_AGENT")}

    def preloaded(self, words, script):
        """The command, whose ranks are started by a script of the shell; None: its processes cannot be told apart."""
        at = next(i for i, word in enumerate(words) if os.path.basename(word).startswith("train_"))
        return [*words[:at], "sh", "-c", script, "sh", *words[at:]]

    def nan(self, step):
        """What is added to the command so that a weight becomes NaN in this step."""
        return ["--fault", f"nan@{step}"]


class Gpt(Trainer):
    name, takes_signals, has_launcher, killed_rank, start_s = "gpt", True, False, (None, 9), 0.2

    def command(self, plan, store, losses):
        words = [self.build / "train_gpt", "--width", 32, "--layers", 2, "--heads", 2, "--context", 64, "--batch", 8, "--threads", 1, "--schedule",
                 "constant", "--steps", STEPS, "--save-every", plan.every, "--background", plan.background, "--store", store, "--run", "gpt", "--resume",
                 "--losses", losses]
        return list(map(str, words))

    def is_rank(self, pid):
        return os.path.basename((words_of(pid) or [""])[0]) == "train_gpt"


class Mpi(Trainer):
    """Four ranks. mpirun passes no SIGUSR1 on, and kills the ranks soon after SIGTERM."""
    name, killed_rank, start_s, memory_kib = "mpi", (137, None), 1, 400000
    noticed_rank = (1, None)  # by MPI_Abort

    def command(self, plan, store, losses):
        words = [self.build / "train_mpi", *Gpt.command(self, plan, store, losses)[1:]]
        return list(map(str, ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 4, *words]))

    def environment(self):
        return dict(super().environment(), OMPI_MCA_btl="self,vader,tcp", OMPI_MCA_btl_vader_single_copy_mechanism="none")

    def is_rank(self, pid):
        return os.path.basename((words_of(pid) or [""])[0]) == "train_mpi"


class Torch(Trainer):
    """
    Two processes of torchrun, which end when it gets SIGTERM. In three cases of four they are copies of a launcher that
    calls what torchrun calls: the imports of each would take longer than the training.
    """
    name, kinds, killed_rank, start_s, disk, memory_kib = "torch", ("fsdp", "ddp"), (1, None), 10, "64m", 4000000

    def __init__(self, python, build, folder):
        self.python = python
        super().__init__(build, folder)

    def plan(self, draw):
        return dataclasses.replace(super().plan(draw), torchrun=draw.random() < 0.25)

    def command(self, plan, store, losses):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 0, TORCH_RUN] if plan.torchrun else \
            [TORCH_RUN, "--fork", 2]
        words = [self.python, "-W", "ignore", *launcher, "--store", store, "--every", plan.every, "--losses", losses, "--name", "gpt", "--steps", STEPS,
                 "--parallel", plan.kind, "--width", 32, "--heads", 2, "--layers", 1, "--context", 32, "--batch", 4, "--text", ROOT / "examples/train_torch.py"]
        return list(map(str, words))

    def environment(self):
        return dict(super().environment(), PYTHONPATH=str(self.build / "python"), OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")

    def is_rank(self, pid):
        """A launcher is the parent of the ranks, with the words of torchrun or with those that they have themselves."""
        words = words_of(pid)
        if words[:1] != [str(self.python)] or "-c" in words or str(TORCH_RUN) not in words or "torch.distributed.run" in words:
            return False
        return "--fork" not in words or words_of(stat_of(pid)[1]) == words

    def preloaded(self, words, script):
        return None

    def nan(self, step):
        return ["--nan", str(step)]


def has_mpi(build):
    return (Path(build) / "train_mpi").exists() and shutil.which("mpirun") is not None
