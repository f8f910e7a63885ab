"""Augmentations against the values of timm and torchvision (public_images.json, scripts/record_public_images.py) at the
same draws, mixing against its expectation, repeated augmentation against index arithmetic, and what is refused."""

import importlib.util
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import runs
from configs import common
from jojax import losses, mixing, task
from jojax.data import augment, stream
from jojax.data.image import image_eval_transform, image_train_transform
from jojax.errors import UserError

HERE = Path(__file__).resolve().parent
PUBLIC = json.loads((HERE / "public_images.json").read_text())
spec = importlib.util.spec_from_file_location("record", HERE.parent / "scripts" / "record_public_images.py")
record = importlib.util.module_from_spec(spec)
spec.loader.exec_module(record)
Script, picture = record.Script, record.picture


def told(entry):
    return entry["inputs"]["called"] + " " + entry["inputs"].get("spec", "")


def difference(image, values):
    return np.abs(np.asarray(image).astype(int) - np.array(values)).max()


@pytest.mark.parametrize("entry", PUBLIC["timm_augment"] + PUBLIC["torchvision_augment"], ids=told)
def test_policies_are_the_libraries(entry):
    """To the last bit, and all draws are used up."""
    given = entry["inputs"]
    script = Script(given["draws"])
    image = picture(given["seed"], *given.get("size", record.SIZE))
    made = augment.policy(given["spec"])(Image.fromarray(image), record.FILL, script)
    assert difference(made, entry["values"]) == 0
    assert given["called"] == "rand_augment_transform" or not script.left


def test_entries_are_no_accident():
    """Nearly every one changes the image, and the two signs differ."""
    entries = PUBLIC["timm_augment"] + PUBLIC["torchvision_augment"]
    sizes = [e["inputs"].get("size", record.SIZE) for e in entries]
    same = [difference(picture(e["inputs"]["seed"], *s), e["values"]) == 0 for e, s in zip(entries, sizes, strict=True)]
    assert sum(same) == 8  # Identity; Equalize of fewer pixels than colours; Solarize above all colours
    assert len(PUBLIC["timm_augment"]) == 2 * 2 * 15 + 2 and len(PUBLIC["torchvision_augment"]) == 2 * 14


@pytest.mark.parametrize("entry", PUBLIC["jitter"])
def test_colour_jitter(entry):
    """Pillow's operations in the drawn order, with the drawn factors."""
    given = entry["inputs"]
    order, factors = given["draws"][:3], given["draws"][3:]
    made = augment.colour_jitter(Image.fromarray(picture(given["seed"])), given["strength"], Script([*order, *factors]))
    assert difference(made, entry["values"]) == 0


@pytest.mark.parametrize("entry", PUBLIC["erasing"])
def test_random_erasing(entry):
    given = entry["inputs"]
    image = np.full((*given["size"], 3), 2.0, np.float32)
    augment.erase(image, given["probability"], given["fill"] == "noise", Script(given["draws"]))
    assert difference(image, entry["values"]) == 0
    assert (image == 2).all() == (given["draws"][0] > 0.5)


def test_cutout_is_the_formula():
    for y, x in ((0, 0), (4, 3), (9, 6)):
        image = np.ones((10, 7, 3), np.float32)
        augment.cutout(image, 4, Script([(y + 0.5) / 10, (x + 0.5) / 7]))
        want = np.ones((10, 7))
        for i, j in itertools.product(range(10), range(7)):
            if y - 2 <= i < y + 2 and x - 2 <= j < x + 2:
                want[i, j] = 0
        np.testing.assert_array_equal(image, np.repeat(want[..., None], 3, 2))


def test_three_augment():
    image = picture(8, 12, 11)
    grey, solarised, blurred = (
        augment.three_augment(Image.fromarray(image), Script([u, 0.5])) for u in (0.1, 0.5, 0.9)
    )
    luma = image @ np.array([0.299, 0.587, 0.114])
    assert np.abs(np.asarray(grey) - luma[..., None]).max() <= 1
    assert difference(solarised, np.where(image < 128, image, 255 - image.astype(int))) == 0
    rough = [np.abs(np.diff(np.asarray(t).astype(float), axis=0)).mean() for t in (image, blurred)]
    assert rough[1] < 0.8 * rough[0] and abs(np.asarray(blurred).mean() - image.mean()) < 2


