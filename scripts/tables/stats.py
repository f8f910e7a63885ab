"""Means over seeds with 95 % intervals, differences paired by seed, and the verdict on a published figure."""

import math
import statistics

from scipy import stats

WANTED = 5  # seeds; two are the least that have an interval

REPRODUCED, DIRECTION, NOT, OPEN, SMALL, NONE = (
    "reproduced",
    "direction only",
    "not reproduced",
    "inconclusive",
    "scaled down",
    "not run",
)
SINGLE = f"{OPEN}: single run"
NOT_PLANNED = "not planned"
VERDICTS = (REPRODUCED, DIRECTION, NOT, OPEN, SINGLE, SMALL, NONE, NOT_PLANNED)


def interval(values):
    """(mean, half of its 95 % Student-t interval); of one value (it, None); of an infinite one (inf, nan)."""
    values = list(values)
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, None
    if not math.isfinite(mean):
        return mean, math.nan
    return mean, stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def shown(values, form, sign=""):
    """'mean ± half'; the mean alone of one value, or where one is infinite; a dash of none."""
    if not values:
        return "–"
    mean, half = interval(values)
    return f"{mean:{sign}{form}}" + ("" if half is None or math.isnan(half) else f" ± {half:{form}}")


def paired(ours, base):
    """{seed: ours − base} of the seeds that both have; runs of one seed share data order and common initial weights."""
    return {seed: ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())}


def direction(gaps, published):
    """1: the interval of the paired differences excludes 0 on the published side; −1: on the other; 0: neither, or
    there are not two pairs or no published difference."""
    if len(gaps) < 2 or not published:
        return 0
    mean, half = interval(gaps.values())
    return 0 if not abs(mean) > half else 1 if (mean > 0) == (published > 0) else -1


def verdict(value, margin, ours, gaps=None, published=0.0):
    """On a published `value`, from full-scale runs of the very config. ours: {seed: figure}; gaps: {seed: difference
    to the baseline}; published: that difference in the paper.

    reproduced: two seeds or more and the whole interval within ± margin; never where the paired difference is
    significantly of the other sign, which is: not reproduced. direction only: the mean lies outside the margin, the
    paired difference is significantly of the published sign. not reproduced: the interval misses the margin, or a run
    diverged. Else inconclusive; one seed always is."""
    if not ours:
        return NONE
    if len(ours) == 1:
        return SINGLE
    if not all(map(math.isfinite, ours.values())):
        return NOT
    mean, half = interval(ours.values())
    off, sign = abs(mean - value), direction(gaps or {}, published)
    if sign < 0:
        return NOT
    if off + half <= margin:
        return REPRODUCED
    if sign > 0 and off > margin:
        return DIRECTION
    return NOT if off - half > margin else OPEN
