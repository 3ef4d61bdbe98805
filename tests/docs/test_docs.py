"""What the documents say, as far as a program can check it: links, and the commands of README."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import support_safetensors as st
from support_cli import run, state

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(p for p in ROOT.glob("**/*.md") if "build" not in p.relative_to(ROOT).parts)


def anchors(document):
    """Those of headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    text = re.sub(r"^(    [^\n]*|```.*?^```)$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_is_short_and_names_all_documents():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100, "reference belongs into docs/"
    for document in [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]:
        name = str(document.relative_to(ROOT))
        assert name == "README.md" or f"]({name})" in text, name


def test_decisions_are_listed_and_named_by_their_rooms():
    listed = re.findall(r"^- \[(.*)\]\(\.\./(.*)/DECISIONS\.md#.*\)$", (ROOT / "docs/decisions.md").read_text(), re.MULTILINE)
    there = []
    for document in (d for d in DOCUMENTS if d.name == "DECISIONS.md"):
        folder = document.parent
        there += [(heading, str(folder.relative_to(ROOT))) for heading in re.findall(r"^## (.*)$", document.read_text(), re.MULTILINE)]
        readme = folder / "README.md"
        assert not readme.exists() or "](DECISIONS.md)" in readme.read_text(), folder
    assert sorted(listed) == sorted(there)


def test_the_commands_of_the_readme_work(tmp_path):
    """Word by word; the files are ours."""
    for age, step in enumerate((1000, 1050, 1100)):
        tensors = state(1, age + 1)
        st.write(tmp_path / f"step{step}.safetensors", {f"blocks.{i}.{name}": tensors[name] for i, name in enumerate(tensors)})
    lines = re.findall(r"^    (ckptdelta .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        words = shlex.split(line, comments=True)
        near = "near" in words
        run(*words[1:], cwd=tmp_path, **({"expect_message": ""} if near else {}))
    assert (tmp_path / "report.html").stat().st_size > 1000
    listed = run("list", tmp_path / "ckpts", "--json").json()["checkpoints"]
    assert [c["fidelity"] for c in listed][-1] == "near"


def test_the_figures_of_the_readme_are_those_of_the_benchmark(tmp_path):
    picture = tmp_path / "peers.svg"
    table = subprocess.run([sys.executable, ROOT / "bench/python/peers_picture.py", "--svg", picture], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert table.count("\n") >= 7 and table in (ROOT / "README.md").read_text()
    assert picture.read_text() == (ROOT / "docs/pictures/peers.svg").read_text()


SUFFIXES = {".c", ".h", ".cu", ".py", ".sh", ".awk"}
OTHER_HEADERS = {"cmocka.h", "xxhash.h"}
SOURCE_NAME = re.compile(r"(?<![\w/.*-])((?:\w+/)*\w+\.(?:c|h|cu|py|sh|awk))\b")
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def test_files_that_comments_name_are_there():
    """A comment that names a source file, by its path or its last folders, names one that exists."""
    sources = [p.relative_to(ROOT) for p in ROOT.glob("**/*.*") if p.suffix in SUFFIXES and "build" not in p.relative_to(ROOT).parts]
    known = {"/".join(path.parts[i:]) for path in sources for i in range(len(path.parts))}
    stale = {(str(path), name) for path in sources if path.suffix in (".c", ".h", ".cu")
             for comment in COMMENT.findall((ROOT / path).read_text())
             for name in SOURCE_NAME.findall(comment) if name not in known | OTHER_HEADERS and "NAME" not in name}
    assert len(sources) > 500 and not stale


def test_comments_begin_with_their_subject():
    """No sentence of a comment is a riddle that begins with a relative clause, or with what something is of."""
    riddles, sentences = [], 0
    for path in (p for folder in ("include", "base", "objects", "codec", "catalog", "kernels", "engine", "peers", "agent", "supervise", "mpi", "cli")
                 for p in (ROOT / folder).rglob("*") if p.suffix in (".c", ".h", ".cu")):
        for comment in re.findall(r"/\*(.*?)\*/", path.read_text(), re.DOTALL):
            text = re.sub(r"\n\s*\*? ?", " ", comment).strip()
            for sentence in re.split(r"(?<=[.!?:])\s+", text):
                sentences += 1
                if re.match(r"(What|Who|Whoever|Whom|Of|Those (of|that|who)|The same of)\b", sentence):
                    riddles.append(f"{path.relative_to(ROOT)}: {sentence}")
    assert sentences > 10000 and not riddles


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_functions_are_there(document):
    """`file.c: function` in a document: the function stands in that file of its folder, of engine/, or of the root."""
    text = re.sub(r"\s+", " ", document.read_text())
    for path, name in re.findall(r"`([\w/]+\.(?:c|h|py|cu)): (\w+)`", text):
        files = [f for f in (document.parent / path, ROOT / "engine" / path, ROOT / path) if f.is_file()]
        assert files, path
        assert any(re.search(rf"\b{name}\b", f.read_text()) for f in files), f"{path}: {name}"
    for path in re.findall(r"`([a-z_]+/[\w/]+\.(?:c|h|py|sh|cu|mk))`", text):
        assert any((f / path).is_file() for f in (document.parent, ROOT / "engine", ROOT)) or "NAME" in path, path


WALKS = [ROOT / "docs" / name for name in ("ARCHITECTURE.md", "walks.md", "where.md")]
PAGES = [ROOT / "CONTRIBUTING.md", *WALKS, *sorted(ROOT.glob("*/*/README.md")), *sorted(ROOT.glob("*/README.md"))]


def test_identifiers_of_the_guides_are_there():
    """An identifier like `this_one` in the guides and in the READMEs of folders is in a source file, or is its name."""
    sources = [p for p in ROOT.glob("**/*") if p.is_file() and "build" not in p.relative_to(ROOT).parts
               and (p.suffix in SUFFIXES | {".mk", ".sql", ".map"} or p.name == "Makefile")]
    known = set().union(*(re.findall(r"\w+", p.read_text()) for p in sources if p != Path(__file__))) | {p.stem for p in sources}
    named = {(str(page.relative_to(ROOT)), name) for page in PAGES for name in re.findall(r"`([a-z]\w*_\w+)(?:\(\))?`", page.read_text())}
    assert len(named) > 300 and not {(page, name) for page, name in named if name not in known}


def test_architecture_is_one_page_whose_steps_name_functions():
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 110, "the walks in full belong into docs/walks.md, questions into docs/where.md"
    assert text.index("](where.md)") < text.index("## ") and "](walks.md)" in text
    steps = re.findall(r"^ ?\d+\. .*$", text, re.MULTILINE)
    assert len(steps) >= 20 and not [s for s in steps if not re.search(r"`[\w/]+\.c: \w+`$", s)]


@pytest.mark.parametrize("document", WALKS, ids=lambda p: p.name)
def test_walks_name_functions_of_files_named_with_them(document):
    """A word in backquotes, like `begin`, is in one of the files that its paragraph or its section names before."""
    for section in re.split(r"^## |^- \*\*", document.read_text(), flags=re.MULTILINE)[1:]:
        words = " ".join(re.findall(r"`([^`]*)`", re.sub(r"\s+", " ", section)))
        paths = [f / path for path in re.findall(r"[\w/]+\.(?:c|h|cu)\b", words) for f in (ROOT / "engine", ROOT)]
        text = "\n".join(f.read_text() for f in paths if f.is_file())
        missing = {name for name in re.findall(r"`([a-z]\w*)`", section) if not re.search(rf"\b{name}\b", text)}
        assert not missing, section


def test_rooms_are_those_that_are_enforced():
    sys.path.insert(0, str(ROOT / "scripts"))
    import check_layers
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| ([\w, ]*?) ?\|$", (ROOT / "docs/ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert {room: set(uses.replace(",", " ").split()) for room, uses in rows} == check_layers.ROOMS["engine"]
    order = [room for room, _ in rows]
    assert all(order.index(used) > order.index(room) for room, uses in rows for used in uses.replace(",", " ").split())


def test_folders_of_the_library_say_what_they_are_for():
    """The README of each folder of the library, and of each room, says what it is for, and names only files that it has."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import check_layers
    folders = sorted({*check_layers.LIBRARY, "cli", "supervise", "mpi", *(f"{f}/{r}" for f, rooms in check_layers.ROOMS.items() for r in rooms)})
    assert len(folders) > 30
    for folder in folders:
        page = ROOT / folder / "README.md"
        assert page.is_file(), f"{folder}/ has no README.md"
        text = page.read_text()
        assert text.startswith(f"# {folder}\n") and 10 <= len(text.splitlines()) <= 30, folder
        for name in re.findall(r"`([\w.]+\.(?:c|h|sql))`", text):
            assert any((ROOT / f / name).is_file() for f in (folder, "include", ".")), f"{page}: {name}"


# What the excerpts take for granted. MPI itself is not needed to see whether they fit the headers.
AROUND = """
#include <ckptdelta.h>
#include <stdio.h>
#define MPI_COMM_WORLD 0
ckd_status ckd_mpi_load_all(ckd_load *, int, const ckd_load_request *, size_t, uint32_t, ckd_error *);
int complain(const ckd_error *);
void forward_and_backward(void), optimizer_step(void);
extern float *weights, *my_half, *my_rows, *device_pointer;
extern void *stream;
extern uint64_t steps, rng, rank;
extern const char *launch_id;
extern ckd_session *session;
"""
LIBRARY = AROUND + """
extern ckd_error err;
extern ckd_store *store;
extern ckd_tensor tensor;
extern ckd_save_options options;
extern ckd_load *load;
extern ckd_load_request weight_request, moment_request;
"""
README = AROUND + """
extern ckd_error err;
extern ckd_session_options options;
extern ckd_checkpoint from;
extern ckd_tensor tensor;
"""


@pytest.mark.parametrize("document, around", [("README.md", README), ("docs/library.md", LIBRARY)], ids=["README", "library"])
def test_c_of_the_documents_compiles(tmp_path, document, around):
    """Each piece by itself, so that one may use names that another has used otherwise."""
    pieces = re.findall(r"^```c\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    assert pieces
    for i, piece in enumerate(pieces):
        source = tmp_path / f"piece{i}.c"
        source.write_text(around + "int piece(void) {\n" + piece.replace("#include <ckptdelta.h>", "") + "return 0;\n}\n")
        done = subprocess.run([*shlex.split(os.environ.get("CC", "gcc")), "-std=gnu11", "-fsyntax-only", "-Wall", "-Werror",
                               "-Wno-unused", f"-I{ROOT}/include", str(source)],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, f"{document}:\n{piece}\n{done.stdout}"