CFG = {"image_size": 16, "crop": "pad4", "flip": True, "mean": (0.5, 0.4, 0.3), "std": 0.25}
FULL = {"rand": "rand-m9-mstd0.5-inc1", "jitter": 0.3, "erase": 0.25, "cutout": 4}


def test_an_augmented_image_is_a_function_of_its_generator():
    example = {"image": picture(9, 20, 18), "label": 3}
    transform = image_train_transform(CFG | {"augment": FULL})
    a, b, c = (transform(example, np.random.default_rng(seed))["image"] for seed in (5, 5, 6))
    assert a.shape == (16, 16, 3) and a.dtype == np.float32
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    off = image_train_transform(CFG | {"augment": common.vit().data.augment})
    plain = image_train_transform(CFG)
    both = [t(example, np.random.default_rng(5))["image"] for t in (off, plain)]
    assert np.array_equal(*both)


def test_cover_crop_and_the_part_that_evaluation_keeps():
    image = picture(1, 50, 60)
    cfg = {"image_size": (10, 10), "crop": "cover", "mean": 0, "std": 1, "crop_ratio": 1.0}
    whole = np.asarray(Image.fromarray(image).resize((12, 10), Image.Resampling.BICUBIC))[:, 1:11] / 255
    np.testing.assert_allclose(image_eval_transform(cfg)({"image": image, "label": 0})["image"], whole, rtol=1e-6)
    large = np.asarray(Image.fromarray(image).resize((13, 11), Image.Resampling.BICUBIC)) / 255
    windows = [large[t : t + 10, s : s + 10] for t in range(2) for s in range(4)]
    rng, seen = np.random.default_rng(0), set()
    for _ in range(60):
        made = image_train_transform(cfg)({"image": image, "label": 0}, rng)["image"]
        seen |= {i for i, window in enumerate(windows) if np.allclose(window, made)}
    assert len(seen) == 8


# ------------------------------------------------------------------------------------ mixing
@pytest.mark.parametrize("entry", PUBLIC["mixing"])
def test_mixed_images_targets_and_losses_are_timm_s(entry):
    given, values = entry["inputs"], entry["values"]
    x = np.stack([picture(s, 8, 6) for s in range(4)]).astype(np.float32) / 255
    at = jnp.asarray([(given["at"][0] + 0.5) / 8, (given["at"][1] + 0.5) / 6])
    images, lam = mixing.blended(jnp.asarray(x), given["cut"], given["lam"], at)
    np.testing.assert_allclose(images, values["images"], atol=2e-6)
    labels = jnp.asarray(given["labels"])
    target = lam * losses.targets(labels, 5, 0.1) + (1 - lam) * losses.targets(mixing.partner(labels), 5, 0.1)
    np.testing.assert_allclose(target, values["targets"], atol=1e-6)
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(4, 5)), jnp.float32)
    soft = lam * losses.cross_entropy(logits, labels, 0.1) + (1 - lam) * losses.cross_entropy(
        logits, mixing.partner(labels), 0.1
    )
    for name, found in (
        ("softmax", soft),
        ("sigmoid", losses.binary_cross_entropy(logits, target)),
        ("both", losses.binary_cross_entropy(logits, jnp.where(target > 0.05, 1.0, 0.0))),
    ):
        assert float(found.mean()) == pytest.approx(values["losses"][name], rel=1e-5)


def batch_of(rng, B=6, classes=5):
    image = rng.normal(size=(B, 8, 6, 3)).astype(np.float32)
    label = rng.integers(classes, size=B)
    return {"image": jnp.asarray(image), "label": jnp.asarray(label), "weight": jnp.ones(B)}


