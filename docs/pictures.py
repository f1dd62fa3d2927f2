"""Draw every penalty and constraint for the page about them, into docs/pictures: `python docs/pictures.py`."""

from pathlib import Path

import matplotlib.pyplot as plt

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


FOLDER = Path(__file__).parent / "pictures"


def draw(folder: Path) -> None:
    for penalty in DRAWN:
        line, _ = plot.prox(penalty)
        line.figure.savefig(folder / f"{type(penalty).__name__}.png", dpi=110)
        plt.close(line.figure)


if __name__ == "__main__":
    draw(FOLDER)
