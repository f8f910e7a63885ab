"""Position encodings, one file a family. `build({'name': 'rope'}, dims)` makes one for any Linen model."""

from jojax.encodings.base import Context, Dims, Edge, Encoding, Journey, path_sum
from jojax.encodings.build import build, load
from jojax.encodings.frames import PlaneFrame

__all__ = ["Context", "Dims", "Edge", "Encoding", "Journey", "PlaneFrame", "build", "load", "path_sum"]
