"""Weights of timm's models give timm's logits, and not with axes, pairing or class token mistaken; files of our own
come back bit for bit; what does not fit is told in a sentence."""

import functools
import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import runs
from configs.encodings import preset
from jojax import checkpoint, convert, evaluate, task, timm, tree, writer
from jojax.encodings import absolute
from jojax.encodings.fold import fold
from jojax.errors import UserError
from scripts.record_timm_weights import SIZES, images, weights

RECORDED = json.loads((Path(__file__).parent / "timm_weights.json").read_text())
GRID = (4, 3)
PLAIN = {"layer_scale": 0.0}
MODELS = {  # entry: encoding, what differs from layer scale and the class token
    "ape": ("learned", PLAIN),
    "ape_mean": ("learned", PLAIN | {"pool": "mean"}),
    "ape_layer_scale": ("learned", {}),
    "axial": ("rope_axial", {}),
    "axial_rows_first": ("rope_axial", {}),
    "axial_ape": ("rope_axial+learned", {}),
    "mixed": ("rope_mixed", {}),
    "mixed_separate": ("rope_mixed", {}),
    "mixed_no_key_bias": ("rope_mixed", {}),
    "mixed_ape": ("rope_mixed+learned", {}),
}
SLOW = ("ape_mean", "ape_layer_scale", "axial_ape", "mixed_ape")
COMROPE = {"name": "comrope", "block": 2, "partition": "ld"}


def slow(*entries):
    return [pytest.param(entry, marks=pytest.mark.slow) for entry in entries]


def config_of(encoding, model=(), **options):
    """A config of the sizes that were recorded; an encoding's preset and options."""
    c = runs.config_of(runs.VIT, {})
    c.model.update(width=24, depth=2, heads=2, eps=1e-6, layer_scale=1.0)
    with c.ignore_type():
        c.model.patch, c.data.image_size = SIZES["patch_size"], SIZES["img_size"]
    c.model.update(dict(model))
    c.data.classes = SIZES["num_classes"]
    own = preset(encoding) if isinstance(encoding, str) else encoding
    c.encoding = ConfigDict(own | options)
    return c


def state(entry):
    return weights(RECORDED[entry]["shapes"])


def saved(tensors, path, metadata=None):
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, path, metadata)
    return path


@functools.cache
def compiled(text):
    config = ConfigDict(evaluate.tuples(json.loads(text)))
    config.dtype = "float64"
    model = task.make(config).model
    return jax.jit(lambda params: model.apply({"params": params}, images()))


def logits(config, params):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda t: np.asarray(t, "float64"), params)
        return np.asarray(compiled(json.dumps(writer.plain(config)))(wide))


def error(config, params, entry):
    """Largest difference from timm's logits, relative to the largest of them."""
    theirs = np.array(RECORDED[entry]["logits"])
    return np.abs(logits(config, params) - theirs).max() / np.abs(theirs).max()


def imported(tmp_path, entry, config, tensors=None, **options):
    file = saved(state(entry) if tensors is None else tensors, tmp_path / f"{entry}.safetensors")
    return convert.import_weights(file, tmp_path / entry, config, **options)


@functools.cache
def quick(entry, encoding, model, first="x", **options):
    """Parameters of an entry without a file."""
    job = task.make(config_of(encoding, model, **options))
    like = jax.eval_shape(job.init, jax.random.key(0))
    found = timm.from_timm(state(entry), tree.leaves(like), job.model.encoding(parent=None), first)
    return tree.named_map(lambda path, _: found[path], like)


def params_of(entry, **options):
    encoding, model = MODELS[entry]
    return quick(entry, encoding, tuple(model.items()), **options)


@pytest.mark.parametrize("entry", [e for e in MODELS if e not in SLOW] + slow(*SLOW))
def test_logits_are_timm_s(entry, tmp_path):
    config = config_of(*MODELS[entry])
    first = "y" if entry == "axial_rows_first" else "x"
    assert error(config, imported(tmp_path, entry, config, first=first), entry) < 1e-6


def test_every_entry_is_tested():
    assert set(RECORDED) == {"libraries", *MODELS}
    assert all(np.abs(np.diff(RECORDED[entry]["logits"], axis=0)).max() > 0.1 for entry in MODELS)


@pytest.mark.parametrize("entry", ["axial", "mixed"])
def test_axes_are_not_mistaken(entry):
    assert error(config_of(*MODELS[entry]), params_of(entry, first="y"), entry) > 1e-2


