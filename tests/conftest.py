"""Strict JAX for every test: what is only a warning elsewhere is an error here."""

import os
import tempfile

# Four CPU devices, so that what a single device hides is seen. One test process uses
# one core's worth of them at a time. LLVM optimises nothing, as most of a test's time
# is compilation: XLA's own passes, which the tests read, are what they are for users.
# Must be set before JAX starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        "--xla_backend_optimization_level=0",
    ]
)

# What one test process, or a program that it starts, has compiled, the others reuse.
# The folder is of this session alone.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="fps_jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

from jaxtyping import install_import_hook

# The hook must be in place before anything imports the package.
install_import_hook("fps_jax", "beartype.beartype")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture(params=["eager", "jit"])
def compiled(request):
    """A test that asks for it runs twice: as Python runs it, and compiled."""
    return jax.jit if request.param == "jit" else (lambda f: f)


@pytest.fixture
def float64():
    """Enables float64 for one test, as the second implementations need."""
    with jax.enable_x64(True):
        yield
