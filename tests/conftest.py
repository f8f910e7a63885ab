"""Eight virtual CPU devices for the sharding tests, no accelerator, no network; set before jax starts a backend."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# code is generated without optimisation: compiling, not running, is what these tests spend their time on
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
    )
)

import numpy as np
import pytest


@pytest.fixture
def rng():
    return np.random.default_rng(0)
