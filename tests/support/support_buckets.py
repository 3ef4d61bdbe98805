"""A store in a bucket, as several machines see it: each has a cache folder of its own."""

import contextlib
import shutil
import subprocess
import threading

import support_cli as cli
import support_safetensors as st
from support_s3 import KEYS, environment
from support_s3_faults import FaultProxy

DUPLICATE = "already has a checkpoint at step"
LEASES_OF_A_SAVE = 3  # to open the store, to choose a parent, to commit
LEASES_OF_A_DELETION = 2


class Machine:
    """Runs the command as one machine does. Machines with the same address share the store, and nothing else."""

    def __init__(self, folder, address, endpoint, name="A", **settings):
        self.folder, self.address, self.endpoint, self.name = folder / name, address, endpoint, name
        self.cache, self.count = self.folder / "cache", 0
        self.folder.mkdir(exist_ok=True)
        self.env = {**environment(endpoint), "CKPTDELTA_CACHE": str(self.cache), "CKPTDELTA_READ_TIME": "0", **settings}

    def file(self, tensors):
        self.count += 1
        return st.write(self.folder / f"in{self.count}.safetensors", tensors)

    def call(self, command, *args, **options):
        result = cli.run(command, self.address, *args, env=self.env, **options)
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in result.out + result.err, "a secret is in a message"
        return result

    def json(self, command, *args, **options):
        return self.call(command, "--json", *args, **options).json()

    def save(self, step, tensors, *args, run_name="a", **options):
        return self.call("save", "--run", run_name, "--step", step, *args, self.file(tensors), **options)

    def load(self, step, run_name="a"):
        out = self.folder / "out.safetensors"
        self.call("load", "--run", run_name, "--step", step, "--out", out, "--force")
        return st.read(out)[0]

    def listed(self):
        return [(c["run"], c["step"]) for c in self.json("list")["checkpoints"]]

    @contextlib.contextmanager
    def started(self, command, *args):
        """The command while it runs. It is killed at the end."""
        process = subprocess.Popen([cli.COMMAND, command, self.address, *map(str, args)], env=self.env, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            try:
                yield process
            finally:
                process.kill()

    def started_save(self, step, tensors, *args):
        return self.started("save", "--run", "a", "--step", step, *args, self.file(tensors))

    def mirror(self):
        """The folder that stands for the store."""
        return next(self.cache.iterdir()) / "store"

    def forget(self):
        shutil.rmtree(self.cache)


class Gate(FaultProxy):
    """Once it is armed, it holds the first request that `which` wants until `open` is set; others pass meanwhile."""

    def __init__(self, endpoint):
        super().__init__(endpoint)
        self.which, self.drop, self.cut = None, False, False
        self.reached, self.open = threading.Event(), threading.Event()

    def arm(self, which, drop=False, cut=False):
        """drop: the server never sees the request. cut: nor those that follow until then, as if the network were down."""
        self.which, self.drop, self.cut = which, drop or cut, cut

    def arm_behind_lease(self, number, drop=False):
        """The files are listed again when a lease was taken, these last. The holder of the n-th lease from now on has then changed nothing yet."""
        begun = len(self.requests)

        def which(line):
            return line.startswith("GET ") and "data%2Fdeletions" in line and len(self.leases(begun)) == number

        self.arm(which, drop)

    def leases(self, begun=0):
        return {line for line in self.requests[begun:] if is_put(line, "lease")}

    def choose(self, line):
        fault = super().choose(line)
        with self.lock:
            held = self.which is not None and self.which(line)
            if held:
                self.which = None
            held = held or (self.cut and self.reached.is_set() and not self.open.is_set())
        if held:
            self.reached.set()
            self.open.wait(120)
            if self.drop:
                raise OSError("the test drops it")
        return fault


def is_put(line, folder):
    return line.startswith("PUT ") and f"/{folder}/" in line.split("?")[0]


def objects_read(requests, folder):
    """The requests that read objects below a folder of a store, such as data/m."""
    return [line for line in requests if line.startswith("GET ") and f"/{folder}/" in line.split("?")[0]]
