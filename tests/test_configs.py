"""Every config on its own preset, presets on the smallest and all on the papers', by shape; docstrings; sweeps."""

import ast
import os
from pathlib import Path

import jax
import pytest

import zoo
from configs import common
from configs.encodings import PRESETS, preset
from jojax import config, dry_run, loop, step
from jojax.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted(p for p in (ROOT / "configs").glob("*.py") if p.stem not in ("common", "encodings"))
TEXT_ONLY = set(PRESETS) - set(zoo.VISION)
VISION_ONLY = set(zoo.VISION) - set(zoo.TEXT)


def traced(spec, **overrides):
    """The run of a config with its whole training step traced by shape."""
    run = loop.Run(config.apply_overrides(config.load(spec), overrides), spec, "")
    after = jax.eval_shape(run.step_fn, run.like, run.abstract_batch())
    assert jax.tree.structure(after) == jax.tree.structure(run.like)
    return run


def traced_loss(spec):
    """Of the step only the loss: what follows does not depend on the encoding."""
    run = loop.Run(config.load(spec), spec, "")
    rngs = dict.fromkeys(step.RNGS, jax.random.key(0))
    total, count, _ = jax.eval_shape(
        lambda *given: run.job.loss(*given, True), run.like.params, run.abstract_batch(), rngs
    )
    assert total.shape == count.shape == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_config_says_what_it_reproduces(path):
    text = ast.get_docstring(ast.parse(path.read_text()))
    for field in ("Command:", "Table:", "Expected:", "Cost:", "Arguments"):
        assert field in text, f"{path.name} lacks {field}"


WITHOUT_DATA = ("quickstart", "quickstart_vit", "probes")
DESIGNED = ("cifar100_vit_tiny", "imagenet_vits_jo", "wikipedia_lm", "length_extrapolation")  # the others: slow tests


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=() if p.stem in DESIGNED else pytest.mark.slow, id=p.stem) for p in CONFIGS]
)
def test_config_traces(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # no data here
    report = dry_run.report(config.load(str(path)), path.stem)
    assert "parameters:" in report and "memory of the state" in report
    assert ("split missing" in report) == (path.stem not in WITHOUT_DATA)


def one_a_module(names):
    """Of every other module the first: the grids below trace the loss of all."""
    return sorted({PRESETS[name]["name"]: name for name in sorted(names, reverse=True)}.values())[::2]


@pytest.mark.parametrize("name", one_a_module(set(PRESETS) - VISION_ONLY))
def test_text_preset_on_the_smallest_config(name):
    traced(f"{ROOT}/configs/quickstart.py:encoding={name},smoke", **{"model.width": 32, "data.length": 16})


@pytest.mark.parametrize("name", one_a_module(set(PRESETS) - TEXT_ONLY))
def test_vision_preset_on_the_smallest_config(name):
    traced(f"{ROOT}/configs/quickstart_vit.py:encoding={name},smoke", **{"model.width": 64, "model.depth": 2})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_point_of_a_sweep_loads(path):
    points = list(config.module(str(path)).sweep())
    specs = {f"{path}:{point['arg']}" for point in points}
    assert len(specs) == len(points) > 1
    for spec in specs:
        config.validate(config.load(spec))


def grid(names, specs):
    """Every preset with the configs in turn, with all of them where GRID is set."""
    if os.environ.get("GRID"):
        return [(spec, name) for name in sorted(names) for spec in specs]
    return [(specs[i % len(specs)], name) for i, name in enumerate(sorted(names))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "name"),
    grid(set(PRESETS) - VISION_ONLY, ["wikipedia_lm.py:n=128,L=2,", "length_extrapolation.py:size=c128,"])
    + grid(set(PRESETS) - TEXT_ONLY, ["cifar100_vit_tiny.py:", "imagenet_vits.py:"]),
)
def test_full_grid(spec, name):
    traced_loss(f"{ROOT}/configs/{spec}encoding={name}")


