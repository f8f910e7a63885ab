"""Eight virtual CPU devices for the sharding tests, no accelerator, no network; set before jax starts a backend."""

import atexit
import os
import shutil
import sys
import tempfile
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# code is generated without optimisation, and the old way where there still is one (an unknown flag would end the
# process): compiling, not running, is what these tests spend their time on
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
    )
)

# one folder for all processes of a test run: compiled functions and a trained model are shared through it
if "JOJAX_TESTS" not in os.environ:
    os.environ["JOJAX_TESTS"] = tempfile.mkdtemp(prefix="jojax-tests-")
    atexit.register(shutil.rmtree, os.environ["JOJAX_TESTS"], ignore_errors=True)
# a run that starts again compiles what its last life compiled: the same executable from a file saves minutes
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(os.environ["JOJAX_TESTS"], "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import numpy as np
import pytest


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """write(module, text) into a package of the user's."""
    folder = tmp_path / "mypackage"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda module, text: (folder / f"{module}.py").write_text(text)
    for name in [n for n in sys.modules if n.split(".")[0] == "mypackage"]:
        del sys.modules[name]
