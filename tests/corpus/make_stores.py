"""Writes the seeds of fuzz_store: make_stores.py COMMAND FOLDER

COMMAND is the built `ckptdelta`. Each seed is a small store in one file, in the form that tests/fuzz/fuzz_store.c describes. Indexes of chunk
files stand uncompressed in them, so that a changed byte is a changed field. Checksums are left as they were: the fuzzer does not compare them.
"""

import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import zstandard

FOLDERS = ["", "c", "m", "n", "t", "i", "k", "p", "q", "r", "x"]
GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"


def write_safetensors(path, tensors):
    header, data = "", b""
    for name, (dtype, a) in tensors.items():
        raw = a.tobytes()
        header += f',"{name}":{{"dtype":"{dtype}","shape":{list(a.shape)},"data_offsets":[{len(data)},{len(data) + len(raw)}]}}'
        data += raw
    text = ("{" + header[1:] + "}").encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def plain_index(raw):
    """The chunk file with its index as it is, and its new size."""
    at, stored, whole, count = struct.unpack_from("<QQQQ", raw, len(raw) - 72)
    if struct.unpack_from("<I", raw, len(raw) - 16)[0] == 0:
        return raw
    index = zstandard.ZstdDecompressor().decompress(raw[at:at + stored])
    footer = struct.pack("<QQQQ", at, whole, whole, count) + raw[-40:-16] + struct.pack("<I", 0) + raw[-12:]
    return raw[:at] + index + footer


def pack(store, operation):
    files = {}
    for path in sorted((store / "data").rglob("*")):
        if path.is_file() and path.name not in ("lock", "readers"):
            files[path.relative_to(store / "data")] = path.read_bytes()
    for name in [n for n in files if n.suffix == ".ckd"]:
        old, files[name] = files[name], plain_index(files[name])
        id_ = bytes.fromhex(name.stem) if len(name.stem) == 32 else old[48:64]
        for note in [n for n in files if n.parts[0] in ("m", "i")]:
            at = files[note].find(id_)
            if at > 0 and files[note][at + 20:at + 28] == struct.pack("<Q", len(old)):
                files[note] = files[note][:at + 20] + struct.pack("<Q", len(files[name])) + files[note][at + 28:]
    out = bytes([operation])
    for name, data in files.items():
        folder = "" if len(name.parts) == 1 else name.parts[0]
        if folder in FOLDERS:
            text = name.name.encode()
            out += bytes([FOLDERS.index(folder), len(text)]) + text + struct.pack("<I", len(data)) + data
    return out


class Model:
    """mixed: gradients are bf16. Then there are as many as their coding needs to be worth it."""

    def __init__(self, seed, mixed=False):
        self.rng, self.mixed = np.random.default_rng(seed), mixed
        self.w = self.rng.standard_normal((32, 20) if mixed else (12, 10)).astype("<f4") * np.float32(0.02)
        self.m = np.zeros_like(self.w)
        self.v = np.zeros_like(self.w)
        self.n = 0

    def step(self):
        g = self.rng.standard_normal(self.w.shape).astype("<f4") * np.float32(0.01)
        if self.mixed:
            g = (g.view("<u4") & 0xffff0000).view("<f4")
        self.n += 1
        self.m = np.float32(0.9) * self.m + np.float32(0.1) * g
        self.v = np.float32(0.999) * self.v + np.float32(0.001) * g * g
        top = self.m / np.float32(1 - 0.9 ** self.n)
        below = np.sqrt(self.v / np.float32(1 - 0.999 ** self.n)) + np.float32(1e-8)
        self.w = self.w * np.float32(1 - 1e-5) - np.float32(1e-3) * top / below

    def tensors(self):
        return {"a.weight": ("F32", self.w), "exp_avg.a.weight": ("F32", self.m), "exp_avg_sq.a.weight": ("F32", self.v),
                "copy": ("F32", self.w), "half": ("F16", self.w.astype("<f2")), "step": ("I64", np.array([self.n]))}


class Builder:
    def __init__(self, command, folder):
        self.command, self.folder = command, folder

    def run(self, *args, check=True):
        subprocess.run([self.command, *map(str, args)], check=check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def saves(self, store, run, count, *options, adam=False, seed=1, mixed=False):
        model = Model(seed, mixed)
        for n in range(1, count + 1):
            model.step()
            write_safetensors(self.folder / "in.safetensors", model.tensors())
            optimizer = ["--adamw", f"lr=1e-3,step={n}"] if adam else []
            self.run("save", store, "--run", run, "--step", n, *options, *optimizer, self.folder / "in.safetensors")

    def stores(self):
        place = self.folder
        self.saves(place / "exact", "r", 3)
        yield "exact", place / "exact", (0, 1, 4)
        self.saves(place / "steps", "r", 3, adam=True)
        yield "steps", place / "steps", (0, 2)
        self.saves(place / "gradients", "r", 3, adam=True, mixed=True)
        yield "gradients", place / "gradients", (0, 2)
        self.saves(place / "near", "r", 3, "--fidelity", "near")
        yield "near", place / "near", (0, 4)
        self.saves(place / "compact", "r", 4, "--fidelity", "coarse")
        yield "compact", place / "compact", (1, 3)
        self.run("compact", place / "compact", "r", "--keep-last", 2, "--keep-every", 1000, "--undo", "1h")
        yield "compacted", place / "compact", (0, 6)
        self.saves(place / "kept", "r", 2)
        self.saves(place / "kept", "s", 2, seed=2)
        for args in (("tag", "best", "r@1"), ("pin", "r@2", "--reason", "why"), ("policy", "--keep-last", 3),
                     ("parity", "--group", "3+1"), ("delete", "s@2", "--undo", "1h")):
            self.run(args[0], place / "kept", *args[1:], check=False)
        yield "kept", place / "kept", (5, 6, 7)
        for name in ("steps", "codings", "handmade", "example"):
            yield "golden-" + name, GOLDEN / name, (0, 3)


def main(command, out):
    Path(out).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, store, operations in Builder(command, Path(folder)).stores():
            for operation in operations:
                (Path(out) / f"{name}-{operation}").write_bytes(pack(store, operation))


if __name__ == "__main__":
    main(*sys.argv[1:])