def test_what_is_drawn(rng):
    """Shares are Beta(α, α); cutmix's are the pixels that stay; the switch is kept; a key decides all."""
    batch = batch_of(rng, B=2)
    draw = jax.jit(jax.vmap(lambda key: mixing.mix(batch, key, 0.8, 1.0, 0.3)))
    out = jax.device_get(draw(jax.random.split(jax.random.key(0), 3000)))
    own, other = np.asarray(batch["image"][0]), np.asarray(batch["image"][1])
    image, share = out["image"][:, 0], out["share"][:, 0]
    taken = np.isclose(image, other).all(-1)
    cut = (taken | np.isclose(image, own).all(-1)).all((1, 2))
    assert abs(cut.mean() - 0.3) < 0.03
    np.testing.assert_allclose(share[cut], 1 - taken[cut].mean((1, 2)), atol=1e-6)
    mixed = share[~cut]
    np.testing.assert_allclose(image[~cut], mixed[:, None, None, None] * (own - other) + other, atol=1e-5)
    assert abs(mixed.mean() - 0.5) < 0.02 and abs(mixed.var() - 1 / (4 * (2 * 0.8 + 1))) < 0.01
    np.testing.assert_array_equal(out["other"][0], batch["label"][::-1])
    one, same, else_ = (mixing.mix(batch, jax.random.key(k), mixup=0.4)["image"] for k in (3, 3, 4))
    assert np.array_equal(one, same) and not np.array_equal(one, else_)


def images(**data):
    c = common.vit(image_size=8)
    c.model.update(width=16, depth=1, heads=2, patch=4, pool="mean")
    c.batch_size = 4
    augmented = data.pop("augment", {})
    c.data.update(data)
    c.data.augment.update(augmented)
    return task.make(c)


def test_the_loss_of_a_mixed_batch_is_its_expectation(rng):
    """That of each label, weighted by its share; BCE against soft targets, or both at 1; accuracy likewise."""
    batch = batch_of(rng, 4, 10) | {"image": jnp.asarray(rng.normal(size=(4, 8, 8, 3)), jnp.float32)}
    batch |= {"other": mixing.partner(batch["label"]), "share": jnp.full(4, 0.7)}
    plain = images(label_smoothing=0.1)
    loss = jax.jit(lambda job, *given: job.loss(*given, None, False), static_argnums=0)
    params = jax.jit(plain.init)(jax.random.key(0))
    params["head"]["kernel"] = jnp.asarray(rng.normal(size=params["head"]["kernel"].shape))
    logits = jax.jit(plain.logits)(params, batch)
    ends = []
    for name in ("label", "other"):
        alone = {k: batch[k] for k in ("image", "weight")} | {"label": batch[name]}
        ends.append(loss(plain, params, alone))
    total, count, aux = loss(plain, params, batch)
    assert float(total) == pytest.approx(float(0.7 * ends[0][0] + 0.3 * ends[1][0]), rel=1e-5) and count == 4
    want = 0.7 * ends[0][2]["accuracy"] + 0.3 * ends[1][2]["accuracy"]
    assert float(aux["accuracy"]) == pytest.approx(float(want))
    hot = np.eye(10)[batch["label"]], np.eye(10)[batch["other"]]
    z = np.asarray(logits, np.float64)
    for both, t in (("share", 0.7 * hot[0] + 0.3 * hot[1]), ("both", np.maximum(*hot))):
        total = loss(images(loss="sigmoid", mixed_targets=both, augment={"mixup": 0.8}), params, batch)[0]
        want = (np.logaddexp(0, z) - t * z).mean(-1).sum()
        assert float(total) == pytest.approx(want, rel=1e-5)


def test_a_wrong_label_is_loud_under_sigmoid():
    assert np.isnan(losses.targets(jnp.asarray([-1, 5, 2]), 5)).any(-1).tolist() == [True, True, False]


