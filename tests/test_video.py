"""Vision transformers of video: three axes against the plain formulas in float64; clips of folders of frames."""

import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm

import reference
import runs
import zoo
from image_sets import encoded, write_files
from jojax import config, dry_run, encodings, evaluate, task
from jojax.data import image as im
from jojax.data.source import open_source
from jojax.data.stream import train_batches
from jojax.encodings import absolute
from jojax.errors import UserError
from jojax.result import check_same_run
from scripts import prepare_data
from test_formulas_comrope import DEFAULTS, generator

GRID, PATCH = (2, 4, 3), (2, 2, 3)  # time, height, width
DEPTH, G, D = 2, 3, 24
SWAPS = ((1, 0, 2), (0, 2, 1), (2, 1, 0))
CENTRES = {"coord": "unit_center", "cls_pos": "center"}


def clips():
    return np.random.default_rng(0).normal(size=(2, *(n * side for n, side in zip(GRID, PATCH, strict=True)), 3))


def model_and_params(options, pool="cls", grid=GRID):
    dims = (("depth", DEPTH), ("axes", 3), ("grid", grid), ("head_dim", D))
    model = zoo.vit_of(options, dims=dims, model=(("pool", pool), ("patch", PATCH)))
    with jax.enable_x64(True):
        return model, zoo.drawn(model, clips())


def logits(model, params, offset=0.0):
    with jax.enable_x64(True):
        return np.asarray(zoo.run(model, params, clips(), offset=offset))


def places(pool, offset=0.0):
    """[L, 3] in patches; the class token in the middle."""
    at = np.indices(GRID).reshape(3, -1).T
    first = [(np.array(GRID)[None] - 1) / 2] if pool == "cls" else []
    return np.concatenate([*first, at]) + offset


def frames(options, pool, order=(0, 1, 2), offset=0.0):
    """Matrix exponentials; `order`: axes taken for another."""
    at = places(pool, offset)
    unit = ((at + 0.5) / GRID)[:, order]
    omega = options.get("base", 1e4) ** -(np.arange(D // 6) / (D // 6))

    def of_block(layer, p, h, x, before):
        if options["name"] == "rope":
            turned = unit if options.get("coord") else at[:, order]
            angles = np.concatenate([turned[:, a, None] * omega for a in range(3)], -1)
            A = reference.frames(np.repeat(angles[:, None], G, 1), options["pairing"])
            if pool == "cls" and "cls_pos" not in options:
                A[0] = np.eye(D)
        else:
            o = DEFAULTS[options["name"]] | options
            parts = [[generator(o, p, a, g, 3, D) for a in range(3)] for g in range(G)]
            A = np.array([[expm(np.tensordot(u, own, 1)) for own in parts] for u in unit])
        return A, None, 0

    return of_block


def nope(layer, p, h, x, before):
    return np.broadcast_to(np.eye(D), (len(h), G, D, D)), None, 0


def formula(params, encode, begin=lambda x: x):
    return np.array([reference.vit(params, clip, encode, DEPTH, PATCH, begin) for clip in clips()])


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "more", "pool", "offset"),
    [
        ("comrope_ap", {"block": 4}, "cls", 0.0),
        slow("comrope_ld", {"block": 8}, "cls", (1.5, 0.25, -2.0)),
        slow("liere", {"block": 4, **CENTRES}, "mean", 0.0),
        ("rope_axial", {}, "cls", (1.5, 0.25, -2.0)),
        slow("rope_unit10k", {}, "cls", 0.0),
    ],
)
def test_frames_on_three_axes(name, more, pool, offset):
    """And no other formula: without frames, or with two axes taken for each other."""
    options = zoo.preset(name) | more
    model, params = model_and_params(options, pool)
    got = logits(model, params, offset)
    np.testing.assert_allclose(got, formula(params, frames(options, pool, offset=offset)), atol=1e-10)
    others = [frames(options, pool, order, offset) for order in SWAPS]
    for wrong in (nope, *others, *([frames(options, pool)] if name == "rope_axial" else [])):
        assert np.abs(got - formula(params, wrong)).max() > 1e-5


@pytest.mark.parametrize("pool", ["cls", slow("mean")])
def test_a_learned_table_on_three_axes(pool):
    model, params = model_and_params({"name": "absolute", "kind": "learned"}, pool)
    first = np.zeros((1, 20)) if pool == "cls" else np.zeros((0, 20))

    def added(x, order=(0, 1, 2)):
        sizes = [GRID[a] for a in order]
        table = params["encoding"]["table"].reshape(*sizes, 20).transpose(*np.argsort(order), 3)
        return x + np.concatenate([first, table.reshape(-1, 20)])

    got = logits(model, params)
    np.testing.assert_allclose(got, formula(params, nope, added), atol=1e-10)
    for order in SWAPS:
        assert np.abs(got - formula(params, nope, lambda x, order=order: added(x, order))).max() > 1e-4


