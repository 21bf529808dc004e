"""Says in one sentence why the package cannot be built with the Python that runs this; silent where it can.

It runs before anything is installed and on whatever Python there is, so it is written for any since 3.6.
"""

import os
import shlex
import shutil
import sys
import sysconfig

OLDEST = (3, 11)


def obstacle():
    """The first thing that is missing, as a sentence, or None."""
    python = sys.executable
    if sys.version_info < OLDEST:
        needed, present = ".".join(map(str, OLDEST)), ".".join(map(str, sys.version_info[:2]))
        return f"Headrace needs Python {needed} or later, {python} is {present}: name a newer one, PYTHON=..."
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return f"{python} cannot make a virtual environment: install its venv package (Debian: python3-venv)."
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        how = "Debian: gcc libc6-dev, Fedora: gcc, macOS: xcode-select --install"
        return f"There is no C compiler, {compiler} was not found: install one ({how}) or name it, CC=..."
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return f"{python} has no C headers: install them (Debian: python3-dev, Fedora: python3-devel)."
    return None


if __name__ == "__main__":
    sys.exit(obstacle())
