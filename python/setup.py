"""Makes a wheel of what make has built: the package, its extension module, and the command.

`pip install ./python` in a checkout builds the C library first. `make wheel` has built it already, and says in
CKPTDELTA_BUILD where. The tree around this folder is left as it is: everything made lies in the build folder.

A source distribution has the sources of the C library in its folder `library`, and builds as a checkout does.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    from wheel.bdist_wheel import bdist_wheel

HERE = Path(__file__).resolve().parent
HEADER = "include/ckptdelta.h"
ROOT = HERE / "library" if (HERE / "library" / HEADER).is_file() else HERE.parent
PAGES = tuple(f"docs/{page}.md" for page in ("THIRD-PARTY", "python", "recipes", "run", "cli"))
SOURCES = ("Makefile", "LICENSE", "NOTICE", *PAGES, "python/*.h", "python/*.py", *(
    f"{folder}/**/*" for folder in ("base", "catalog", "codec", "engine", "kernels", "objects", "cli", "supervise", "agent", "peers", "include", "mk", "scripts")))
BUILT = ("_native.abi3.so", "bin/ckptdelta", "notices.txt", "libckptdelta_cuda.so", "libckptdelta_s3.so")


def version():
    header = ROOT / HEADER
    if not header.is_file():
        sys.exit("ckptdelta: the sources of the C library are not beside this folder: install from a checkout (pip install ./python), a wheel, "
                 "or a source distribution")
    return ".".join(re.search(rf"define CKD_VERSION_{part} +(\d+)", header.read_text()).group(1) for part in ("MAJOR", "MINOR", "PATCH"))


def make(*arguments, **options):
    # The variables of a make around this one would reach into the build.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments], cwd=ROOT, env=env, check=True,
                          text=True, **options)


def build_folder():
    """The build folder, with the package in it."""
    given = os.environ.get("CKPTDELTA_BUILD")
    if given:
        return Path(given)
    try:
        make(f"-j{os.cpu_count() or 2}", "python-package", stdout=sys.stderr)
        return ROOT / make("-s", "print-build-dir", stdout=subprocess.PIPE).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"ckptdelta: make could not build the C library ({error}); scripts/setup-deps.sh python says what is missing")


class BuiltByMake(build_ext):
    """The extension module and what lies beside it come from make."""

    def run(self):
        source = build_folder() / "python" / "ckptdelta"
        target = HERE / "src" / "ckptdelta" if self.inplace else Path(self.build_lib) / "ckptdelta"
        for name in BUILT:
            if (source / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, target / name)

    def get_outputs(self):
        return [str(Path(self.build_lib) / "ckptdelta" / name) for name in BUILT]


class Wheel(bdist_wheel):
    """One wheel for all versions of Python from 3.10 on."""

    def finalize_options(self):
        self.py_limited_api = "cp310"
        super().finalize_options()


class WithLibrary(sdist):
    """A source distribution, with the sources of the C library."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for file in sorted({file for pattern in SOURCES for file in ROOT.glob(pattern)}):
            target = Path(base_dir) / "library" / file.relative_to(ROOT)
            if file.is_file() and file.suffix != ".pyc":
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)


work = Path(os.environ.get("CKPTDELTA_BUILD") or ROOT / "build" / "python-wheel") / "wheel-work"
work.mkdir(parents=True, exist_ok=True)
setup(
    version=version(),
    ext_modules=[Extension("ckptdelta._native", [], py_limited_api=True)],
    cmdclass={"build_ext": BuiltByMake, "bdist_wheel": Wheel, "sdist": WithLibrary},
    options={"build": {"build_base": str(work)}, "egg_info": {"egg_base": str(work)}, "bdist_wheel": {"bdist_dir": str(work / "bdist")}},
)
