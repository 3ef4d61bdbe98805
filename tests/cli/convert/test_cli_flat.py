"""Flat buffers of ZeRO and FSDP1: import takes parameters out of them, and load assembles them again, as
docs/layouts.md says."""

import math

import numpy as np
import pytest

import support_safetensors as st
from support_cli import DOC, FAILED, USAGE, run, store  # noqa: F401
from support_ranks import chunk, split

STATES = ("", "exp_avg.", "exp_avg_sq.")


def up(n, to):
    return -(-n // to) * to


def flat(arrays, n, pad=1, pad_all=1, align=1, each=False, stripped=False):
    """What each of n ranks has of these arrays: all elements one after the other, padded with zeros, in equal
    shares."""
    step = math.lcm(pad * n, pad_all)
    if each:
        parts = [[] for _ in range(n)]
        for x in arrays:
            share = up(x.size, step) // n
            whole = np.concatenate([x.reshape(-1), np.zeros(share * n - x.size, x.dtype)])
            for rank in range(n):
                part = whole[rank * share:(rank + 1) * share]
                used = sum(map(len, parts[rank]))
                parts[rank] += [np.zeros(up(used, align) - used, x.dtype), part[:max(0, x.size - rank * share)] if stripped else part]
        return [np.concatenate(p) for p in parts]
    line = np.zeros(0, arrays[0].dtype)
    for x in arrays:
        line = np.concatenate([line, np.zeros(up(len(line), align) - len(line), x.dtype), x.reshape(-1)])
    share = up(len(line), step) // n
    whole = line if stripped else np.concatenate([line, np.zeros(share * n - len(line), line.dtype)])
    return [whole[rank * share:(rank + 1) * share] for rank in range(n)]


def noise(*shape, seed=3, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def written(store, text, name="layout"):
    path = store.folder / name
    path.write_text(text)
    return path


def ranks(folder, held):
    folder.mkdir(exist_ok=True)
    return [st.write(folder / f"rank{i:05}.safetensors", tensors) for i, tensors in enumerate(held)]


def do_import(store, text, held, step=1, *args, **options):
    return run("import", store.path, "--layout", written(store, text), "--run", "a", "--step", step, *args,
               *ranks(store.folder / "in", held), **options)


def check_ranks(store, text, held):
    """Loads the files of all ranks at once, and then one by one."""
    layout, out = written(store, text, "back"), store.folder / "out"
    run("load", store.path, "--layout", layout, "--out", out, "--force")
    for i, tensors in enumerate(held):
        assert st.same(st.read(out / f"rank{i:05}.safetensors")[0], tensors)
    assert st.same(store.load("--layout", layout, "--shard", f"{len(held) - 1}/{len(held)}")[0], held[-1])


def arrays_of(store, like):
    got = store.load()[0]
    assert got.keys() == like.keys() and all(got[name][1] == list(like[name].shape) for name in like)
    return {name: np.frombuffer(got[name][2], like[name].dtype).reshape(like[name].shape) for name in like}


def entry(name, array):
    return name + ":" + ("x".join(map(str, array.shape)) or "scalar")


def some_shapes(seed):
    """Random shapes of up to 3 dimensions and 53 elements, among them scalars and empty tensors."""
    rng = np.random.default_rng(seed)
    shapes = [(), (53,), (1,), (0,), (7, 7), (3, 17), (2, 5, 5), (1, 1, 1), (4, 0, 2), (13, 4), (52, 1)]
    while len(shapes) < 20:
        shape = tuple(rng.integers(1, 54, rng.integers(1, 4)))
        if math.prod(shape) <= 53:
            shapes.append(shape)
    return [shapes[i] for i in rng.permutation(len(shapes))[:1 + seed * 3 % 17]]


WAYS = {"zero1": {"pad": 2}, "zero3": {"each": True}, "fsdp": {"align": 4}, "megatron": {"pad_all": 128, "align": 64}, "lean": {"stripped": True},
        "bare": {}, "lean3": {"each": True, "stripped": True, "align": 3}}


def options_of(pad=1, pad_all=1, align=1, each=False, stripped=False):
    return f"pad={pad} pad_all={pad_all} align={align}" + (" cut=each" if each else "") + (" padding=none" if stripped else "")


# ------------------------------------------------------------------------------------------------------ conformance

@pytest.mark.parametrize("fidelity", ["exact", "near"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("there, here", [(4, 2), (2, 4), (4, 3)])
@pytest.mark.sampled(4)
def test_other_numbers_of_ranks(store, there, here, way, fidelity):
    """DP of the import and of the load differ. The files are those that the trainer has with that number of
    ranks, for moments, too, and on the way back."""
    for seed in range(3):
        names = [f"p{i}" for i in range(len(some_shapes(seed)))]
        whole = {state + name: noise(*shape, seed=seed + len(state)) * np.float32(0.1 if state else 1)
                 for state in STATES for name, shape in zip(names, some_shapes(seed))}
        if fidelity == "near":
            whole |= {f"exp_avg_sq.{name}": np.square(whole[f"exp_avg_sq.{name}"]) for name in names}

        def held(n, values):
            parts = {state: flat([values[state + name] for name in names], n, **WAYS[way]) for state in STATES}
            return [{state + "flat": parts[state][rank] for state in STATES} for rank in range(n)]

        text = "mesh dp={}\nlist all " + " ".join(entry(n, whole[n]) for n in names) + \
               f"\nflat flat of=all over=dp {options_of(**WAYS[way])}\np[0-9]+ replicated\n"
        do_import(store, text.format(there), held(there, whole), seed, "--fidelity", fidelity, "--base")
        values = arrays_of(store, whole)
        assert fidelity != "exact" or st.same(values, whole)
        for n in (here, there, 1):
            check_ranks(store, text.format(n), held(n, values))


def test_a_chain(store):
    """Deltas on checkpoints that other numbers of ranks saved."""
    whole = {"a": noise(300, 70), "b": noise(129)}
    text = "mesh dp={}\nlist l a:300x70 b:129\nflat flat of=l over=dp pad=2\n[ab] replicated\n"
    for step, n in enumerate((4, 3, 5)):
        do_import(store, text.format(n), [{"flat": x} for x in flat(list(whole.values()), n, 2)], step)
        assert st.same(store.load()[0], whole)
        whole["a"][step] += 1
    assert [c["kind"] for c in store.checkpoints()] == ["base", "delta", "delta"]


def test_a_group_of_one_tensor_and_empty_ranks(store):
    """With fewer elements than ranks, the last ranks have only padding. Without padding they have an empty
    tensor, or none."""
    x = noise(3)
    text = "mesh dp={}\nlist one x:3\nf flat of=one over=dp {}\nx replicated\n"
    held = [{"f": part} for part in flat([x], 5)]
    assert [len(h["f"]) for h in held] == [1] * 5 and not held[3]["f"].any()
    do_import(store, text.format(5, ""), held)
    assert st.same(store.load()[0], {"x": x})
    lean = [{"f": part} for part in flat([x], 5, stripped=True)]
    assert [len(h["f"]) for h in lean] == [1, 1, 1, 0, 0]
    check_ranks(store, text.format(5, "padding=none"), lean)
    do_import(store, text.format(5, "padding=none"), lean[:4] + [{}], 2)
    assert st.same(store.load()[0], {"x": x})
    refused = do_import(store, text.format(5, "padding=none"), lean[:2] + [{}] + lean[3:], 3, expect=FAILED).err
    assert "layout:3: rank 2 (dp=2) has no 'f', while rank 0 has one" in refused


def test_large_ones(store):
    """Ranges begin and end within blocks and rows. They are larger than the pieces that are read or
    written."""
    whole = {"a": noise(3000, 401), "b": noise(7), "c": noise(5, 1200, 700), "d": noise(1300001)}
    text = "mesh dp={} tp={}\nlist l a:3000x401 b:7\nlist l c:5x1200x700 d:1300001\nflat flat of=l over=dp pad=8\n" \
           "a sharded dim=0 over=tp\nc sharded dim=1 over=tp\nd sharded dim=0 over=tp cut=chunk\nb replicated\n"

    def held(dp, tp):
        out = []
        for t in range(tp):
            local = [split(whole["a"], t, tp), whole["b"], split(whole["c"], t, tp, 1), chunk(whole["d"], t, tp)]
            out.append(flat(local, dp, 8))
        return [{"flat": out[t][d]} for d in range(dp) for t in range(tp)]

    do_import(store, text.format(3, 2), held(3, 2))
    assert st.same(store.load()[0], whole)
    check_ranks(store, text.format(2, 4), held(2, 4))
    check_ranks(store, text.format(5, 1), held(5, 1))


def test_explain_counts_the_blocks_of_a_range(store):
    """A rank reads only the blocks of its range. Some are zeros, which take no space, the others noise."""
    block = 1 << 18
    row = np.concatenate([np.zeros(block, np.float32), noise(block)])
    text = "mesh dp=4 tp={}\nlist l x:524288 y:2x524288\nf flat of=l over=dp\nx replicated\ny sharded dim=0 over=tp\n"
    do_import(store, text.format(1), [{"f": part} for part in flat([row, np.stack([row, row])], 4)])
    for tp, blocks in ((1, [2, 2, 2, 2]), (2, [1, 1, 1, 1])):
        for dp in range(4):
            said = store.json("load", "--layout", written(store, text.format(tp)), "--shard", f"{dp * tp + tp - 1}/{4 * tp}", "--explain")
            assert said["blocks"] == blocks[dp]
            # tp 1: halves of x, and halves of a row of y
            assert tp == 1 or (said["read_bytes"] < 1000) == (dp in (0, 2))


# ------------------------------------------------------------------------------------------------- whole trainers

def zero_model(layers=4, heads=4, kv=2):
    shapes = {"embed.weight": (11, 6), "final.weight": (6,)}
    for i in range(layers):
        shapes |= {f"layers.{i}.norm": (6,), f"layers.{i}.q": (2 * heads, 6), f"layers.{i}.k": (2 * kv, 6), f"layers.{i}.v": (2 * kv, 6),
                   f"layers.{i}.down": (6, 8)}
    return {name: noise(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


ZERO = """\
mesh pp={pp} dp={dp} tp={tp}
state fp32.* master.*
number layer over=pp count=4
list decay   embed.weight:11x6 pp=0
list decay   layers.{{layer}}.qkv:16x6 layers.{{layer}}.down:6x8
list decay   final.weight:6 pp=last
list nodecay layers.{{layer}}.norm
group0 flat of=decay over=dp pad=2 state=only
group1 flat of=nodecay over=dp pad=2 state=only
embed\\.weight            sharded dim=0 over=tp size=11 pad=2 pp=0
layers\\.{{layer}}\\.qkv  sharded dim=0 over=tp parts=q:8:2,k:4:2:repeat,v:4:2:repeat as=layers.{{layer}}.{{part}}
layers\\.{{layer}}\\.down sharded dim=-1 over=tp
layers\\.{{layer}}\\.norm replicated
final\\.weight            replicated pp=last
"""


def zero_ranks(whole, pp, dp, tp):
    """DeepSpeed 3-D: weights are tensors; masters and moments are in two flat groups."""
    def local(state, p, t):
        held = {}
        if p == 0:
            rows = up(11, 2 * tp)
            held["embed.weight"] = split(np.concatenate([whole[state + "embed.weight"], np.zeros((rows - 11, 6), np.float32)]), t, tp)
        for i in range(4 // pp):
            at = f"{state}layers.{p * (4 // pp) + i}."
            heads = [whole[at + "q"], whole[at + "k"], whole[at + "v"]]
            held[f"layers.{i}.qkv"] = np.concatenate([split(x, t * min(tp, len(x) // 2) // tp, min(tp, len(x) // 2)) for x in heads])
            held[f"layers.{i}.down"] = split(whole[at + "down"], t, tp, 1)
            held[f"layers.{i}.norm"] = whole[at + "norm"]
        if p == pp - 1:
            held["final.weight"] = whole[state + "final.weight"]
        return held

    out = []
    for p in range(pp):
        for d in range(dp):
            for t in range(tp):
                held = local("", p, t)
                for state, name in (("master.", "fp32."), ("exp_avg.", "exp_avg."), ("exp_avg_sq.", "exp_avg_sq.")):
                    parts = local(state, p, t)
                    groups = [[x for n, x in parts.items() if not n.endswith("norm")], [x for n, x in parts.items() if n.endswith("norm")]]
                    held |= {f"{name}group{i}": flat(group, dp, 2)[d] for i, group in enumerate(groups)}
                out.append(held)
    return out


@pytest.mark.parametrize("there, here", [((1, 2, 1), (2, 2, 2)), ((2, 3, 4), (1, 4, 2)), ((4, 2, 2), (2, 1, 4))])
def test_zero_with_tensor_and_pipeline_parallel(store, there, here):
    """(PP, DP, TP): a flat group has the tensors of the stage's layers, cut, padded and repeated by other
    rules."""
    model = zero_model()
    whole = model | {state + name: x * np.float32(0.5 + len(state)) for state in ("master.", "exp_avg.", "exp_avg_sq.") for name, x in model.items()}

    def layout(pp, dp, tp):
        return ZERO.format(pp=pp, dp=dp, tp=tp)

    do_import(store, layout(*there), zero_ranks(whole, *there))
    assert st.same(store.load()[0], whole)
    for mesh in (here, there, (1, 1, 1)):
        check_ranks(store, layout(*mesh), zero_ranks(whole, *mesh))
    names = [t["name"] for t in store.json("show", "--step", 1)["tensors"]]
    assert set(names) == set(whole)


def test_fsdp_units(store):
    """One flat parameter for each layer, and one for the rest. No file has a shape. Moments are buffers with
    names of moments."""
    layers, rest = [{"w": noise(5, 7, seed=i), "b": noise(5, seed=9 + i)} for i in range(3)], {"embed": noise(9, 4), "norm": noise(4)}
    text = """\
mesh one=1 dp={}
number layer over=one count=3
list root  embed:9x4 norm:4
list block layers.{{layer}}.w:5x7 layers.{{layer}}.b:5
_flat_param flat of=root over=dp align=4
layers\\.{{layer}}\\._flat_param flat of=block over=dp align=4
.* replicated
"""
    whole = {f"{s}layers.{i}.{n}": x + len(s) for s in ("", "exp_avg.") for i, held in enumerate(layers) for n, x in held.items()}
    whole |= {f"{s}{n}": x + len(s) for s in ("", "exp_avg.") for n, x in rest.items()} | {"step": np.array(3)}

    def held(n):
        out = [{"step": np.array(3)} for _ in range(n)]
        for s in ("", "exp_avg."):
            units = {s + "_flat_param": flat([whole[s + "embed"], whole[s + "norm"]], n, align=4)}
            units |= {f"{s}layers.{i}._flat_param": flat([whole[f"{s}layers.{i}.w"], whole[f"{s}layers.{i}.b"]], n, align=4) for i in range(3)}
            for name, parts in units.items():
                for rank in range(n):
                    out[rank][name] = parts[rank]
        return out

    do_import(store, text.format(3), held(3))
    assert st.same(store.load()[0], whole)
    for n in (1, 2, 8):
        check_ranks(store, text.format(n), held(n))
    got = store.load("--layout", written(store, text.format(2)), "--shard", "1/2", "--tensor", "layers.1._flat_param")[0]
    assert st.same(got, {"layers.1._flat_param": held(2)[1]["layers.1._flat_param"]})
    part = store.json("load", "--layout", written(store, text.format(2)), "--shard", "1/2", "--tensor", "exp_avg.layers.1*", "--explain")
    assert [t["name"] for t in part["tensors"]] == ["exp_avg.layers.1.w", "exp_avg.layers.1.b"]
    # of 41 elements, padded to 42, the second rank has 21: one is padding between w and b, and one at the end
    assert part["raw_bytes"] == 4 * 19


def test_copies_of_shares_are_compared(store):
    """Ranks over dp have ranges. Ranks over replicas have copies of these, and ranks over tp have copies of
    tensors that are not cut."""
    x, y = noise(5, 3), noise(4, 2)
    text = "mesh replica=2 dp=3 tp=2\nlist l x:5x3 y:4x2\nf flat of=l over=dp\nx replicated\ny sharded dim=0 over=tp\n"
    held = [{"f": flat([x, split(y, t, 2)], 3)[d]} for _ in range(2) for d in range(3) for t in range(2)]
    do_import(store, text, held)
    assert st.same(store.load()[0], {"x": x, "y": y})
    for rank, at, said in ((6, 2, "'x' on ranks 0 and 6 differ, first at element 2"), (3, 4, "'x' on ranks 2 and 3 differ, first at element 11"),
                           (10, 3, "'y' on ranks 4 and 10 differ, first at element 2")):
        bad = [{name: x.copy() for name, x in h.items()} for h in held]
        assert len(bad[rank]["f"]) == 7
        bad[rank]["f"][at] += 1
        assert f"layout:{5 if 'y' in said else 4}: the copies of {said}" in do_import(store, text, bad, 2, expect=FAILED).err
    do_import(store, text.replace("replicated", "averaged"), held, 3)


def test_shapes_from_weights_in_the_same_file(store):
    """ZeRO-1: shapes are those of the rank's own weights, which are tensors in its file, even if a rule skips
    them."""
    x, y = noise(5, 6), noise(5)
    held = [{"x": chunk(x, t, 2), "y": y, "exp_avg.f": flat([chunk(x, t, 2) * 2, y * 2], 3)[d]} for d in range(3) for t in range(2)]
    text = "mesh dp=3 tp=2\nlist l x y\nf flat of=l over=dp state=only\nx sharded dim=0 over=tp cut=chunk\ny {}\n"
    do_import(store, text.format("replicated"), held)
    assert st.same(store.load()[0], {"x": x, "y": y, "exp_avg.x": x * 2, "exp_avg.y": y * 2})
    check_ranks(store, text.format("replicated"), held)
    text = "mesh dp=3 tp=2\nlist l x y\nf flat of=l over=dp state=only\nexp_avg\\.x sharded dim=0 over=tp cut=chunk\nexp_avg\\.y replicated\n[xy] skipped\n"
    do_import(store, text, held, 2, expect_message="a@2 lacks 2 tensors")
    assert st.same(store.load()[0], {"exp_avg.x": x * 2, "exp_avg.y": y * 2})
    check_ranks(store, text, [{name: value for name, value in h.items() if "f" in name} for h in held])


def test_states_with_different_padding(store):
    """ZeRO-1 removes the padding of masters, but not of moments. FSDP1 removes that of parameters. One name
    has a rule for each."""
    x, y = noise(7, 3), noise(4)
    text = """\
mesh dp={}
state fp32.* master.*
list l x:7x3 y:4
g flat of=l over=dp pad=2 state=none align=4
g flat of=l over=dp pad=2 state=master.* padding=none
g flat of=l over=dp pad=2 state=exp_avg.*,exp_avg_sq.*
[xy] replicated
"""
    whole = {f"{s}{n}": a + np.float32(len(s)) for s in (*STATES, "master.") for n, a in (("x", x), ("y", y))}

    def held(n):
        ways = {"": {"align": 4}, "master.": {"stripped": True}, "exp_avg.": {}, "exp_avg_sq.": {}}
        parts = {s: flat([whole[s + "x"], whole[s + "y"]], n, 2, **way) for s, way in ways.items()}
        return [{s.replace("master", "fp32") + "g": parts[s][rank] for s in parts} for rank in range(n)]

    assert [len(h["fp32.g"]) for h in held(4)] == [8, 8, 8, 1] and [len(h["exp_avg.g"]) for h in held(4)] == [8] * 4
    do_import(store, text.format(4), held(4))
    assert st.same(store.load()[0], whole)
    for n in (4, 3, 1):
        check_ranks(store, text.format(n), held(n))
    without = text.format(4).replace("state=exp_avg.*,exp_avg_sq.*", "state=exp_avg.*")
    assert "layout: no rule matches 'exp_avg_sq.g' of rank 0 (dp=0)" in do_import(store, without, held(4), 2, expect=FAILED).err


def test_dry_run(store):
    held = [{"exp_avg.f": part} for part in flat([noise(5), noise(3, 2)], 2)]
    text = "mesh dp=2\nlist l x:5 y:3x2\nf flat of=l over=dp\n[xy] replicated\nz replicated\n"
    files = ranks(store.folder / "in", held)
    done = run("import", store.path, "--layout", written(store, text), "--dry-run", "--json", *files, expect_message="layout:5: the rule 'z' is unused")
    assert "layout:3" not in done.err and "layout:4" not in done.err
    plan = done.json()["tensors"]
    assert [(t["name"], t["from"], t["shape"], t["ranks"], t["copies"], t["line"]) for t in plan] == [
        ("exp_avg.x", "exp_avg.f", [5], [0, 1], 1, 4), ("exp_avg.y", "exp_avg.f", [3, 2], [0, 1], 1, 4)]
    assert plan[0]["role"] == "other"  # there is no weight x
    named = run("import", store.path, "--layout", written(store, text), "--dry-run", "--json", "--role", "exp_avg.*=exp_avg", *files, expect_message="")
    assert named.json()["tensors"][0]["role"] == "exp_avg"


# ------------------------------------------------------------------------------------------------- the documentation

def example(mark):
    """The layout in docs/layouts.md that contains `mark`, for a small model: 2 layers, width 4, a vocabulary
    of 11."""
    block = next(b for b in (DOC.parent / "layouts.md").read_text().split("\n\n") if b.startswith("    mesh") and mark in b)
    for large, small in (("50257", "11"), ("3072", "12"), ("4096", "16"), ("1024", "4"), ("count=24", "count=2")):
        block = block.replace(large, small)
    return "\n".join(line[4:] for line in block.splitlines()) + "\n"


SHAPES = {"norm1.weight": (4,), "qkv.weight": (12, 4), "proj.weight": (4, 4), "norm2.weight": (4,), "up.weight": (16, 4), "down.weight": (4, 16)}
LAYERS = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}


def test_zero_layout_of_the_documentation(store):
    """Files as DeepSpeed writes them: only data-parallel rank 0 has weights; masters have no padding, and
    moments do."""
    names = {"embed.weight": (11, 4)} | LAYERS | {"norm.weight": (4,)}
    weights = {name: noise(*shape, seed=i, dtype=np.float16) for i, (name, shape) in enumerate(names.items())}
    states = {f"{s}.{n}": x.astype(np.float32) * len(s) for s in ("master", "exp_avg", "exp_avg_sq") for n, x in weights.items()}
    groups = [[n for n in names if "norm" not in n], [n for n in names if "norm" in n]]
    text = example("zero_pp_rank")

    def held(dp):
        parts = {f"{s}.group{i}": flat([states[f"{s}.{n}"] for n in group], dp, 2, stripped=s == "master")
                 for s in ("master", "exp_avg", "exp_avg_sq") for i, group in enumerate(groups)}
        return [{name: part[rank] for name, part in parts.items()} for rank in range(dp)]

    def path(folder, rank):
        return folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.safetensors"

    files = [st.write(path(store.folder, rank), tensors) for rank, tensors in enumerate(held(8))]
    files.append(st.write(store.folder / "mp_rank_00_model_states.safetensors", weights))
    run("import", store.path, "--layout", written(store, text), "--run", "a", "--step", 1, *files)
    assert st.same(store.load()[0], weights | states)
    for dp in (8, 6):
        out = store.folder / f"out{dp}"
        run("load", store.path, "--layout", written(store, text.replace("dp=8", f"dp={dp}")), "--out", out)
        for rank, tensors in enumerate(held(dp)):
            assert st.same(st.read(path(out, rank))[0], tensors | (weights if rank == 0 else {}))


def test_fsdp_layout_of_the_documentation(store):
    names = {"embed.weight": (11, 4), "norm.weight": (4,)} | LAYERS
    whole = {s + n: noise(*shape, seed=i) + len(s) for s in STATES for i, (n, shape) in enumerate(names.items())}
    text = example("_flat_param")

    def held(dp):
        units = {s + "_flat_param": flat([whole[s + "embed.weight"], whole[s + "norm.weight"]], dp, align=4) for s in STATES}
        units |= {f"{s}layers.{i}._flat_param": flat([whole[f"{s}layers.{i}.{n}"] for n in SHAPES], dp, align=4) for s in STATES for i in range(2)}
        return [{name: part[rank] for name, part in units.items()} for rank in range(dp)]

    for folder, dp in (("in", 8), ("out", 3)):
        (store.folder / folder).mkdir()
        files = [store.folder / folder / f"rank{rank}.safetensors" for rank in range(dp)]
        layout = written(store, text.replace("dp=8", f"dp={dp}"))
        if folder == "in":
            run("import", store.path, "--layout", layout, "--run", "a", "--step", 1, *[st.write(f, h) for f, h in zip(files, held(dp))])
            assert st.same(store.load()[0], whole)
        else:
            run("load", store.path, "--layout", layout, "--out", store.folder / folder)
            assert all(st.same(st.read(f)[0], h) for f, h in zip(files, held(dp)))


# ---------------------------------------------------------------------------------------------------------- errors

HEAD = "mesh dp=2 tp=2\nnumber l over=tp count=4\nnumber d over=dp count=4\n"


@pytest.mark.parametrize("line, text", [
    (4, "list"), (4, "list a"), (4, "list 1 x"), (4, "list a x:"), (4, "list a x:3x"), (4, "list a x:x3"), (4, "list a x:3,4"), (4, "list a :3"),
    (4, "list a x:99999999999999999999"), (4, "list a x:1099511627776x2"), (4, "list a x:" + "1x" * 16 + "1"), (4, "list a x:scalars"),
    (4, "list a {n}"), (4, "list a {l"), (4, "list a x pp=0"), (4, "list a x dp=2"), (4, "list a x dp=0 dp=1"), (4, "list a " + "x" * 5000),
    (5, "list a x\nf flat"), (5, "list a x\nf flat of=a"), (5, "list a x\nf flat over=dp"), (5, "list a x\nf flat of=b over=dp"),
    (5, "list a x\nf flat of=a over=pp"), (5, "list a x\nf flat of=a over=dp pad=0"), (5, "list a x\nf flat of=a over=dp pad=x"),
    (5, "list a x\nf flat of=a over=dp align=0"), (5, "list a x\nf flat of=a over=dp cut=chunk"), (5, "list a x\nf flat of=a over=dp padding=some"),
    (5, "list a x\nf flat of=a over=dp state=some"),
    (5, "list a x\nf flat of=a over=dp state=master.*,some.*\nx replicated"), (5, "list a x\nf flat of=a over=dp state=only state=none"),
    (5, "list a x\nf flat of=a over=dp state=master.*,"), (5, "list a x\nf flat of=a over=dp as=g"), (5, "list a x\nf flat of=a over=dp dim=0"),
    (5, "list a x\nf flat of=a over=dp odd"), (5, "list a x\nf flat of=a over=dp dp=0"), (5, "list a x dp=0\nf flat of=a over=dp"),
    (5, "list a x{d}\nf flat of=a over=dp"), (5, "list a x\nf{d} flat of=a over=dp"), (5, "list a x\nf.* flat of=a over=dp"),
    (5, "list a x\n(f) flat of=a over=dp"), (5, "list a x\nf[01] flat of=a over=dp"), (5, "list a x\nf|g flat of=a over=dp"),
    (5, "list a x\nf{2} flat of=a over=dp"), (5, "list a x\nf? flat of=a over=dp"), (5, "x replicated\nlist a x"),
    (5, "list a x\nf flat of=a over=dp,dp"), (4, "list a x{l}{l2}"), (6, "list a x\ny replicated\nf flat of=b over=dp"),
])
def test_errors_of_the_text_name_the_line(store, line, text):
    held = [{"w": noise(2)}] * 4
    refused = do_import(store, HEAD + text + "\n", held, expect=USAGE).err
    assert f"layout:{line}: " in refused, refused
    layout = store.folder / "layout"
    assert run("load", store.path, "--layout", layout, "--shard", "0/4", "--out", store.folder / "o", expect=USAGE).err == refused


X, Y = noise(4, 3), noise(5)
F = flat([X, Y], 2)


@pytest.mark.parametrize("line, text, held, said", [
    (3, "list l x:4x3 y:5\nf flat of=l over=dp pad=2\n.* replicated", [{"f": f} for f in F],
     ["'f' is [9] on rank 0 (dp=0)", "should be [10]", "2 parameters have 17 elements", "2 ranks"]),
    (3, "list l x:4x3 y:5\nf flat of=l over=dp padding=none\n.* replicated", [{"f": f} for f in F], ["'f' is [9] on rank 1", "should be [8]"]),
    (3, "list l x:4x3 y:5\nf flat of=l over=dp\n.* replicated", [{"f": f.reshape(3, 3)} for f in F], ["'f' is [3, 3] on rank 0", "should be [9]"]),
    (3, "list l x:4x3 y:5\nf flat of=l over=dp\n.* replicated", [{"f": F[0]}, {}], ["rank 1 (dp=1) has no 'f', while rank 0 has one"]),
    (4, "list l x:4x3 y:5\nf flat of=l over=dp\n.* replicated", [{"f": F[0]}, {"f": F[1].astype(np.float64)}], ["'x' is f64 on rank 1", "f32 on rank 0"]),
    (2, "list l x y:5\nf flat of=l over=dp\n.* replicated", [{"f": f} for f in F], ["the shape of 'x' is not known", "rank 0 (dp=0) has no tensor"]),
    (2, "list l x:4x3 y:5\nf flat of=l over=dp\nx replicated", [{"f": f} for f in F], ["no rule stores 'y' of rank 0 (dp=0);"]),
    (2, "list l x:4x3 y:5\nf flat of=l over=dp\nx replicated\ny skipped", [{"f": f} for f in F], ["no rule stores 'y'", "does not skip it"]),
    (2, "list l x:4x3 f\nf flat of=l over=dp\nx replicated", [{"f": f} for f in F], ["no rule stores 'f'"]),
    (2, "list l x:4x3 y:5\nf flat of=l over=dp\nx sharded dim=0 over=dp\ny replicated", [{"f": f} for f in F],
     ["line 4 says which ranks along dp have 'x', over which the flat buffer of line 3 is cut"]),
    (2, "list l x:4x3 y:5\nf flat of=l over=dp\n.* unique", [{"f": f} for f in F], ["line 4 says which ranks along dp have 'x'"]),
    (2, "list l x:4x3 y:5\nf flat of=l over=dp\n(.*) replicated as=\\1.{rank}", [{"f": f} for f in F], ["line 4 says which ranks along dp have 'x'"]),
    (2, "list l x:4x3 y:5\nf flat of=l over=dp\n.* replicated dp=0", [{"f": f} for f in F], ["line 4 says which ranks along dp have 'x'"]),
    (3, "list l x:4x3 y:5\nf flat of=l over=dp\n.* replicated", [{"f": f, "x": X} for f in F], ["load would put 'x' into 'f', but rank 0 (dp=0) has a tensor"]),
    (5, "list l x:4x3 y:5\nlist k y:5\nf flat of=l over=dp\ng flat of=k over=dp\n.* replicated", [{"f": f} for f in F], ["'y' is in 'g' of rank 0", "by line 4"]),
    (3, "list l x:12 x:5\nf flat of=l over=dp\n.* replicated", [{"f": f} for f in F], ["'x' is in flat buffers of rank 0 (dp=0) twice", "lines 3 and 3"]),
    (3, "list l x:4x3 y:5\nf flat of=l over=dp\ng flat of=l over=dp\n.* replicated", [{"f": f, "g": f} for f in F],
     ["'x' is in flat buffers of rank 0 (dp=0) twice", "lines 3 and 4"]),
    (3, "list l x:4x3 y:5\nf.g flat of=l over=dp\n.* replicated", [{"f-g": f} for f in F], ["the rule matches 'f-g', which load would call 'f.g'"]),
    (2, "list l x:4x3 y:5\nf flat of=l over=dp\nx replicated dp=1\ny replicated", [{"f": f} for f in F], ["no rule stores 'x' of rank 0 (dp=0)"]),
    (3, "list l x:4x3 y:5\nf flat of=l over=dp pad=1099511627776\n.* replicated", [{"f": f} for f in F], ["cannot be padded that way"]),
    (5, "list l x:12 y:5\nf flat of=l over=dp\nx replicated as=z\ny replicated as=z", [{"f": f} for f in F], ["'x' and 'y' of rank 0 both become 'z'"]),
])
def test_errors_of_files_name_the_line(store, line, text, held, said):
    refused = do_import(store, "mesh dp=2\n" + text + "\n", held, expect=FAILED).err
    assert f"layout:{line}: " in refused, refused
    for part in said:
        assert part in refused, refused
    assert not store.path.exists()


def test_loads_that_are_refused(store):
    store.save(1, {"x": X, "y": Y, "exp_avg.x": X, "master.x": X.astype(np.float64), "master.y": Y})

    def refused(rules):
        path = written(store, "mesh dp=2\n" + rules)
        return run("load", store.path, "--layout", path, "--shard", "1/2", "--out", store.folder / "o", expect=FAILED).err

    said = refused("list l x y\nf flat of=l over=dp\n.* replicated\n")
    assert "layout:2: the checkpoint has nothing for 'exp_avg.y', which 'exp_avg.f' of rank 1 (dp=1) has between others (line 3)" in said
    said = refused("list l x\nlist l y:6\nf flat of=l over=dp state=none\n.* replicated\n")
    assert "layout:3: 'y' is [5] in the checkpoint, and not [6] as the list says" in said
    said = refused("list l x y\nf flat of=l over=dp\nexp_avg.* skipped\n.* replicated\n")
    assert "layout:2: 'master.y' is f32 and 'master.x' f64: they cannot be in one flat buffer" in said
    said = refused("list l x y\nlist k y\nf flat of=l over=dp state=none\ng flat of=k over=dp state=none\n.* replicated\n")
    assert "layout:3: 'y' would be in 'g' of rank 1 twice, or in two buffers" in said
    said = refused("list l x x\nf flat of=l over=dp state=none\n.* replicated\n")
    assert "layout:2: 'x' would be in 'f' of rank 1 twice" in said
    said = refused("list l x\ny flat of=l over=dp state=none\n.* replicated\n")
    assert "layout:3: the checkpoint has a tensor 'y', which is the name of a flat buffer" in said
    said = refused("list l x\nlist k y\nf flat of=l over=dp state=none\nf flat of=k over=dp state=none\n.* replicated\n")
    assert "layout:" in said and "rank 1 would have two flat buffers 'f', by lines" in said
    said = refused("list l x y\nf flat of=l over=dp state=none\n[xy] sharded dim=0 over=dp cut=chunk\n.* replicated\n")
    assert "layout:2: line 4 says which ranks along dp have 'x'" in said
    assert not (store.folder / "o").exists()
