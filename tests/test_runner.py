"""tests/run.py calls nothing passed that did not: crashes, missing or damaged results, time, skips, leftovers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).resolve().parent / "run.py"
XML = "<?xml version='1.0'?><testsuites><testsuite name='a'>{}</testsuite></testsuites>"
PASS, FAIL = "<testcase name='good'/>", "<testcase name='bad'><failure><![CDATA[why it failed]]></failure></testcase>"
SKIP = "<testcase name='left'><skipped/></testcase>"


def program(folder, name, script):
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)


@pytest.fixture
def tree(tmp_path):
    """Adds programs and scripts to a small tree, runs the runner on it."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "build" / "tests").mkdir(parents=True)

    class Tree:
        root = tmp_path

        def cmocka(self, name, script):
            (tmp_path / "tests" / f"{name}.c").touch()
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
    "printf '<testsuites></testsuites>' >${CMOCKA_XML_FILE%/*}/a.xml",  # no test in it
])
def test_bad_results_are_failures(tree, script):
    tree.cmocka("test_a", script)
    assert tree.run()[0] == (0, 1, 0)


@pytest.mark.parametrize("end", ["exit 3", "kill -ABRT $$"])
def test_bad_end_after_good_results_is_a_failure(tree, end):
    tree.results("test_a", PASS, status=f"0 & wait $!; {end}")
    assert tree.run()[0] == (1, 1, 0)


def test_program_that_is_absent_is_a_failure(tree):
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


def test_77_failures_are_no_skip(tree):
    tree.results("test_a", *[FAIL] * 77, status=77)
    assert tree.run()[0] == (0, 77, 0)


def test_scripts_and_replays_are_one_test_each(tree):
    for name, status in (("check_a.sh", 0), ("check_b.sh", 1), ("check_c.sh", 77)):
        program(tree.root / "tests", name, f"exit {status}")
    (tree.root / "tests" / "fuzz_x.c").touch()
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


def test_only_what_matches(tree):
    tree.results("test_chunk", PASS)
    tree.results("test_chain", FAIL, status=1)
    assert tree.run("--only", "chu*")[0] == (1, 0, 0)
    assert tree.run("--only", "nothing")[0] == (0, 1, 0)


def test_environment_and_temporary_folder(tree):
    program(tree.root / "tests", "check_a.sh",
            '[ "$CKPTDELTA" = "$CKPTDELTA_BUILD/ckptdelta" ] && [ -d "$TMPDIR" ] && [ "$PWD" = '
            f'"{tree.root}" ] && echo "$TMPDIR" >"{tree.root}/where" && touch "$TMPDIR/left"')
    assert tree.run()[0] == (1, 0, 0)
    assert not os.path.exists((tree.root / "where").read_text().strip())
