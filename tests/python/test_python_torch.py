"""Modules, optimizers and tensors of torch. Skipped where torch is not installed."""

import logging
import random
import struct
import subprocess
import sys

import numpy as np
import pytest

from support_cli import run
from support_python import ckptdelta, environment, needs_package, needs_torch, torch

pytestmark = [needs_package, needs_torch]


@pytest.fixture
def store(tmp_path):
    with ckptdelta.open(tmp_path / "store") as found:
        yield found


def same(a, b):
    """Equal bit for bit, with the same types and the same order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def raw(tensor):
    return bytes(tensor.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


class Block(torch.nn.Module if torch else object):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(torch.nn.Module if torch else object):
    """Tied embeddings, buffers, parameters of one and two dimensions, one that is frozen."""

    def __init__(self, width=16, words=50):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.layers = torch.nn.ModuleList([Block(width) for _ in range(2)])
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x):
        y = self.embed(x)
        for layer in self.layers:
            y = layer(y)
        return self.head(y)


def adamw(model, **options):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3, **options)


def make(seed, optimizer=adamw):
    torch.manual_seed(seed)
    model = Model()
    opt = optimizer(model)
    return model, opt, torch.optim.lr_scheduler.MultiStepLR(opt, [2, 5, 9])


def train(model, optimizer, scheduler, steps):
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 50, (8,))
        loss = torch.nn.functional.cross_entropy(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def everything(model, optimizer, scheduler, epoch=0):
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": epoch,
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}}


def test_training_goes_on_bit_for_bit_after_a_load(store):
    first = make(1)
    train(*first, 3)
    store.save(everything(*first, 3), run="gpt", step=3)
    train(*first, 1)
    store.save(everything(*first, 4), run="gpt", step=4)
    expected = train(*first, 5)
    other = make(2)
    state = everything(*other)
    assert store.load(state, run="gpt").step == 4 and state["epoch"] == 4
    assert other[0].head.weight is other[0].embed.weight
    torch.set_rng_state(state["rng"]["torch"])
    assert train(*other, 5) == expected
    for a, b in zip(first, other):
        assert same(a.state_dict(), b.state_dict())
    older = make(3)
    store.load(dict(zip(("model", "optimizer", "scheduler"), older)), step=3)
    assert int(older[1].state[older[0].embed.weight]["step"]) == 3 and older[2].last_epoch == 3


def test_the_whole_state_comes_back_as_new_tensors(store):
    model, optimizer, scheduler = make(1)
    train(model, optimizer, scheduler, 2)
    state = everything(model, optimizer, scheduler, 5)
    store.save(state, run="gpt", step=2)
    found = store.state_dict()
    assert same(found["model"], dict(model.state_dict())) and found["model"]["head.weight"] is found["model"]["embed.weight"]
    assert same(found["optimizer"], optimizer.state_dict()) and found["scheduler"] == scheduler.state_dict()
    assert found["rng"]["python"] == state["rng"]["python"] and same(found["rng"]["torch"], state["rng"]["torch"])
    fresh, opt, _ = make(9)
    fresh.load_state_dict(found["model"])
    opt.load_state_dict(found["optimizer"])
    assert same(opt.state_dict(), optimizer.state_dict())
    part = store.state_dict(only="model.layers.1", tensors="numpy")
    assert {type(v) for v in part["model"].values()} == {np.ndarray} and len(part["model"]) == 9
    assert store.state_dict(tensors="numpy", only="optimizer")["optimizer"]["state"][0]["step"].shape == ()


def test_roles_are_those_of_the_weights(store):
    model, optimizer, scheduler = make(1)
    train(model, optimizer, scheduler, 2)
    store.save({"opt": optimizer, "net": model}, run="gpt", step=2)
    roles = {t.name: t.role for t in store.tensors()}
    parameters = [f"net.{name}" for name, p in model.named_parameters() if p.requires_grad]
    for name in parameters:
        assert roles[f"opt.state.{name}.exp_avg"] == "exp_avg" and roles[f"opt.state.{name}.exp_avg_sq"] == "exp_avg_sq"
        assert roles[name] == "weight"
    assert roles["net.table"] == roles["net.layers.0.norm.running_mean"] == "other"
    assert not any("step" in name for name in roles), "the counters of all parameters are in the record"
    assert "net.head.weight" not in roles and len(roles) == 3 * len(parameters) + 1 + 1 + 6
    shown = run("show", store.path, "gpt@2").out
    assert "opt.state.net.embed.weight.exp_avg_sq" in shown and "exp_avg_sq" in run("report", store.path).out


def test_a_lossy_save_keeps_pairs_together_and_buffers_exact(store, caplog):
    model, optimizer, scheduler = make(1)
    train(model, optimizer, scheduler, 2)
    with caplog.at_level(logging.WARNING, "ckptdelta"):
        store.save({"model": model, "optimizer": optimizer}, run="gpt", step=2, fidelity="near")
    assert caplog.records == []
    order = [t.name for t in store.tensors()]
    at = order.index("model.embed.weight")
    assert order[at - 2:at] == ["optimizer.state.model.embed.weight.exp_avg_sq", "optimizer.state.model.embed.weight.exp_avg"]
    other = make(2)
    loaded = store.load({"model": other[0], "optimizer": other[1]})
    assert loaded.fidelity == "near"
    assert not same(other[0].state_dict(), model.state_dict()) and same(other[0].table, model.table)
    assert torch.allclose(other[0].embed.weight, model.embed.weight, atol=1e-2)


def test_moments_without_their_model_stay_exact_and_are_named(store, caplog):
    model, optimizer, scheduler = make(1)
    train(model, optimizer, scheduler, 2)
    with caplog.at_level(logging.WARNING, "ckptdelta"):
        store.save({"optimizer": optimizer}, run="gpt", step=2, fidelity="near")
    assert any("optimizer.state.0.exp_avg" in r.getMessage() and "kept exact" in r.getMessage() for r in caplog.records)
    other = make(2)[1]
    store.load({"optimizer": other})
    assert same(other.state_dict(), optimizer.state_dict()), "parameters are found by their place"


OPTIMIZERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "SGD without momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "AMSGrad": lambda m: adamw(m, amsgrad=True), "capturable": lambda m: adamw(m, foreach=True), "fused": lambda m: adamw(m, fused=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True), "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()), "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "lr is a tensor": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-3)),
    "names": lambda m: torch.optim.AdamW(m.named_parameters()), "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_of_all_kinds_come_back(store, kind):
    model, optimizer, scheduler = make(1, OPTIMIZERS[kind])
    train(model, optimizer, scheduler, 2)
    store.save({"m": model, "o": optimizer}, run="gpt", step=2)
    for fresh, steps in ((make(2, OPTIMIZERS[kind]), 0), (make(3, OPTIMIZERS[kind]), 1)):
        train(*fresh, steps)
        store.load({"m": fresh[0], "o": fresh[1]})
        assert same(fresh[1].state_dict(), optimizer.state_dict()) and same(fresh[0].state_dict(), model.state_dict())
    assert same(store.state_dict(only="o")["o"], optimizer.state_dict())


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "fused"])
def test_steps_are_predicted_although_a_scheduler_has_changed_the_rate(store, kind):
    torch.manual_seed(1)
    model = torch.nn.Linear(256, 256)
    optimizer = {"AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3), "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
                 "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "fused": lambda p: torch.optim.AdamW(p, fused=True)}[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        scheduler.step()

    sizes = {}
    with ckptdelta.Updates(optimizer) as updates:
        for name, given in (("with", updates), ("without", None)):
            step()
            updates.saved()
            store.save({"m": model, "o": optimizer}, run=name, step=1)
            step()
            saved = store.save({"m": model, "o": optimizer}, run=name, step=2, updates=given)
            sizes[name] = saved.stored_bytes
            found = store.state_dict(run=name)
            assert same(found["m"], dict(model.state_dict())) and same(found["o"], optimizer.state_dict())
        methods = {t.name: t.method for t in store.tensors(run="with")}
        assert methods["m.weight"] == "step" and sizes["with"] < 0.75 * sizes["without"]
        step(), step()
        assert updates.groups_of(optimizer) is None, "two steps since the last save"
        store.save({"m": model, "o": optimizer}, run="with", step=4, updates=updates)
        assert "step" not in {t.method for t in store.tensors(run="with")}, "two steps are not predicted"
        assert same(store.state_dict(run="with")["m"], dict(model.state_dict()))
    step()
    assert updates.groups_of(optimizer) is None, "nothing is followed after the end"
    with pytest.raises(ckptdelta.InvalidError, match="calls no hooks"):
        ckptdelta.Updates(model)


class MasterAdamW(torch.optim.AdamW if torch else object):
    """Its parameters are bf16, with an f32 master of each in the state."""

    @torch.no_grad() if torch else (lambda f: f)
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=torch.tensor(0.0), fp32=p.float(), exp_avg=torch.zeros(p.shape), exp_avg_sq=torch.zeros(p.shape))
            state["step"] += 1
            g, m, v, n = p.grad.float(), state["exp_avg"], state["exp_avg_sq"], state["step"].item()
            m.lerp_(g, 0.1)
            v.mul_(0.95).addcmul_(g, g, value=0.05)
            state["fp32"].mul_(1 - 1e-5).addcdiv_(m, (v.sqrt() / (1 - 0.95**n)**0.5).add_(1e-8), value=-1e-3 / (1 - 0.9**n))
            p.copy_(state["fp32"])


@pytest.mark.parametrize("masters", [False, True])
def test_gradients_that_were_bf16_take_the_place_of_first_moments(store, masters):
    """Under autocast and with masters, also clipped: bit for bit, in less than half of what f32 gradients take."""
    torch.manual_seed(1)
    model = torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16 if masters else None)
    optimizer = (MasterAdamW if masters else torch.optim.AdamW)(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    with ckptdelta.Updates(optimizer) as updates:
        for step in range(1, 4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(8, 256)).float().square().sum()
            optimizer.zero_grad()
            loss.backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.5, "they are clipped"
            optimizer.step()
            saved = store.save({"m": model, "o": optimizer}, run="r", step=step, updates=updates, max_load_cost=16)
    found = store.state_dict(run="r")
    assert same(found["m"], dict(model.state_dict())) and same(found["o"], optimizer.state_dict())
    assert {t.role for t in store.tensors(run="r") if t.method == "step"} == {"exp_avg", "exp_avg_sq", "master" if masters else "weight"}
    assert 8 * saved.stored_bytes < 13 * 256 * 256


def test_optimizers_with_other_numbers_do_not_stop_the_training():
    class Odd(torch.optim.Adam):
        def step(self, closure=None):
            self.param_groups[0]["betas"] = (0.9, 0.95, 0.99)

    class Bare(torch.optim.SGD):
        def step(self, closure=None):
            del self.param_groups[0]["dampening"]

    for optimizer in (Odd([torch.nn.Parameter(torch.zeros(3))]), Bare([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9)):
        with ckptdelta.Updates(optimizer) as updates:
            optimizer.step()
            assert updates.groups_of(optimizer) == [None]


def test_updates_are_ignored_where_they_cannot_help(store):
    """Half precision, lossy saves, AMSGrad, parameters without a model."""
    for number, (dtype, options, fidelity, whole) in enumerate([(torch.bfloat16, {}, "exact", True), (torch.float32, {}, "near", True),
                                                                (torch.float32, {"amsgrad": True}, "exact", True), (torch.float32, {}, "exact", False)]):
        model = torch.nn.Linear(16, 16).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        with ckptdelta.Updates(optimizer) as updates:
            for step in (1, 2, 3):
                model(torch.randn(4, 16, dtype=dtype)).square().mean().backward()
                optimizer.step()
                assert (updates.groups_of(optimizer) == [None]) == bool(options)
                state = {"o": optimizer, **({"m": model} if whole else {})}
                store.save(state, run=f"r{number}", step=step, updates=updates, fidelity=fidelity)
        assert "step" not in {t.method for t in store.tensors(run=f"r{number}")}
        if fidelity == "exact":
            assert same(store.state_dict(run=f"r{number}")["o"], optimizer.state_dict())


def test_lbfgs_whose_states_are_lists_comes_back(store):
    def make_one(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 2)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    model, optimizer = make_one(1)
    x = torch.randn(8, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    store.save({"m": model, "o": optimizer}, run="a", step=1)
    other = make_one(2)
    store.load({"m": other[0], "o": other[1]})
    assert same(other[1].state_dict(), optimizer.state_dict())


def test_states_in_another_dtype_than_their_parameter_keep_it(store):
    """torch casts them when it loads. What was saved comes back."""
    def make_one():
        p = torch.nn.Parameter(torch.randn(64, dtype=torch.bfloat16))
        return p, torch.optim.AdamW([p])

    p, optimizer = make_one()
    p.grad = torch.randn(64, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.randn(64)
    store.save({"p": p, "o": optimizer}, run="a", step=1)
    other, opt = make_one()
    store.load({"p": other, "o": opt})
    assert opt.state[other]["exp_avg"].dtype == torch.float32 and same(opt.state[other]["exp_avg"], optimizer.state[p]["exp_avg"])
    assert same(other.detach(), p.detach())


def test_parameters_are_found_by_name_in_another_order(store):
    model, optimizer, scheduler = make(1, lambda m: torch.optim.AdamW(m.parameters()))
    train(model, optimizer, scheduler, 2)
    store.save({"model": model, "optimizer": optimizer}, run="a", step=1)
    other, reversed_one, _ = make(2, lambda m: torch.optim.AdamW(reversed(list(m.parameters()))))
    store.load({"model": other, "optimizer": reversed_one})
    for (name, a), b in zip(model.named_parameters(), other.parameters()):
        assert same(dict(optimizer.state.get(a, {})), dict(reversed_one.state.get(b, {}))), name
    with pytest.raises(ckptdelta.MismatchError, match="optimizer.state.model.*for a parameter of the shape"):
        store.load({"optimizer": reversed_one})  # alone, it does not know the names of its parameters


def test_names_that_tell_no_parameter_apart_are_not_used():
    from ckptdelta._names import read_optimizer
    state = {"state": {}, "param_groups": [{"params": [0, 1], "param_names": ["a", "a"]}, {"params": [2, 3], "param_names": ["0", "b"]}]}
    assert read_optimizer(state, None, {}).names == [[None, None], [None, "b"]]


def test_parameters_of_fsdp1_without_the_wrapper_are_refused(store):
    """They look like whole tensors without the wrapper, which marks them so. test_python_fsdp1.py has real ones."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    store.save({"model": model}, run="a", step=1)
    model[0].weight._fsdp_flattened = True
    for call in (lambda: store.save({"model": model}, run="a", step=2), lambda: store.load({"model": model}, run="a")):
        with pytest.raises(ckptdelta.InvalidError, match="model has parameters of FullyShardedDataParallel.*pass the wrapped model"):
            call()
    assert store.find(run="a").step == 1


