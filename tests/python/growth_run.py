"""Saves again and again, and prints what the process holds meanwhile: growth_run.py store|session|dcp SAVES FOLDER

Each line of the output is a JSON object: saves made, KiB of the state, KiB that malloc has given out, resident memory in KiB without files,
open files, threads, objects of Python.
"""

import ctypes
import gc
import json
import os
import sys
import warnings
from pathlib import Path

import torch

import ckptdelta

WIDTH, MARKS = 96, 10


class Training:
    def __init__(self):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Tanh(), torch.nn.Linear(4 * WIDTH, WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, WIDTH)).square().mean().backward()
        self.optimizer.step()


def by_store(folder, training):
    with ckptdelta.open(folder) as store, ckptdelta.Updates(training.optimizer) as updates:
        for step in range(1, 1 << 30):
            training.step()
            store.save({"model": training.model, "optimizer": training.optimizer, "step": step}, run="gpt", step=step, updates=updates)
            yield


def by_session(folder, training):
    with ckptdelta.open(folder) as store, ckptdelta.Session(store, "gpt", model=training.model, optimizer=training.optimizer, every=1) as session:
        while True:
            training.step()
            session.step()
            session.fence()
            session.wait()
            yield


def by_dcp(folder, training):
    import torch.distributed.checkpoint as dcp
    from ckptdelta.dcp import StorageWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict

    warnings.simplefilter("ignore", UserWarning)
    writer = StorageWriter(folder, "gpt")
    for step in range(1, 1 << 30):
        training.step()
        model, optimizer = get_state_dict(training.model, training.optimizer)
        dcp.save({"model": model, "optim": optimizer, "step": step}, storage_writer=writer, checkpoint_id=str(step))
        yield


class MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                                                     "fordblks", "keepcost")]


def given_out():
    """Bytes in use in all arenas and in blocks mapped for themselves. Free memory that malloc keeps does not count, so this is the same in
    every run."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # gives free pages back: how many each thread's arena keeps differs from run to run
    about = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"heap_kib": given_out() // 1024, "anonymous_kib": int(about["RssAnon"].split()[0]),
            "files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")), "objects": len(gc.get_objects())}


def main(kind, count, folder):
    torch.set_num_threads(1)
    training = Training()
    state_kib = 3 * sum(p.numel() * 4 for p in training.model.parameters()) // 1024
    saves = {"store": by_store, "session": by_session, "dcp": by_dcp}[kind](Path(folder), training)
    for number in range(1, count + 1):
        next(saves)
        if number * MARKS % count < MARKS:
            print(json.dumps({"saves": number, "state_kib": state_kib, **held()}), flush=True)
    saves.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
