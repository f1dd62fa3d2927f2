"""Draw every penalty and constraint for the page about them."""

from pathlib import Path

import matplotlib.pyplot as plt
from sphinx.application import Sphinx

import proxmo
from proxmo import plot

DRAWN = [
    proxmo.L1(1.0),
    proxmo.SquaredL2(1.0),
    proxmo.ElasticNet(1.0, 1.0),
    proxmo.Huber(1.0, 0.5),
    proxmo.L0(1.0),
    proxmo.MCP(1.0),
    proxmo.SCAD(1.0),
    proxmo.LHalf(1.0),
    proxmo.GroupL2(1.0),
    proxmo.GroupLInf(1.0),
    proxmo.SparseGroup(0.5, 0.5),
    proxmo.Nuclear(1.0),
    proxmo.Rank(1),
    proxmo.NuclearBall(1.0),
    proxmo.Box(-0.5, 1.0),
    proxmo.NonNegative(),
    proxmo.L1Ball(1.0),
    proxmo.L2Ball(1.0),
    proxmo.LInfBall(1.0),
    proxmo.Simplex(),
    proxmo.TopK(1),
    proxmo.NM(2, 4),
    proxmo.Trimmed(proxmo.L1(1.0), keep=1),
]


def _draw(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "pictures"
    folder.mkdir(exist_ok=True)
    for penalty in DRAWN:
        file = folder / f"{type(penalty).__name__}.svg"
        if not file.exists():
            line, _ = plot.prox(penalty)
            line.figure.savefig(file)
            plt.close(line.figure)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", _draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
