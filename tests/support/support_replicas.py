"""Processes of a gloo group whose tensors should be the same, and are not."""

import functools

import torch

import ckptdelta
from ckptdelta import _replicas
from support_dcp import launch, open_world
from support_ranked import Training
from support_ranked_told import Heard

launch = functools.partial(launch, script=__file__)
ALARM = "not the same as on"


def flip(tensor, bit):
    with torch.no_grad():
        words = tensor.view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        words[words.numel() // 2] ^= 1 << bit


def targets(training):
    """What may be damaged: some tensors, and a bit of each: the lowest, one of the exponent, the sign."""
    net, state = training.model.module, training.optimizer.state
    return [(net.up.weight, 0), (net.head.weight, 23), (state[net.down.weight]["exp_avg"], 31), (state[net.norm.bias]["exp_avg_sq"], 0)]


def alarms(heard):
    found, heard.lines = [line for line in heard.lines if ALARM in line], []
    return found


def one_of_three(rank, mesh, heard, folder):
    """The rank whose memory has changed says so, once, and the others go on. Without damage nobody says anything."""
    for case in range(5):
        training = Training("ddp", rank, mesh)
        with ckptdelta.open(folder / f"store{case}") as store, ckptdelta.Session(store, "gpt", **training.parts(), every=2) as session:
            for step in range(1, 13):
                training.step()
                if rank == 1 and step == 5 and case < 4:
                    flip(*targets(training)[case])
                session.step()
            session.wait()
            found = alarms(heard)
            assert len(found) == (rank == 1 and case < 4), found
            if found:  # it was the same at step 4, the last save before
                assert "rank 1, step 5: " in found[0] and "the values were the same at step 4, and differ at step 6" in found[0], found
                assert "the other ranks" in found[0] and ("optimizer.state" in found[0]) == (case > 1 and "more" not in found[0]), found


def one_of_two(rank, mesh, heard, folder):
    """Nothing tells which rank is right, so both say so. What differs is not compared again until all is restored."""
    training = Training("ddp", rank, mesh)
    with ckptdelta.open(folder / "one_of_two") as store, ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
        for step in range(1, 9):
            training.step()
            if rank and step == 3:
                flip(training.model.module.up.weight, 3)
            session.step()
        session.wait()
        found = alarms(heard)
        assert len(found) == 1 and f"rank {rank}, step 3: model.up.weight is not the same as on another rank, and nothing tells which is right" in found[0], found
        assert session.restore(2) == 2
        for step in range(3, 8):
            training.step()
            if rank and step == 5:
                flip(training.model.module.up.weight, 3)
            session.step()
        session.wait()
        found = alarms(heard)
        assert len(found) == 1 and f"rank {rank}, step 5: " in found[0], found


def in_turn(rank, mesh, heard, folder):
    """Of many parts a save compares one. After as many saves a change is found, wherever it is."""
    _replicas._LEAST = 64
    training = Training("ddp", rank, mesh)
    with ckptdelta.open(folder / "in_turn") as store, ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
        for step in range(1, 40):
            training.step()
            if rank == 2 and step == 20:
                for tensor, bit in targets(training):
                    flip(tensor, bit)
            session.step()
        session.wait()
    found = alarms(heard)
    assert len(found) == (4 if rank == 2 else 0), found
    steps = [int(line.split("differ at step ")[1].split(";")[0]) for line in found]
    assert all(20 <= step <= 20 + _replicas._PARTS for step in steps), steps
    assert rank != 2 or all(any(name + " is not" in line for line in found) for name in ("up.weight", "embed.weight", "down.weight.exp_avg",
                                                                                         "norm.bias.exp_avg_sq")), found


def drifting(rank, mesh, heard, folder):
    """Models that are the same at first and then train by themselves, as with local SGD: rank 0 says so once, and nobody raises an alarm."""
    training = Training("none", rank, mesh)
    with ckptdelta.open(folder / "drifting") as store, ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
        for step in range(1, 8):
            if step == 1:
                training.model.zero_grad()
                training.model(torch.ones(4, 8, dtype=torch.long)).sum().backward()
                for p in training.model.parameters():
                    torch.distributed.all_reduce(p.grad)
                training.optimizer.step()
            else:
                training.step()
            session.step()
        session.wait()
    assert sum("had the same model at step 1, and have different ones at step 2" in line for line in heard.lines) == (rank == 0), heard.lines
    assert not alarms(heard)


def not_wrapped(rank, mesh, heard, folder):
    """Models that differ from the start: rank 0 warns, and no later save does."""
    training = Training("none", rank, mesh, seed=1 + rank)
    with ckptdelta.open(folder / "not_wrapped") as store, ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
        for _ in range(5):
            training.step()
            session.step()
        session.wait()
    assert sum("more tensors are not the same on rank 0 and rank 1" in line for line in heard.lines) == (rank == 0)
    assert not alarms(heard)


def three(rank, world, folder):
    """One start of the processes for all that take three."""
    mesh, heard = open_world(rank, world), Heard()
    one_of_three(rank, mesh, heard, folder)
    in_turn(rank, mesh, heard, folder)


def two(rank, world, folder):
    mesh, heard = open_world(rank, world), Heard()
    one_of_two(rank, mesh, heard, folder)
    drifting(rank, mesh, heard, folder)
    not_wrapped(rank, mesh, heard, folder)
