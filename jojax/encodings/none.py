"""NoPE: no position information but the causal mask (arXiv 2305.19466). In an encoder, order is then invisible."""

from jojax.encodings import base


class NoPE(base.Encoding):
    pass
