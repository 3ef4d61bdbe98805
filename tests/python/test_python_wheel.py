"""The wheel has all that it needs: it works where there are no compiler, no make and no checkout."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from support_python import BUILD, ROOT, needs_package

pytestmark = [needs_package, pytest.mark.skipif(not (importlib.util.find_spec("setuptools") and importlib.util.find_spec("wheel")),
                                                reason="no setuptools and wheel here (Debian: python3-setuptools, python3-wheel)")]
SCRIPT = """
import sys, numpy, ckptdelta
with ckptdelta.open(sys.argv[1]) as store:
    store.save({"w": numpy.arange(1000.0), "n": {1, 2}}, run="a", step=1)
    assert store.state_dict()["n"] == {1, 2} and store.verify()
print(ckptdelta.__version__, ckptdelta.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([sys.executable, "-W", "ignore", "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder)], cwd=ROOT / "python",
                          env={**os.environ, "CKPTDELTA_BUILD": str(BUILD)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    found, = folder.glob("*.whl")
    return found


def test_one_wheel_is_for_every_python_from_3_10_on(wheel):
    name = wheel.name.split("-")
    assert name[0] == "ckptdelta" and name[2:4] == ["cp310", "abi3"] and name[4].startswith("linux_")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("_native.abi3.so", "bin/ckptdelta", "py.typed", "_native.pyi", "notices.txt", "_store.py"):
        assert f"ckptdelta/{wanted}" in names
    text = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert "Requires-Python: >=3.10" in text and "Requires-Dist: cffi" in text and "Requires-Dist: numpy ;" not in text.replace('; extra', '')


def is_the_page_for_users(metadata):
    """The description of a package: DESCRIPTION.md, and no link that leads nowhere outside a checkout."""
    page = (ROOT / "python/DESCRIPTION.md").read_text()
    head, _, body = metadata.partition("\n\n")
    return "Description-Content-Type: text/markdown" in head and body.strip() == page.strip() and "](" not in page


def test_the_description_is_for_users(wheel, unpacked):
    """Installing, plain use, Session, DCP, Trainers."""
    with zipfile.ZipFile(wheel) as files:
        text = files.read(next(n for n in files.namelist() if n.endswith("METADATA"))).decode()
    assert is_the_page_for_users(text) and is_the_page_for_users((unpacked / "PKG-INFO").read_text())
    assert all(word in text for word in ("pip install", "store.save(", "Session(", "StorageWriter(", "Trainer(", "help(ckptdelta.Store)"))


def test_it_works_without_a_compiler_and_a_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    os.chmod(site / "ckptdelta/bin/ckptdelta", 0o755)  # as pip does
    env = {"PATH": "/nonexistent", "PYTHONPATH": str(site), "LC_ALL": "C.UTF-8"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "store")], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    version, file = done.stdout.split()
    assert file.startswith(str(site))
    command = [sys.executable, "-m", "ckptdelta"]
    assert subprocess.run([*command, "--version"], env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.split() == ["ckptdelta", version]
    assert "a" in subprocess.run([*command, "list", str(tmp_path / "store")], env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A source distribution, in a folder far from the checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    done = subprocess.run([sys.executable, "-W", "ignore", "setup.py", "-q", "sdist", "--dist-dir", str(folder)], cwd=ROOT / "python",
                          env={**os.environ, "CKPTDELTA_BUILD": str(BUILD)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    archive, = folder.glob("ckptdelta-*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


def alone(command, folder, **variables):
    """Runs it without the variables of the make around the tests, and without a build that there is already."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "CKPTDELTA"))} | variables
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_source_distribution_has_all_sources(unpacked):
    """Those of the package, and those that make needs: it plans the whole build with them."""
    package = {path.name for path in (ROOT / "python/src/ckptdelta").iterdir() if path.is_file()}
    assert {path.name for path in (unpacked / "src/ckptdelta").iterdir()} == package
    folders = [ROOT / name for name in ("base", "catalog", "codec", "engine", "include", "kernels")]
    headers = {path.relative_to(ROOT) for folder in folders for path in folder.rglob("*.h")}
    assert len(headers) > 50 and all((unpacked / "library" / header).is_file() for header in headers)
    plan = alone(["make", "-n", "python-package", "CUDA=0", f"PYTHON={sys.executable}"], unpacked / "library")
    assert "catalog_schema.h" in plan and "_native.abi3.so" in plan
    assert alone([sys.executable, "-W", "ignore", "setup.py", "--version"], unpacked).split()[-1] == importlib.import_module("ckptdelta").__version__


def test_a_source_distribution_has_the_pages_that_its_description_names(unpacked):
    named = re.findall(r"^- `(.*?\.md)`", (ROOT / "python/DESCRIPTION.md").read_text(), re.MULTILINE)
    assert len(named) == 4 and all((unpacked / "library/docs" / page).is_file() for page in named)


def is_left_out():
    """The library is built once more, which takes a minute: at the full level, and for one commit in CKD_FULL_EVERY."""
    every, seed = (int(os.environ.get(name) or least) for name, least in (("CKD_FULL_EVERY", 1), ("CKD_SWEEP_SEED", 0)))
    return os.environ.get("CKD_TEST_LEVEL") == "quick" or seed % every != 0


@pytest.mark.skipif(is_left_out(), reason="it builds the library once more: full level, and then one commit in CKD_FULL_EVERY")
def test_a_source_distribution_becomes_a_wheel(unpacked, tmp_path):
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path)]
    alone(command, unpacked, OPT="-O0")  # compiles in half of the time
    found, = tmp_path.glob("*.whl")
    assert {"ckptdelta/_native.abi3.so", "ckptdelta/bin/ckptdelta", "ckptdelta/notices.txt"} <= set(zipfile.ZipFile(found).namelist())


def test_the_tree_stays_as_it_is(wheel, unpacked):
    assert not [p for p in (ROOT / "python").iterdir() if p.name in ("build", "dist") or p.name.endswith(".egg-info")]
    assert not list((ROOT / "python").rglob("*.so"))


def test_the_extension_needs_nothing_of_a_particular_python(wheel):
    """The stable interface only: no symbol that begins with an underscore but those of the reference counts."""
    symbols = subprocess.run(["nm", "-D", "--undefined-only", str(BUILD / "python/ckptdelta/_native.abi3.so")], stdout=subprocess.PIPE, text=True, check=True)
    used = [line.split()[-1] for line in symbols.stdout.splitlines()]
    assert [s for s in used if s.startswith("_Py")] in ([], ["_Py_Dealloc"], ["_Py_NoneStruct"], ["_Py_Dealloc", "_Py_NoneStruct"])
    assert [s for s in used if s.startswith("Py")]