# ------------------------------------------------------------------------------------ repeated augmentation
def test_repeated_examples_stand_apart_in_their_batch_and_are_augmented_apart():
    rows = [{"row": np.int32(i)} for i in range(8)]
    noise = lambda example, rng: example | {"noise": rng.random()}  # noqa: E731
    whole = stream.train_batches(rows, 6, 1, transform=noise, repeat=3)
    once = stream.train_batches(rows, 2, 1)
    for step in (0, 3, 11):
        batch = whole[step]
        np.testing.assert_array_equal(batch["row"], np.tile(once[step]["row"], 3))
        assert len(set(batch["noise"])) == 6
    seen = np.concatenate([whole[step]["row"] for step in range(4)])
    np.testing.assert_array_equal(np.bincount(seen), np.full(8, 3))  # r epochs of N / B steps
    halves = [
        stream.train_batches(rows, 6, 1, transform=noise, repeat=3, process_index=i, process_count=2) for i in (0, 1)
    ]
    for key in ("row", "noise"):
        np.testing.assert_array_equal(np.concatenate([half[5][key] for half in halves]), whole[5][key])
    with pytest.raises(UserError, match=r"batch_size is 8: make it a multiple of data\.augment\.repeat, 3"):
        stream.train_batches(rows, 8, 1, repeat=3)


# ------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"augment": {"rand": "rand-m9-x2"}},
            r"data\.augment\.rand is 'rand-m9-x2': write timm's rand-m9-mstd0\.5-inc1",
        ),
        ({"augment": {"rand": "randaug"}}, r"data\.augment\.rand is 'randaug'"),
        ({"augment": {"rand": "torchvision-m9-inc1"}}, r"data\.augment\.rand is 'torch"),
        ({"augment": {"rand": "rand-n1.5"}}, r"data\.augment\.rand is 'rand-n1\.5'"),
        ({"augment": {"rand": "rand", "three": True}}, r"data\.augment\.three = True .*not both"),
        ({"augment": {"cutmx": 1.0}}, r"data\.augment\.cutmx is no augmentation; there are rand, three"),
        ({"augment": {"switch": 0.3, "mixup": 1.0}}, r"data\.augment\.switch = 0\.3 .*mixup and cutmix together"),
        ({"augment": {"erase_fill": "mean"}}, r"data\.augment\.erase_fill = 'mean' .*data\.augment\.erase"),
        ({"augment": {"erase_fill": "grey"}}, r"data\.augment\.erase_fill is 'grey': choose one of noise, mean"),
        ({"loss": "bce"}, r"data\.loss is 'bce': choose one of softmax, sigmoid"),
        ({"mixed_targets": "both"}, r"data\.mixed_targets = 'both' .*with data\.loss = 'sigmoid'"),
        ({"mixed_targets": "both", "loss": "sigmoid"}, r"data\.mixed_targets = 'both' does nothing"),
        (
            {"mixed_targets": "both", "loss": "sigmoid", "augment": {"mixup": 1.0}, "label_smoothing": 0.1},
            r"data\.label_smoothing = 0\.1 .*targets are 0 or 1",
        ),
        ({"crop_ratio": 1.0}, r"data\.crop_ratio = 1\.0 .*'inception' or 'cover'"),
    ],
)
def test_refused(data, words):
    with pytest.raises(UserError, match=words):
        image_train_transform(CFG | data)


def test_mixing_needs_pairs():
    job = images(augment={"mixup": 1.0})
    assert job.mix is not None and images().mix is None
    job.config.batch_size = 5
    with pytest.raises(UserError, match=r"batch_size=5: mixup and cutmix .* even number"):
        _ = job.mix


@pytest.mark.slow
def test_a_run_with_everything_on_trains_the_same_with_micro_batches(tmp_path):
    """Mixing comes before the cut into micro-batches; all of it goes through the loop, devices and the record."""
    full = {f"data.augment.{k}": v for k, v in {**FULL, "mixup": 0.8, "cutmix": 1.0, "repeat": 2}.items()}
    full |= {"data.loss": "sigmoid", "optim.name": "lamb", "model.layer_scale": 1e-2, "model.drop_path": 0.0}
    told = []
    for accumulate in (1, 2):
        workdir = tmp_path / str(accumulate)
        runs.train_here(runs.VIT, runs.vit(steps=3, optim__accumulate=accumulate, optim__ema=0.5) | full, workdir)
        told.append(runs.losses(workdir))
        assert {"accuracy", "ema_accuracy"} <= runs.result(workdir)["metrics"].keys()
    assert told[0] == pytest.approx(told[1], rel=1e-4) and len(told[0]) == 3
