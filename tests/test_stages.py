"""Staged training: what a stage takes over, the boundary that leaves the logits alone, kill and resume across it."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
import zoo
from configs.encodings import preset
from jojax import checkpoint, evaluate, loop, stages, tree
from jojax.errors import UserError
from runs import LM, VIT, lm, vit

FIXED, PROJECTED = preset("jo_fixed"), preset("jo_projected")
PLAN = (
    {"steps": 4, "encoding": FIXED, "lr": 2e-3},
    {"steps": 3, "lr": 1e-3, "encoding_lr": 0.0},
    {"steps": 5, "lr": 5e-4, "encoding_lr": 0.1, "reset_optimizer": True},
)


def staged(plan=PLAN, **more):
    often = {"checkpoint.every_steps": 2, "checkpoint.keep": 20, "eval.every_steps": 0, "eval.lengths": ()}
    more = {"steps": sum(s["steps"] for s in plan), "model.depth": 2, "encoding": PROJECTED, "optim.ema": 0.5} | more
    return lm() | often | {"optim.schedule": "constant", "optim.warmup_steps": 0, "stages": plan} | more


def state_at(workdir, overrides, step):
    run = loop.Run(runs.config_of(LM, overrides), LM, "")
    with checkpoint.Checkpoints(workdir, read_only=True) as saved:
        return tree.leaves(saved._restore(step, run.like_at(step))[0])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("staged")
    assert runs.train_here(LM, staged(), workdir) == 0
    return workdir


@pytest.mark.slow
def test_each_stage_trains_what_it_says(done, capsys):
    first, second, frozen, end = (state_at(done, staged(), step) for step in (4, 6, 7, 12))
    new = {name for name in second if name not in first}
    assert new and all("encoding" in name for name in new)
    held = [name for name in second if name.startswith("params/") and "encoding" in name]
    for name in held:
        assert not second[name].any() and not frozen[name].any() and end[name].any(), name
    body = "params/blocks/mlp_in/kernel"
    assert (first[body] != second[body]).any() and (frozen[body] != end[body]).any()
    counts = [int(state[next(n for n in state if n.endswith("/count"))]) for state in (first, second, frozen, end)]
    assert counts == [4, 6, 7, 5]  # Adam's: carried over, then fresh
    record = runs.result(done)["stages"]
    assert [s["steps"] for s in record] == [[0, 4], [4, 7], [7, 12]]
    assert [s["trained"] for s in record] == ["all", "all but the encoding", "all"]
    assert [s["encoding"]["name"] for s in record] == ["rope", "joformer", "joformer"]
    rates = {line["step"]: line["train/lr"] for line in runs.told(done) if "train/lr" in line}
    assert [rates[step] for step in (1, 4, 5, 7, 8, 12)] == pytest.approx([2e-3, 2e-3, 1e-3, 1e-3, 5e-4, 5e-4])


@pytest.mark.slow
def test_a_boundary_leaves_the_logits_and_the_average_alone():
    """The fixed model's state, and what stage 2 makes of it: the same logits, bit for bit."""
    run = loop.Run(runs.config_of(LM, staged(PLAN[:2])), LM, "")
    run.like_at(4)
    now = run.fresh_state()
    now = now.replace(ema=zoo.noisy(now.ema, 0.1))
    run.clock = loop.clock.Clock()
    before, ema = (np.asarray(jax.jit(run.job.probe)(tree)) for tree in (now.params, now.ema))
    after = run.convert(now, run.stages[1])
    assert run.stage.number == 2 and run.job.config.encoding.name == "joformer"
    np.testing.assert_array_equal(jax.jit(run.job.probe)(after.params), before)
    np.testing.assert_array_equal(jax.jit(run.job.probe)(after.ema), ema)


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 6])
def test_going_on_from_any_checkpoint_is_bit_equal(done, tmp_path, step, capsys):
    """At a boundary, which is then crossed again, and within a stage."""
    shutil.copytree(done, tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)
    record = runs.result(done)
    (tmp_path / "run" / "result.json").write_text(runs.json.dumps(record | {"state": "running"}))
    assert runs.train_here(LM, staged(), tmp_path / "run") == 0
    assert f"going on from step {step}" in capsys.readouterr().out
    runs.same(*(state_at(folder, staged(), 12) for folder in (tmp_path / "run", done)))
    assert runs.told(tmp_path / "run") == runs.told(done)
    assert runs.result(tmp_path / "run")["metrics"] == record["metrics"]


