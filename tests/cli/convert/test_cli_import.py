"""import, and load --layout: files of other trainers' ranks become a checkpoint, and are written again.
docs/layouts.md says what the results must be."""

import numpy as np
import pytest

import support_safetensors as st
from support_cli import DOC, FAILED, NOT_FOUND, USAGE, check_documented, run, store  # noqa: F401
from support_ranks import chunk, model, model_layout, model_path, model_rank, split, write_model


def do_import(store, layout, files, step=1, *args, **options):
    return run("import", store.path, "--layout", layout, "--run", "a", "--step", step, *args, *files, **options)


def check_model(store, folder, layout, tensors, tp, pp):
    """Loads with a layout, and compares the files of all ranks with what numpy cuts."""
    run("load", store.path, "--layout", layout, "--out", folder)
    for p in range(pp):
        for t in range(tp):
            got, metadata = st.read(model_path(folder, t, p))
            assert st.same(got, model_rank(tensors, t, p, tp, pp)) and metadata == {"format": "pt"}


# ---------------------------------------------------------------------------------------- tensor and pipeline parallel

@pytest.mark.parametrize("vocabulary", [17, 127, 128, 31123])
@pytest.mark.parametrize("there, here", [((2, 4), (4, 2)), ((1, 8), (8, 1)), ((2, 1), (1, 8)), ((1, 1), (2, 4))])
@pytest.mark.sampled(4)
def test_tensor_and_pipeline_parallel(store, vocabulary, there, here):
    """(TP, PP) of the import and of the load differ. Imports a base and a delta."""
    layouts = [model_layout(store.folder / f"layout{i}", *mesh, vocabulary) for i, mesh in enumerate((there, here))]
    for step in (1, 2):
        tensors = model(vocabulary, step=step)
        files = write_model(store.folder / f"in{step}", tensors, *there)
        do_import(store, layouts[0], files, step)
        assert st.same(store.load()[0], tensors)
        for mesh, layout in zip((there, here), layouts):
            check_model(store, store.folder / f"out{step}.{mesh[0]}", layout, tensors, *mesh)
    assert [c["kind"] for c in store.checkpoints()] == ["base", "delta"]


@pytest.mark.parametrize("fidelity", ["exact", "near", "coarse"])
@pytest.mark.sampled(3)
def test_through_long_chains(store, fidelity):
    """Imports in two layouts in turn. At depths up to 16, ranks get the values of the whole load."""
    meshes = [(2, 4), (4, 2)]
    layouts = [model_layout(store.folder / f"layout{i}", *mesh, 127) for i, mesh in enumerate(meshes)]
    for step in range(17):
        tensors = model(127, step=step)
        files = write_model(store.folder / f"in{step % 2}", tensors, *meshes[step % 2])
        do_import(store, layouts[step % 2], files, step, "--fidelity", fidelity, "--max-load-cost", 1000,
                  "--newest-load-cost", 1000)
        if step in (0, 1, 4, 16):
            whole = store.load()[0]
            arrays = {n: np.frombuffer(v[2], tensors[n].dtype).reshape(tensors[n].shape) for n, v in whole.items()}
            assert (fidelity != "exact") or st.same(arrays, tensors)
            for mesh, layout in zip(meshes, layouts):
                check_model(store, store.folder / f"out{step}.{mesh[0]}", layout, arrays, *mesh)
    assert store.checkpoints()[-1]["depth"] == 16


