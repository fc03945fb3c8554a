"""The start of the command; it handles Ctrl-C from here on."""

import os
import signal
import sys

_EXIT_INTERRUPTED = 130


def main() -> int:
    """Run `cli.main`; until it handles Ctrl-C itself, Ctrl-C ends the process silently."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(_EXIT_INTERRUPTED))
    from granite4_neuron.commands import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
