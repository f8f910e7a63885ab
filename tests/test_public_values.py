"""Encodings against what public libraries compute (public_values.json): equal to the rounding of the library's dtype,
and not with another base, pairing, option or input."""

import jax
import numpy as np
import pytest

import public


def test_every_entry_has_a_case():
    assert set(public.VALUES) == {*public.CASES, *public.APART}


@pytest.mark.parametrize("entry", public.CASES)
def test_equal_and_not_by_accident(entry):
    allowed = public.VALUES[entry]["tolerance"]
    assert public.error(entry) <= allowed
    assert public.error(entry, wrong=True) > max(100 * allowed, 1e-3)


def test_yarn_ramps_over_turns_and_the_library_over_plane_numbers():
    """Equal where neither is within its ramp; within, jojax has the paper's formula, and the other is no rounding."""
    entry = "rope_yarn_frequencies"
    given, theirs, ours = public.VALUES[entry]["inputs"], public.theirs(entry), public.ours(entry)
    D, s, trained = given["head_dim"], given["factor"], given["original_max_position_embeddings"]
    omega = given["rope_theta"] ** (-2 * np.arange(D // 2) / D)
    turns = omega * trained / (2 * np.pi)
    keep = np.clip((turns - 1) / (32 - 1), 0, 1)
    np.testing.assert_allclose(ours[:-1], (1 - keep) * omega / s + keep * omega, rtol=1e-12)
    same = np.abs(theirs / ours - 1) < 1e-6
    within = (keep > 0) & (keep < 1)
    assert same[:-1][~within].all() and same[-1] and within.any()
    assert not same[:-1][within].any()


def test_tables_are_resized_without_antialiasing():
    """Which timm's function has by default."""
    assert public.error("learned_smaller_antialias") > 0.1


def test_mixed_frequencies_start_as_the_library_s():
    """In size, and in the right angle between the halves of the planes; the direction is drawn."""
    given = public.VALUES["rope_mixed"]["inputs"]
    theirs = np.array(given["freqs"])
    encoding, ctx = public.make(public.preset("rope_mixed"), given), public.context(given)
    with jax.enable_x64(True):
        ours = encoding.init(jax.random.key(0), None, ctx, method=public.first_block)["params"]["freq"]
    np.testing.assert_allclose(np.linalg.norm(ours, axis=0), np.linalg.norm(theirs, axis=0), rtol=1e-6)
    for freqs in (theirs, np.asarray(ours)):
        first, second = np.split(freqs, 2, -1)
        assert np.abs((first * second).sum(0)).max() < 1e-6


def test_a_table_of_errors():
    table = public.public_errors()
    assert {"rope", "xpos", "alibi", "t5_bias", "rope_axial", "fox"} <= set(table)
    assert all(" " in libraries and 0 <= error < 1e-4 for libraries, error in table.values())
