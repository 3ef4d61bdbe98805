"""Lossy fidelities on the command line: options, messages, and loaded values."""

import re

import numpy as np
import pytest

import support_safetensors as st
from support_cli import USAGE, check_documented, run, store  # noqa: F401

ROWS, COLUMNS = 160, 96


def state(step, seed=1):
    """A training state with moments of AdamW, integers and a double. Weights change a little each step."""
    start = np.random.default_rng(seed)
    weight, bias = start.standard_normal((ROWS, COLUMNS)) * 0.02, start.standard_normal(COLUMNS) * 0.02
    rows = np.exp(start.standard_normal((ROWS, 1)))
    for k in range(step):
        move = np.random.default_rng([seed, k])
        weight += move.standard_normal((ROWS, 3)) @ move.standard_normal((3, COLUMNS)) * 3e-4
        weight += move.standard_normal(weight.shape) * 1e-4
        bias += move.standard_normal(COLUMNS) * 1e-4
    now = np.random.default_rng([seed, step, 7])
    moment, bias_moment = now.standard_normal(weight.shape) * rows * 1e-4, now.standard_normal(COLUMNS) * 1e-4
    second = rows ** 2 * start.chisquare(4, weight.shape) * 1e-9 * np.exp(0.05 * now.standard_normal(weight.shape))
    floats = {
        "layer.weight": weight, "layer.bias": bias, "exp_avg.layer.weight": moment, "exp_avg.layer.bias": bias_moment,
        "exp_avg_sq.layer.weight": second, "exp_avg_sq.layer.bias": bias_moment ** 2 + 1e-12,
    }
    tensors = {name: value.astype(np.float32) for name, value in floats.items()}
    return tensors | {"step": np.array(step, np.int64), "scale": np.array([0.1, 1e-300]), "tiny": np.float32([1.1, 2.2])}


def arrays(tensors):
    back = {code: dtype for dtype, code in st.NUMPY.items()}
    return {name: np.frombuffer(raw, back[dtype]).reshape(shape) for name, (dtype, shape, raw) in tensors.items()}


def is_exact(store, step, name, wanted):
    return arrays(store.load("--step", step)[0])[name].tobytes() == wanted[name].tobytes()


def error_of(got, wanted):
    return np.linalg.norm((got.astype(np.float64) - wanted).ravel()) / np.linalg.norm(wanted.astype(np.float64).ravel())


@pytest.mark.parametrize("fidelity", ["near", "coarse"])
def test_which_tensors_are_lossy(store, fidelity):
    for step in range(3):
        store.save(step, state(step), "--fidelity", fidelity)
    wanted, got = state(2), arrays(store.load()[0])
    for name in ("step", "scale", "tiny"):
        assert got[name].tobytes() == wanted[name].tobytes(), name
    listed = store.json("list")
    assert [c["kind"] for c in listed["checkpoints"]] == ["base", "delta", "delta"]
    assert {c["fidelity"] for c in listed["checkpoints"]} == {fidelity}
    assert [e["checkpoint"] for e in listed["errors"]] == ["a@0", "a@1", "a@2"]
    assert 0 < listed["errors"][2]["bits_per_element"] < listed["errors"][0]["bits_per_element"] < 16
    shown = {t["name"]: t for t in store.json("show")["tensors"]}
    for name, value in wanted.items():
        difference = np.abs(got[name].astype(np.float64) - value)
        if name in ("step", "scale", "tiny"):
            assert shown[name]["rel_l2"] == shown[name]["max_error"] == 0
            continue
        assert shown[name]["rel_l2"] == pytest.approx(error_of(got[name], value), rel=5e-3), name
        assert shown[name]["max_error"] == pytest.approx(difference.max(), rel=8e-3), name
        assert difference.max() > 0, f"{name} would not even be lossy"
    assert error_of(got["layer.weight"], wanted["layer.weight"]) < 0.05
    check_documented(listed, "`list`")
    store.call("verify")


