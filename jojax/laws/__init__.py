"""The laws of encodings, checked on tiny models in float64: what every one must keep, and what each says of itself.

`python -m jojax.laws NAME` is the command; the tests of this package's encodings are these laws too.
"""

import dataclasses
from collections.abc import Callable

import jax

from jojax.errors import UserError
from jojax.laws import journeys, models


@dataclasses.dataclass(frozen=True)
class Law:
    name: str
    residual: Callable[[models.Subject], float]
    claim: str | None = None  # None = all must keep it; 'not X' where it holds for what does not claim X
    least: float = 0.0  # the residual of a law that holds is at most this,
    clear: float = 0.5  # that of a law that fails is more than this
    kinds: tuple[str, ...] = ("text", "vision")

    def applies(self, subject) -> bool:
        return subject.kind in self.kinds and (
            self.residual is not models.start or subject.encoding.STARTS_AS is not None
        )

    def claimed(self, encoding) -> bool | None:
        if self.claim is None:
            return None
        return getattr(encoding, self.claim.removeprefix("not ")) != self.claim.startswith("not ")

    def check(self, subject) -> "Finding":
        with jax.enable_x64(True):
            residual = float(self.residual(subject))
        holds = True if residual <= self.least else False if residual > self.clear else None
        return Finding(self.name, self.claimed(subject.encoding), holds, residual)


@dataclasses.dataclass(frozen=True)
class Finding:
    law: str
    claimed: bool | None  # None = not a claim, all must keep it
    holds: bool | None  # None = neither shown to hold nor to fail
    residual: float

    @property
    def good(self) -> bool:
        return self.holds is (self.claimed is not False)

    def __str__(self):
        claimed = {None: "must", True: "claimed", False: "not claimed"}[self.claimed]
        holds = {None: "unclear", True: "holds", False: "fails"}[self.holds]
        return f"{self.law:<40} {claimed:<12} {holds:<8} {self.residual:.1e}{'' if self.good else '  <- broken'}"


TEXT = ("text",)
LAWS = {
    "relative": Law("RELATIVE", models.relative, "RELATIVE", 1e-9, 1e-4),
    "norms": Law("NORM_PRESERVING", journeys.norms, "NORM_PRESERVING", 1e-12, 1e-6),
    "flat": Law("FLAT", journeys.detours, "FLAT", 1e-9, 1e-6),
    "order": Law("the same both ways (not CAUSAL_ONLY)", journeys.both_ways, "not CAUSAL_ONLY", 1e-9, 1e-6),
    "bounded": Law("ends with its table (BOUNDED_LENGTH)", journeys.ends, "BOUNDED_LENGTH"),
    "chunks": Law("any chunking = the whole (STREAMS)", models.chunks, "STREAMS", 1e-10, 1e-4, TEXT),
    "sites": Law("site by site = the whole (STREAMS)", models.site_by_site, "STREAMS", 1e-10, 1e-4, TEXT),
    "packed": Law("packed documents = alone", models.packed, None, 1e-10, 1e-10, TEXT),
    "causal": Law("the future is invisible, bit for bit", models.causal, None, 0, 0, TEXT),
    "blocks": Law("chunked attention = xla", journeys.blocks, None, 1e-12, 1e-12),
    "unrolled": Law("scanned = unrolled", models.unrolled, None, 1e-11, 1e-11),
    "gradients": Law("gradients finite, parameters reached", models.gradients),
    "bfloat16": Law("bfloat16 follows float32", journeys.bfloat16, None, 1, 1),
    "odd": Law("odd sizes refused by name", journeys.odd_sizes),
    "start": Law("starts as STARTS_AS", models.start, None, 1e-10, 1e-10),
}


def subjects(config) -> list[models.Subject]:
    """In all kinds of models that take it. UserError of the first where none does."""
    made, refused = [], []
    for kind in journeys.DIMS:
        try:
            made.append(models.Subject(config, kind))
        except UserError as error:
            refused.append(error)
    if not made:
        raise refused[0]
    return made