def test_one_rank(store):
    """--shard R/W writes the same file as for all ranks. --tensor selects by the rank's names."""
    layout = model_layout(store.folder / "layout", 2, 4, 17)
    tensors = model(17)
    do_import(store, layout, write_model(store.folder / "in", tensors, 2, 4))
    for rank in range(8):
        got = store.load("--layout", layout, "--shard", f"{rank}/8")[0]
        assert st.same(got, model_rank(tensors, rank % 2, rank // 2, 2, 4))
    got = store.load("--layout", layout, "--shard", "5/8", "--tensor", "layers.1.fc1.*")[0]
    want = model_rank(tensors, 1, 2, 2, 4)["layers.1.fc1.weight"]
    assert st.same(got, {"layers.1.fc1.weight": want})
    part = store.json("load", "--layout", layout, "--shard", "5/8", "--tensor", "layers.1.fc1.*", "--explain")
    check_documented(part, "`load --explain`")
    assert [t["name"] for t in part["tensors"]] == ["layers.5.gate.weight", "layers.5.up.weight"]
    assert part["raw_bytes"] == want.nbytes


def test_dry_run(store):
    layout = model_layout(store.folder / "layout", 2, 4, 17)
    files = write_model(store.folder / "in", model(17), 2, 4)
    plan = run("import", store.path, "--layout", layout, "--dry-run", "--json", *files).json()
    check_documented(plan, "`import --dry-run`")
    assert not store.path.exists() and plan["world"] == 8
    tensors = {t["name"]: t for t in plan["tensors"]}
    assert tensors.keys() == model(17).keys()
    up = tensors["layers.7.up.weight"]
    assert up["from"] == "layers.1.fc1.weight" and up["ranks"] == [6, 7] and up["copies"] == 1 and up["kind"] == "sharded"
    assert layout.read_text().splitlines()[up["line"] - 1].startswith("layers\\.{layer}\\.fc1")
    assert tensors["exp_avg.embed.weight"]["from"] == "optimizer.embed.weight.m"
    assert tensors["exp_avg.embed.weight"]["role"] == "exp_avg" and tensors["embed.weight"]["shape"] == [17, 16]
    assert tensors["step"]["ranks"] == list(range(8)) and tensors["step"]["copies"] == 8
    assert sorted(s["rank"] for s in plan["skipped"]) == list(range(8))
    text = run("import", store.path, "--layout", layout, "--dry-run", *files).out
    assert "layers.7.up.weight" in text and "6-7" in text and "rng of 8 ranks" in text and "nothing was saved" in text


def test_files_in_the_order_of_ranks(store):
    """Without `files` in the layout, FILE arguments are in the order of ranks."""
    layout = model_layout(store.folder / "layout", 2, 2, 17)
    layout.write_text("".join(line for line in layout.open() if not line.startswith("files")))
    tensors = model(17)
    files = write_model(store.folder / "in", tensors, 2, 2)
    do_import(store, layout, files)
    assert st.same(store.load()[0], tensors)
    run("load", store.path, "--layout", layout, "--out", store.folder / "out")
    got = st.read(store.folder / "out" / "rank00002.safetensors")[0]
    assert st.same(got, model_rank(tensors, 0, 1, 2, 2))
    swapped = do_import(store, layout, [files[0], files[2], files[1], files[3]], 2, expect=FAILED)
    assert "layout:" in swapped.err
    assert len(store.checkpoints()) == 1


# ------------------------------------------------------------------------------------------------- small layouts

def ranks(folder, *held):
    folder.mkdir(exist_ok=True)
    return [st.write(folder / f"rank{i}", tensors) for i, tensors in enumerate(held)]


def written(store, text, name="layout"):
    path = store.folder / name
    path.write_text(text)
    return path


def check_import_and_load(store, text, held, whole, step=1, **options):
    """Imports files of ranks and expects these whole tensors. Loads them, and expects the same files."""
    layout = written(store, text)
    do_import(store, layout, ranks(store.folder / "in", *held), step, **options)
    assert st.same(store.load()[0], whole)
    check_ranks(store, text, held)


def check_ranks(store, text, held):
    layout = written(store, text)
    for i, tensors in enumerate(held):
        assert st.same(store.load("--layout", layout, "--shard", f"{i}/{len(held)}")[0], tensors)


def noise(*shape, seed=3):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def gqa(q, k, v, n):
    """Rank i of n: heads of 4 elements; query, key and value in one matrix."""
    def heads(array, i):
        return chunk(array.reshape(-1, 4, 10), i, n).reshape(-1, 10)
    return [{"qkv": np.concatenate([heads(x, i) for x in (q, k, v)])} for i in range(n)]


@pytest.mark.parametrize("apart", [True, False])
def test_gqa_with_ranks_without_keys(store, apart):
    """8 query heads, and 2 heads of keys and values. With 4 ranks, two have none of the latter; with 16, half
    have nothing at all."""
    q, k, v = noise(32, 10), noise(8, 10, seed=4), noise(8, 10, seed=5)
    rule = "qkv sharded dim=0 over=tp cut=chunk parts=q:32:4,k:8:4,v:8:4" + (" as=attention.{part}" if apart else "")
    whole = {"attention.q": q, "attention.k": k, "attention.v": v} if apart else {"qkv": np.concatenate([q, k, v])}
    check_import_and_load(store, f"mesh tp=4\n{rule}\n", gqa(q, k, v, 4), whole)
    assert gqa(q, k, v, 16)[15]["qkv"].shape == (0, 10)
    for n in (1, 2, 3, 5, 16):
        check_ranks(store, f"mesh tp={n}\n{rule}\n", gqa(q, k, v, n))
    files = ranks(store.folder / "in16", *gqa(q, k, v, 16)[:8], *[{} for _ in range(8)])
    do_import(store, written(store, f"mesh tp=16\n{rule}\n"), files, 2)
    assert st.same(store.load()[0], whole)


def repeated(array, i, n):
    """Heads of 4 rows for rank i of n. If there are fewer heads than ranks, several ranks have each."""
    heads = len(array) // 4
    return split(array, i, n) if heads >= n else split(array, i * heads // n, heads)


def gqa_repeated(q, k, v, n):
    return [{"qkv": np.concatenate([split(q, i, n), repeated(k, i, n), repeated(v, i, n)]), "k_norm": repeated(k, i, n)}
            for i in range(n)]


def stored(store, like):
    """All tensors of the checkpoint, as arrays with the shapes of `like`."""
    got = store.load()[0]
    assert got.keys() == like.keys() and all(got[name][1] == list(like[name].shape) for name in like)
    return {name: np.frombuffer(got[name][2], like[name].dtype).reshape(like[name].shape) for name in like}


@pytest.mark.parametrize("fidelity", ["exact", "near"])
@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.sampled(4)
def test_gqa_with_repeated_keys(store, fidelity, kv, apart):
    """TP 2, 4, 8; 8 query heads; 1, 2, 4 heads of keys and values. If there are more ranks than the latter,
    several have copies of one. The same with moments."""
    q, k, v = noise(32, 10), noise(4 * kv, 10, seed=4), noise(4 * kv, 10, seed=5)
    rules = f"qkv sharded dim=-2 over=tp parts=q:32:4,k:{4 * kv}:4:repeat,v:{4 * kv}:4:repeat{' as={part}' if apart else ''}\n" \
            f"k_norm sharded dim=0 over=tp cut=repeat unit=4 size={4 * kv}\n"

    def ranks_of(whole, n):
        held = []
        for state in ("", "exp_avg."):
            qkv = np.split(whole[state + "qkv"], [32, 32 + 4 * kv]) if not apart else [whole[state + part] for part in "qkv"]
            parts = gqa_repeated(*qkv, n)
            held.append([{state + name: x for name, x in rank.items() if name != "k_norm"} |
                         {state + "k_norm": repeated(whole[state + "k_norm"], i, n)} for i, rank in enumerate(parts)])
        return [a | b for a, b in zip(*held)]

    whole = {"q": q, "k": k, "v": v} if apart else {"qkv": np.concatenate([q, k, v])}
    whole |= {"k_norm": k + 1}
    whole |= {f"exp_avg.{name}": x * np.float32(0.01) for name, x in whole.items()}
    for step, n in enumerate((2, 4, 8)):
        layout = written(store, f"mesh tp={n}\n{rules}")
        do_import(store, layout, ranks(store.folder / f"in{n}", *ranks_of(whole, n)), step, "--fidelity", fidelity)
        found = stored(store, whole)
        assert fidelity != "exact" or st.same(found, whole)
        for m in (1, 2, 4, 8):
            check_ranks(store, f"mesh tp={m}\n{rules}", ranks_of(found, m))
    plan = run("import", store.path, "--layout", layout, "--dry-run", "--json", *ranks(store.folder / "in8", *ranks_of(whole, 8))).json()
    copies = {t["name"]: t["copies"] for t in plan["tensors"]}
    assert copies["k_norm"] == 8 // kv and copies.get("q", 1) == 1 and copies["exp_avg.k" if apart else "qkv"] == 8 // kv


@pytest.mark.parametrize("rule", ["parts=q:32:4,k:8:4:repeat,v:8:4:repeat", "parts=q:32:4,k:8:4:repeat,v:8:4:repeat as={part}"])
def test_repeated_keys_that_differ(store, rule):
    """A copy of a head differs from the others. The import finds it in any place and names it; take=first
    takes the first copy."""
    q, k, v = noise(32, 10), noise(8, 10, seed=4), noise(8, 10, seed=5)
    layout = written(store, f"mesh dp=2 tp=8\nk_norm skipped\nqkv sharded dim=0 over=tp {rule}\n")
    good = gqa_repeated(q, k, v, 8) + gqa_repeated(q, k, v, 8)
    for rank, row, element in ((3, 5, 13), (7, 11, 79), (13, 4, 40), (8, 0, 0)):
        bad = [{name: x.copy() for name, x in held.items()} for held in good]
        bad[rank]["qkv"][row, element % 10] += 1
        refused = do_import(store, layout, ranks(store.folder / "in", *bad), expect=FAILED)
        part = "qkv"[(row >= 4) + (row >= 8)]
        begin = {"q": 0, "k": 32, "v": 40}[part] * (0 if "as=" in rule else 10)
        at = begin + {"q": rank % 8 * 40, "k": rank % 8 // 4 * 40, "v": rank % 8 // 4 * 40}[part] + row % 4 * 10 + element % 10
        first = rank % 8 if part == "q" else rank % 8 // 4 * 4
        name = part if "as=" in rule else "qkv"
        assert f"layout:3: the copies of '{name}' on ranks {first} and {rank} differ, first at element {at};" in refused.err, refused.err
    do_import(store, written(store, layout.read_text().replace("over=tp", "over=tp take=first")), ranks(store.folder / "in", *bad))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 12])
def test_groups_of_heads_shared_by_ranks(store, n):
    """Megatron's order with 2 or 3 groups of 4 queries of 2 rows. With more ranks than groups, the queries of
    a group are distributed to several ranks, each of which has the group's key and value."""
    groups = 3 if n % 3 == 0 else 2
    q, k, v = noise(8 * groups, 5), noise(2 * groups, 5, seed=4), noise(2 * groups, 5, seed=5)

    def held(n):
        out = []
        for i in range(n):
            if n <= groups:
                mine = range(i * groups // n, (i + 1) * groups // n)
                out.append(np.concatenate([split(x, g, groups) for g in mine for x in (q, k, v)]))
            else:
                g, sub, each = i * groups // n, i % (n // groups), n // groups
                out.append(np.concatenate([split(split(q, g, groups), sub, each), split(k, g, groups), split(v, g, groups)]))
        return [{"qkv": x} for x in out]

    sizes = f"q:{8 * groups}:2,k:{2 * groups}:2:repeat,v:{2 * groups}:2:repeat"
    rule = f"qkv sharded dim=0 over=tp parts={sizes} groups={groups} as={{part}}.weight\n"
    check_import_and_load(store, f"mesh tp={n}\n{rule}", held(n), {"q.weight": q, "k.weight": k, "v.weight": v})
    for m in (groups, 2 * groups, 4 * groups, 1):
        check_ranks(store, f"mesh tp={m}\n{rule}", held(m))


def test_averaged_repeats(store):
    """Means of all copies, those of one tp and those of several dp."""
    a, b = noise(8, 3), noise(8, 3, seed=4)
    held = [{"k": split(x, t // 2, 2)} for x in (a, b) for t in range(4)]
    held[1]["k"] = held[1]["k"] + np.float32(2)
    rule = "k averaged dim=0 over=tp cut=repeat unit=4 size=8\n"
    do_import(store, written(store, "mesh dp=2 tp=4\n" + rule), ranks(store.folder / "in", *held))
    parts = [sum(held[r]["k"].astype(np.float64) for r in rank) / 4 for rank in ((0, 1, 4, 5), (2, 3, 6, 7))]
    assert st.same(store.load()[0], {"k": np.concatenate(parts).astype(np.float32)})


def test_groups_of_heads(store):
    """Megatron's order: each group of heads has its queries, key and value together. The checkpoint has three
    tensors."""
    q, k, v = noise(24, 5), noise(12, 5, seed=4), noise(12, 5, seed=5)

    def held(n):
        groups = [np.concatenate([x.reshape(6, -1, 5)[g] for x in (q, k, v)]) for g in range(6)]
        return [{"qkv": np.concatenate(groups[i * 6 // n:(i + 1) * 6 // n])} for i in range(n)]

    for step, n in enumerate((2, 3, 1)):
        text = f"mesh tp={n}\nqkv sharded dim=0 over=tp parts=q:24,k:12,v:12 groups=6 as={{part}}.weight\n"
        check_import_and_load(store, text, held(n), {"q.weight": q, "k.weight": k, "v.weight": v}, step)


def test_experts_by_number(store):
    """(TP, PP, EP) = (1, 1, 8) -> (1, 1, 2). Ranks number their experts from 0. All ranks have the router."""
    experts = [noise(6, 4, seed=e) for e in range(16)]
    router = noise(16, 4)
    text = "mesh pp=1 ep={} tp=1\nnumber expert over=ep count=16\nrouter replicated\nexperts\\.{{expert}}\\.w expert\n"

    def held(n):
        return [{"router": router} | {f"experts.{i}.w": experts[e * (16 // n) + i] for i in range(16 // n)} for e in range(n)]

    whole = {"router": router} | {f"experts.{e}.w": x for e, x in enumerate(experts)}
    check_import_and_load(store, text.format(8), held(8), whole)
    check_ranks(store, text.format(2), held(2))


def test_stacked_experts_cut_over_two_axes(store):
    """Experts in one tensor, distributed over ep, and each cut over tp: a grid."""
    stack = noise(8, 6, 4)
    text = "mesh ep={} tp={}\nstack expert dim=0 over=ep dim=2 over=tp\n"

    def held(ep, tp):
        return [{"stack": split(split(stack, e, ep), t, tp, 2)} for e in range(ep) for t in range(tp)]

    check_import_and_load(store, text.format(4, 2), held(4, 2), {"stack": stack})
    for ep, tp in ((1, 1), (2, 4), (8, 1)):
        check_ranks(store, text.format(ep, tp), held(ep, tp))


def test_two_axes_of_one_dimension_and_odd_cuts(store):
    rows, columns, line = noise(14, 3), noise(2, 11, seed=4), noise(7, seed=5)
    text = """\
mesh dp=2 tp=3
rows    sharded dim=0 over=dp,tp sizes=0,5,1,1,0,7
columns sharded dim=1 over=tp,dp cut=chunk     # tp counts slower here
line    sharded dim=0 over=tp cut=chunk unit=2
"""
    cuts = np.cumsum([0, 0, 5, 1, 1, 0, 7])
    held = [{"rows": rows[cuts[r]:cuts[r + 1]], "columns": chunk(columns, r % 3 * 2 + r // 3, 6, 1),
             "line": line[[0, 4, 7][r % 3]:[4, 7, 7][r % 3]]} for r in range(6)]
    check_import_and_load(store, text, held, {"rows": rows, "columns": columns, "line": line})


def test_dimensions_counted_from_the_last(store):
    """One rule for tensors with different numbers of dimensions. The results are as with dimensions counted
    from the first."""
    whole = {"a": noise(4, 6), "cube": noise(5, 3, 6, seed=4), "c": noise(6, seed=5)}
    parts = [{name: split(x, t, 3, -1) for name, x in whole.items()} for t in range(3)]
    check_import_and_load(store, "mesh tp=3\n[a-z]+ sharded dim=-1 over=tp\n", parts, whole)
    check_import_and_load(store, "mesh dp=2 tp=3\nb sharded dim=-3 over=dp dim=-1 over=tp parts=x,y,z\n", [
        {"b": np.concatenate([split(split(p, i, 2, 0), j, 3, 2) for p in np.split(noise(4, 6, 9), 3, 2)], 2)}
        for i in range(2) for j in range(3)], {"b": noise(4, 6, 9)}, 2, expect_message="a@2 lacks 3 tensors")
    clash = written(store, "mesh dp=2 tp=2\nb sharded dim=1 over=dp dim=-2 over=tp\n")
    files = ranks(store.folder / "clash", *[{"b": noise(2, 2, 2)}] * 4)
    assert "layout:2: of a tensor of 3 dimensions, 1 and -2 are the same one" in do_import(store, clash, files, 3, expect=FAILED).err
    refused = run("load", store.path, "--layout", clash, "--shard", "0/4", "--out", store.folder / "o", expect=FAILED).err
    assert "layout:2: of a tensor of 3 dimensions, 1 and -2 are the same one" in refused


def test_numbers_of_interleaved_stages(store):
    """Chunks of layers are distributed in turns; the second chunk has its own name. Stages are uneven;
    numbers are global."""
    layers = [noise(3, seed=n) for n in range(8)]
    whole = {f"layers.{n}.w": x for n, x in enumerate(layers)}
    text = """\
mesh pp=2
number first over=pp table=0,1/2,3
number second over=pp table=4,5/6,7
model0\\.layers\\.{first}\\.(.*)  replicated as=layers.{first}.\\1
model1\\.layers\\.{second}\\.(.*) replicated as=layers.{second}.\\1
"""
    held = [{f"model{m}.layers.{i}.w": layers[4 * m + 2 * p + i] for m in range(2) for i in range(2)} for p in range(2)]
    check_import_and_load(store, text, held, whole)
    text = "mesh pp=3\nnumber layer over=pp sizes=3,1,4\nlayers\\.{layer}\\.w replicated\n"
    check_ranks(store, text, [{f"layers.{i}.w": x for i, x in enumerate(part)} for part in (layers[:3], layers[3:4], layers[4:])])
    text = "mesh pp=4\nnumber layer over=pp count=8 global\nlayers\\.{layer}\\.w replicated\n"
    check_ranks(store, text, [{f"layers.{2 * p + i}.w": layers[2 * p + i] for i in range(2)} for p in range(4)])
    do_import(store, written(store, text), ranks(store.folder / "in", *[
        {f"layers.{2 * p + i}.w": layers[2 * p + i] for i in range(2)} for p in range(4)]), 2)
    assert st.same(store.load()[0], whole)


def test_tied_weights_by_two_names(store):
    """The first and the last stage share a matrix. The last one has another name for it, and cuts it in
    another way."""
    embed, norm = noise(8, 4), noise(4)
    text = """\
mesh pp=2 tp=2
embed sharded dim=0 over=tp pp=0
out   sharded dim=1 over=tp pp=1 as=embed
norm  unique pp=1
"""
    held = [{"embed": embed[:4]}, {"embed": embed[4:]}, {"out": split(embed, 0, 2, 1), "norm": norm}, {"out": split(embed, 1, 2, 1)}]
    check_import_and_load(store, text, held, {"embed": embed, "norm": norm})
    held[3]["out"] = held[3]["out"] + np.float32(1)
    refused = do_import(store, written(store, text), ranks(store.folder / "in", *held), 2, expect=FAILED)
    assert "layout:3: " in refused.err and "'embed'" in refused.err and "ranks 0 and 3 differ" in refused.err
    assert "element 2;" in refused.err


def test_tensors_that_belong_to_one_rank(store):
    """Coordinates in as=: the random state of each rank, and tensors of each stage."""
    held = [{"rng": np.array([r], np.int64), "stage": noise(3, seed=r // 2)} for r in range(4)]
    text = "mesh pp=2 tp=2\nrng replicated as=rng.{rank}\nstage replicated as=stage.{pp}\n"
    whole = {f"rng.{r}": held[r]["rng"] for r in range(4)} | {f"stage.{p}": held[2 * p]["stage"] for p in range(2)}
    check_import_and_load(store, text, held, whole)
    more = written(store, "mesh pp=2 tp=4\nrng replicated as=rng.{rank}\nstage replicated as=stage.{pp}\n")
    got = [store.load("--layout", more, "--shard", f"{r}/8")[0] for r in range(8)]
    assert all(st.same(got[r], {"stage": held[r // 4 * 2]["stage"]} | ({"rng": held[r]["rng"]} if r < 4 else {})) for r in range(8))
    held[3]["stage"] = noise(3, seed=9)
    refused = do_import(store, written(store, text), ranks(store.folder / "in", *held), 2, expect=FAILED)
    assert "layout:3: " in refused.err and "'stage.1' on ranks 2 and 3" in refused.err


def test_a_last_rule_for_all_names(store):
    """A last rule for all names does not apply to the layers of a stage, or to tensors that belong to one
    rank."""
    layers = [noise(3, seed=n) for n in range(4)]
    text = """\
mesh pp=2
number layer over=pp count=4
layers\\.{layer}\\.w replicated
rng replicated as=rng.{rank}
.* replicated
"""
    held = [{f"layers.{i}.w": layers[2 * p + i] for i in range(2)} | {"rng": np.array([p]), "step": np.array(7)} for p in range(2)]
    whole = {f"layers.{n}.w": x for n, x in enumerate(layers)} | {f"rng.{p}": np.array([p]) for p in range(2)} | {"step": np.array(7)}
    check_import_and_load(store, text, held, whole)


def test_many_blocks(store):
    """Tensors larger than the pieces that are read, cut into long and short runs; also as a delta."""
    tall, wide, deep = noise(3000, 400), noise(40, 30000, seed=4), noise(30, 600, 50, seed=5)
    text = """\
mesh tp=4
tall sharded dim=1 over=tp
wide sharded dim=0 over=tp
deep sharded dim=1 over=tp parts=a:40:10,b:560:10 as=deep.{part}
"""
    for step in (1, 2):
        held = [{"tall": split(tall, t, 4, 1), "wide": split(wide, t, 4),
                 "deep": np.concatenate([split(x, t, 4, 1) for x in (deep[:, :40], deep[:, 40:])], 1)} for t in range(4)]
        whole = {"tall": tall, "wide": wide, "deep.a": np.ascontiguousarray(deep[:, :40]), "deep.b": np.ascontiguousarray(deep[:, 40:])}
        check_import_and_load(store, text, held, whole, step)
        for array in (tall, wide, deep):
            array += np.float32(1e-6)
    assert store.checkpoints()[-1]["kind"] == "delta"


# ---------------------------------------------------------------------------------------------------------- copies

def test_copies_that_differ(store):
    x = noise(5000)
    other = x.copy()
    other[4321] += 1
    files = ranks(store.folder / "in", {"w": x}, {"w": x}, {"w": other})
    layout = written(store, "mesh dp=3\n\nw replicated\n")
    refused = do_import(store, layout, files, expect=FAILED)
    assert "layout:3: the copies of 'w' on ranks 0 and 2 differ, first at element 4321" in refused.err
    assert store.checkpoints() == [] and "take=first" in refused.err
    do_import(store, written(store, "mesh dp=3\nw replicated take=first\n"), files)
    assert st.same(store.load()[0], {"w": x})


def to_bf16(values):
    """Rounds doubles to nearest even, with integers."""
    out = []
    for value in values:
        if value == 0:
            out.append(0x8000 if np.signbit(value) else 0)
            continue
        exact = np.frombuffer(np.float64(value).tobytes(), np.uint64)[0]
        sign, exponent, mantissa = int(exact) >> 63, (int(exact) >> 52 & 2047) - 1023, int(exact) & (1 << 52) - 1
        assert -126 <= exponent < 127
        kept, rest = mantissa >> 45, mantissa & (1 << 45) - 1
        kept += rest > 1 << 44 or (rest == 1 << 44 and kept & 1)
        out.append((sign << 15) + (exponent + 127 << 7) + kept)
    return np.array(out, np.uint16)


def test_averaged(store):
    """Means are computed in double and rounded once, to nearest even. The mean of equal values is this
    value."""
    dtypes = {"f64": np.float64, "f32": np.float32, "f16": np.float16}
    copies = [{name: (1000 * np.random.default_rng(seed).standard_normal(3000)).astype(dtype) for name, dtype in dtypes.items()}
              for seed in range(3)]
    for held in copies:
        held["f16"][:4] = [65504, 6e-8, -0.0, np.inf]
        held["f32"][:2] = [np.nan, -0.0]
    copies[1]["f16"][1], copies[2]["f16"][1] = 0, 0  # below the smallest: becomes 0
    bf16 = [to_bf16(1000 * np.random.default_rng(9 + seed).standard_normal(3000)) for seed in range(3)]
    files = ranks(store.folder / "in", *[held | {"bf16": ("BF16", [3000], bits.tobytes())} for held, bits in zip(copies, bf16)])
    do_import(store, written(store, "mesh dp=3\n.* averaged\n"), files)
    got = store.load()[0]
    for name, dtype in dtypes.items():
        mean = sum(held[name].astype(np.float64) for held in copies) / 3
        want = mean.astype(dtype)
        assert np.array_equal(np.frombuffer(got[name][2], dtype), want, equal_nan=True), name
    assert np.signbit(np.frombuffer(got["f16"][2], np.float16)[2]) and np.signbit(np.frombuffer(got["f32"][2], np.float32)[1])
    values = [(bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for bits in bf16]
    assert got["bf16"][2] == to_bf16(sum(values) / 3).tobytes()
    assert st.same(store.load("--layout", written(store, "mesh dp=3\n.* averaged\n"), "--shard", "2/3")[0], got)
    refused = do_import(store, written(store, "mesh dp=2\n.* averaged\n"),
                        ranks(store.folder / "in2", {"n": np.zeros(3, np.int32)}, {"n": np.zeros(3, np.int32)}), 2, expect=FAILED)
    assert "layout:2: 'n' is i32" in refused.err


def test_averaged_shards(store):
    """Cut over tp, averaged over dp."""
    a, b = noise(6, 4), noise(6, 4, seed=4)
    held = [{"w": split(x, t, 2)} for x in (a, b) for t in range(2)]
    do_import(store, written(store, "mesh dp=2 tp=2\nw averaged dim=0 over=tp\n"), ranks(store.folder / "in", *held))
    want = ((a.astype(np.float64) + b) / 2).astype(np.float32)
    assert st.same(store.load()[0], {"w": want})


# ---------------------------------------------------------------------------------------------------------- errors

@pytest.mark.parametrize("line, text", [
    (1, "w replicated"), (1, "mesh"), (1, "mesh tp"), (1, "mesh tp=0"), (1, "mesh tp=2 tp=2"), (1, "mesh dim=2"),
    (1, "mesh tp=65537"), (1, "mesh a=300 b=300"), (2, "mesh tp=2\nmesh tp=2"), (2, "mesh tp=2\nw"), (2, "mesh tp=2\nw shared"),
    (3, "mesh tp=2\nw replicated\nfiles r{tp}"), (2, "mesh tp=2\nfiles r"), (2, "mesh tp=2\nfiles r{pp}"),
    (2, "mesh tp=2\nfiles r{tp"), (2, "mesh tp=2\nfiles {tp}{tp}"), (2, "mesh tp=2\nfiles {tp}.{tp}"), (2, "mesh tp=2\nfiles {tp}1"),
    (2, "mesh tp=2\nfiles {tp:0}"), (2, "mesh tp=2\nfiles {tp:99}"), (2, "mesh tp=2\nfiles /{tp}"), (2, "mesh tp=2\nfiles r tp=0"), (3, "mesh tp=2\nfiles r{tp}\nfiles s tp=2"),
    (3, "mesh tp=2\nfiles r{tp}\nfiles s{tp} tp=0"), (3, "mesh tp=2\nfiles r{tp}\nfiles s{rank} tp=0"), (3, "mesh tp=2\nfiles r{tp}\nfiles s dp=0"),
    (3, "mesh tp=2\nfiles r{tp}\nfiles s tp=0 tp=0"), (3, "mesh tp=2\nfiles r{tp}\nfiles s odd"), (2, "mesh tp=2\nfiles {tp}.{rank}"),
    (2, "mesh tp=2\nstate a.* b"), (2, "mesh tp=2\nstate a.*"), (2, "mesh tp=2\nstate * m.*"), (2, "mesh tp=2\nstate a.*.* m.*"),
    (2, "mesh tp=2\nnumber l over=tp"), (2, "mesh tp=2\nnumber l over=pp count=4"), (2, "mesh tp=2\nnumber l over=tp count=3"),
    (2, "mesh tp=2\nnumber l over=tp count=0"), (2, "mesh tp=2\nnumber l over=tp sizes=1,2,3"), (2, "mesh tp=2\nnumber l over=tp sizes=1,"),
    (2, "mesh tp=2\nnumber l over=tp table=0,1"), (2, "mesh tp=2\nnumber l over=tp table=0,/1"), (2, "mesh tp=2\nnumber l over=tp table=0/1/2"),
    (2, "mesh tp=2\nnumber l over=tp count=2 sizes=1,1"), (2, "mesh tp=2\nnumber l over=tp count=2 odd"), (2, "mesh tp=2\nnumber 1 over=tp count=2"),
    (3, "mesh tp=2\nnumber l over=tp count=2\nnumber l over=tp count=2"), (2, "mesh tp=2\nnumber l over=tp,tp count=4"),
    (2, "mesh tp=2\n( replicated"), (2, "mesh tp=2\n) replicated"), (2, "mesh tp=2\n[ replicated"), (2, "mesh tp=2\na{l} replicated"),
    (2, "mesh tp=2\na{2000} replicated"), (2, "mesh tp=2\n((a{50}){50}){50} replicated"), (2, "mesh tp=2\n(a)\\1 replicated"),
    (2, "mesh tp=2\na{ replicated"), (2, "mesh tp=2\na++ replicated"), (2, "mesh tp=2\na" + "+" * 100 + " replicated"),
    (2, "mesh tp=2\na*{2} replicated"), (2, "mesh tp=2\na{2}? replicated"), (2, "mesh tp=2\na\\ replicated"), (2, "mesh tp=2\na\\`b replicated"), (2, "mesh tp=2\na\\>b replicated"), (2, "mesh tp=2\n" + "(" * 30 + ")" * 30 + " replicated"),
    (2, "mesh tp=2\n*{3 replicated"), (2, "mesh tp=2\na.* replicated as=b"), (2, "mesh tp=2\n(a) replicated as=b"),
    (2, "mesh tp=2\n(a) replicated as=\\1\\1"), (2, "mesh tp=2\n(a) replicated as=\\2"), (2, "mesh tp=2\n(a(b)) replicated as=\\2"),
    (2, "mesh tp=2\na replicated as=b as=c"), (2, "mesh tp=2\na replicated as={part}"), (2, "mesh tp=2\na replicated as={b}"),
    (2, "mesh tp=2\na replicated as={tp}{tp}"), (2, "mesh tp=2\na replicated as={tp} tp=0"), (2, "mesh tp=2\na sharded dim=0 over=tp as={rank}"),
    (3, "mesh tp=2\nnumber l over=tp count=2\nx{l} replicated as=x"), (3, "mesh tp=2\nnumber l over=tp count=2\n(x{l}) replicated as=\\1"),
    (2, "mesh tp=2\nw sharded"), (2, "mesh tp=2\nw sharded dim=0"), (2, "mesh tp=2\nw sharded over=tp"), (2, "mesh tp=2\nw sharded dim=16 over=tp"), (2, "mesh tp=2\nw sharded dim=-17 over=tp"), (2, "mesh tp=2\nw sharded dim=- over=tp"),
    (2, "mesh tp=2\nw sharded dim=--1 over=tp"), (2, "mesh tp=2 pp=2\nw sharded dim=-1 over=tp dim=-1 over=pp"),
    (2, "mesh tp=2\nw sharded dim=0 over=pp"), (2, "mesh tp=2\nw sharded dim=0 over=tp over=tp"), (2, "mesh tp=2\nw sharded dim=0 over=tp dim=1 over=tp"),
    (2, "mesh tp=2\nw sharded dim=0 over=tp dim=0 over=tp"), (2, "mesh tp=2\nw sharded dim=0 over=tp cut=odd"), (2, "mesh tp=2\nw sharded dim=0 over=tp sizes=1"),
    (2, "mesh tp=2\nw sharded dim=0 sizes=1,1 over=tp"), (2, "mesh tp=2\nw sharded dim=0 over=tp unit=0"), (2, "mesh tp=2\nw sharded dim=0 over=tp size=0"),
    (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a,a"), (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a:1,b"), (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a:"),
    (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a:2:3"), (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a,"), (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a size=3"),
    (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a,b groups=2"), (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a:3,b:3 groups=2 as={part}"),
    (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a,b unit=2"),
    (2, "mesh tp=2\nw sharded dim=0 over=tp cut=repeat"), (2, "mesh tp=2\nw sharded dim=0 over=tp cut=repeat size=2 pad=2"),
    (2, "mesh tp=2\nw sharded dim=0 over=tp cut=repeat parts=a,b"), (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a:2:1:odd"),
    (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a:2:1:"), (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a:2:repeat"),
    (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a:2:1:sizes"), (2, "mesh tp=2\nw averaged dim=0 over=tp parts=a:2:1:repeat"),
    (2, "mesh tp=2 pp=2\nw sharded dim=0 over=tp cut=repeat dim=1 over=pp size=2"),
    (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a:4:2,b:4:4:repeat groups=2 as={part}"), (2, "mesh tp=2\nw sharded dim=0 over=tp parts=a as={part}{part}"),
    (2, "mesh tp=2 pp=2\nw sharded dim=0 over=tp pad=2 dim=1 over=pp pad=2"), (2, "mesh tp=2\nw sharded dim=0 over=tp tp=0"),
    (2, "mesh tp=2\nw replicated dim=0 over=tp"), (2, "mesh tp=2\nw replicated tp=2"), (2, "mesh tp=2\nw replicated tp="), (2, "mesh tp=2\nw replicated tp=0 tp=1"),
    (2, "mesh tp=2\nw replicated pp=0"), (2, "mesh tp=2\nw replicated first"), (2, "mesh tp=2\nw replicated take=last"), (2, "mesh tp=2\nw averaged take=first"),
    (2, "mesh tp=2\nw skipped as=x"), (2, "mesh tp=2\nw expert"), (3, "mesh tp=2\nnumber l over=tp count=2\nx{l} sharded dim=0 over=tp"),
    (2, "mesh tp=2\nw replicated " + "tp=0 " * 70),
])
def test_errors_of_the_text_name_the_line(store, line, text):
    """import and load report the same error."""
    layout = written(store, text + "\n" if line < 3 else text)
    file = ranks(store.folder / "in", {"w": noise(2)})[0]
    refused = do_import(store, layout, [file, file], expect=USAGE)
    assert f"layout:{line}: " in refused.err, refused.err
    assert run("load", store.path, "--layout", layout, "--shard", "0/2", "--out", store.folder / "o", expect=USAGE).err == refused.err
    assert not store.path.exists()


def test_files_that_are_no_layout(store):
    file = ranks(store.folder / "in", {"w": noise(2)})[0]
    assert "layout: " in do_import(store, written(store, ""), [file], expect=USAGE).err
    assert "no rules" in do_import(store, written(store, "mesh tp=1\n# w replicated\n"), [file], expect=USAGE).err
    assert "zero byte" in do_import(store, written(store, "mesh tp=1\nw replicated\0\n"), [file], expect=USAGE).err
    assert "bytes" in do_import(store, written(store, "#" * (1 << 20) + "#"), [file], expect=USAGE).err
    assert "nowhere" in do_import(store, store.folder / "nowhere", [file], expect=NOT_FOUND).err


W = noise(4, 6)


@pytest.mark.parametrize("line, rule, held, said", [
    (2, "w sharded dim=0 over=tp", [{"w": W[:2]}, {"w": W[2:].astype(np.float64)}], ["'w' is f64 on rank 1 (tp=1)", "f32 on rank 0"]),
    (2, "w sharded dim=0 over=tp", [{"w": W[:2]}, {"w": W[2:, :5].copy()}], ["'w' is [2, 5] on rank 1 (tp=1)", "[2, 6] on rank 0"]),
    (2, "w sharded dim=0 over=tp", [{"w": W[:2]}, {"w": W[2:3]}], ["3 elements", "cannot be cut evenly into 2", "ranks 0, 1 have 2, 1"]),
    (2, "w sharded dim=0 over=tp", [{"w": W[:1]}, {"w": W[1:]}], ["'w' is [1, 6] on rank 0", "should be [2, 6]", "ranks 0, 1 have 1, 3"]),
    (2, "w sharded dim=0 over=tp cut=chunk", [{"w": W[:1]}, {"w": W[1:]}], ["should be [2, 6]", "ranks 0, 1 have 1, 3"]),
    (2, "w sharded dim=0 over=tp sizes=3,2", [{"w": W[:3]}, {"w": W[3:]}], ["sizes= adds up to 5", "4 elements"]),
    (2, "w sharded dim=0 over=tp sizes=3,1", [{"w": W[:2]}, {"w": W[2:]}], ["'w' is [2, 6] on rank 0", "should be [3, 6]"]),
    (2, "w sharded dim=2 over=tp", [{"w": W[:2]}, {"w": W[2:]}], ["no dimension 2"]),
    (2, "w sharded dim=-3 over=tp", [{"w": W[:2]}, {"w": W[2:]}], ["no dimension -3"]),
    (2, "w sharded dim=-2 over=tp", [{"w": W[:1]}, {"w": W[1:]}], ["should be [2, 6]", "of dimension 0, ranks 0, 1 have 1, 3"]),
    (2, "w sharded dim=0 over=tp unit=3", [{"w": W[:2]}, {"w": W[2:]}], ["units of 3"]),
    (2, "w sharded dim=0 over=tp size=3", [{"w": W[:1]}, {"w": W[1:]}], ["'w' is [1, 6] on rank 0", "should be [2, 6]"]),
    (2, "w sharded dim=0 over=tp size=5", [{"w": W[:2]}, {"w": W[2:]}], ["should be [3, 6]"]),
    (2, "w sharded dim=0 over=tp pad=2", [{"w": W[:2]}, {"w": W[2:]}], ["size=N"]),
    (2, "w sharded dim=0 over=tp parts=a:1,b:3", [{"w": W[:2]}, {"w": W[2:]}], ["a: ", "1 elements"]),
    (2, "w sharded dim=0 over=tp parts=a:2,b:4", [{"w": W[:2]}, {"w": W[2:]}], ["4 elements", "parts="]),
    (2, "w sharded dim=0 over=tp parts=a,b,c as={part}", [{"w": W[:2]}, {"w": W[2:]}], ["4 elements, which are not 3 parts"]),
    (2, "w sharded dim=0 over=tp", [{"w": W}, {}], ["rank 1 (tp=1) has no 'w'", "rank 0"]),
    (2, "w sharded dim=0 over=tp cut=repeat size=3", [{"w": W[:2]}, {"w": W[2:]}], ["3 elements, which cannot be cut evenly"]),
    (2, "w sharded dim=0 over=tp cut=repeat unit=3 size=3", [{"w": W[:3]}, {"w": W[:2]}], ["'w' is [2, 6] on rank 1", "should be [3, 6]"]),
    (2, "w sharded dim=0 over=tp cut=repeat unit=3 size=3", [{"w": W[:3]}, {}], ["rank 1 (tp=1) has no 'w'"]),
    (2, "w replicated", [{"w": W}, {}], ["rank 1 (tp=1) has no 'w'"]),
    (2, "w replicated tp=0", [{"w": W}, {"w": W}], ["matches 'w', but by its numbers or coordinates rank 1 (tp=1) does not hold it"]),
    (2, "w unique", [{}, {"w": W}], ["matches 'w', but by its numbers or coordinates rank 1 (tp=1) does not hold it"]),
    (2, "w replicated", [{"w": W}, {"w": W[:3]}], ["'w' is [3, 6] on rank 1", "[4, 6] on rank 0"]),
    (2, "w replicated", [{"w": W}, {"w": W[0]}], ["'w' is [6] on rank 1", "[4, 6] on rank 0"]),
    (0, "v replicated", [{"v": W, "w": W}, {"v": W}], ["no rule matches 'w' of rank 0 (tp=0)"]),
    (3, "w replicated as=v\nv replicated", [{"w": W, "v": W}, {"w": W, "v": W}], ["both become 'v'"]),
    (3, "v replicated\nw replicated as=v", [{"w": W}, {"w": W}], ["'w' of rank 0 becomes 'v'", "line 2"]),
    (2, "w(.*) replicated as=a\\1.*\n", [{"w.b": W}, {"w.bb": W}], ["rank 1 (tp=1) has no 'w.b'"]),
    (2, "(w|v) replicated as=\\1", [{"w": W}, {"v": W}], ["has no"]),
    (2, "w.x replicated as=v", [{"w-x": W}, {"w-x": W}], ["'w-x' of rank 0 becomes 'v', which load would make 'w.x'"]),
    (3, "w skipped tp=1\n[vw] replicated as_=", [{"w": W}, {"w": W}], None),
    (3, "a replicated tp=0\nb sharded dim=0 over=tp as=a", [{"a": W, "b": W[:2]}, {"b": W[2:]}], ["both become 'a'"]),
    (3, "a replicated tp=0\nb replicated tp=1 as=a", [{"a": W}, {"b": W[:2]}], ["by this line 'a' is [2, 6], by line 2 it is [4, 6]"]),
])
def test_errors_of_files_name_the_line(store, line, rule, held, said):
    layout = written(store, "mesh tp=2\n" + rule + "\n")
    files = ranks(store.folder / "in", *held)
    refused = do_import(store, layout, files, expect=USAGE if said is None else FAILED)
    assert (f"layout:{line}: " if line else "layout: ") in refused.err, refused.err
    for text in said or []:
        assert text in refused.err, refused.err
    assert not store.path.exists()


def test_numbers_beyond_the_layout(store):
    layout = written(store, "mesh pp=2\nnumber layer over=pp count=4\nl{layer} replicated\n")
    good = [{"l0": W, "l1": W}, {"l0": W + 1, "l1": W + 2}]
    do_import(store, layout, ranks(store.folder / "in", *good))
    for name in ("l2", "l01", "l12345678901234567890"):
        refused = do_import(store, layout, ranks(store.folder / "in", good[0], good[1] | {name: W}), 2, expect=FAILED)
        assert name in refused.err and "layout" in refused.err
    fewer = written(store, "mesh pp=1\nnumber layer over=pp count=3\nl{layer} replicated\n")
    refused = run("load", store.path, "--layout", fewer, "--shard", "0/1", "--out", store.folder / "o", expect=FAILED)
    assert "layout:3: " in refused.err and "'l3'" in refused.err and "no rank" in refused.err


def test_files_and_ranks(store):
    layout = model_layout(store.folder / "layout", 2, 2, 17)
    files = write_model(store.folder / "in", model(17), 2, 2)
    refused = do_import(store, layout, files[:2] + files[3:], expect=NOT_FOUND)
    assert "no file of rank 2 (pp=1 tp=0)" in refused.err
    refused = do_import(store, layout, files[:1], expect=NOT_FOUND)
    assert "no file of rank 1 (pp=0 tp=1), and of 2 more ranks" in refused.err
    stray = st.write(store.folder / "stray", {"w": W})
    assert "stray" in do_import(store, layout, [*files, stray], expect=USAGE).err
    refused = do_import(store, layout, [*files, files[0]], expect=USAGE)
    assert "of one rank" in refused.err
    beyond = model_path(store.folder, 2, 0)
    beyond.parent.mkdir()
    assert "mp_rank_02_000" in do_import(store, layout, [*files, st.write(beyond, {"w": W})], expect=USAGE).err
    plain = written(store, "mesh tp=1\n.* replicated\n", "plain")
    assert "2 files" in do_import(store, plain, files[:2], expect=USAGE).err
    assert not store.path.exists()
    apart = {n: {k: v for k, v in st.read(f)[0].items() if k.startswith("opt") == n} for n in (False, True) for f in files[:1]}
    two = written(store, layout.read_text().replace("files ", "files optimizer/{tp}.{pp}\nfiles "), "two")
    optimizer = store.folder / "optimizer" / "0.0"
    optimizer.parent.mkdir()
    split_files = [st.write(files[0], apart[False], {"format": "pt"}), st.write(optimizer, apart[True]), *files[1:]]
    do_import(store, two, split_files)
    assert st.same(store.load()[0], model(17))


def test_notes(store):
    layout = written(store, "mesh tp=2\nw replicated\nv.* replicated\n")
    files = [st.write(store.folder / f"r{i}", {"w": W}, {"rank": str(i), "format": "pt"}) for i in range(2)]
    said = do_import(store, layout, files, expect_message="'rank'").err
    assert "layout:3: the rule 'v.*' is unused" in said
    assert store.load()[1] == {"format": "pt"}
    do_import(store, layout, files, 2, "-q")


def test_loads_that_are_refused(store):
    store.save(1, {"w": W, "v": noise(5)})

    def refused(text, *args, expect=FAILED):
        path = written(store, "mesh tp=2\n" + text)
        return run("load", store.path, "--layout", path, *(args or ("--shard", "0/2", "--out", store.folder / "o")), expect=expect).err

    assert "layout: no rule matches 'v'" in refused("w replicated\n")
    assert "layout:3: " in refused("w replicated\nv sharded dim=0 over=tp\n")
    assert "layout:3: " in refused("w replicated\nv sharded dim=1 over=tp\n")
    assert "layout:2: dimension 0 has 4 elements, size= says 6" in refused("w sharded dim=0 over=tp size=6\nv skipped\n")
    said = refused("x sharded dim=0 over=tp parts=w,y as={part}\nv skipped\n")
    assert "layout:2: the checkpoint has no part y of 'x'" in said
    said = refused("x sharded dim=0 over=tp parts=w,v as={part}\n")
    assert "layout:2: " in said and "cannot be parts of 'x'" in said
    said = refused("x replicated as=w\n(x) replicated as=v\\1\nx replicated as=v\n")
    assert "layout:4: " in said and "both be 'x' on rank 0" in said
    both = "w replicated\nv skipped\n"
    assert "the mesh has 2 ranks, --shard says 3" in refused(both, "--shard", "0/3", "--out", store.folder / "o", expect=USAGE)
    for args in (["--shard", "0/2", "--dim", "0"], ["--shard", "0/2", "--region", "w=[:1]"]):
        assert "--layout" in refused(both, *args, "--out", store.folder / "o", expect=USAGE)
    assert "--shard" in refused(both, "--explain", expect=USAGE)
    assert "no tensor" in refused(both, "--shard", "0/2", "--tensor", "y", "--out", store.folder / "o", expect=NOT_FOUND)
    assert not (store.folder / "o").exists()


def test_all_ranks_or_none(store):
    """An existing file is found before anything is written."""
    store.save(1, {"w": W})
    layout = written(store, "mesh tp=3\nfiles r{tp}/w\nw replicated\n")
    there = store.folder / "out" / "r2" / "w"
    there.parent.mkdir(parents=True)
    there.write_text("mine")
    refused = run("load", store.path, "--layout", layout, "--out", store.folder / "out", expect=FAILED)
    assert "r2/w" in refused.err and there.read_text() == "mine" and not (store.folder / "out" / "r0").exists()
    said = run("load", store.path, "--layout", layout, "--out", store.folder / "out", "--force", "--json").json()
    check_documented(said, "`load`")
    files = [store.folder / "out" / f"r{i}" / "w" for i in range(3)]
    assert said["tensor_count"] == 3 and said["bytes"] == sum(f.stat().st_size for f in files)
    assert all(st.same(st.read(f)[0], {"w": W}) for f in files)


def test_a_file_that_changes_or_ends_early(store):
    layout = written(store, "mesh tp=2\nw sharded dim=0 over=tp\n")
    files = ranks(store.folder / "in", {"w": W[:2]}, {"w": W[2:]})
    files[1].write_bytes(files[1].read_bytes()[:-1])
    assert "rank1" in do_import(store, layout, files, expect=4).err
    assert not store.path.exists()


def examples():
    """The layouts in docs/layouts.md. Parts of layouts get the lines they need."""
    blocks, block = [], []
    for line in (DOC.parent / "layouts.md").read_text().splitlines() + ["end"]:
        if line.startswith("    ") and not line.startswith("    ckptdelta"):
            block.append(line[4:])
        elif block:
            blocks.append("\n".join(block) + "\n")
            block = []
    return blocks


def test_examples_of_the_documentation(store):
    """They are accepted: the error is only that there is no store."""
    found = examples()
    assert len(found) >= 12
    for i, text in enumerate(found):
        head = "" if text.startswith("mesh") else "mesh pp=2 tp=4 ep=1 dp=1\n"
        if "{layer}" in text and "number layer" not in text:
            head += "number layer over=pp count=24\n"
        layout = written(store, head + text, f"layout{i}")
        refused = run("load", store.path, "--layout", layout, "--out", store.folder / "o", expect=NOT_FOUND)
        assert "store" in refused.err
