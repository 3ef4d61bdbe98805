"""Processes of a gloo group whose tensors should be the same, and are not."""

import functools

import torch

import ckptdelta
from ckptdelta import _replicas
from support_dcp import launch, open_world
from support_ranked import Training
from support_ranked_told import Heard

launch = functools.partial(launch, script=__file__)
ALARM = "not the same on all ranks: "


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
    """Rank 0 names the rank whose memory has changed, once. Without damage nobody says anything."""
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
            assert len(found) == (rank == 0 and case < 4), found
            if found:  # all was the same at step 4, the last save before
                assert "rank 0, step 5: " in found[0] and ": rank 1 differs from most others; all values were the same at step 4, these differ at step 6" \
                    in found[0], found


def one_of_two(rank, mesh, heard, folder):
    """Nothing tells which rank is right. What differs is not compared again until all is restored."""
    training = Training("ddp", rank, mesh)
    with ckptdelta.open(folder / "one_of_two") as store, ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
        for step in range(1, 9):
            training.step()
            if rank and step == 3:
                flip(training.model.module.up.weight, 3)
            session.step()
        session.wait()
        found = alarms(heard)
        assert len(found) == (rank == 0) and all("step 3: model.up.weight is not the same on all ranks: nothing tells which is right" in f for f in found), found
        assert session.restore(2) == 2
        for step in range(3, 8):
            training.step()
            if rank and step == 5:
                flip(training.model.module.up.weight, 3)
            session.step()
        session.wait()
        found = alarms(heard)
        assert len(found) == (rank == 0) and all("step 5: " in f for f in found), found


def in_turn(rank, mesh, heard, folder):
    """Of many parts a save compares one. After as many saves a change is found, wherever it is. A tensor may be larger than a part."""
    least, _replicas._LEAST = _replicas._LEAST, 64
    training = Training("ddp", rank, mesh)
    with ckptdelta.open(folder / "in_turn") as store, ckptdelta.Session(store, "gpt", **training.parts(), every=1) as session:
        for step in range(1, 40):
            training.step()
            if rank == mesh.size() - 1 and step == 20:
                for tensor, bit in targets(training):
                    flip(tensor, bit)
            session.step()
        session.wait()
    _replicas._LEAST = least
    found = alarms(heard)
    assert (len(found) > 2) == (rank == 0) and (rank == 0 or not found), found
    for line in found:
        since, step = (int(line.split(text)[1].split(end)[0]) for text, end in (("same at step ", ","), ("differ at step ", ";")))
        assert 20 - _replicas._PARTS <= since < 20 <= step <= 20 + _replicas._PARTS and f"step {since + 1}: " in line, line
    assert rank or all(any(name + " is not" in line for line in found) for name in ("up.weight", "embed.weight", "down.weight")), found


def drifting(rank, mesh, heard, folder):
    """Tensors that are the same at first, and that ranks then train by themselves: rank 0 says so once, and nobody raises an alarm."""
    torch.manual_seed(1)
    base, adapter, rows = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Embedding(50, 8, max_norm=0.5)
    model = torch.nn.ModuleDict({"base": base.requires_grad_(False), "adapter": adapter, "rows": rows})
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    with ckptdelta.open(folder / "drifting") as store, ckptdelta.Session(store, "gpt", model=model, optimizer=optimizer, every=1) as session:
        for step in range(1, 8):
            x = torch.full((4, 64), 1.0 if step == 1 else float(rank + step))
            rows(torch.tensor([step + 10 * rank]))  # shortens this row
            optimizer.zero_grad()
            adapter(base(x)).square().mean().backward()
            optimizer.step()
            session.step()
        session.wait()
    told = [line for line in heard.lines if "any more, and differ in most places" in line]
    assert len(told) == (rank == 0) and all("adapter." in line and "rows" not in line for line in told), heard.lines
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
    drifting(rank, mesh, heard, folder)


def two(rank, world, folder):
    mesh, heard = open_world(rank, world), Heard()
    one_of_two(rank, mesh, heard, folder)
    in_turn(rank, mesh, heard, folder)
    drifting(rank, mesh, heard, folder)
    not_wrapped(rank, mesh, heard, folder)