@pytest.mark.slow
def test_a_table_sampled_between_its_cells_on_three_axes():
    grid = (3, 2, 5)
    model, params = model_and_params({"name": "ape_grid"}, grid=grid)
    table = params["encoding"]["table"]

    def added(x, order=(0, 1, 2)):
        out = []
        for u in ((places("cls") + 0.5) / GRID)[:, order]:
            at = (u * grid - 0.5).clip(0, np.array(grid) - 1)
            cells = itertools.product(*map(range, grid))
            out.append(sum(np.prod(np.maximum(0, 1 - np.abs(at - cell))) * table[cell] for cell in cells))
        return x + np.array(out)

    got = logits(model, params)
    np.testing.assert_allclose(got, formula(params, nope, added), atol=1e-10)
    for order in SWAPS:
        assert np.abs(got - formula(params, nope, lambda x, order=order: added(x, order))).max() > 1e-4


def test_a_table_of_clips_fits_other_sizes_frame_by_frame():
    table = np.random.default_rng(1).normal(size=(2, 4, 3, 5))
    got = absolute.resize({"table": jnp.asarray(table.reshape(-1, 5))}, (2, 4, 3), (2, 3, 6))["table"]
    of_frames = [absolute.resize({"table": jnp.asarray(t.reshape(-1, 5))}, (4, 3), (3, 6))["table"] for t in table]
    np.testing.assert_allclose(got, np.concatenate(of_frames), atol=1e-5)


def test_frames_of_a_clip_are_not_perturbed():
    dims = zoo.vit_dims(axes=3, grid=GRID, head_dim=D)
    encoding = encodings.build({"name": "comrope", "block": 4, "perturb_sigma": 1.0}, dims)(parent=None)
    position = jnp.asarray(places("cls"), jnp.float32)[None]
    placed = jnp.arange(len(places("cls")))[None] > 0
    ctx = encodings.Context(position=position, restart=None, segment=None, placed=placed, train=True)
    drawn = np.asarray(encoding.apply({}, ctx, method="noise", rngs={"encoding": jax.random.key(0)}))
    assert drawn.shape == (1, 25, 3) and not drawn[..., 0].any() and not drawn[:, 0].any()
    assert (drawn[:, 1:, 1:] != 0).all() and np.abs(drawn).max() <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(zoo.PRESETS))
def test_a_preset_takes_three_axes_or_says_why_not(name):
    try:
        model, params = model_and_params(zoo.preset(name))
    except UserError as error:
        assert "encoding" in str(error) or "model" in str(error)
    else:
        got = logits(model, params)
        assert np.isfinite(got).all() and np.abs(got[0] - got[1]).max() > 1e-4


# --------------------------------------------------------------------------------- data
HEIGHT, WIDTH = 9, 14


def frame(video, number):
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([np.full_like(x, 8 * number), 15 * x, 20 * y + video], -1).astype(np.uint8)


def write_videos(folder, train, test, numbered=True):
    """Lengths of the videos, by turns of two classes. Red is the number of a frame; names are not padded."""
    files = {
        f"{split}/{'ab'[v % 2]}/v{v}/img_{k + 8}.png": encoded(frame(v, k * numbered), "PNG")
        for split, lengths in (("train", train), ("test", test))
        for v, length in enumerate(lengths)
        for k in range(length)
    }
    return write_files(folder, files)


def data(folder, **more):
    base = dict(source="folder", path=str(folder), classes=2, image_size=(HEIGHT, WIDTH), mean=0.0, std=1.0)
    return base | dict(frames=3, frame_stride=2) | more


def numbers(clip):
    """Of the frames of a clip, which were not cropped."""
    assert clip.shape[1:] == (HEIGHT, WIDTH, 3)
    red = np.rint(clip[..., 0] * 255 / 8).astype(int)
    assert (red == red[:, :1, :1]).all()
    return red[:, 0, 0].tolist()


def test_clips_start_anywhere_in_training_and_in_the_middle_in_evaluation(tmp_path):
    cfg = data(write_videos(tmp_path, (12, 5, 7, 9), (12, 5)))
    source, transform = open_source(cfg, "train"), im.image_train_transform(cfg)
    assert [source[i]["label"] for i in range(4)] == [0, 0, 1, 1]
    assert [len(source[i]["image"]) for i in range(4)] == [12, 7, 5, 9]  # classes a and b
    for i, length in enumerate((12, 7, 5, 9)):
        seen = {tuple(numbers(transform(source[i], np.random.default_rng(s))["image"])) for s in range(60)}
        assert seen == {(k, k + 2, k + 4) for k in range(length - 4)}
    held_out, fixed = open_source(cfg, "valid"), im.image_eval_transform(cfg)
    assert [numbers(fixed(held_out[i])["image"]) for i in range(2)] == [[3, 5, 7], [0, 2, 4]]