def test_another_model_is_refused_before_anything_is_written(store):
    model, optimizer, scheduler = make(1)
    train(model, optimizer, scheduler, 1)
    store.save({"model": model, "optimizer": optimizer}, run="a", step=1)
    wide = Model(width=24)
    before = {k: v.clone() for k, v in wide.state_dict().items()}
    with pytest.raises(ckptdelta.MismatchError, match=r"model.embed.weight: the checkpoint has float32 \[50, 16\], not float32 \[50, 24\].*and \d+ more"):
        store.load({"model": wide})
    assert same(before, dict(wide.state_dict()))
    del model.layers[1]
    with pytest.raises(ckptdelta.MismatchError, match="model.layers.1.up.weight: the module has no such tensor"):
        store.load({"model": model})
    assert store.load({"model": model}, strict=False).step == 1
    model.embed, model.embedding = torch.nn.Identity(), model.embed
    with pytest.raises(ckptdelta.MismatchError, match=r"^a@1 does not fit: model\.embedding\.weight: .*; did you mean embed\.weight\?"):
        store.load({"model": model})
    with pytest.raises(ckptdelta.MismatchError, match="groups of"):
        store.load({"optimizer": torch.optim.AdamW(wide.parameters())})


def test_a_dict_of_state_dicts_is_as_good_as_the_objects(store):
    model, optimizer, scheduler = make(1)
    train(model, optimizer, scheduler, 2)
    store.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, run="a", step=1)
    other = make(2)
    store.load({"model": other[0], "optimizer": other[1]})
    assert same(other[0].state_dict(), model.state_dict()) and same(other[1].state_dict(), optimizer.state_dict())
    train(*other, 1)
    state = {"model": other[0].state_dict(), "optimizer": other[1].state_dict()}
    store.load(state)
    assert same(state["optimizer"], optimizer.state_dict()) and same(dict(other[0].state_dict()), dict(model.state_dict()))