@pytest.mark.slow
def test_an_unfinished_run_is_evaluated_as_the_stage_it_is_in(done, tmp_path):
    shutil.copytree(done, tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        if int(folder.name) > 4:
            shutil.rmtree(folder)
    assert evaluate.restore(tmp_path / "run")[1].encoding.name == "rope"
    assert evaluate.restore(done)[1].encoding.name == "joformer"


@pytest.mark.slow
def test_a_stage_that_changes_the_model_is_refused(tmp_path):
    """In the run, at the boundary: the checkpoint there is the earlier stage's."""
    plan = ({"steps": 2, "encoding": preset("rope")}, {"steps": 2})
    with pytest.raises(UserError, match=r"config\.stages\[1\]\.encoding changes the model: .*jo_projected after jo_f"):
        runs.train_here(LM, staged(plan), tmp_path)
    assert [int(p.name) for p in (tmp_path / "checkpoints").iterdir()] == [2]


def test_the_check_sees_a_small_change():
    f = lambda p: p["a"] * jnp.arange(1.0, 5.0)  # noqa: E731
    stage = stages.Stage(2, 4, 7, False, None)
    assert stages.check_alike((f, {"a": 3.0}), (f, {"a": 3.0001}), stage) < stages.TOLERANCE
    for other in (3.001, np.nan):
        with pytest.raises(UserError, match=r"config\.stages\[1\]\.encoding changes the model"):
            stages.check_alike((f, {"a": 3.0}), (f, {"a": other}), stage)


def test_the_check_multiplies_at_full_precision():
    seen = []
    f = lambda p: seen.append(jax.config.jax_default_matmul_precision) or p["a"] * jnp.ones(2)  # noqa: E731
    stages.check_alike((f, {"a": 3.0}), (f, {"a": 3.0}), stages.Stage(2, 4, 7, False, None))
    assert seen == ["highest", "highest"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"stages": ({"steps": 4}, {"steps": 5})},
            r"config\.stages have 9 steps in all, config\.steps is 12: set it to",
        ),
        (
            {"stages": ({"steps": 12, "rate": 1.0},)},
            r"config\.stages\[0\]\.rate does not exist: a stage has steps, enc",
        ),
        ({"stages": ({"lr": 1.0},)}, r"config\.stages\[0\]\.steps = None: give the number of steps"),
        ({"stages": ({"steps": 12, "lr": -1.0},)}, r"config\.stages\[0\]\.lr .* numbers of at least 0"),
        ({"stages": ({"steps": 12, "reset_optimizer": 1},)}, r"reset_optimizer = 1 must be True or False"),
        ({"stages": ({"steps": 12, "encoding": "rope"},)}, r"config\.stages\[0\]\.encoding = 'rope': give a dict"),
        ({"stages": ({"steps": 12, "encoding": FIXED},)}, r"the last of config\.stages must have config\.encoding"),
        ({"optim.warmup_steps": 3}, r"optim\.warmup_steps=3 must be smaller than the 3 steps it is a part of"),
    ],
)
def test_plans_that_do_not_fit(changes, words):
    with pytest.raises(UserError, match=words):
        loop.Run(runs.config_of(LM, staged() | changes), LM, "")


