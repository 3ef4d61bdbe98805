"""Roles of tensors with names that other programs give: what becomes lossy, what stays exact, and what the
command says about it."""

import json

import numpy as np
import pytest

import support_safetensors as st
from support_cli import check_documented, store  # noqa: F401

SHAPES = {"emb.weight": (96, 32), "seq.0.weight": (64, 48), "seq.0.bias": (64,)}
MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def training(steps):
    """What AdamW makes of noisy gradients: {parameter: (weight, first moment, second moment)}. Some rows have
    almost no gradient."""
    out = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        rng = np.random.default_rng(number)
        weight, first, second = rng.standard_normal(shape) * 0.05, np.zeros(shape), np.zeros(shape)
        rows = np.exp(rng.uniform(-7, 0, (shape[0],) + (1,) * (len(shape) - 1)))
        for step in range(1, steps + 1):
            gradient = rng.standard_normal(shape) * rows
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient ** 2
            update = first / (1 - 0.9 ** step) / (np.sqrt(second / (1 - 0.999 ** step)) + 1e-8)
            weight = weight * (1 - 1e-3 * 0.01) - 1e-3 * update
        out[name] = tuple(a.astype(np.float32) for a in (weight, first, second))
    return out


# The names that a program gives to a weight, its first and second moment, and its step counter.
PROGRAMS = {
    "ckptdelta": ("{}", "exp_avg.{}", "exp_avg_sq.{}", "step.{}"),
    "dcp": ("model.{}", "optimizer.state.{}.exp_avg", "optimizer.state.{}.exp_avg_sq", "optimizer.state.{}.step"),
    "dcp, short": ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq", "optim.{}.step"),
    "fsdp": ("{}", "state.{}.exp_avg", "state.{}.exp_avg_sq", "state.{}.step"),
    "torchtitan": ("{}", "optimizer.state.{}.exp_avg", "optimizer.state.{}.exp_avg_sq", "optimizer.state.{}.step"),
    "compiled": ("_orig_mod.{}", "optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq", "optim.state.{}.step"),
    "lightning": ("state_dict.{}", "optimizer_states.0.state.{}.exp_avg", "optimizer_states.0.state.{}.exp_avg_sq",
                  "optimizer_states.0.state.{}.step"),
    "deepspeed": ("module.{}", "zero/{}/exp_avg.pt", "zero/{}/exp_avg_sq.pt", "zero/{}/step.pt"),
    "megatron": ("{}", "optimizer.state.exp_avg.{}", "optimizer.state.exp_avg_sq.{}", "optimizer.state.step.{}"),
    "megatron, chained": ("{}", "chained_0.optimizer.state.exp_avg.{}", "chained_0.optimizer.state.exp_avg_sq.{}",
                          "chained_0.optimizer.state.step.{}"),
    "optax": ("params.{}", "opt_state.0.mu.{}", "opt_state.0.nu.{}", "opt_state.0.count.{}"),
}
LIGHTNING = "lightning"  # has numbers instead of names


def called(program, training_state):
    """The state as the program writes it: ({name: array}, {name: (parameter, part)}, metadata)."""
    tensors, meant, numbers = {}, {}, {n: str(i) for i, n in enumerate(training_state)}
    for name, values in training_state.items():
        by_number = program == LIGHTNING
        for part, (pattern, value) in enumerate(zip(PROGRAMS[program], values)):
            full = pattern.format(numbers[name] if by_number and part else name)
            tensors[full], meant[full] = value, (name, part)
        tensors[PROGRAMS[program][3].format(numbers[name] if by_number else name)] = np.float32(7)
    metadata = None
    if program == LIGHTNING:
        groups = [{"params": [0], "param_names": ["emb.weight"]}, {"params": [1, 2], "param_names": list(SHAPES)[1:]}]
        metadata = {"optimizer_states.0.param_groups": json.dumps(groups)}
    return tensors, meant, metadata


def loaded(store, run_name, meant):
    got = store.load("--run", run_name)[0]
    return {meant[name]: value[2] for name, value in got.items() if name in meant}


@pytest.mark.parametrize("fidelity", ["near", "coarse"])
def test_names_of_other_programs_give_the_same_roles(store, fidelity):
    wanted = None
    for program in PROGRAMS:
        run_name = program.replace(", ", "-")
        for steps in (20, 21):
            tensors, meant, metadata = called(program, training(steps))
            said = store.save(steps, tensors, "--fidelity", fidelity, "--json", run_name=run_name, metadata=metadata)
            assert said.json()["in_doubt"] == [] and "like optimizer state" not in said.err
        roles = {t["name"]: t["role"] for t in store.json("show", "--run", run_name)["tensors"]}
        assert {name: roles[name] for name in meant} == {
            name: ("weight", "exp_avg", "exp_avg_sq")[part] for name, (_, part) in meant.items()}
        got = loaded(store, run_name, meant)
        wanted = wanted or got
        assert got == wanted, program
    exact = {(name, part): values[part].tobytes() for name, values in training(21).items() for part in range(3)}
    assert all(wanted[key] != exact[key] for key in wanted if key[0] != "seq.0.bias"), "nothing is lossy"