def test_presets_and_their_aliases():
    assert preset("jo_fixed") == preset("rope_qkv") == preset("jo_fixed_qkv")
    assert preset("rope") == preset("jo_fixed_qk") == preset("rope_qk")
    assert preset("rope_v")["transport"] == "v"
    assert preset("rope_axial_learned_qkv")["learned"]
    for name in ("rop", "alibi_qk", "none_v"):
        with pytest.raises(ValueError, match="no such preset; there are"):
            preset(name)


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("speed=3", "'speed': this config has encoding, seed, smoke"),
        ("seed=x", "seed wants int"),
        ("smoke=maybe", "smoke wants bool"),
    ],
)
def test_arguments_behind_the_colon(arg, message):
    with pytest.raises(UserError, match=message):
        config.load(f"{ROOT}/configs/quickstart.py:{arg}")
    assert common.parse("seed=3,smoke").to_dict() == {"encoding": "", "seed": 3, "smoke": True}


@pytest.mark.parametrize(
    ("spec", "body", "encoding"),
    [
        # NB's counts; of the projected model without its dead last head (2C² + C/2)
        ("length_extrapolation.py:size=owt16,encoding=rope", 162_591_488, 0),
        ("length_extrapolation.py:size=owt16", 162_591_488, 193_760_000 - 162_591_488 - 2 * 768**2 - 384),
        ("length_extrapolation.py:size=c128,encoding=rope", 9_413_888, 0),
        ("length_extrapolation.py:size=c128", 9_413_888, 11_626_048 - 9_413_888),
        ("wikipedia_lm.py:n=128,L=6,context=64,encoding=rope_integer", 5_301_888, 0),
        (
            "wikipedia_lm.py:n=128,L=6,context=64,encoding=jo_projected",
            5_301_888,
            6_522_880 - 5_301_888 - 2 * 128**2 - 64,
        ),
    ],
)
def test_parameter_counts_are_the_published_ones(spec, body, encoding):
    run = loop.Run(config.load(f"{ROOT}/configs/{spec}"), spec, "")
    counts = loop.result.count_parameters(run.like.params)
    assert (counts["body"], counts["encoding"]) == (body, encoding)


@pytest.mark.parametrize(
    "changes", zoo.some([{}, {"model.depth": 5, "model.kv_heads": 1}, {"model.mlp": "swiglu", "data.vocab": 300}])
)
def test_matched_rope_has_the_parameters_of_jo_projected(changes):
    def total(name):
        settings = config.load(f"{ROOT}/configs/length_extrapolation.py:encoding={name}")
        run = loop.Run(config.apply_overrides(settings, changes), name, "")
        return loop.result.count_parameters(run.like.params)["total"]

    assert (
        abs(total("rope_matched_qkv") / total("jo_projected") - 1)
        < 2e-3
        < abs(total("rope") / total("jo_projected") - 1)
    )


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "spec",
    [
        "imagenet_vits.py:recipe=deit3",
        slow("comrope_vitb.py:encoding=liere,sigma=1"),
        "comrope_finetune.py:size=384,encoding=comrope_ap",
        slow("extrapolation_stages.py:size=c128"),
        slow("length_extrapolation.py:size=c128,plan=frozen"),
        slow("grape_llama.py:size=large,form=paper,kv_shift"),
        slow("wikipedia_lm.py:n=128,L=2,context=64,encoding=rope_integer"),
    ],
)
def test_other_arguments_trace_too(spec, monkeypatch, tmp_path):
    """At full size, every stage of them; and smoke makes each small."""
    monkeypatch.chdir(tmp_path)
    report = dry_run.report(config.load(f"{ROOT}/configs/{spec}"), spec)
    assert report.count("stage of steps") == {"extrapolation": 3, "length": 2}.get(spec.split("_")[0], 0)
    assert config.load(f"{ROOT}/configs/{spec},smoke").steps <= 4


@pytest.mark.parametrize(
    ("spec", "body", "encoding"),
    [
        slow("encoding=rope", 353_508_352, 0),
        slow("encoding=grape_m_freq", 353_508_352, 1536),
        ("encoding=grape_ap_official", 353_508_352, 1_572_864),
        slow("size=large,encoding=fox", 772_234_496, 461_160),
        slow("encoding=rope,kv_shift", 353_508_352 + 393_216, 0),
    ],
)
def test_llama_has_the_published_parameters(spec, body, encoding):
    counts = loop.result.count_parameters(
        loop.Run(config.load(f"{ROOT}/configs/grape_llama.py:{spec}"), spec, "").like.params
    )
    assert (counts["body"], counts["encoding"]) == (body, encoding)
