"""tests/run.py never counts a test as passed that did not pass: crashes, missing or damaged results, time
limits, skips, old files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).resolve().parents[1] / "run.py"
XML = "<?xml version='1.0'?><testsuites><testsuite name='a'>{}</testsuite></testsuites>"
PASS, FAIL = "<testcase name='good'/>", "<testcase name='bad'><failure><![CDATA[why it failed]]></failure></testcase>"
SKIP = "<testcase name='left'><skipped/></testcase>"


def program(folder, name, script):
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)


@pytest.fixture
def tree(tmp_path):
    """Adds programs and scripts to a small tree, and runs the runner on it."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "build" / "tests").mkdir(parents=True)

    class Tree:
        root = tmp_path

        def cmocka(self, name, script):
            (tmp_path / "tests" / "room" / "part").mkdir(parents=True, exist_ok=True)
            (tmp_path / "tests" / "room" / "part" / f"{name}.c").touch()
            program(tmp_path / "build" / "tests", name, script)

        def results(self, name, *cases, status=0, before=""):
            xml = XML.format("".join(cases))
            self.cmocka(name, f'{before}\ncat >"${{CMOCKA_XML_FILE%/*}}/a.xml" <<"END"\n{xml}\nEND\nexit {status}\n')

        def run(self, *args, **env):
            done = subprocess.run([sys.executable, RUNNER, "--root", tmp_path, "--build", tmp_path / "build", *args],
                                  env={**os.environ, "CKD_REQUIRE_GPU": "", **env}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
            last = done.stdout.splitlines()[-1].split()
            counts = int(last[0]), int(last[2]), int(last[4])
            assert last[1::2] == ["passed,", "failed,", "skipped"]
            assert (done.returncode == 0) == (counts[1] == 0), done.stdout
            return counts, done.stdout

    return Tree()


def test_counts_test_functions(tree):
    tree.results("test_a", PASS, PASS, FAIL, status=1)
    tree.results("test_b", PASS)
    counts, output = tree.run()
    assert counts == (3, 1, 0)
    assert "why it failed" in output


@pytest.mark.parametrize("script", [
    "exit 0",  # no results at all
    "exit 1",
    "kill -SEGV $$",
    "echo junk >${CMOCKA_XML_FILE%/*}/a.xml",
    "printf \"<testsuites><testsuite><testcase name='x'/>\" >${CMOCKA_XML_FILE%/*}/a.xml",  # cut off
    "printf '<testsuites></testsuites>' >${CMOCKA_XML_FILE%/*}/a.xml",  # has no test
])
def test_bad_results_are_failures(tree, script):
    tree.cmocka("test_a", script)
    assert tree.run()[0] == (0, 1, 0)


@pytest.mark.parametrize("end", ["exit 3", "kill -ABRT $$"])
def test_bad_end_after_good_results_is_a_failure(tree, end):
    tree.results("test_a", PASS, status=f"0 & wait $!; {end}")
    assert tree.run()[0] == (1, 1, 0)


def test_missing_program_is_a_failure(tree):
    (tree.root / "tests" / "test_a.c").touch()
    assert tree.run()[0] == (0, 1, 0)


def test_no_test_at_all_is_a_failure(tree):
    assert tree.run()[0] == (0, 1, 0)


def test_results_of_an_earlier_run_do_not_count(tree):
    tree.results("test_a", PASS)
    assert tree.run()[0] == (1, 0, 0)
    tree.cmocka("test_a", "exit 0")
    assert tree.run()[0] == (0, 1, 0)


def test_two_groups_in_one_file_both_count(tree):
    both = XML.format(PASS) + "\n" + XML.format(FAIL)
    tree.cmocka("test_a", f'cat >"${{CMOCKA_XML_FILE%/*}}/a.xml" <<"END"\n{both}\nEND\nexit 1\n')
    assert tree.run()[0] == (1, 1, 0)


def test_out_of_time(tree):
    tree.cmocka("test_a", "sleep 1000")
    counts, output = tree.run("--timeout", "0.5")
    assert counts == (0, 1, 0)
    assert "ran out of time" in output


def test_skips_are_counted_and_explained(tree):
    tree.cmocka("test_gpu", "echo 'SKIP: no GPU here'; exit 77")
    tree.results("test_b", PASS, SKIP, before="echo 'SKIP: not on a Sunday'")
    counts, output = tree.run()
    assert counts == (1, 0, 2)
    assert "test_gpu: no GPU here" in output and "test_b left: not on a Sunday" in output


def test_required_gpu_turns_its_skips_into_failures(tree):
    tree.cmocka("test_gpu", "echo 'SKIP: no GPU here'; exit 77")
    tree.results("test_cuda_parity", PASS, SKIP)
    tree.results("test_b", SKIP)
    assert tree.run(CKD_REQUIRE_GPU="1")[0] == (1, 2, 1)


def test_77_failures_are_not_a_skip(tree):
    tree.results("test_a", *[FAIL] * 77, status=77)
    assert tree.run()[0] == (0, 77, 0)


def test_scripts_and_replays_are_one_test_each(tree):
    for folder in ("tools", "fuzz"):
        (tree.root / "tests" / folder).mkdir()
    for name, status in (("check_a.sh", 0), ("tools/check_b.sh", 1), ("tools/check_c.sh", 77)):
        program(tree.root / "tests", name, f"exit {status}")
    (tree.root / "tests" / "fuzz" / "fuzz_x.c").touch()
    (tree.root / "tests" / "corpus" / "x").mkdir(parents=True)
    program(tree.root / "build" / "tests", "fuzz_x", f'[ "$*" = "{tree.root}/tests/corpus/x" ]')
    assert tree.run()[0] == (2, 1, 1)


def test_pytest_files(tree):
    (tree.root / "tests" / "cli").mkdir()
    (tree.root / "tests" / "test_a.py").write_text("import pytest\ndef test_good(): pass\n"
                                                   "def test_left(): pytest.skip('why')\n")
    (tree.root / "tests" / "cli" / "test_b.py").write_text("def test_bad(): assert 0\n")
    (tree.root / "tests" / "cli" / "test_c.py").write_text("import no_such_module\n")
    (tree.root / "tests" / "cli" / "test_d.py").write_text("x = 1\n")
    assert tree.run()[0] == (1, 3, 1)
    assert tree.run("--pytest-args=-k good", "--only", "a")[0] == (1, 0, 0)


def test_a_pytest_file_may_skip_itself(tree):
    (tree.root / "tests" / "test_a.py").write_text("import pytest\npytest.importorskip('nowhere', reason='no nowhere')\n"
                                                   "def test_left(): pass\n")
    counts, out = tree.run()
    assert counts == (0, 0, 1) and "no nowhere" in out
    (tree.root / "tests" / "test_a.py").write_text("")
    assert tree.run()[0] == (0, 1, 0)


def test_a_name_is_unique(tree):
    for folder in ("a", "b"):
        (tree.root / "tests" / folder).mkdir()
        (tree.root / "tests" / folder / "test_x.c").touch()
    done = subprocess.run([sys.executable, RUNNER, "--root", tree.root, "--build", tree.root / "build"], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert done.returncode == 1 and "several tests have the name test_x" in done.stdout


def test_only_matching_tests_run(tree):
    tree.results("test_chunk", PASS)
    tree.results("test_chain", FAIL, status=1)
    assert tree.run("--only", "chu*")[0] == (1, 0, 0)
    assert tree.run("--only", "nothing")[0] == (0, 1, 0)


def test_the_longest_is_first(tree):
    for name in ("test_a", "test_b", "test_c"):
        tree.results(name, PASS, before=f'echo {name} >>"$PWD/order"')
    (tree.root / "tests" / "times.txt").write_text("2 1 test_b\n3 1 test_c\n")
    tree.run("--jobs", "1")
    assert (tree.root / "order").read_text().split() == ["test_c", "test_b", "test_a"]
    times = tree.root / "build" / "results" / "times.json"
    known = json.loads(times.read_text())
    assert set(known["full"]) == {"test_a", "test_b", "test_c"}
    # the times of the other level do not count
    times.write_text(json.dumps({"full": {"test_b": 9.0}, "quick": {"test_a": 99.0}}))
    (tree.root / "order").unlink()
    tree.run("--jobs", "1")
    assert (tree.root / "order").read_text().split() == ["test_b", "test_c", "test_a"]
    assert json.loads(times.read_text())["quick"] == {"test_a": 99.0}


def test_those_that_wait_run_beside_the_others(tree):
    for name, other in (("test_a", "b"), ("test_b", "a")):
        tree.results(name, PASS, before=f'touch "$PWD/{name[-1]}"; for i in $(seq 200); do [ -e "$PWD/{other}" ] && break; sleep .05; done; '
                                        f'[ -e "$PWD/{other}" ] || exit 1')
    (tree.root / "tests" / "times.txt").write_text("2 1 test_b\n3 1 test_a waits\n")
    assert tree.run("--jobs", "1")[0] == (2, 0, 0)


def test_a_budget_leaves_tests_out(tree):
    names = [f"test_{n}" for n in "abcdefgh"]
    for name in names + ["test_short", "test_unknown"]:
        tree.results(name, PASS)
    (tree.root / "tests" / "times.txt").write_text("".join(f"9 5 {n}\n" for n in names) + "9 1 test_short waits\n")

    def runs(seed, *args):
        counts, output = tree.run("--budget", "18", *args, CKD_SWEEP_SEED=seed)
        passed = {name for name in names + ["test_short", "test_unknown"] if f"ok    {name} " in output}
        assert counts == (len(passed), 0, 10 - len(passed))
        left_out = output.partition("Left out, ")[2].split("\n\n")[0].split()
        assert sorted(n for n in names if n not in passed) == [n for n in left_out if n in names]
        return passed

    drawn = [runs(str(seed)) for seed in range(6)]
    assert all({"test_short", "test_unknown"} < d and len(d) == 5 for d in drawn)  # 1 + 1.5 + 3 * 5 <= 18 s
    assert drawn[0] == runs("0") and len(set(map(frozenset, drawn))) > 1
    assert len(runs("0", "--san", "address")) == 3  # one of them takes twice the time there
    assert tree.run("--budget", "0")[0] == (10, 0, 0)


def test_a_budget_goes_to_what_was_changed(tree):
    for name in ("test_elsewhere", "test_name_again"):
        tree.results(name, PASS)
    (tree.root / "tests" / "other").mkdir()
    tree.results("test_room", PASS)
    (tree.root / "tests" / "room" / "part" / "test_room.c").rename(tree.root / "tests" / "other" / "test_mine.c")
    (tree.root / "build" / "tests" / "test_room").rename(tree.root / "build" / "tests" / "test_mine")
    (tree.root / "tests" / "times.txt").write_text("9 5 test_elsewhere\n9 5 test_name_again\n9 5 test_mine\n")
    (tree.root / ".gitignore").write_text("build/\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *words], cwd=tree.root, check=True)

    def runs(path):
        (tree.root / path).parent.mkdir(parents=True, exist_ok=True)
        (tree.root / path).touch()
        outputs = [tree.run("--budget", "6", CKD_SWEEP_SEED=str(seed))[1] for seed in range(8)]
        (tree.root / path).unlink()
        return {name for name in ("test_elsewhere", "test_name_again", "test_mine") for o in outputs if f"ok    {name} " in o}

    assert runs("other/x.c") == {"test_mine"}  # its folder
    assert runs("tools/name.c") == {"test_name_again"}  # its name
    assert runs("tests/other/y.h") == runs("z.c") == {"test_elsewhere", "test_name_again", "test_mine"}  # of no test


def test_level(tree):
    shutil.copy(RUNNER.parent / "conftest.py", tree.root / "tests")
    (tree.root / "tests" / "test_p.py").write_text("import pytest\n@pytest.mark.sampled(3)\n@pytest.mark.parametrize('i', range(9))\n"
                                                   "def test_some(i): open('cases', 'a').write(f'{i} ')\ndef test_all(): pass\n"
                                                   "@pytest.mark.sampled(6, full=2)\n@pytest.mark.parametrize('i', range(6))\n"
                                                   "def test_half(i): open('halves', 'a').write(f'{i} ')\n")
    program(tree.root / "tests", "check_a.sh", 'echo "$CKD_TEST_LEVEL" >"$PWD/level"')
    cases, halves = tree.root / "cases", tree.root / "halves"
    for level, seed, passed in (("full", "1", 14), ("full", "2", 14), ("big", "1", 17)):
        assert tree.run("--level", level, CKD_SWEEP_SEED=seed, CKD_FULL_EVERY="")[0] == (passed, 0, 0)
        assert (tree.root / "level").read_text() == f"{level}\n"
    assert sorted(halves.read_text().split()) == sorted(2 * "012345")  # the two halves, and all
    drawn = []
    for seed in "123":
        cases.unlink()
        assert tree.run("--level", "quick", CKD_SWEEP_SEED=seed)[0] == (6, 0, 0)
        drawn += cases.read_text().split()
    assert (tree.root / "level").read_text() == "quick\n"
    assert sorted(drawn) == list("012345678")  # other seeds draw other cases
    cases.unlink()
    for seed in "12":
        tree.run("--level", "full", CKD_SWEEP_SEED=seed, CKD_FULL_EVERY="2")
    assert sorted(cases.read_text().split()) == list("012345678")


def test_seed_of_sweeps(tree):
    program(tree.root / "tests", "check_a.sh", 'echo "$CKD_SWEEP_SEED" >>"$PWD/seeds"')
    env = {"GIT_CEILING_DIRECTORIES": str(tree.root.parent), "CKD_SWEEP_SEED": ""}
    assert "CKD_SWEEP_SEED=1\n" in tree.run(**env)[1]  # there is no repository
    assert "CKD_SWEEP_SEED=77\n" in tree.run(**{**env, "CKD_SWEEP_SEED": "77"})[1]
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], cwd=tree.root, check=True)
    for _ in range(2):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "m", "--date", "now"], cwd=tree.root, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree.root, stdout=subprocess.PIPE, text=True, check=True).stdout
        assert f"CKD_SWEEP_SEED={int(head[:8], 16)}\n" in tree.run(**env)[1]
    assert len(set((tree.root / "seeds").read_text().split())) == 4


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm")
def test_memory_or_disk(tree):
    about = os.statvfs("/dev/shm")
    if about.f_flag & os.ST_NOEXEC or about.f_bavail * about.f_frsize < 2 << 30:
        pytest.skip("/dev/shm is too small, or runs no programs")
    for name in ("test_a", "test_base_file"):
        tree.results(name, PASS, before=f'echo "$TMPDIR" >"$PWD/{name}"')
    where = lambda name: (tree.root / name).read_text()  # noqa: E731
    assert tree.run(TMPDIR="")[0] == (2, 0, 0)
    assert where("test_a").startswith("/dev/shm/") and not where("test_base_file").startswith("/dev/shm/")
    (tree.root / "own").mkdir()
    assert tree.run(TMPDIR=str(tree.root / "own"))[0] == (2, 0, 0)
    assert where("test_a").startswith(f"{tree.root}/own/") and where("test_base_file").startswith(f"{tree.root}/own/")


def test_environment_and_temporary_folder(tree):
    program(tree.root / "tests", "check_a.sh",
            '[ "$CKPTDELTA" = "$CKPTDELTA_BUILD/ckptdelta" ] && [ -d "$TMPDIR" ] && [ "$PWD" = '
            f'"{tree.root}" ] && echo "$TMPDIR" >"{tree.root}/where" && touch "$TMPDIR/left"')
    assert tree.run()[0] == (1, 0, 0)
    assert not os.path.exists((tree.root / "where").read_text().strip())
