"""Builds every Cython module below ext/ into the headrace package; what else it is says pyproject.toml.

HEADRACE_DEBUG=1 builds with bounds checks, assertions and sanitizers, in a directory of its own.
HEADRACE_ONLY=headrace.log,headrace.bus builds just these modules; HEADRACE_ONLY=none builds none.
"""

import os
import re
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("ext")
DEBUG = os.environ.get("HEADRACE_DEBUG", "") not in ("", "0")
ONLY = set(filter(None, os.environ.get("HEADRACE_ONLY", "").split(",")))
CORES = os.cpu_count() or 1

# Neither time stamps nor file names tell the two kinds of build apart, so each has its own directory.
BUILD = Path("build/debug" if DEBUG else "build")

if DEBUG:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    compile_args = ["-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer", *sanitizers]
    link_args = [*sanitizers]
else:
    # Cython compares its own loop counters with signed bounds; the debug build shows such warnings.
    compile_args = ["-O3", "-g0", "-fvisibility=hidden", "-Wno-sign-compare"]
    link_args = []
    if sys.platform == "linux":
        compile_args.append("-fno-plt")
compile_args.append("-pthread")
link_args.append("-pthread")


class BuildIntoTree(build_ext):
    """build_ext, whose in-place copy also replaces a newer module that the other kind of build left there."""

    def copy_extensions_to_source(self) -> None:
        for extension in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(extension.name))
            in_tree = Path(self.get_ext_fullpath(extension.name))
            if in_tree.exists() and in_tree.stat().st_mtime != built.stat().st_mtime:
                in_tree.unlink()
        super().copy_extensions_to_source()


def extensions() -> list[Extension]:
    by_name = {
        ".".join(source.relative_to(SOURCES).with_suffix("").parts): source
        for source in sorted(SOURCES.rglob("*.pyx"))
    }
    if unknown := ONLY - by_name.keys() - {"none"}:
        sys.exit(f"HEADRACE_ONLY names no module of ext/: {', '.join(sorted(unknown))}")
    return [
        Extension(
            name,
            [str(source)],
            # Cython writes C files below build/, so a header next to its .pyx has to be named too.
            include_dirs=list(dict.fromkeys([str(source.parent), "ext/headrace"])),
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
        for name, source in by_name.items()
        if not ONLY or name in ONLY
    ]


def headers_of(source: Path, include_dirs: list[str]) -> set[str]:
    """The project's headers that a C file includes, directly or through another of them."""
    found: set[str] = set()
    unread = [source]
    while unread:
        text = unread.pop().read_text(encoding="utf-8", errors="replace")
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            for header in (Path(directory, name) for directory in include_dirs):
                if header.is_file() and str(header) not in found:
                    found.add(str(header))
                    unread.append(header)
    return found


def compiled() -> list[Extension]:
    modules = cythonize(
        extensions(),
        nthreads=CORES,
        build_dir=str(BUILD / "cython"),
        include_path=[str(SOURCES)],
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": True,
            "embedsignature": True,
        },
    )
    # A changed header or flag compiles again exactly the modules that use it.
    for module in modules:
        module.depends = ["setup.py", *sorted(headers_of(Path(module.sources[0]), module.include_dirs))]
    return modules


# Cython's worker processes import this file again where they are not forked, and must not build.
if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    setup(
        ext_modules=compiled(),
        cmdclass={"build_ext": BuildIntoTree},
        options={"build": {"build_base": str(BUILD)}, "build_ext": {"parallel": CORES}},
    )
