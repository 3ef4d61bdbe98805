"""A small GPT as the ranks of parallel trainings hold it, cut with numpy, and layout files that describe
this."""

import numpy as np

import support_safetensors as st

H, LAYERS, HEADS, HEAD = 16, 8, 8, 2  # width, layers, heads and their width
FFN = 32


def model(vocabulary, seed=1, step=0):
    """Whole tensors, as an imported checkpoint has them; each step changes them a little."""
    noise = np.random.default_rng(seed)
    tensors = {"embed.weight": noise.standard_normal((vocabulary, H)), "head.weight": noise.standard_normal((vocabulary, H)),
               "final_norm.weight": noise.standard_normal(H)}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        tensors |= {at + "norm.weight": noise.standard_normal(H), at + "qkv.weight": noise.standard_normal((3 * H, H)),
                    at + "qkv.bias": noise.standard_normal(3 * H), at + "proj.weight": noise.standard_normal((H, H)),
                    at + "gate.weight": noise.standard_normal((FFN, H)), at + "up.weight": noise.standard_normal((FFN, H)),
                    at + "down.weight": noise.standard_normal((H, FFN)), at + "down.bias": noise.standard_normal(H)}
    drift = np.random.default_rng(seed + 1)
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    for _ in range(step):
        for value in tensors.values():
            value += (1e-4 * drift.standard_normal(value.shape)).astype(np.float32)
    tensors |= {f"exp_avg.{name}": value * np.float32(0.1) for name, value in tensors.items()}
    return tensors | {"step": np.array(step, np.int64)}


def chunk(array, i, n, dim=0):
    """Part i of torch.chunk; it may be empty."""
    each = -(-array.shape[dim] // n)
    size = array.shape[dim]
    return np.ascontiguousarray(np.take(array, range(min(i * each, size), min((i + 1) * each, size)), dim))


def split(array, i, n, dim=0):
    """Part i of n equal parts."""
    assert array.shape[dim] % n == 0
    return chunk(array, i, n, dim)


def padded(array, to):
    out = np.zeros((to, *array.shape[1:]), array.dtype)
    out[:len(array)] = array
    return out


def round_up(n, to):
    return -(-n // to) * to


MODEL_RULES = """\
mesh pp={pp} tp={tp}
files mp_rank_{{tp:2}}_{{pp:3}}/model.safetensors
state optimizer.*.m exp_avg.*           # what this trainer calls a first moment
number layer over=pp count={layers}
(embed|head)\\.weight                      sharded dim=0 over=tp size={vocabulary} pad={pad} {ends}
layers\\.{{layer}}\\.qkv\\.(weight|bias)       sharded dim=0 over=tp parts=q,k,v
layers\\.{{layer}}\\.fc1\\.weight              sharded dim=0 over=tp parts=gate,up as=layers.{{layer}}.{{part}}.weight
layers\\.{{layer}}\\.(proj|down)\\.weight      sharded dim=1 over=tp
layers\\.{{layer}}\\.(norm\\.weight|down\\.bias) replicated
final_norm\\.weight                        replicated pp=last
step                                      replicated
rng                                       skipped
"""


def model_layout(path, tp, pp, vocabulary, pad=8):
    rules = MODEL_RULES.format(tp=tp, pp=pp, vocabulary=vocabulary, pad=pad, layers=LAYERS, ends="pp=0,last")
    first, last = rules.replace("(embed|head)", "embed"), rules.replace("(embed|head)", "head")
    line = next(line for line in first.splitlines() if line.startswith("embed"))
    other = next(line for line in last.splitlines() if line.startswith("head"))
    text = first.replace(line, line.replace("pp=0,last", "pp=0") + "\n" + other.replace("pp=0,last", "pp=last"))
    path.write_text(text)
    return path


def model_rank(tensors, t, p, tp, pp, pad=8):
    """What rank (t, p) holds, under its local names."""
    def of_weight(whole, local, array):
        if whole in ("embed.weight", "head.weight"):
            if p == (0 if whole == "embed.weight" else pp - 1):
                return local, split(padded(array, round_up(len(array), pad * tp)), t, tp)
        elif whole == "final_norm.weight":
            if p == pp - 1:
                return local, array
        else:
            _, number, rest = whole.split(".", 2)
            own = int(number) - p * (LAYERS // pp)
            if 0 <= own < LAYERS // pp:
                return f"layers.{own}.{rest}", by_kind(rest, array)
        return None

    def by_kind(rest, array):
        if rest.startswith("qkv"):
            return np.concatenate([split(part, t, tp) for part in np.split(array, 3)])
        if rest in ("proj.weight", "down.weight"):
            return split(array, t, tp, 1)
        return split(array, t, tp) if rest in ("gate.weight", "up.weight") else array

    held = {}
    for name, array in tensors.items():
        if name == "step":
            held[name] = array
            continue
        moment = name.startswith("exp_avg.")
        found = of_weight(name.removeprefix("exp_avg."), name, array)
        if found:
            local = found[0].removeprefix("exp_avg.") if moment else found[0]
            held[f"optimizer.{local}.m" if moment else local] = found[1]
    return fuse(held)


def fuse(held):
    """Joins gate and up to one matrix."""
    out = {}
    for name, array in held.items():
        if ".gate." in name:
            out[name.replace(".gate.", ".fc1.")] = np.concatenate([array, held[name.replace(".gate.", ".up.")]])
        elif ".up." not in name:
            out[name] = array
    return out


def model_path(folder, t, p):
    return folder / f"mp_rank_{t:02d}_{p:03d}" / "model.safetensors"


def write_model(folder, tensors, tp, pp, pad=8):
    """Writes the files of all ranks. Each also has a tensor that belongs to its rank only."""
    paths = []
    for p in range(pp):
        for t in range(tp):
            path = model_path(folder, t, p)
            path.parent.mkdir(parents=True, exist_ok=True)
            held = model_rank(tensors, t, p, tp, pp, pad) | {"rng": np.array([p, t], np.uint8)}
            paths.append(st.write(path, held, {"format": "pt"}))
    return paths
