"""jojax: position encodings as frames, journeys and biases, in JAX/Flax."""

__version__ = "0.1.0"