# ------------------------------------------------------------------------------------ starts
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    zoo.some(
        [
            ("comrope_ap", "vision", {"angle_init": "zero"}),
            ("comrope_ld", "vision", {"angle_init": "zero"}),
            ("comrope_ld", "text", {"angle_init": "zero", "coord": "index", "cls_pos": "none", "block": 4}),
            ("grape_m_freq", "text", {}),
            ("grape_m_freq", "vision", {"base": 100.0}),
        ],
        4,
    ),
)
def test_encodings_start_as_they_say(name, kind, options):
    subject = zoo.laws.models.Subject(preset(name) | options, kind)
    assert subject.encoding.STARTS_AS is not None
    finding = zoo.laws.LAWS["start"].check(subject)
    assert finding.good, finding


def test_what_does_not_start_so_does_not_say_so():
    for name, options in (("comrope_ap", {}), ("grape_m_plane", {}), ("grape_m_basis", {})):
        assert (
            zoo.laws.models.Subject(preset(name) | options, "vision" if "com" in name else "text").encoding.STARTS_AS
            is None
        )


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["comrope_ap", "comrope_ld"])
def test_zero_comrope_beside_a_learned_table_starts_at_the_checkpoint_s_accuracy(tmp_path, partition, capsys):
    """Fine-tuning from a checkpoint without rotation: its table stays, the rotation is added at zero."""
    small = vit(model__patch=16, steps=2, eval__batch_size=500)
    runs.train_here(VIT, small | {"encoding": preset("learned")}, tmp_path / "ape")
    both = {"name": "joint", "rotation": preset(partition) | {"angle_init": "zero"}, "bias": preset("learned")}
    given = small | {"encoding": both, "init_from": str(tmp_path / "ape")}
    run = loop.Run(runs.config_of(VIT, given), VIT, tmp_path)
    with checkpoint.Checkpoints(tmp_path / "new") as saved:
        now = run.start_state(saved)
    assert "missing: " in capsys.readouterr().out
    metrics, _ = evaluate.evaluate_split(run.job, now.params, run.mesh)
    want = runs.result(tmp_path / "ape")["metrics"]
    assert metrics["accuracy"] == want["accuracy"] and metrics["loss"] == pytest.approx(want["loss"], rel=1e-6)
    grads = jax.grad(lambda p: (run.job.probe(p) ** 2).sum())(now.params)
    moved = [n for n, g in tree.leaves(grads).items() if "encoding" in n and n.endswith("/p") and jnp.abs(g).max() > 0]
    assert moved  # zero is no dead end


@pytest.mark.slow
def test_a_checkpoint_resized_by_the_script_is_a_start_at_another_resolution(tmp_path, capsys):
    """Its scores are those of the zero-shot evaluation at that resolution."""
    small = vit(model__patch=16, steps=2, eval__batch_size=500) | {"encoding": preset("learned")}
    runs.train_here(VIT, small | {"eval.resolutions": (48,)}, tmp_path / "ape")
    script = ["scripts/resize_checkpoint.py", "--workdir", str(tmp_path / "ape"), "--resolution", "48"]
    script += ["--out", str(tmp_path / "ape48")]
    assert "at step 2 for 48 pixels" in runs.run(script)[0]
    assert "choose another --out" in runs.run(script, code=1)[1]
    both = {"name": "joint", "rotation": preset("comrope_ld") | {"angle_init": "zero"}, "bias": preset("learned")}
    given = small | {"encoding": both, "init_from": str(tmp_path / "ape48"), "data.image_size": 48}
    run = loop.Run(runs.config_of(VIT, given), VIT, tmp_path)
    with checkpoint.Checkpoints(tmp_path / "new") as saved:
        now = run.start_state(saved)
    metrics, _ = evaluate.evaluate_split(run.job, now.params, run.mesh)
    (row,) = runs.result(tmp_path / "ape")["resolutions"]["rows"]
    assert metrics["accuracy"] == row["accuracy"] and metrics["loss"] == pytest.approx(row["loss"], rel=1e-6)
