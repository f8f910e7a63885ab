"""Evaluation of vision models against NumPy loops over single images; other resolutions, other coordinates."""

import functools

import jax
import numpy as np
import pytest
from PIL import Image

import runs
import zoo
from image_sets import write_imagenet
from jojax import evaluate, shard, task
from jojax.errors import UserError
from runs import VIT, vit


@functools.cache
def folder():
    return write_imagenet(runs.FOLDER / "images", classes=10, train=3, valid=37, kind="PNG")


def config_of(encoding, pool="cls"):
    given = vit(data__source="folder", data__path=str(folder()), data__valid_split="val", model__pool=pool)
    return f"{VIT},encoding={encoding}", given


@functools.cache
def trained():
    """The workdir of a run of a few steps with a table of positions."""
    with runs.alone("learned"):
        if not (runs.FOLDER / "learned" / "result.json").exists():
            runs.train(*config_of("learned"), runs.FOLDER / "learned")
    return runs.FOLDER / "learned"


def examples(size):
    """[(float32 [1, h, w, 3], label)] of the valid split: class by class, scaled to the size, -1 to 1."""
    out = []
    for label, wnid in enumerate(sorted((folder() / "val").iterdir())):
        for file in sorted(wnid.iterdir()):
            image = Image.open(file).convert("RGB").resize(size[::-1], Image.Resampling.BICUBIC)
            out.append(((np.asarray(image, np.float32)[None] / 255 - 0.5) / 0.5, label))
    return out


def loop(job, params, size, offset=0.0):
    """loss and accuracy, one image at a time on one device"""
    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    logits = jax.jit(lambda image: job.apply(params, image, offset=offset))
    nll, correct = [], []
    for image, label in examples(size):
        row = np.asarray(logits(image))[0].astype(np.float64)
        nll.append(np.log(np.exp(row).sum()) - row[label])
        correct.append(row.argmax() == label)
    assert len(nll) == 37  # no batch of 8, 16 or 40 divides it
    return {"loss": np.mean(nll), "accuracy": np.mean(correct)}


def test_image_metrics_are_a_loop_over_all_images():
    _, config, job, params, mesh = evaluate.restore(trained())
    want = loop(job, params, (32, 32))
    for batch_size in (1, 16, 100):
        config.eval.batch_size = batch_size
        got, scored = evaluate.evaluate_split(task.make(config), params, mesh)
        assert (mesh.size, scored) == (8, 37)
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5) and got["accuracy"] == want["accuracy"]


def interpolated(table, old, new, taps):
    """[Πold, C] -> [Πnew, C]: Σ taps(distance) · cell along y and then x; beyond the rim its last cell stands."""
    grid = table.reshape(*old, -1)
    for axis in (0, 1):
        rows, out = np.moveaxis(grid, axis, 0), []
        for i in range(new[axis]):
            centre = (i + 0.5) * old[axis] / new[axis] - 0.5
            near = range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3)
            out.append(sum(taps(abs(centre - j)) * rows[min(max(j, 0), old[axis] - 1)] for j in near))
        grid = np.moveaxis(np.array(out), 0, axis)
    return grid.reshape(-1, grid.shape[-1])


def cubic(d):
    """Cubic convolution (Keys 1981) with a = −3/4, as vision code has it."""
    return 1.25 * d**3 - 2.25 * d**2 + 1 if d <= 1 else -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)


def linear(d):
    return max(1 - d, 0)


def test_command_resizes_a_table_to_grids_that_need_not_be_square():
    workdir = trained()
    args = ["-m", "jojax.evaluate", "--workdir", str(workdir), "--resolutions", "48,32x48"]
    out, err = runs.run(args, env=runs.environment(devices=1))
    assert "48×48 px" in out and "32×48 px" in out and err == ""
    record = runs.result(workdir)["resolutions"]
    assert record["protocol"]["resolutions"] == [[48, 48], [32, 48]] and "zero-shot" in record["protocol"]["kind"]
    assert [(row["resolution"], row["scored"]) for row in record["rows"]] == [(48, 37), ([32, 48], 37)]


@pytest.mark.parametrize("encoding", ["ape_grid", "liere"])
def test_what_answers_at_any_grid_is_read_as_it_was_trained(encoding):
    """Coordinates are scaled by the grid of the training, and a table that is sampled stays whole."""
    config = runs.config_of(*config_of(encoding))
    job, mesh = task.make(config), shard.make_mesh(config.mesh)
    params = zoo.noisy(jax.jit(job.init)(jax.random.key(0)), 0.3)
    (row,) = evaluate.evaluate_resolutions(config, params, mesh, ((32, 48),), (0.25,))["rows"]
    want = loop(job, params, (32, 48), offset=0.25)
    assert row["loss"] == pytest.approx(want["loss"], rel=1e-5) and row["accuracy"] == want["accuracy"]
    wrong = loop(job, params, (32, 48))
    assert abs(row["loss"] - wrong["loss"]) > 1e-4 * row["loss"]


