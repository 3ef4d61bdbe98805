"""Saves to and loads from a bucket, beside rclone.

    bench_bucket.py [--megabytes N] [--repeats N] [--out FILE]

A SeaweedFS server runs on loopback, on the same cores. Needs the servers of scripts/s3-venv.sh (CKD_S3_SERVERS=FOLDER) and numpy.
The state has N MB of f32 values in matrices of 4 MiB; a second one differs by a part in ten thousand. Each repeat runs, in turn:

- base, delta: `ckptdelta save` of either into a store that exists, the whole command. A delta also reads its parent from the bucket. Beside it, `rclone
  copy` uploads the chunk files that this save has written, and for a delta downloads the parent's as well.
- load, load delta: `ckptdelta load` of either into a file in memory. Beside it, `rclone copy` downloads the chunk files that it
  reads.
- directory: save and load of the same in a directory.

The ratio is rclone's time over ours, so 1 is equal and less is slower; medians, and the range of all repeats. `eighth` is a load of
one eighth of each matrix (--shard 0/8): the bytes that came from the server, counted on the way, over the stored bytes of the
blocks that intersect. The results go to FILE as JSON, by default bench/results/bench_bucket.json.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("CKPTDELTA_BUILD", ROOT / "build" / "current")).resolve()
sys.path[:0] = [str(ROOT / "tests" / "support")]
import support_s3  # noqa: E402
import support_safetensors as st  # noqa: E402


class Counter:
    """A relay to the server that counts the bytes of its answers."""

    def __init__(self, endpoint):
        self.upstream = endpoint.removeprefix("http://").split(":")
        self.received, self.lock = 0, threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection((self.upstream[0], int(self.upstream[1])))
            for source, target, counts in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=(source, target, counts), daemon=True).start()

    def _pump(self, source, target, counts):
        while data := source.recv(1 << 16):
            if counts:
                with self.lock:
                    self.received += len(data)
            target.sendall(data)
        target.close()


class Bench:
    def __init__(self, folder, megabytes):
        self.folder = folder
        self.server = support_s3.seaweed(folder)
        support_s3.make_bucket(self.server.endpoint, "bucket")
        self.env = {**support_s3.environment(self.server.endpoint), "CKPTDELTA_CACHE": str(folder / "cache")}
        self.config = folder / "rclone.conf"
        self.config.write_text("[w]\ntype = s3\nprovider = Other\nendpoint = %s\naccess_key_id = %s\nsecret_access_key = %s\n" %
                               (self.server.endpoint, *support_s3.KEYS.values()))
        self.rclone = support_s3.server_program("rclone")
        random = np.random.default_rng(1)
        state = {f"layers.{i}.weight": random.standard_normal((1024, 1024), np.float32) for i in range(max(1, megabytes * 10**6 >> 22))}
        self.files = [st.write(folder / "1.safetensors", state)]
        for name in state:
            state[name] *= 1 + np.float32(1e-4) * random.standard_normal(state[name].shape, np.float32)
        self.files.append(st.write(folder / "2.safetensors", state))
        self.small = st.write(folder / "small.safetensors", {"weight": np.ones(4, np.float32)})
        self.count = 0

    def run(self, *command, env=None):
        begun = time.monotonic()
        done = subprocess.run([*map(str, command)], env=env or self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return time.monotonic() - begun, done.stdout

    def command(self, *arguments, env=None):
        return self.run(BUILD / "ckptdelta", *arguments, env=env)[0]

    def copy(self, source, target):
        return self.run(self.rclone, "--config", self.config, "copy", source, target)[0]

    def new(self, name):
        self.count += 1
        return f"{name}{self.count}"

    def repeat(self):
        """Seconds of everything, once."""
        bucket, here, out = f"s3://bucket/{self.new('store')}", self.folder / self.new("dir"), self.folder / "out.safetensors"
        times = {}
        for step, name in ((1, "base"), (2, "delta")):
            times[f"directory {name}"] = self.command("save", here, "--run", "r", "--step", step, "-q", self.files[step - 1])
        chunks = sorted((here / "data/c").iterdir(), key=lambda p: p.stat().st_mtime)
        folders = []
        for chunk in chunks:
            folders.append(self.folder / self.new("chunk"))
            folders[-1].mkdir()
            chunk.rename(folders[-1] / chunk.name)
            os.link(folders[-1] / chunk.name, chunk)
        self.command("save", bucket, "--run", "first", "--step", 1, "-q", self.small)  # creates the store, and probes the server
        for step, name in ((1, "base"), (2, "delta")):
            times[name] = self.command("save", bucket, "--run", "r", "--step", step, "-q", self.files[step - 1])
            times[f"rclone {name}"] = self.copy(folders[step - 1], f"w:bucket/{folders[step - 1].name}")
            if step == 2:
                times[f"rclone {name}"] += self.copy(f"w:bucket/{folders[0].name}", self.folder / self.new("down"))
        for step, name in ((1, "load"), (2, "load delta")):
            times[name] = self.command("load", bucket, "--run", "r", "--step", step, "-q", "--force", "-o", out)
            assert st.same(st.read(out)[0], st.read(self.files[step - 1])[0])
            times[f"rclone {name}"] = sum(self.copy(f"w:bucket/{f.name}", self.folder / self.new("down")) for f in folders[:step])
            times[f"directory {name}"] = self.command("load", here, "--run", "r", "--step", step, "-q", "--force", "-o", out)
        self.bucket = bucket
        for folder in (*folders, here, *self.folder.glob("down*")):
            shutil.rmtree(folder)
        return times

    def eighth(self):
        """(bytes of the server's answers, stored bytes of the blocks that intersect) of a load of an eighth."""
        counter = Counter(self.server.endpoint)
        env = {**self.env, "AWS_ENDPOINT_URL_S3": counter.endpoint, "CKPTDELTA_CACHE": str(self.folder / "other")}
        self.command("list", self.bucket, env=env)
        load = ("load", self.bucket, "--run", "r", "--step", 2, "--shard", "0/8")
        explained = json.loads(self.run(BUILD / "ckptdelta", *load, "--explain", "--json", env=env)[1])
        before = counter.received
        self.command(*load, "-q", "-o", self.folder / "eighth.safetensors", env=env)
        return counter.received - before, explained["read_bytes"]


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1].strip())
    parser.add_argument("--megabytes", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/bench_bucket.json")
    args = parser.parse_args()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        bench = Bench(Path(folder), args.megabytes)
        try:
            bench.repeat()  # warms up: the probe, the server's volumes
            repeats = [bench.repeat() for _ in range(args.repeats)]
            received, stored = bench.eighth()
        finally:
            bench.server.stop()
    names = ("base", "delta", "load", "load delta")
    rows = {n: {"seconds": statistics.median(r[n] for r in repeats), "rclone": statistics.median(r[f"rclone {n}"] for r in repeats),
                "directory": statistics.median(r[f"directory {n}"] for r in repeats),
                "ratios": sorted(round(r[f"rclone {n}"] / r[n], 3) for r in repeats)} for n in names}
    print(f"{'':12}{'seconds':>9}{'rclone':>9}{'ratio':>7}  {'range':<14}{'directory':>9}")
    for n, row in rows.items():
        row["ratio"] = statistics.median(row["ratios"])
        print(f"{n:12}{row['seconds']:9.2f}{row['rclone']:9.2f}{row['ratio']:7.2f}  {row['ratios'][0]:.2f} to {row['ratios'][-1]:<6.2f}"
              f"{row['directory']:9.2f}")
    print(f"an eighth: {received} bytes came from the server, {stored} are stored of its blocks: {received / stored:.3f}")
    result = {"bench": "bucket", "megabytes": args.megabytes, "repeats": args.repeats, "cores": os.cpu_count(), "machine": platform.machine(),
              "rows": rows, "eighth": {"received": received, "stored": stored, "ratio": received / stored}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
