"""examples/demo.sh, shortened: its figures are those of the store that it leaves, and its last commands work."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build/current").resolve()


@pytest.mark.skipif(bool(os.environ.get("CKPTDELTA_SAN")), reason="trains for long, and the command has tests of its own")
def test_the_demo(tmp_path):
    for program in ("train_gpt", "ckptdelta"):
        (tmp_path / program).symlink_to(BUILD / program)
    text = tmp_path / "text"
    text.write_text("\n".join(map(str, range(60000))))
    done = subprocess.run(["sh", ROOT / "examples/demo.sh", tmp_path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=600, env={**os.environ, "DEMO_STEPS": "25", "TEXT": str(text)})
    assert done.returncode == 0, done.stdout
    assert "are identical, and so are all" in done.stdout and "verified" in done.stdout
    rows = {row[0].strip(): row[1:] for row in re.findall(r"^\| (.{31}) (.{18}) \| (.{29}) \|$", done.stdout, re.MULTILINE)}
    assert list(rows)[1:] == ["exact, saved every 5 steps", "exact, saved after every step", "near, saved every 5 steps", "coarse, saved every 5 steps"]
    folder = tmp_path / "demo"
    listed = json.loads(subprocess.run([BUILD / "ckptdelta", "list", folder / "store", "--json"], capture_output=True, check=True, text=True).stdout)
    for (name, first), (takes, _) in zip((("gpt", 5), ("killed", 20), ("near", 5), ("coarse", 5)), list(rows.values())[1:]):
        mine = [c for c in listed["checkpoints"] if c["run"] == name and c["step"] > first]
        ratio = sum(c["raw_bytes"] for c in mine) / sum(c["stored_bytes"] for c in mine)
        assert float(takes.split()[-1].rstrip("x")) == pytest.approx(ratio, abs=0.051 if ratio < 10 else 0.51), name
    losses = {name: re.search(r"validation loss (\S+)", (folder / f"{name}.log").read_text())[1] for name in ("gpt", "near", "coarse", "resumed")}
    assert losses["resumed"] == losses["gpt"]
    exact, every, near, coarse = (loss.strip() for _, loss in list(rows.values())[1:])
    assert exact == every == f"{float(losses['gpt']):.4f}, not one bit differs"
    for said, name in ((near, "near"), (coarse, "coarse")):
        assert said == f"{float(losses[name]):.4f}, {float(losses[name]) - float(losses['gpt']):+.4f}"
    assert (folder / "report.html").stat().st_size > 10_000
    commands = re.findall(r"^    \.\./ckptdelta (.*)$", done.stdout, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        subprocess.run([tmp_path / "ckptdelta", *command.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert (folder / "saves.svg").exists()