def test_near_has_smaller_errors_and_is_larger(store):
    errors, sizes = [], []
    for number, fidelity in enumerate(["near", "coarse"]):
        for step in range(2):
            store.save(step, state(step), "--fidelity", fidelity, run_name=fidelity)
        error = store.json("list", "--run", fidelity)["errors"][1]
        errors.append(error["rel_l2"])
        sizes.append(error["bits_per_element"])
    assert errors[0] < errors[1] and sizes[0] > 1.1 * sizes[1]


def test_fidelity_by_role(store):
    one_option = ["--fidelity", "weight=near,exp_avg=coarse"]
    several = ["--fidelity", "coarse", "--fidelity", "weight=exact,exp_avg_sq=exact"]
    store.save(1, state(1), *one_option)
    store.save(1, state(1), *several, run_name="b")
    wanted = state(1)
    for run_name, exact in (("a", {"exp_avg_sq"}), ("b", {"weight", "exp_avg_sq"})):
        got = arrays(store.load("--run", run_name)[0])
        for name, value in wanted.items():
            role = name.split(".")[0] if name.startswith("exp_avg") else "weight"
            same = got[name].tobytes() == value.tobytes()
            assert same == (role in exact or name in ("step", "scale", "tiny")), (run_name, name)
        assert store.json("show", "--run", run_name)["checkpoints"][0]["fidelity"] == "coarse"


def test_the_last_fidelity_option_counts(store):
    store.save(1, state(1), "--fidelity", "coarse", "--fidelity", "exact")
    assert st.same(store.load()[0], state(1))
    assert store.checkpoints()[0]["fidelity"] == "exact" and store.json("list")["errors"] == []


@pytest.mark.parametrize("args", [
    ["--fidelity", "lossy"], ["--fidelity", "nearly"], ["--fidelity", ""], ["--fidelity", "near,"], ["--fidelity", "other=near"],
    ["--fidelity", "weights=near"], ["--fidelity", "weight="], ["--fidelity", "=near"], ["--fidelity", "weight=near=near"],
    ["--fidelity", "near", "--effort", "0"], ["--fidelity", "near", "--effort", "10"],
    ["--fidelity", "near", "--effort", "some"],
    ["--fidelity", "near", "--target-bits", "0"], ["--fidelity", "near", "--target-bits", "64"],
    ["--fidelity", "near", "--target-bits", "-1"], ["--fidelity", "near", "--target-ratio", "nan"],
    ["--fidelity", "near", "--target-ratio", "0"], ["--fidelity", "near", "--target-ratio", "1e7"],
    ["--fidelity", "near", "--target-ratio", "100", "--target-bits", "1"],
    ["--fidelity", "near", "--max-error", "0"], ["--fidelity", "near", "--max-error", "1"],
    ["--fidelity", "near", "--step-scale", "0"], ["--fidelity", "near", "--step-scale", "0.01"],
    ["--fidelity", "near", "--step-scale", "65"], ["--fidelity", "near", "--step-scale", "nan"],
    ["--fidelity", "near", "--target-ratio", "9", "--step-scale", "2"],
    ["--fidelity", "near", "--max-error", "1e-3x"], ["--fidelity", "near", "--max-error", "0.1", "--target-bits", "1"],
])
def test_wrong_usage(store, args):
    refused = store.save(1, state(1), *args, expect=USAGE)
    assert args[-2] in refused.err and not store.path.exists()


@pytest.mark.parametrize("option", ["--effort", "--target-bits", "--target-ratio", "--max-error", "--step-scale"])
def test_options_of_lossy_saves_need_a_lossy_save(store, option):
    value = "0.5" if option != "--effort" else "3"
    for fidelity in ([], ["--fidelity", "exact"], ["--fidelity", "near,weight=exact", "--fidelity", "exact"]):
        if "near,weight=exact" in fidelity:
            fidelity = ["--fidelity", "exact,weight=exact"]
        refused = store.save(1, state(1), *fidelity, option, value, expect=USAGE)
        assert f"{option} is for lossy checkpoints" in refused.err and "near or --fidelity coarse" in refused.err
    store.save(1, state(1), "--fidelity", "weight=near", option, value)