@pytest.mark.parametrize("entry", ["axial", *slow("mixed")])
def test_pairing_is_not_mistaken(entry):
    """Channels are put where the config's pairing wants them, and there alone."""
    half = config_of(*MODELS[entry], pairing="half")
    assert error(half, params_of(entry, pairing="half"), entry) < 1e-6
    assert error(half, params_of(entry), entry) > 1e-2


def test_tables_and_class_token_are_not_mistaken():
    config, params, theirs = config_of(*MODELS["ape"]), params_of("ape"), state("ape")
    np.testing.assert_array_equal(params["cls"], theirs["cls_token"] + theirs["pos_embed"][:, :1])
    assert error(config, params, "ape") < 1e-6
    table = params["encoding"]["table"]
    turned = table.reshape(*GRID[::-1], -1).swapaxes(0, 1).reshape(table.shape)  # columns first
    block = params["blocks"]
    for wrong in (
        {"cls": theirs["cls_token"]},
        {"encoding": {"table": turned}},
        {"encoding": {"table": theirs["pos_embed"][0, :-1]}},  # the class token's position for the first patch
        {"blocks": block | {"query": block["key"], "key": block["query"]}},
        {"blocks": block | {"key": block["value"], "value": block["key"]}},
    ):
        assert error(config, params | wrong, "ape") > 1e-2, wrong.keys()


@functools.cache
def mixed_config():
    return config_of(*MODELS["mixed"])


def test_other_names_of_the_same():
    """RoPE-ViT's own files, and what data-parallel training puts before a name."""
    theirs = state("mixed")
    renamed = {name: t for name, t in theirs.items() if name != "rope.freqs"}
    renamed |= {"freqs": theirs["rope.freqs"].reshape(2, 2, -1), "freqs_t_x": np.arange(12), "freqs_t_y": np.arange(12)}
    job = task.make(mixed_config())
    like = tree.leaves(jax.eval_shape(job.init, jax.random.key(0)))
    found = timm.from_timm({f"module.{n}": t for n, t in renamed.items()}, like, job.model.encoding(parent=None))
    runs.same(found, tree.leaves(params_of("mixed")))


@pytest.mark.parametrize("entry", ["axial", *slow("ape_layer_scale", "axial_ape", "mixed")])
def test_export_to_timm_is_the_way_back(entry, tmp_path):
    config, theirs = config_of(*MODELS[entry]), state(entry)
    imported(tmp_path, entry, config)
    convert.export_weights(tmp_path / entry, tmp_path / "back.safetensors", form="timm")
    runs.same(load_file(tmp_path / "back.safetensors"), theirs)
    rows = convert.export_weights(tmp_path / entry, tmp_path / "rows.safetensors", form="timm", first="y")
    assert (entry == "ape_layer_scale") == all(np.array_equal(rows[name], theirs[name]) for name in theirs)


def test_own_files_come_back_bit_for_bit(tmp_path):
    config = mixed_config()
    params = tree.leaves(imported(tmp_path, "mixed", config))
    file = tmp_path / "deep" / "own.safetensors"
    convert.export_weights(tmp_path / "mixed", file)
    runs.same(load_file(file), params)
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    assert (metadata["format"], metadata["step"]) == ("jojax", "0")
    assert json.loads(metadata["encoding"])["form"] == "mixed"
    again = convert.import_weights(file, tmp_path / "again")
    runs.same(tree.leaves(again), params)
    result, found, _, restored, _ = evaluate.restore(tmp_path / "again")
    assert result["state"] == "finished" and found.to_dict() == config.to_dict()
    runs.same(jax.tree.map(np.asarray, tree.leaves(restored)), params)
    with pytest.raises(UserError, match="holds a run: choose another --out"):
        convert.import_weights(file, tmp_path / "again")
    with pytest.raises(UserError, match=r"do not fit the model: missing: .* leave --config out"):
        convert.import_weights(file, tmp_path / "other", config_of("learned"))


def test_a_run_of_other_classes_starts_from_it(tmp_path):
    imported(tmp_path, "axial", config_of(*MODELS["axial"]))
    other = config_of("rope_axial_qkv", MODELS["axial"][1])  # the same parameters, values turned too
    other.data.classes = 7
    start = jax.eval_shape(task.make(other).init, jax.random.key(0))
    start = jax.tree.map(lambda t: jax.numpy.asarray(np.zeros(t.shape, t.dtype)), start)
    params, difference = checkpoint.restore_params(tmp_path / "axial", start)
    assert {text.split()[0] for text in difference.shape} == {"head/kernel", "head/bias"}
    assert not difference.missing and not difference.unexpected
    np.testing.assert_array_equal(params["blocks"]["query"]["kernel"], params_of("axial")["blocks"]["query"]["kernel"])


def test_tables_beside_rotations_are_resized():
    config, params = config_of(*MODELS["axial_ape"]), params_of("axial_ape")
    fitted = evaluate.resized(config, params, GRID, (6, 6))
    table, want = params["encoding"]["of_bias"], fitted["encoding"]["of_bias"]["table"]
    np.testing.assert_array_equal(want, absolute.resize(table, GRID, (6, 6))["table"])
    assert want.shape == (36, 24)
    runs.same(*(tree.leaves(p["blocks"]) for p in (params, fitted)))


def drawn(config, path):
    """Random weights, which become a run by a file of our own."""
    like = tree.leaves(jax.eval_shape(task.make(config).init, jax.random.key(0)))
    tensors = weights({name: t.shape for name, t in like.items()})
    tensors = {name: 8 * t if "encoding" in name else t + ("scale" in name) for name, t in tensors.items()}
    metadata = {"format": "jojax", "config": json.dumps(writer.plain(config)), "step": "7"}
    return convert.import_weights(saved(tensors, f"{path}.safetensors", metadata), path)


def test_folded_export(tmp_path):
    """The folded model, of which test_fold.py shows that it is the same."""
    config = config_of(COMROPE)
    params = drawn(config, tmp_path / "run")
    convert.export_weights(tmp_path / "run", tmp_path / "folded.safetensors", fold=True)
    found = convert.import_weights(tmp_path / "folded.safetensors", tmp_path / "folded")
    made, want = fold(task.make(config).model.encoding(parent=None), params)
    recorded = runs.result(tmp_path / "folded")
    assert recorded["steps"] == 7 and made.items() <= recorded["config"]["encoding"].items()
    runs.same(tree.leaves(found), tree.leaves(want))


@pytest.mark.slow
def test_folded_export_to_timm(tmp_path):
    """ComRoPE of patches counted, the class token never turned, is a mixed rotation of timm's."""
    config = config_of(COMROPE | {"coord": "index", "cls_pos": "none"})
    want = logits(config, drawn(config, tmp_path / "run"))
    out = convert.export_weights(tmp_path / "run", tmp_path / "timm.safetensors", fold=True, form="timm")
    assert {name: list(t.shape) for name, t in out.items()} == RECORDED["mixed"]["shapes"]
    params = convert.import_weights(tmp_path / "timm.safetensors", tmp_path / "timm", mixed_config())
    np.testing.assert_allclose(logits(mixed_config(), params), want, rtol=0, atol=1e-5 * np.abs(want).max())
    still = {"blocks": params["blocks"] | {"encoding": {"freq": np.zeros_like(params["blocks"]["encoding"]["freq"])}}}
    assert np.abs(logits(mixed_config(), params | still) - want).max() > 1e-2


REFUSED_EXPORTS = {
    "values": ("rope_axial_qkv", {}, r"encoding.transport = 'qkv': timm's models have qk alone"),
    "learned_axes": ("rope_axial_learned_per_layer", {}, r"encoding.learned = True: timm's models have False alone"),
    "coordinates": ("rope_unit10k", {}, r"encoding.coord = 'unit_center': timm's models have index alone"),
    "waves": ("sincos2d", {}, r"encoding.kind = 'sincos2d': timm's models have learned alone"),
    "others": ("ape_grid", {}, "timm's models have no encoding like ApeGrid"),
    "joint": ("rope_mixed+alibi_2d", {}, "timm's models have no encoding like Relative"),
    "gains": ("rope_mixed", {"qk_norm": "before"}, "blocks/norm_k/scale has no counterpart in timm"),
}


@pytest.mark.parametrize("case", REFUSED_EXPORTS)
def test_what_timm_has_not_is_refused(case):
    encoding, model, words = REFUSED_EXPORTS[case]
    made = task.make(config_of(encoding, model)).model.encoding(parent=None)
    with pytest.raises(UserError, match=words):
        timm.to_timm({"blocks/norm_k/scale": np.ones((2, 12))} if model else {}, made)


@pytest.mark.slow
def test_what_does_not_fold_is_refused(tmp_path):
    drawn(config_of("rope_axial"), tmp_path / "run")
    with pytest.raises(UserError, match="nothing folds into plain rope"):
        convert.export_weights(tmp_path / "run", tmp_path / "file.safetensors", fold=True)


