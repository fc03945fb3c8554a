"""Counts work, so that a test can see how it grows."""

import sys
from pathlib import Path

import granite4_neuron

_PACKAGE = str(Path(granite4_neuron.__file__).parent)


def steps_of(action, *kinds):
    """Return how many lines of the package an action runs, and how many characters it puts into attributes of objects
    of these classes: a text that grows there is copied with each piece.
    """
    steps = 0

    def in_frame(frame, event, _):
        nonlocal steps
        steps += event == "line"
        return in_frame

    def count(self, name, value):
        nonlocal steps
        steps += len(value) if isinstance(value, str) else 0
        object.__setattr__(self, name, value)

    before = sys.gettrace()
    for kind in kinds:
        kind.__setattr__ = count
    sys.settrace(lambda frame, *_: in_frame if frame.f_code.co_filename.startswith(_PACKAGE) else None)
    try:
        action()
    finally:
        sys.settrace(before)
        for kind in kinds:
            del kind.__setattr__
    return steps
