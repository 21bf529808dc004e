"""A `headrace` command as the demo's child: it also stops when its standard input ends, so that it does not outlive a
demo that was killed."""

import os
import signal
import sys
import threading


def stop_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    from headrace.cli import main as headrace

    threading.Thread(target=stop_with_parent, name="parent", daemon=True).start()
    headrace(sys.argv[1:])


if __name__ == "__main__":
    main()