def test_clips_are_functions_of_seed_and_step(tmp_path):
    cfg = data(write_videos(tmp_path, (31,) * 4, (5, 5)))

    def starts(seed, step):
        batches = train_batches(open_source(cfg, "train"), 4, seed, transform=im.image_train_transform(cfg))
        batch = batches[step]
        batches.close()
        assert batch["image"].shape == (4, 3, HEIGHT, WIDTH, 3) and batch["image"].dtype == np.float32
        return {int(clip[0, 0, 0, 2] * 255 + 0.5): numbers(clip)[0] for clip in batch["image"]}  # by video

    first = starts(0, 0)
    assert starts(0, 0) == first and len(first) == 4 and len(set(first.values())) > 1
    assert starts(0, 1) != first != starts(1, 0)  # another epoch, another seed


def test_short_videos_repeat_their_last_frame_and_are_counted_once(tmp_path, caplog):
    cfg = data(write_videos(tmp_path, (4, 5, 1), (9, 9)))
    for _ in range(2):
        source = open_source(cfg, "train")
    assert "train: 2 of 3 videos have fewer than the 5 frames of a clip; their last one is repeated" in caplog.text
    assert len(caplog.records) == 1
    of_train, of_valid = im.image_train_transform(cfg), im.image_eval_transform(cfg)
    for i, want in ((0, [0, 2, 3]), (1, [0, 0, 0])):
        assert numbers(of_train(source[i], np.random.default_rng(i))["image"]) == want
        assert numbers(of_valid(source[i])["image"]) == want


def test_frames_of_a_clip_are_augmented_alike(tmp_path):
    """A still video stays one; two images with one generator do not."""
    still = data(write_videos(tmp_path, (8, 8), (5, 5), numbered=False), crop="inception", flip=True)
    still["augment"] = {"rand": "rand-m9-mstd0.5-inc1", "jitter": 0.3, "erase": 0.9, "cutout": 2}
    source, transform = open_source(still, "train"), im.image_train_transform(still)
    made = [transform(source[0], np.random.default_rng(seed))["image"] for seed in range(8)]
    for clip in made:
        assert clip.shape == (3, HEIGHT, WIDTH, 3) and (clip == clip[:1]).all()
    assert len({clip.tobytes() for clip in made}) == 8
    one, rng = im.image_train_transform(still | {"frames": 0}), np.random.default_rng(0)
    a, b = (one({"image": frame(0, 0), "label": 0}, rng)["image"] for _ in range(2))
    assert (a != b).any()