def test_numbered_moments_without_an_order_stay_exact(store):
    tensors, meant, _ = called(LIGHTNING, training(9))
    said = store.save(1, tensors, "--fidelity", "coarse", expect_message="6 tensors look like optimizer state but belong to no weight")
    moments = sorted(name for name, (_, part) in meant.items() if part)
    assert "--role" in said.err and "and 3 more" in said.err
    assert sum(f"  {name}\n" in said.err for name in moments) == 3
    got = store.load()[0]
    for name in moments:
        assert got[name][2] == tensors[name].tobytes(), name
    assert got["state_dict.emb.weight"][2] != tensors["state_dict.emb.weight"].tobytes()
    assert {t["role"] for t in store.json("show")["tensors"] if t["name"] in moments} == {"other"}
    every = store.save(2, tensors, "--fidelity", "near", "-v", expect_message="6 tensors look like optimizer state").err
    assert all(f"  {name}\n" in every for name in moments) and "more" not in every
    as_json = store.save(3, tensors, "--fidelity", "near", "--json", expect_message="6 tensors look like optimizer state").json()
    check_documented(as_json, "`save`")
    assert sorted(as_json["in_doubt"]) == moments
    store.save(4, tensors, "--fidelity", "near", "-q")
    store.save(5, tensors)  # nothing is lossy, so nothing is in doubt


def test_a_given_role_takes_precedence(store):
    tensors, meant, _ = called(LIGHTNING, training(9))
    store.save(1, tensors, "--fidelity", "coarse", "--role", "*.exp_avg=exp_avg", "--role", "*.exp_avg_sq=exp_avg_sq")
    got = store.load()[0]
    large = [name for name, (parameter, part) in meant.items() if part and parameter != "seq.0.bias"]
    assert len(large) == 4 and all(got[name][2] != tensors[name].tobytes() for name in large)


UNPAIRED = ["exp_avg.another", "optimizer.state.0.exp_avg_sq", "optimizer.state.layer.weight.sum", "opt_state.1.ema.layer.weight",
            "mu.other.weight", "momentum.layer.weight", "m.layer.weight", "layer.weight.v", "fp32_groups_flat.0", "adam_m.layer.weight",
            "optimizer.param_groups.0.table", "state.layer.z"]


@pytest.mark.parametrize("name", UNPAIRED)
def test_unpaired_optimizer_state_is_no_weight(store, name):
    rng = np.random.default_rng(3)
    tensors = {"layer.weight": rng.standard_normal((64, 32), np.float32), name: rng.standard_normal((64, 32), np.float32) ** 2}
    said = store.save(1, tensors, "--fidelity", "coarse", "--json", expect_message="1 tensor looks like optimizer state but belongs")
    assert said.json()["in_doubt"] == [name]
    got = store.load()[0]
    assert got[name][2] == tensors[name].tobytes() and got["layer.weight"][2] != tensors["layer.weight"].tobytes()


def test_factors_counters_and_momentum(store):
    """The state of Adafactor, SGD and Lion, with the names that PyTorch gives."""
    rng = np.random.default_rng(4)
    def values(*shape):
        return rng.standard_normal(shape, np.float32)
    tensors = {"a": values(96, 80), "b": values(96, 64), "optimizer.state.a.row_var": values(96, 1), "optimizer.state.a.col_var": values(1, 80),
               "optimizer.state.a.exp_avg_sq_row": values(96), "optimizer.state.b.momentum_buffer": values(96, 64),
               "optimizer.state.a.exp_avg": values(96, 80), "optimizer.state.a.step": np.float32(3)}
    said = store.save(1, tensors, "--fidelity", "near", "--json")
    assert said.json()["in_doubt"] == []
    roles = {t["name"].split(".")[-1]: t["role"] for t in store.json("show")["tensors"]}
    assert roles == {"a": "weight", "b": "weight", "row_var": "other", "col_var": "other", "exp_avg_sq_row": "other",
                     "momentum_buffer": "exp_avg", "exp_avg": "exp_avg", "step": "other"}
    got = store.load()[0]
    for name in ("optimizer.state.a.row_var", "optimizer.state.a.col_var", "optimizer.state.a.exp_avg_sq_row"):
        assert got[name][2] == tensors[name].tobytes()


@pytest.mark.parametrize("key, value", [
    ("optimizer_states.0.param_groups", "no JSON"), ("optimizer_states.0.param_groups", "[]"), ("optimizer_states.0.param_groups", "7"),
    ("optimizer_states.0.param_groups", '[{"params": [0, -1, 99999999999], "param_names": 3}]'),
    ("optimizer_states.0.param_groups", '[{"params": 5}, {"params": ["a"], "param_names": [{}]}]'),
    ("optimizer_states.0.param_names", '{"0": "emb.weight"}'), ("optimizer_states.1.param_names", '["emb.weight"]'),
    ("xparam_names", '["emb.weight"]')])
def test_metadata_without_an_order(store, key, value):
    tensors, _, _ = called(LIGHTNING, training(3))
    said = store.save(1, tensors, "--fidelity", "near", "--json", metadata={key: value}, expect_message="6 tensors")
    assert len(said.json()["in_doubt"]) == 6


def test_names_by_number(store):
    tensors, _, _ = called(LIGHTNING, training(3))
    said = store.save(1, tensors, "--fidelity", "near", "--json", expect_message="2 tensors",
                      metadata={"optimizer_states.0.param_names": '["emb.weight", "nobody", "seq.0.bias"]'})
    assert said.json()["in_doubt"] == ["optimizer_states.0.state.1.exp_avg", "optimizer_states.0.state.1.exp_avg_sq"]


def test_steps_of_an_optimizer_are_found_under_other_names(store):
    sizes = {}
    for program in ("ckptdelta", "dcp", "megatron", LIGHTNING):
        for steps in (20, 21):
            tensors, _, metadata = called(program, training(steps))
            store.save(steps, tensors, "--adamw", f"lr=1e-3,step={steps}", run_name=program, metadata=metadata)
        shown = store.json("show", "--run", program)
        methods = {t["name"]: t["method"] for t in shown["tensors"]}
        assert methods[PROGRAMS[program][0].format("emb.weight")] == "step", methods
        sizes[program] = sum(t["stored_bytes"] for t in shown["tensors"] if t["role"] != "other" and t["shape"])
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes
