"""Python's garbage collector during a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 200_000
"""So many more objects made than freed before the young ones are looked through. A batch of many
episodes holds fewer, and looking through them while it is made frees nothing. Python's own
figure is 700."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Spares the collector what it need not look at again.

    Most of a process's objects are modules and what the libraries made of themselves: hundreds of
    thousands, which a full collection walks through in a tenth of a second and never frees. Those
    that are there now are left out while this is held. Episodes leave few cycles behind, so the
    young ones are looked at less often, too.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
