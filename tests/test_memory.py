"""A long evaluation needs memory for sites, not for pairs of sites or for logits: by what the compiler lays out, so
that nothing is run."""

import jax
import numpy as np
import pytest

import runs
import zoo
from jojax import task

L = 65_536
WIDTHS = 24  # float32 numbers a site and channel of the model that may stand at a time
NAMES = ("jo_projected", "rope", "alibi", "fox", "grape_ap", "jo_random", "fire", "jo_blocks")


def widths_a_site(name, **changes):
    """Temporaries of the evaluation step for one window of L tokens, over L, in float32 numbers a channel."""
    given = runs.lm(model__depth=2, data__vocab=2048, **changes)
    job = task.make(runs.config_of(f"configs/quickstart.py:smoke,encoding={name}", given))
    names = ("tokens", "targets", "position", "segment")
    batch = {key: jax.ShapeDtypeStruct((1, L), np.int32) for key in names}
    step = jax.jit(job.nll).lower(jax.eval_shape(job.init, jax.random.key(0)), batch).compile()
    return step.memory_analysis().temp_size_in_bytes / L / (4 * job.config.model.width)


@pytest.mark.parametrize("name", zoo.some(NAMES, 4))
def test_an_evaluation_s_memory_is_linear_in_its_length(name):
    assert widths_a_site(name) < WIDTHS


@pytest.mark.parametrize("changes", [dict(attention="xla"), dict(model__loss_chunk=L)])
def test_pairs_or_logits_that_stand_whole_are_more(changes):
    assert widths_a_site("rope", **changes) > 2 * WIDTHS
