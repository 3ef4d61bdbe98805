"""Manual pages and shell completions, which are made from the help text; and `complete`, which lists names in
a store."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support_cli import COMMAND, CORRUPT, NOT_FOUND, USAGE, run, state, store  # noqa: F401

BUILD = Path(os.environ.get("CKPTDELTA_BUILD") or Path(__file__).resolve().parents[3] / "build/current")
MAN = BUILD / "man"


def commands():
    listed = run("help").out.split("Commands:\n")[1].split("\n\n")[0]
    return [line.split()[0] for line in listed.splitlines() if line.split()[0] != "help"]


def help_of(command):
    """The help of a command, without line breaks in paragraphs."""
    return run("help", command, env=dict(os.environ, ARGP_HELP_FMT="rmargin=30000")).out


def options_of(command):
    text = re.split("\nExamples?:\n", help_of(command))[0]
    return re.findall(r"^ {2,6}(?:-., )?(--[a-z-]+)", text, re.MULTILINE)


@pytest.fixture
def filled(store):  # noqa: F811
    store.save(1, state(1, 1))
    store.save(2, state(1, 2))
    store.save(30, state(2, 1), run_name="tuned~2.x")
    store.call("tag", "best", "a@2")
    return store


# --------------------------------------------------------------------------------------------------------- complete

@pytest.mark.parametrize("args, names", [
    (["runs"], ["a", "tuned~2.x"]),
    (["steps"], ["1", "2", "30"]),
    (["steps", "--run", "a"], ["1", "2"]),
    (["checkpoints"], ["a@1", "a@2", "tuned~2.x@30", "@best"]),
    (["checkpoints", "--run=a"], ["a@1", "a@2", "@best"]),
    (["tags"], ["best"]),
    (["steps", "--run", "nobody"], []),
])
def test_names_of_a_store(filled, args, names):
    assert filled.call("complete", *args).out.splitlines() == names


def test_complete_hides_errors(filled, tmp_path):
    def silent(*args):
        done = subprocess.run([COMMAND, "complete", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert (done.stdout, done.stderr) == (b"", b"")
        return done.returncode
    assert silent(tmp_path / "nothing", "runs") == NOT_FOUND
    (tmp_path / "folder").mkdir()
    assert silent(tmp_path / "folder", "tags") == NOT_FOUND
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == []
    for path in filled.path.glob("data/**/*"):  # one intact manifest would tell the store's id
        if path.is_file():
            path.write_bytes(b"damaged")
    assert silent(filled.path, "runs") == CORRUPT


@pytest.mark.parametrize("args", [[], ["s"], ["s", "everything"], ["s", "runs", "more"]])
def test_complete_refuses_wrong_arguments(args):
    run("complete", *args, expect=USAGE)


def test_complete_is_not_listed():
    assert "complete" not in commands()
    assert run("help", "complete").out.startswith("Usage: ckptdelta complete ")


# ----------------------------------------------------------------------------------------------------- manual pages

def plain(page):
    """The text of a page without roff commands."""
    text = re.sub(r"\\f[A-Z]", "", page)
    for escape, char in {r"\-": "-", r"\(aq": "'", r"\(ga": "`", r"\(dq": '"', r"\(ha": "^", r"\(ti": "~", r"\e": "\\",
                         r"\&": ""}.items():
        text = text.replace(escape, char)
    return text


def test_each_command_has_a_page():
    assert sorted(p.name for p in MAN.glob("*.1")) == sorted(["ckptdelta.1"] + [f"ckptdelta-{c}.1" for c in commands()])
    main = plain((MAN / "ckptdelta.1").read_text())
    for command in commands():
        assert f".BR ckptdelta-{command} (1)" in main


def test_pages_have_the_text_of_the_help():
    for command in commands():
        text, examples = re.split("\nExamples?:\n", help_of(command))
        page = plain((MAN / f"ckptdelta-{command}.1").read_text())
        heads = page.split('.SH "OPTIONS"')[1].split("\n.SH")[0].split(".TP\n")[1:]
        # An option in the help, "-q, --quiet", and its description.
        of_help = re.findall(r"^ {2,6}(-[^ \n]+(?: --[^ \n]+)?)(?: {2,}|\n {20,})([^ ].*)$", text, re.MULTILINE)
        assert [tuple(h.split("\n")[:2]) for h in heads] == of_help, command
        assert len(of_help) >= 5
        # Lines that are not prose are unchanged: examples, and lines below the options.
        others = re.findall(r"^  (.*)$", text.split("Print program version")[-1], re.MULTILINE)
        assert others or command != "import"
        for line in others + [line[2:] for line in examples.splitlines()]:
            assert "\n" + line + "\n" in page
        description = text.split("\n")[1:]
        assert "\n" + description[0] + "\n" in page
        usage = text.split("\n")[0].split(f"ckptdelta {command} ")[1]
        assert f".B ckptdelta {command}\n{usage}\n" in page


def test_pages_render():
    """If groff is installed, it reports no problems. In any case each page has all sections."""
    for page in sorted(MAN.glob("*.1")):
        text = page.read_text()
        for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "EXAMPLES", "EXIT STATUS", "SEE ALSO"):
            assert text.count(f'\n.SH "{section}"\n') == 1, page
        # roff prints a plain - as a hyphen, which cannot be pasted into a command line.
        assert page.name == "ckptdelta.1" or "\n\\fB\\-?\\fR, \\fB\\-\\-help\\fR\n" in text
        assert max(map(ord, text)) < 128 and 1 <= text.count(".nf") == text.count(".fi")
        if shutil.which("groff"):
            done = subprocess.run(["groff", "-ww", "-man", "-Tutf8", "-P-cbou", str(page)], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, env=dict(os.environ, LC_ALL="C.UTF-8"))
            assert (done.returncode, done.stderr) == (0, ""), page
            assert "\nEXIT STATUS\n" in done.stdout


# ------------------------------------------------------------------------------------------------------ completions

BASH = """
source "$1"
COMP_LINE=$2
COMP_POINT=${#COMP_LINE}
_ckptdelta
printf '%s\\n' "${COMPREPLY[@]}"
"""


def bash(line, cwd, **environment):
    """What bash offers at the end of a line. Errors must not be printed."""
    done = subprocess.run(["bash", "--norc", "-c", BASH, "bash", str(BUILD / "completions/ckptdelta.bash"),
                           line.replace("ckptdelta", COMMAND, 1)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=dict(os.environ, HOME=str(cwd), **environment))
    assert done.stderr == "" and done.returncode == 0, done.stderr
    return [line for line in done.stdout.split("\n") if line]


@pytest.mark.parametrize("line, offered", [
    ("ckptdelta pu", ["publish", "push", "pull"]),
    ("ckptdelta help exp", ["export"]),
    ("ckptdelta prune store --keep-l", ["--keep-last"]),
    ("ckptdelta show store --run ", ["a", "tuned~2.x"]),
    ("ckptdelta show store --run=t", ["tuned~2.x"]),
    ("ckptdelta show store --run t", ["tuned~2.x"]),
    ("ckptdelta show store --step ", ["latest", "1", "2", "30"]),
    ("ckptdelta show store --run a --step ", ["latest", "1", "2"]),
    ("ckptdelta show --run=a store --step=", ["latest", "1", "2"]),
    ("ckptdelta load ~/store --tag ", ["best"]),
    ("ckptdelta delete store ", ["a@1", "a@2", "tuned~2.x@30", "@best"]),
    ("ckptdelta delete store a@1 tuned", ["tuned~2.x@30"]),
    # bash splits the word here, and adds the offered text after it
    ("ckptdelta delete store a@", ["1", "2"]),
    ("ckptdelta delete store @b", ["best"]),
    ("ckptdelta compact store ", ["a", "tuned~2.x"]),
    ("ckptdelta tag store best ", ["a@1", "a@2", "tuned~2.x@30", "@best", "best"]),
    ("ckptdelta list st", ["store"]),
    ("ckptdelta load store --out in2.", ["in2.safetensors"]),
    ("ckptdelta list nowhere --run ", []),
    ("ckptdelta load store --threads ", []),
    ("ckptdelta nonsense store --", []),
])
def test_bash(filled, line, offered):
    assert bash(line, filled.folder) == offered


def test_bash_offers_all_options(filled):
    for command in commands():
        assert bash(f"ckptdelta {command} store -", filled.folder) == options_of(command)
    aliases = re.findall(r"(\w+) for \w+", "".join(re.findall("^Aliases: .*", run("help").out, re.MULTILINE)))
    assert bash("ckptdelta ", filled.folder) == ["help", *commands(), *aliases, "--help", "--version"]


def test_bash_takes_the_store_of_the_environment(filled):
    assert bash("ckptdelta delete a@", filled.folder, CKPTDELTA_STORE="store") == ["1", "2"]
    assert bash("ckptdelta show --run t", filled.folder, CKPTDELTA_STORE=str(filled.path)) == ["tuned~2.x"]


def test_zsh_and_fish_read_their_scripts():
    """The scripts have everything that their tables should have. If the shells are installed, they can read
    them."""
    for shell, name in (("zsh", "_ckptdelta"), ("fish", "ckptdelta.fish")):
        script = BUILD / "completions" / name
        text = script.read_text()
        assert "@TABLES@" not in text
        for command in commands():
            for option in options_of(command):
                if shell == "fish":
                    assert re.search(rf"'__fish_seen_subcommand_from {command}\b[^']*' -l {option[2:]}\b", text)
                else:
                    assert f"'{option}:" in text.split(f"\n        {command})\n")[1].split(";;")[0]
        if shutil.which(shell):
            done = subprocess.run([shell, "-n", str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert (done.returncode, done.stdout) == (0, "")


def test_fish(filled):
    """test_bash tests the commands that it calls. If fish is installed, the script itself is tested, too."""
    script = (BUILD / "completions/ckptdelta.fish").read_text()
    for kind in ("runs", "steps", "tags", "checkpoints"):
        assert f"(__ckptdelta_names {kind})" in script
    if not shutil.which("fish"):
        return

    def fish(line):
        done = subprocess.run(["fish", "--no-config", "-c", f"source {BUILD}/completions/ckptdelta.fish; complete -C '{line}'"],
                              cwd=filled.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=dict(os.environ, PATH=f"{BUILD}:{os.environ['PATH']}", HOME=str(filled.folder)))
        assert done.stderr == ""
        return [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert fish("ckptdelta pus") == ["push"]
    assert fish("ckptdelta show store --run ") == ["a", "tuned~2.x"]
    assert sorted(fish("ckptdelta show store --run=a --step ")) == ["1", "2", "latest"]
    assert fish("ckptdelta delete store tun") == ["tuned~2.x@30"]
    assert fish("ckptdelta load nowhere --tag ") == []