def test_a_sampled_table_is_resized_to_what_is_read_there():
    """To train on at another size: at its patches the model is the one that was trained."""
    config = runs.config_of(*config_of("ape_grid"))
    params = zoo.noisy(jax.jit(task.make(config).init)(jax.random.key(0)), 0.3)
    fitted = evaluate.resized(config, params, (4, 4), (4, 6))
    other = evaluate.at_resolution(config, (32, 48)).config
    batch = {"image": np.concatenate([image for image, _ in examples((32, 48))])}
    want = task.make(config).logits(params, batch)
    np.testing.assert_allclose(task.make(other).logits(fitted, batch), want, atol=1e-5)
    assert fitted["encoding"]["table"].shape == (4, 6, 32)


@pytest.mark.slow
def test_tables_are_resized_by_cubic_convolution():
    _, config, _, params, mesh = evaluate.restore(trained())
    params = zoo.noisy(params, 0.5)  # so that the place of a patch matters
    sizes = ((48, 48), (32, 48))
    result = evaluate.evaluate_resolutions(config, params, mesh, sizes)
    for row, size in zip(result["rows"], sizes, strict=True):
        grid, table = tuple(n // 8 for n in size), params["encoding"]["table"]
        fitted = [params | {"encoding": {"table": interpolated(table, (4, 4), grid, f)}} for f in (cubic, linear)]
        want, wrong = (loop(evaluate.at_resolution(config, size), other, size) for other in fitted)
        assert row["loss"] == pytest.approx(want["loss"], rel=1e-5) and row["accuracy"] == want["accuracy"]
        assert abs(row["loss"] - wrong["loss"]) > 1e-3 * row["loss"]


@pytest.mark.slow
def test_relative_frames_answer_at_any_resolution_and_offset():
    """Top-1 does not change with the origin; with a class token, which stands at no place, it would."""
    config = runs.config_of(*config_of("rope_axial", pool="mean"))
    job, mesh = task.make(config), shard.make_mesh(config.mesh)
    params = zoo.noisy(jax.jit(job.init)(jax.random.key(0)), 0.1)
    offsets = [(0.0, 0.0), (7.5, -3.0)]
    result = evaluate.evaluate_resolutions(config, params, mesh, (32, 40), offsets)
    rows = {(row["resolution"], row["offset"][0]): row for row in result["rows"]}
    assert list(rows) == [(32, 0.0), (32, 7.5), (40, 0.0), (40, 7.5)]
    for size in (32, 40):
        assert rows[size, 0.0]["accuracy"] == rows[size, 7.5]["accuracy"]
    assert rows[40, 0.0]["loss"] != rows[32, 0.0]["loss"]

    batch = {"image": np.concatenate([image for image, _ in examples((32, 32))])}
    here, there = (np.asarray(job.logits(params, batch, offset=o)) for o in offsets)
    np.testing.assert_allclose(here, there, atol=1e-4)
    assert here.std(0).max() > 0.1  # it does look at the image
    config.model.pool = "cls"
    other, token = task.make(config), {**params, "cls": np.ones((1, 1, 32), np.float32)}
    here, there = (np.asarray(other.logits(token, batch, offset=o)) for o in offsets)
    assert np.abs(here - there).max() > 0.01


def test_a_table_has_no_answer_at_an_offset():
    with pytest.raises(UserError, match="learned is a table of the training grid: it has no answer at an offset"):
        evaluate.evaluate_run(trained(), offsets=(1.0,))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(lengths=(32,)), "--lengths and --stride are for language models"),
        (dict(resolutions=(33,)), r"an image of 33×33 has no whole number of 8×8 patches"),
    ],
)
def test_what_a_vision_model_cannot_do(given, words):
    before = runs.snapshot(trained())
    with pytest.raises(UserError, match=words):
        evaluate.evaluate_run(trained(), **given)
    assert runs.snapshot(trained()) == before


@pytest.mark.slow
def test_a_folded_model_is_recorded_beside_the_run(tmp_path):
    """The same figures by plain rope, under keys of their own; a table of positions has nothing to fold."""
    assert runs.train_here(*config_of("comrope_ld"), tmp_path) == 0
    before, (_, config, job, params, mesh) = runs.result(tmp_path), evaluate.restore(tmp_path)
    evaluate.evaluate_run(tmp_path, fold=True, resolutions=((32, 48),))
    after = runs.result(tmp_path)
    made, rows = after.pop("evaluation-folded"), after.pop("resolutions-folded")["rows"]
    assert after == before
    assert made["protocol"]["encoding"] | {"name": "rope", "form": "mixed"} == made["protocol"]["encoding"]
    assert made["scored"] == 37 and made["loss"] == pytest.approx(before["metrics"]["loss"], rel=1e-5)
    want = evaluate.evaluate_resolutions(config, params, mesh, ((32, 48),))["rows"]
    assert rows[0]["loss"] == pytest.approx(want[0]["loss"], rel=1e-5)
    plain, other = evaluate.folded(job, params, mesh)
    images = np.concatenate([image for image, _ in examples((32, 32))])
    one, two = (np.asarray(j.logits(p, {"image": images})) for j, p in ((job, params), (plain, other)))
    np.testing.assert_allclose(one, two, atol=1e-4)
    with pytest.raises(UserError, match="Absolute has no frames"):
        evaluate.evaluate_run(trained(), fold=True)
