"""A vector carried across a lattice along two paths, flat and curved: results/plots/journey.png.

    python scripts/draw_journey.py [FILE.png]

What stands at a site is A_s⁻¹ e, the vector e of the first site as site s sees it; all angles are jojax.algebra.grid's.
"""

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp
import matplotlib
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jojax.algebra import grid  # noqa: E402 — the repository's own package, installed or not
from jojax.algebra.journey import ANGLES  # noqa: E402

SIZE = 3  # sites along each axis
ALIKE = np.array([35.0, 20.0])  # turn of a step up, of a step to the right, in degrees
EXTRA = np.array([[[0, 10, -10], [0, 15, 15], [0, 0, 0]], [[0, -15, 0], [-30, -10, 0], [-45, -30, 0]]])  # by site
PATHS = {"right, then up": ((1, 1, 0, 0), "#1b6ca8", 4.5), "up, then right": ((0, 0, 1, 1), "#d1622b", 2)}


def carried(steps, path):
    """[(row, column), angle of A_s⁻¹ in degrees] along a path from the first site on."""
    site, out = np.zeros(2, int), [((0, 0), 0.0)]
    for i, axis in enumerate(path, 1):
        site[axis] += 1
        out.append((tuple(site), -float(grid.along(steps, path[:i], (0, 0), ANGLES)[0])))
    return out


def panel(ax, steps, title, below):
    curls = np.asarray(grid.holonomy(steps, 1, 0, ANGLES))[..., 0]
    for (r, c), curl in np.ndenumerate(curls):
        ax.fill([c, c + 1, c + 1, c], [r, r, r + 1, r + 1], color="#7a4fa3", alpha=min(abs(curl) / 80, 0.6), lw=0)
        ax.text(c + 0.5, r + 0.5, degrees(curl), ha="center", va="center", color="#4b2e69")
    for k in range(SIZE):
        ax.plot([0, SIZE - 1], [k, k], [k, k], [0, SIZE - 1], color="0.8", lw=1, zorder=1)
    ends = []
    for name, (path, color, width) in PATHS.items():
        way = carried(steps, path)
        rows, columns = zip(*(site for site, _ in way), strict=True)
        ax.plot(columns, rows, color=color, lw=2.5, zorder=2, label=name, solid_capstyle="round")
        for (r, c), angle in way:
            last = (r, c) == (SIZE - 1, SIZE - 1)
            arrow(ax, c, r, angle, color if (r, c) != (0, 0) else "0.15", 0.62 if last else 0.36, width if last else 2)
        ends.append(way[-1][1])
    a, b = sorted(ends)
    top = SIZE - 1
    if b - a > 1e-9:
        turn = np.radians(np.linspace(a, b, 40) + 90)
        ax.plot(top + 0.42 * np.cos(turn), top + 0.42 * np.sin(turn), color="#7a4fa3", lw=2)
    ax.text(-0.09, 0.18, "e", ha="right", va="center", style="italic")
    ax.set_title(title, fontsize=12)
    ax.text(top / 2, -0.25, below, ha="center", va="top", fontsize=9.5)
    ax.set(xlim=(-0.5, top + 0.8), ylim=(-0.6, top + 0.75), aspect="equal")
    ax.axis("off")


def degrees(angle):
    return f"{angle:+.0f}°".replace("-", "−") if angle else "0°"


def arrow(ax, x, y, angle, color, length, width):
    turn = np.radians(angle + 90)  # e points up
    tip = x + length * np.cos(turn), y + length * np.sin(turn)
    ax.annotate(
        "", tip, (x, y), arrowprops=dict(arrowstyle="-|>", color=color, lw=width, shrinkA=0, shrinkB=0), zorder=4
    )
    ax.plot([x], [y], "o", color=color, ms=5, zorder=4)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "results" / "plots" / "journey.png")
    file = parser.parse_args(arguments).file
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.2, 4.9))
    flat = grid.constant(jnp.asarray(ALIKE)[:, None], (SIZE, SIZE))
    curved = flat + EXTRA[..., None]
    inside = np.asarray(grid.holonomy(curved, 1, 0, ANGLES)).ravel()
    turned, sum_of = degrees(inside.sum()), " ".join(map(degrees, inside))
    panel(
        axes[0],
        flat,
        "Flat: both ways bring e to one vector",
        "each step to the right turns alike, and each step up:\ngoing round a square turns nothing",
    )
    panel(
        axes[1],
        curved,
        f"Curved: they differ by {turned}",
        f"each step turns by what stands at its site:\nround the squares {sum_of} = {turned}",
    )
    axes[0].legend(loc="upper center", bbox_to_anchor=(1.1, 0.0), ncols=2, frameon=False)
    figure.savefig(file, dpi=100, bbox_inches="tight")


if __name__ == "__main__":
    main()
