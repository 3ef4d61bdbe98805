"""ckptdelta run --rewind-on-nan: checkpoints whose bytes are whole and whose values are not finite."""

import sys
import textwrap

import pytest

from support_cli import CORRUPT, USAGE, run
from support_run import TRAINER, Job, job  # noqa: F401

# `values` are those of the state's only tensor; TRAINER saves the step.
NAN = TRAINER.replace('json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})', "json.dumps(header_of())") \
    .replace("struct.pack(\"<f\", step))", "content + struct.pack(\"<f\", step))") \
    .replace('"branch", file', '"branch", *options, file') + """
dtype, bits, name, options = "F32", 0, "model.v", []
def header_of():
    global content
    content = bits.to_bytes({"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I32": 4}[dtype], "little") * 3
    n = len(content)
    return {name: {"dtype": dtype, "shape": [3], "data_offsets": [0, n]}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [n, n + 4]}}
"""


def trainer(job, text):  # noqa: F811
    path = job.folder / "train.py"
    path.write_text(NAN + textwrap.dedent(text))
    return [sys.executable, path]


BAD = [("F64", 0x7FF0 << 48), ("F64", 0xFFF8 << 48), ("F32", 0x7F800000), ("F32", 0xFFC00001), ("F32", 0x7F800001), ("F16", 0x7C00), ("F16", 0xFE00),
       ("BF16", 0xFF80), ("BF16", 0x7FC0), ("F8_E4M3", 0xFF), ("F8_E5M2", 0x7C)]
GOOD = [("F64", 0x7FEF << 48), ("F32", 0xFF7FFFFF), ("F16", 0x7BFF), ("BF16", 0xFF7F), ("F8_E4M3", 0x7E), ("F8_E5M2", 0xFB), ("I32", -1 & 0xFFFFFFFF)]


@pytest.mark.parametrize("dtype, bits, suspect", [(*one, True) for one in BAD] + [(*one, False) for one in GOOD])
def test_which_values_are_suspect(job, dtype, bits, suspect):  # noqa: F811
    job.run(*trainer(job, f"""
        train(1)
        dtype, bits = {dtype!r}, {bits}
        train(1)
    """))
    out, err = job.run("true", options=["--rewind-on-nan", "1"])
    assert ("gpt@2 is suspect and passed over: values became NaN or infinite" in err) == suspect
    attempt = job.attempts()[-1]
    assert (attempt["checkpoint"], attempt["suspect"]) == (("gpt@1", "gpt@2") if suspect else ("gpt@2", None))


@pytest.mark.parametrize("back, expected", [(None, "gpt@3"), (1, "gpt@3"), (2, "gpt@2"), (9, "gpt@1")])
def test_it_goes_back(job, back, expected):  # noqa: F811
    """Steps that were made from bad values are lost, and those of good ones that may have led there."""
    options = ["--rewind-on-nan", str(back)] if back else []
    job.run(*trainer(job, """
        if attempt == 1:
            train(3)
            bits = 0x7fc00000
            train(2)
            sys.exit(1)
        train(6 - step)
    """), options=options)
    assert job.starts() == ["1 None", f"2 {expected}"]
    second = job.attempts()[1]
    assert second["suspect"] == "gpt@5"
    # The suspect ones are no progress that had to be made again: only the finite ones of the step count.
    assert (second["first_step"], second["last_step"]) == (3, 6)
    # What it has trained since is finite, and is the newest.
    job.run("true", options=options)
    assert job.attempts()[-1]["checkpoint"] == "gpt~2@6" and job.attempts()[-1]["suspect"] is None


def test_if_none_is_good_nothing_is_started(job):  # noqa: F811
    job.run(*trainer(job, "train(1); bits = 0x7f800000; train(1)"))
    job.damage(1)
    out, err = job.run("touch", "started", expect=CORRUPT)
    assert "of the 2 checkpoints of gpt, 1 are suspect" in err and not (job.folder / "started").exists()


def test_other_tensors_may_have_infinities(job):  # noqa: F811
    """A mask, for example, which is no weight."""
    job.run(*trainer(job, 'name = "mask"; bits = 0xff800000; options = ["--role", "mask=other"]; train(1)'))
    job.run("true", options=["--rewind-on-nan", "1"])
    assert job.attempts()[-1]["checkpoint"] == "gpt@1"


def test_damage_and_nan_together(job):  # noqa: F811
    job.run(*trainer(job, """
        train(2)
        bits = 0x7fc00000
        train(1)
        bits = 0
        train(1)
    """))
    job.damage(4)
    out, err = job.run("true", options=["--rewind-on-nan", "2"])
    assert "gpt@4 is damaged and passed over" in err and "gpt@3 is suspect" in err
    assert job.attempts()[-1]["checkpoint"] == "gpt@1"


@pytest.mark.parametrize("count", ["0", "x", "-1"])
def test_wrong_options(job, count):  # noqa: F811
    run("run", job.store, "--run", "gpt", "--rewind-on-nan", count, "--", "true", expect=USAGE)
