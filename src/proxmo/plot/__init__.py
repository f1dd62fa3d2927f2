"""Pictures of penalties, runs, layers and paths; requires ``pip install 'proxmo[plot]'``.

Each function draws on the axes ``ax``, or on a new figure of pyplot if there are none, and returns what it drew on: one
``Axes``, or an array of them. Colours can be told apart by colour-blind readers, and figures stay legible at the width
of a phone. Texts and backgrounds follow your style sheet, so that dark ones work.

>>> import proxmo
>>> from proxmo import plot
>>> line, plane = plot.prox(proxmo.L1(1.0))
>>> line.get_title("left")
'L1(1)'
"""

from importlib.util import find_spec

if find_spec("matplotlib") is None:
    raise ImportError("proxmo.plot needs matplotlib: pip install 'proxmo[plot]'")

from proxmo.plot.paths import path
from proxmo.plot.penalties import prox
from proxmo.plot.runs import history
from proxmo.plot.sizes import layers

__all__ = ["history", "layers", "path", "prox"]