def test_max_error_holds_for_every_value(store):
    for number, bound in enumerate((0.05, 0.002)):
        for step in range(3):
            store.save(step, state(step), "--fidelity", "coarse", "--max-error", bound, run_name=f"r{number}")
            got, wanted = arrays(store.load("--run", f"r{number}")[0]), state(step)
            for name, value in wanted.items():
                if name in ("step", "scale", "tiny"):
                    continue
                rms = np.sqrt(np.mean(value.astype(np.float64) ** 2))
                assert np.abs(got[name].astype(np.float64) - value).max() <= bound * rms * (1 + 1e-9), (name, step, bound)


@pytest.mark.parametrize("options", [["near"], ["coarse"], ["coarse", "--target-bits", "0.5"]])
def test_weights_that_become_zero(store, options):
    """They have moved far, and steps follow the movement. But no error is small against zeros."""
    zeros = {name: value * 0 if "layer" in name and "exp" not in name else value for name, value in state(1).items()}
    for step, tensors in enumerate([state(0), zeros, state(2)]):
        store.save(step, tensors, "--fidelity", *options)
    for name in ("layer.weight", "layer.bias"):
        assert is_exact(store, 1, name, zeros), name
    store.call("verify")


def test_targets(store):
    """Steps are chosen to meet targets. (Tests with larger tensors check how close they come.)"""
    bits = {}
    for name, args in {"few": ["--target-bits", "0.5"], "more": ["--target-bits", "4"], "ratio": ["--target-ratio", "24"]}.items():
        for step in range(2):
            store.save(step, state(step), "--fidelity", "near", *args, run_name=name)
        tensors = [t for t in store.json("show", "--run", name)["tensors"] if t["name"].endswith("layer.weight")]
        bits[name] = 8 * sum(t["stored_bytes"] for t in tensors) / (ROWS * COLUMNS)
    assert bits["few"] < 1.2 < 2 < bits["more"] < 6
    assert bits["ratio"] == pytest.approx(bits["more"], rel=0.02), "96 bits over 24"


def test_steps_are_scaled(store):
    """Scaled steps lie between the fidelities and beyond them: weights and first moments become coarser and
    smaller."""
    errors, sizes = [], []
    for number, scale in enumerate((0.25, 1, 1.5)):
        for step in range(2):
            store.save(step, state(step), "--fidelity", "near", "--step-scale", scale, run_name=f"s{number}")
        got = arrays(store.load("--run", f"s{number}")[0])
        errors.append([error_of(got[name], state(1)[name]) for name in ("layer.weight", "exp_avg.layer.weight")])
        sizes.append(store.checkpoints()[-1]["stored_bytes"])
    assert errors[0][0] < errors[1][0] < errors[2][0] and errors[0][1] < errors[1][1] < errors[2][1]
    assert sizes[0] > sizes[1] > sizes[2]


def test_efforts(store):
    errors = []
    for effort in (1, 9):
        for step in range(2):
            store.save(step, state(step), "--fidelity", "coarse", "--effort", effort, run_name=f"e{effort}")
        got = arrays(store.load("--run", f"e{effort}")[0])
        errors.append(error_of(got["layer.weight"], state(1)["layer.weight"]))
    assert errors[1] <= errors[0] < 0.05
    assert store.checkpoints()[3]["stored_bytes"] < 1.1 * store.checkpoints()[1]["stored_bytes"]


def test_lossy_resumes_are_counted(store):
    store.save(0, state(0))
    store.save(1, state(1), "--fidelity", "near", "--resumed-from", "a@0")
    store.save(2, state(2), "--fidelity", "near", "--resumed-from", "a@1")
    told = store.save(3, state(3), "--fidelity", "near", "--resumed-from", "a@2").out
    assert "2 lossy resumes before it" in told
    store.save(4, state(4), "--resumed-from", "a@3")
    store.save(5, state(5))
    assert [c["lossy_resumes"] for c in store.checkpoints()] == [0, 0, 1, 2, 3, 3]


