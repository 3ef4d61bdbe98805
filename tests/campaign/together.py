"""Saves by several ranks: cuts a state into the parts of the ranks, and starts the processes."""

import shlex

import numpy as np

import commands

DTYPES = {"F64": 1, "F32": 2, "F16": 3, "BF16": 4, "F8_E4M3": 5, "F8_E5M2": 6, "I64": 7, "I32": 8, "I16": 9, "I8": 10, "U64": 11,
          "U32": 12, "U16": 13, "U8": 14, "BOOL": 15}


def parts(shape, cut, number, rank, world):
    """(offsets, lengths) of a rank's part of tensor `number`; None if it has none. A tensor that cannot be
    cut is whole on each rank."""
    if not shape or 0 in shape:
        return [0] * len(shape), list(shape)
    dim = {"rows": 0, "columns": len(shape) - 1, "mixed": number % len(shape)}[cut]
    each = -(-shape[dim] // world)
    first, last = min(rank * each, shape[dim]), min((rank + 1) * each, shape[dim])
    if first == last:
        return None
    offsets, lengths = [0] * len(shape), list(shape)
    offsets[dim], lengths[dim] = first, last - first
    return offsets, lengths


def write(path, tensors, cut, rank, world):
    """Writes the two files of a rank for campaign_ranks."""
    lines, data = [], b""
    for number, (name, (dtype, shape, raw)) in enumerate(tensors.items()):
        part = parts(shape, cut, number, rank, world)
        if part is None:
            continue
        size = len(raw) // max(int(np.prod(shape, dtype=np.int64)), 1)
        array = np.frombuffer(raw, f"V{size}").reshape(shape) if raw else np.zeros(shape, "V1")
        box = array[tuple(slice(o, o + n) for o, n in zip(*part))]
        lines.append(" ".join(map(str, [name, DTYPES[dtype], len(shape), *shape, *part[0], *part[1], len(data)])))
        data += box.tobytes() if raw else b""
    path.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    path.with_suffix(".bin").write_bytes(data)


def line(op, rank, file):
    return [str(a) for a in (op["store"], op["run"], op["step"], op["fidelity"][""], rank, op["world"], op["group"], file)]


def save(program, op, tensors, folder, environments, may_die=()):
    """The results of all ranks, by rank. A fault affects only the rank that the command names."""
    started = []
    for rank in range(op["world"]):
        file = folder / f"{op['group']}-{rank}"
        write(file, tensors, op["cut"], rank, op["world"])
        args = line(op, rank, file.name)
        fault = op.get("fault") if rank == op["victim"] else None
        started.append((args, commands.start(program, args, folder, environments(fault), fault)))
    results = [commands.finish(process, args, may_die) for args, process in started]
    for rank in range(op["world"]):
        for suffix in (".txt", ".bin"):
            (folder / f"{op['group']}-{rank}").with_suffix(suffix).unlink()
    return results


def text(op):
    """The commands as text."""
    ranks = "; ".join("campaign_ranks " + shlex.join(line(op, rank, f"{op['group']}-{rank}")) + " &" for rank in range(op["world"]))
    fault = f"  # rank {op['victim']}: CAMPAIGN_FAULT={op['fault']}" if op.get("fault") else ""
    return f"{ranks} wait  # cut by {op['cut']}{fault}"