MISFITS = {
    "classes": (
        ("mixed", "rope_mixed", {}),
        {"data.classes": 10},
        r"has 5 classes, the config 10: import with the file",
    ),
    "grid": (
        ("ape", "learned", PLAIN),
        {"data.image_size": (8, 12)},
        "has 13 positions, the config 16 patches: .*resize_",
    ),
    "missing": (("ape", "learned", {}), {}, r"missing: blocks.0.ls1.gamma, .*; set the config's model"),
    "unexpected": (("mixed", "rope_mixed", PLAIN), {}, r"unexpected: blocks.0.ls1.gamma"),
    "table": (("ape", "none", PLAIN), {}, "unexpected: pos_embed"),
    "frequencies": (("axial", "rope_mixed", {}), {}, "missing: rope.freqs"),
    "fixed": (("mixed", "rope_axial", {}), {}, "unexpected: rope.freqs"),
    "width": (
        ("mixed", "rope_mixed", {"mlp_ratio": 2.0}),
        {},
        r"shape: .*blocks.0.mlp.fc1.weight \(96, 24\) -> \(48, 24\)",
    ),
    "pool": (("mixed", "rope_mixed", {"pool": "mean"}), {}, "unexpected: cls_token"),
    "eps": (("mixed", "rope_mixed", {"eps": 1e-5}), {}, r"model.eps = 1e-05: timm's have 1e-06 \(--config.model.eps"),
    "values": (("mixed", "rope_mixed_qkv", {}), {}, r"timm's models have qk alone; .*\(config.init_from\)"),
}


FEW = ("classes", "grid", "missing", "table", "eps", "values")


@pytest.mark.parametrize("case", [*FEW, *slow(*(case for case in MISFITS if case not in FEW))])
def test_misfits_are_told(case, tmp_path):
    (entry, encoding, model), changes, words = MISFITS[case]
    config = config_of(encoding, model)
    with config.ignore_type():
        config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=words):
        imported(tmp_path, entry, config)
    assert not (tmp_path / entry).exists()


def test_files_that_are_none(tmp_path, monkeypatch):
    torch = types.ModuleType("torch")
    tensor = types.SimpleNamespace(float=lambda: types.SimpleNamespace(numpy=lambda: np.ones(3)))

    def load(path, **options):
        assert options == {"map_location": "cpu", "weights_only": True}
        return {"model": {"head.bias": tensor}, "epoch": 3} if path.name == "good.pth" else {"model": 3}

    torch.load = load
    for name in ("good.pth", "bad.pth", "bad.safetensors"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
    monkeypatch.setitem(sys.modules, "torch", None)
    for name, words in {
        "none.pth": "no such file",
        "bad.safetensors": "not read as safetensors",
        "good.pth": "torch is not installed: install it, or convert the file",
    }.items():
        with pytest.raises(UserError, match=words):
            convert.read(tmp_path / name)
    monkeypatch.setitem(sys.modules, "torch", torch)
    np.testing.assert_array_equal(convert.read(tmp_path / "good.pth")[0]["head.bias"], np.ones(3))
    with pytest.raises(UserError, match="not read as weights alone"):
        convert.read(tmp_path / "bad.pth")
    with pytest.raises(UserError, match="--config is missing"):
        convert.import_weights(saved(state("ape"), tmp_path / "ape.safetensors"), tmp_path / "run")


@pytest.mark.slow
def test_the_command_line(tmp_path):
    from test_evaluate_images import config_of as of_images

    spec, given = of_images("rope_mixed")
    given |= {"model.width": 24, "model.eps": 1e-6, "model.layer_scale": 1.0, "model.patch": 8, "data.image_size": 32}
    config = runs.config_of(spec, given)
    shapes = {
        name: t.shape for name, t in tree.leaves(jax.eval_shape(task.make(config).init, jax.random.key(0))).items()
    }
    encoding = task.make(config).model.encoding(parent=None)
    file = saved(timm.published(timm.to_timm(weights(shapes), encoding), True), tmp_path / "timm.safetensors")
    overrides = [f"--config.{key}={value}" for key, value in given.items()]
    command = ["-m", "jojax.convert"]
    made = [*command, "import", f"--weights={file}", f"--config={spec}", *overrides, f"--out={tmp_path / 'run'}"]
    assert "parameters of" in runs.run(made)[0]
    runs.run(["-m", "jojax.evaluate", "--workdir", str(tmp_path / "run")])
    assert runs.result(tmp_path / "run")["evaluation"]["scored"] == 37
    runs.run([*command, "export", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'own.safetensors'}"])
    runs.same(load_file(tmp_path / "own.safetensors"), weights(shapes))
    for args, words in (
        (["import"], "import needs"),
        ([], "'nothing' is not understood"),
        (["export"], "export needs"),
    ):
        assert words in runs.run([*command, *args], code=2)[1]