def test_broken_folders_of_frames_are_refused(tmp_path):
    cfg = data(write_videos(tmp_path, (5, 5), (5, 5)))

    def message(files):
        write_files(tmp_path, files)
        with pytest.raises(UserError) as caught:
            open_source(cfg, "train")[0]
        for name in files:
            (tmp_path / name).unlink()
        return str(caught.value)

    video = tmp_path / "train/a/w.avi"
    assert f"mkdir {video.with_suffix('')} && ffmpeg -i {video} -q:v 2" in message({"train/a/w.avi": b"RIFF"})
    assert "holds img_8.png and x_8.png, two kinds of frames" in message({"train/a/v0/x_8.png": b""})
    with pytest.raises(UserError, match="v0 holds no video folder: remove that class, or put its video folders there"):
        open_source(cfg | {"path": str(tmp_path / "train")}, "a")  # a folder too deep
    (tmp_path / "train/a/empty").mkdir()
    assert "a/empty holds no frame named *.jpg, *.jpeg, *.png" in message({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.source": "fashion_mnist", "data.path": ""}, "data.frames = 8 would not be read: clips are of"),
        ({"data.frames": 0}, "data.frame_stride = 2 does nothing here"),
        ({"data.frames": 0, "data.frame_stride": 0, "model.patch_frames": 2}, "model.patch_frames = 2 does nothing"),
        ({"model.patch_frames": 3}, "a clip of 8×224×224 has no whole number of 3×16×16 patches"),
        ({"model.heads": 6}, "head_dim = 64 divisible by 24"),
        ({"encoding.partition": "ld", "encoding.angle_init": "spectrum"}, "angle_init = 'spectrum' with"),
        ({"encoding": zoo.preset("sincos2d")}, "kind = 'sincos2d' does not fit coordinates with 3 axes"),
        ({"encoding": zoo.preset("sinusoidal")}, "kind = 'sinusoidal' does not fit coordinates with 3 axes"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        task.make(runs.config_of("configs/comrope_ucf101.py:encoding=comrope_ap", changes))


def test_official_lists_become_folders(tmp_path, capsys):
    root, out = write_videos(tmp_path / "in", (3, 2), (4,)) / "train", tmp_path / "out"
    shutil.move(root.parent / "test/a/v0", root / "a/v2")
    lists = {"train": "a/v0.avi 1\r\nb/v1.avi 2\r\n", "test": "a/v2.avi\n"}
    arguments = ["ucf101", str(root), "--out", str(out)]
    assert prepare_data.main(arguments) == 2 and "trainlist01.txt is missing. UCF-101: " in capsys.readouterr().err
    write_files(root, {f"ucfTrainTestlist/{split}list01.txt": text.encode() for split, text in lists.items()})
    for _ in range(2):
        assert prepare_data.main(arguments) == 0
    assert "train: 2 videos of 2 classes\ntest: 1 videos of 1 classes\n" in capsys.readouterr().out
    source = open_source(data(out), "valid")
    assert (len(source), len(source[0]["image"]), source[0]["label"]) == (1, 4, 0)
    write_files(root, {"ucfTrainTestlist/testlist01.txt": b"a/v3.avi\n"})
    assert prepare_data.main(arguments) == 2 and "a/v3 is no folder of frames" in capsys.readouterr().err
    write_files(root, {"ucfTrainTestlist/testlist01.txt": b"b/v1.avi\n"})
    assert prepare_data.main(arguments) == 2 and "has a/v2, which testlist01.txt has not" in capsys.readouterr().err


def small(folder, encoding, **more):
    """A spec and its overrides, on videos written there; `a__b` means a.b."""
    given = {"data.path": str(write_videos(folder, range(7, 18), range(6, 17))), "data.classes": 2}
    given |= {"data.image_size": 8, "model.width": 24, "model.heads": 2, "model.depth": 2, "model.patch": 4}
    given |= {"data.frames": 4, "model.patch_frames": 2, "eval.resolutions": (), "eval.diagnostics": 0}
    given |= {"steps": 4, "checkpoint.every_steps": 2, "log.every_steps": 1, "dtype": "float32"}
    return f"configs/comrope_ucf101.py:smoke,encoding={encoding}", given | runs.dotted(more)


@pytest.mark.slow
def test_a_run_on_videos_goes_on_where_it_was(tmp_path):
    spec, given = small(tmp_path, "rope_axial")
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert runs.train_here(spec, given, whole) == 0
    shutil.copytree(whole / "checkpoints" / "2", again / "checkpoints" / "2")
    assert runs.train_here(spec, given, again) == 0
    runs.same(*runs.states(spec, given, whole, again))
    a, b = (runs.result(folder) for folder in (whole, again))
    assert a["metrics"] == b["metrics"] and a["scored"] == 11 and a["examples"] == 32


@pytest.mark.slow
def test_a_run_on_videos_is_read_at_other_sizes_and_folded(tmp_path):
    """Frames as trained; folded into plain rope, the same model."""
    more = dict(eval__resolutions=((12, 8),), eval__offsets=(1.5,), eval__diagnostics=2)
    spec, given = small(tmp_path, "comrope_ap", encoding__block=2, **more)
    assert runs.train_here(spec, given, tmp_path / "run") == 0
    result = runs.result(tmp_path / "run")
    (row,) = result["resolutions"]["rows"]
    assert row["resolution"] == [12, 8] and row["offset"] == [1.5, 1.5, 1.5] and row["scored"] == 11
    assert len(result["diagnostics"]["blocks"]) == 2
    folded = evaluate.evaluate_run(tmp_path / "run", fold=True)["evaluation-folded"]
    np.testing.assert_allclose(folded["loss"], result["metrics"]["loss"], rtol=1e-5)


def test_a_run_from_before_there_were_clips_goes_on():
    """What the keys of clips are by default is off."""
    now = config.load(f"{runs.ROOT}/{runs.VIT}").to_dict()
    old = {group: dict(value) if isinstance(value, dict) else value for group, value in now.items()}
    del old["model"]["patch_frames"], old["data"]["frames"], old["data"]["frame_stride"]
    check_same_run(old, now, "DIR")
    with pytest.raises(UserError, match=r"data\.frames: None → 8"):
        check_same_run(old, now | {"data": now["data"] | {"frames": 8}}, "DIR")


def test_the_config_is_ready(monkeypatch, tmp_path):
    """Without data, at full size."""
    monkeypatch.chdir(tmp_path)
    report = dry_run.report(config.load(f"{runs.ROOT}/configs/comrope_ucf101.py:encoding=comrope_ap"), "ucf")
    assert "| (1, 16, 16, 3, 384)" in report and "768 clips a step; 993 steps" in report and "split missing" in report