def test_duplicates(store):
    store.save(1, state(1), "--fidelity", "near")
    refused = store.save(1, state(1), "--fidelity", "near", "--on-duplicate", "same-ok", expect=1)
    assert "a@1" in refused.err or "step 1" in refused.err
    store.save(2, state(2), "--fidelity", "near")
    store.save(1, state(3), "--fidelity", "near", "--on-duplicate", "branch", expect_message="rewound")
    assert [(c["run"], c["step"]) for c in store.checkpoints()] == [("a", 1), ("a", 2), ("a~2", 1)]


def test_a_lossy_save_prints_bits_and_errors(store):
    said = store.save(0, state(0), "--fidelity", "coarse").out.splitlines()
    assert len(said) == 2 and re.fullmatch(
        r"coarse: [0-9.]+ bits per parameter; relative error \(L2\) up to [0-9.e-]+ in weights, [0-9.e-]+ in moments", said[1])
    bits = float(said[1].split()[1])
    parameters = ROWS * COLUMNS + COLUMNS + 4
    assert bits == pytest.approx(8 * store.checkpoints()[0]["stored_bytes"] / parameters, rel=1e-2)
    shown = {t["name"]: t["rel_l2"] for t in store.json("show")["tensors"]}
    assert float(said[1].split(" in weights")[0].split()[-1]) == pytest.approx(
        max(shown["layer.weight"], shown["layer.bias"]), rel=1e-2)
    assert len(store.save(1, state(1)).out.splitlines()) == 1, "of an exact one there is nothing to tell"
    assert store.save(2, state(2), "--fidelity", "near", "-q").out == ""
    weights = {name: value for name, value in state(3).items() if "exp" not in name}
    assert store.save(3, weights, "--fidelity", "near", expect_message="a@3 lacks").out.splitlines()[1].endswith("in weights")


def test_order_of_tensors(store):
    """Tensors are saved parameter by parameter in any order of the file: second moment, first moment, master,
    weight. Masters are first in exact saves."""
    matrix = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    names = ["z.weight", "a.weight", "exp_avg.a.weight", "master.a.weight", "exp_avg_sq.z.weight", "max_exp_avg_sq.a.weight",
             "exp_avg.z.weight", "exp_avg_sq.a.weight", "alone"]
    bf16 = (matrix.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {name: matrix ** 2 if "_sq" in name else matrix for name in names}
    tensors["a.weight"] = ("BF16", [ROWS, COLUMNS], bf16.tobytes())
    store.save(1, tensors, "--fidelity", "near")
    shown = store.json("show")["tensors"]
    assert [t["name"] for t in shown] == ["exp_avg_sq.a.weight", "max_exp_avg_sq.a.weight", "exp_avg.a.weight", "master.a.weight",
                                          "a.weight", "exp_avg_sq.z.weight", "exp_avg.z.weight", "z.weight", "alone"]
    store.save(1, tensors, "--fidelity", "near,exp_avg=exact", run_name="first-exact")
    shown = [t["name"] for t in store.json("show", "--run", "first-exact")["tensors"]]
    assert shown[:2] == ["exp_avg.a.weight", "exp_avg_sq.a.weight"], "the lossy one is coded by the exact one"
    store.save(1, tensors, "--fidelity", "near,exp_avg_sq=exact", "--adamw", "lr=1e-3,step=1", run_name="second-exact",
               expect_message="are ignored")
    shown = [t["name"] for t in store.json("show", "--run", "second-exact")["tensors"]]
    assert shown.index("exp_avg_sq.a.weight") < shown.index("exp_avg.a.weight")
    store.save(1, tensors, run_name="exact")
    assert [t["name"] for t in store.json("show", "--run", "exact")["tensors"]] == ["master.a.weight"] + [
        n for n in names if n != "master.a.weight"], "exact saves keep the files' order, but for masters"


def test_optimizer_steps_of_lossy_saves(store):
    note = "are ignored"
    store.save(1, state(1), "--fidelity", "near", "--adamw", "lr=1e-3,step=1", expect_message=note)
    store.save(2, state(2), "--fidelity", "near", "--adamw", "lr=1e-3,step=2", "-q")
    store.save(3, state(3), "--fidelity", "weight=near", "--adamw", "lr=1e-3,step=3")
    assert is_exact(store, 3, "exp_avg.layer.weight", state(3))