def test_optimizer_states_keyed_by_name_are_stored_like_others(store):
    """As torch.distributed.checkpoint.state_dict gives them."""
    model, optimizer, scheduler = make(1)
    train(model, optimizer, scheduler, 1)
    names = {id(p): n for n, p in model.named_parameters()}
    by_name = {"state": {names[id(p)]: s for p, s in optimizer.state.items()},
               "param_groups": [{"lr": 0.1, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups]}
    store.save({"model": model, "optim": by_name}, run="a", step=1)
    roles = {t.name: t.role for t in store.tensors()}
    assert roles["optim.state.layers.0.up.weight.exp_avg"] == "exp_avg" and not any(n.endswith("step") for n in roles)
    assert same(store.state_dict()["optim"], by_name)


def test_wrapped_modules_have_the_names_of_the_model(store):
    model = Model()
    store.save({"model": torch.compile(model)}, run="a", step=1)
    other = Model()
    store.load({"model": torch.nn.DataParallel(other)})
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert "model.embed.weight" in {t.name for t in store.tensors()}


def pair(*, flip=False, extra=True):
    """Two layers of the same shape, their optimizer, and a parameter of it that no module has."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in "ab"})
    weights = [model["a"].weight, model["b"].weight]
    more = torch.nn.Parameter(torch.zeros(3, 3))
    return model, torch.optim.AdamW((weights[::-1] if flip else weights) + ([more] if extra else [])), more


def test_states_go_by_name_also_beside_parameters_without_one(store):
    model, optimizer, more = pair()
    (model["a"](torch.ones(3)).sum() + 100 * model["b"](torch.ones(3)).sum() + 7 * more.sum()).backward()
    optimizer.step()
    store.save({"model": model, "optimizer": optimizer}, run="r", step=1)
    other, moved, rest = pair(flip=True)
    store.load({"model": other, "optimizer": moved}, run="r")
    for one, two in ((model["a"].weight, other["a"].weight), (model["b"].weight, other["b"].weight), (more, rest)):
        assert torch.equal(optimizer.state[one]["exp_avg"], moved.state[two]["exp_avg"])
    named = torch.nn.ModuleDict({**other, "c": torch.nn.Linear(3, 3, bias=False)})
    with pytest.raises(ckptdelta.MismatchError, match="has parameters without names, which may be model.c.weight"):
        store.load({"model": named, "optimizer": torch.optim.AdamW(named.parameters())}, run="r", strict=False)


def test_what_torch_does_not_write_into_is_refused_before_anything_is_written(store):
    store.save({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, run="r", step=1)
    with torch.inference_mode():
        fixed = torch.zeros(2, 3)
    for last, why in ((torch.zeros(3).expand(2, 3), "expanded"), (fixed, "inference")):
        state = {"a": torch.zeros(6), "b": last}
        with pytest.raises(ckptdelta.InvalidError, match=why) as caught:
            store.load(state, run="r")
        assert caught.value.path == "b" and not state["a"].any() and not last.any()
    with torch.inference_mode():
        store.load({"b": fixed}, run="r")
    assert bool((fixed == 1).all())


class Extra(torch.nn.Module if torch else object):
    """A module with a state of its own beside tensors, and one that changes what is loaded."""

    def __init__(self, note):
        super().__init__()
        self.w, self.note, self.loaded = torch.nn.Parameter(torch.zeros(2)), note, 0

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]

    def _load_from_state_dict(self, *args):
        self.loaded += 1
        super()._load_from_state_dict(*args)


def test_extra_states_and_hooks_of_modules_are_served(store):
    store.save({"m": Extra("one")}, run="a", step=1)
    other = Extra("two")
    store.load({"m": other})
    assert (other.note, other.loaded) == ("one", 1)


def test_weights_are_loaded_where_they_are(store):
    model = Model()
    store.save(model, run="a", step=1)
    other = Model()
    before = {name: p.data_ptr() for name, p in other.named_parameters()}
    calls = []
    other.register_load_state_dict_post_hook(lambda module, keys: calls.append(keys))
    store.load(other)
    assert calls, "a module with hooks gets its load_state_dict()"
    assert {name: p.data_ptr() for name, p in other.named_parameters()} == before and same(dict(other.state_dict()), dict(model.state_dict()))


def tensors_of_all_kinds():
    torch.manual_seed(5)
    bytes_of = torch.randint(0, 256, (256,), dtype=torch.uint8)
    names = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
             "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "complex32", "complex64", "complex128"]
    found = {name: bytes_of.view(getattr(torch, name)) for name in names if hasattr(torch, name)}
    found |= {"bool": bytes_of > 128, "transposed": torch.randn(5, 7).t(), "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
              "strided": torch.randn(20)[::3], "expanded": torch.randn(1, 4).expand(3, 4), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3),
              "conjugated": torch.randn(4, dtype=torch.complex64).conj(), "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
              "parameter": torch.nn.Parameter(torch.randn(3)), "needs grad": torch.randn(3, requires_grad=True) * 2}
    return found


def test_tensors_of_every_kind_come_back_bit_for_bit(store):
    tensors = tensors_of_all_kinds()
    store.save(tensors, run="a", step=1)
    found = store.state_dict()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape and raw(found[name]) == raw(tensor.detach()), name
    targets = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_() if name not in ("expanded", "strided") else torch.zeros(t.shape) for name, t in tensors.items()}
    targets["strided"] = torch.zeros(40)[::6][:7]
    before = dict(targets)
    store.load(targets)
    for name, tensor in tensors.items():
        assert targets[name] is before[name] and raw(targets[name]) == raw(tensor.detach()), name
    assert store.verify()


def test_a_conjugate_is_not_taken_for_the_memory_that_it_shares(store):
    z = torch.tensor([1 + 2j, 3 - 4j])
    store.save({"z": z, "conjugate": z.conj(), "again": z.view(2)}, run="a", step=1)
    found = store.state_dict()
    assert torch.equal(found["conjugate"].imag, -z.imag) and found["again"] is found["z"]


def test_a_load_between_forward_and_backward_is_noticed(store):
    model = torch.nn.Linear(3, 3)
    store.save(model, run="a", step=1)
    x = torch.randn(2, 3, requires_grad=True)
    loss = model(x).square().sum()
    store.load(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_an_optimizer_keeps_is_no_weight_whatever_it_is_called(store):
    class Solver:
        """Has states that are lists, beside moments."""

        def __init__(self, parameter):
            self.param_groups = [{"params": [parameter], "lr": torch.full((2, 2), 0.5)}]

        def state_dict(self):
            return {"state": {0: {"exp_avg": torch.ones(4, 4), "history": [torch.ones(4, 4) * 2, torch.ones(4, 4) * 3]}}, "sum": torch.ones(3, 3) * 5,
                    "param_groups": [{"params": [0], "lr": self.param_groups[0]["lr"]}]}

        def load_state_dict(self, state):
            self.loaded = state

    model = torch.nn.Linear(4, 4, bias=False)
    solver = Solver(model.weight)
    store.save({"net": model, "solver": solver}, run="a", step=1)
    roles = {t.name: t.role for t in store.tensors()}
    assert roles.pop("net.weight") == "weight" and roles.pop("solver.state.net.weight.exp_avg") == "exp_avg" and set(roles.values()) == {"other"}
    other = Solver(torch.nn.Linear(4, 4).weight)
    store.load({"solver": other})
    assert same(other.loaded["state"][0]["history"], solver.state_dict()["state"][0]["history"]) and other.loaded["sum"][0, 0] == 5


def test_nan_payloads_and_minus_zero_survive(store):
    odd = torch.tensor([0x7FC0, 0xFF81, 0x8000, 0x0001], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    store.save({"w": odd}, run="a", step=1)
    assert raw(store.state_dict()["w"]) == struct.pack("<4H", 0x7FC0, 0xFF81, 0x8000, 0x0001)


def test_sizes_dtypes_and_devices_come_back(store):
    value = {"shape": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cuda", 1)}
    store.save(value, run="a", step=1)
    assert same(store.state_dict(), value)


@pytest.mark.parametrize("make_tensor, says", [
    (lambda: torch.zeros(3, device="meta"), "meta device"), (lambda: torch.eye(3).to_sparse(), "layout"),
    (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    (lambda: torch.nn.LazyLinear(3).weight, "without a shape yet"),
], ids=["meta", "sparse", "quantized", "lazy"])
def test_tensors_without_plain_elements_are_named(store, make_tensor, says):
    try:
        tensor = make_tensor()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch makes none: {error}")
    with pytest.raises(ckptdelta.InvalidError, match=says) as caught:
        store.save({"fine": torch.ones(2), "x": [tensor]}, run="a", step=1)
    assert caught.value.path == "x.0"


def test_torch_is_not_imported_for_a_state_without_it(store):
    store.save({"w": torch.ones(3), "a": np.ones(2)}, run="a", step=1)
    code = f"""
import sys, ckptdelta, numpy
with ckptdelta.open({store.path!r}) as store:
    store.save({{"a": numpy.ones(2)}}, run="b", step=1)
    store.load({{"a": numpy.zeros(2)}}, run="b")
    assert store.state_dict(run="a", tensors="numpy")["w"].sum() == 3
    assert "torch" not in sys.modules
    sys.modules["torch"] = None
    try:
        store.state_dict(run="a")
    except ckptdelta.UnsupportedError as error:
        assert error.path == "w" and "tensors='numpy'" in str(error)
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def test_bf16_as_numpy_needs_a_package_and_says_which(store):
    store.save({"w": torch.ones(3, dtype=torch.bfloat16)}, run="a", step=1)
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(ckptdelta.UnsupportedError, match="ml_dtypes"):
            store.state_dict(tensors="numpy")
    else:
        assert store.state_dict(tensors="numpy")["w"].dtype == ml_dtypes.bfloat16
