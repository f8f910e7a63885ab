"""Values of position encodings as public libraries compute them, for tests/test_public_values.py: the tests read the
numbers, so that they need no PyTorch. The libraries are called, none of their code is here.

    python3.11 -m venv public
    public/bin/pip install torch transformers x-transformers rotary-embedding-torch
    public/bin/pip install --no-deps timm
    public/bin/python scripts/record_public_values.py

An entry of tests/public_values.json holds the library, its version, what was called, the inputs (arrays by seed, see
`drawn`), the values, and a tolerance relative to the largest of them: the rounding of the library's dtype times how
far it grows (the largest angle or sum). Neither jojax nor JAX is imported.
"""

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).resolve().parent.parent / "tests" / "public_values.json"
RECORDERS = []

# inputs, exact in float32
TEXT: dict[str, Any] = {"seed": 1, "position": [0, 1, 2, 5, 13, 31], "heads": 2, "head_dim": 8}
IMAGE: dict[str, Any] = {"seed": 2, "grid": [2, 3], "heads": 2, "head_dim": 8}
FURTHEST = TEXT["position"][-1]
HEAD_COUNTS = [1, 2, 4, 5, 6, 8, 10, 12, 16]


def drawn(seed, *shape):
    """Eighths from −2 to 2."""
    return np.random.default_rng(seed).integers(-16, 17, shape) / 8


def recorder(*paths, grows=2):
    """Registers a function that gets what stands at `paths` ("package.module:name") and yields entries: name, inputs,
    values. grows: by how much rounding may grow."""
    return lambda function: RECORDERS.append((paths, grows, function))


def public(path):
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def tensor(array, dtype="float32"):
    torch = importlib.import_module("torch")
    return torch.tensor(np.asarray(array), dtype=getattr(torch, dtype))


def queries_and_keys(inputs, parts=2):
    """q, k [1, H, L, D], as the libraries take them."""
    sites = np.prod(inputs["grid"]) if "grid" in inputs else len(inputs["position"])
    return [tensor(part)[None] for part in drawn(inputs["seed"], parts, inputs["heads"], sites, inputs["head_dim"])]


def scores(q, k):
    """q·k [H, Lq, Lk] of q, k [1, H, L, D]; summed in float64, so that the rounding is that of the rotations."""
    q, k = (t.detach().numpy()[0].astype(np.float64) for t in (q, k))
    return np.einsum("hqd,hkd->hqk", q, k).astype(np.float32)


# ------------------------------------------------------------------------------------ rotations of text
LLAMA, NEOX = "transformers.models.llama.modeling_llama:", "transformers.models.gpt_neox.modeling_gpt_neox:"
ROFORMER, MARIAN = "transformers.models.roformer.modeling_roformer:", "transformers.models.marian.modeling_marian:"
XT, TIMM = "x_transformers.x_transformers:", "timm.layers.pos_embed_sincos:"
RELATIVE = "timm.layers.pos_embed_rel:"


def rotated(config, embedding, apply, inputs, **sizes):
    """Scores of a model of transformers."""
    H, D = inputs["heads"], inputs["head_dim"]
    made = config(hidden_size=H * D, num_attention_heads=H, **sizes)
    cos, sin = embedding(made)(tensor(0), tensor([inputs["position"]], "int64"))
    return scores(*apply(*queries_and_keys(inputs), cos, sin))


@recorder("transformers:LlamaConfig", LLAMA + "LlamaRotaryEmbedding", LLAMA + "apply_rotary_pos_emb", grows=FURTHEST)
def llama(*library):
    # ntk: the dynamic form, base times sequence over trained length where the factor is 1; yarn: two planes, one above
    # and one below the ramp; partial: frequencies as among all planes, the slowest put to zero (Gemma 4)
    for name, D, trained, options in (
        ("rope", 8, 4096, {"rope_type": "default"}),
        ("rope_pi", 8, 4096, {"rope_type": "linear", "factor": 4.0}),
        ("rope_ntk", 8, (FURTHEST + 1) // 4, {"rope_type": "dynamic", "factor": 1.0}),
        ("rope_yarn", 4, 2048, {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}),
        ("rope_partial", 8, 4096, {"rope_type": "proportional", "partial_rotary_factor": 0.75}),
    ):
        inputs, options = TEXT | {"head_dim": D}, {"rope_theta": 10_000.0} | options
        sizes = {"max_position_embeddings": trained, "rope_parameters": options}
        yield name, inputs | {"max_position_embeddings": trained} | options, rotated(*library, inputs, **sizes)


@recorder("transformers:LlamaConfig", "transformers.modeling_rope_utils:ROPE_INIT_FUNCTIONS")
def yarn(config, functions):
    # frequencies of all planes, those within the ramp too, and last the factor of queries and keys
    options = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "rope_theta": 10_000.0}
    made = config(hidden_size=16, num_attention_heads=1, max_position_embeddings=2048, rope_parameters=dict(options))
    omega, factor = functions["yarn"](made)
    yield "rope_yarn_frequencies", {"head_dim": 16} | options, np.append(omega.numpy(), np.float32(factor))


@recorder("transformers:GPTNeoXConfig", NEOX + "GPTNeoXRotaryEmbedding", NEOX + "apply_rotary_pos_emb", grows=FURTHEST)
def neox(*library):
    # the first half of the dimensions, with all frequencies of so small a head
    options = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    yield "rope_partial_neox", TEXT | options, rotated(*library, TEXT, rope_parameters=dict(options))


def waves(embedding, position, width):
    """[L, width] of a sinusoidal table of transformers."""
    made = embedding(max(position) + 1, width)
    made.weight.data = made.create_weight()
    return made(None, position_ids=tensor(position, "int64"))


@recorder(
    ROFORMER + "RoFormerSinusoidalPositionalEmbedding",
    ROFORMER + "RoFormerSelfAttention.apply_rotary_position_embeddings",
    grows=FURTHEST,
)
def roformer(embedding, apply):
    q, k, v = apply(waves(embedding, TEXT["position"], TEXT["head_dim"]), *queries_and_keys(TEXT, 3))
    yield "rope_interleaved", TEXT | {"parts": 3}, scores(q, k)
    yield "rope_values", TEXT | {"parts": 3}, v[0]  # turned at their own site


@recorder(XT + "RotaryEmbedding", XT + "apply_rotary_pos_emb", grows=FURTHEST)
def xpos(embedding, apply):
    q, k = queries_and_keys(TEXT)
    freqs, scale = embedding(TEXT["head_dim"], use_xpos=True, scale_base=16)(tensor(TEXT["position"]))
    yield "xpos", TEXT | {"scale_base": 16}, scores(apply(q, freqs, scale), apply(k, freqs, 1 / scale))


@recorder("rotary_embedding_torch:RotaryEmbedding", "rotary_embedding_torch:apply_rotary_emb", grows=6)
def rotary_embedding_torch(embedding, apply):
    inputs = TEXT | {"position": list(range(6)), "scale_base": 4}
    made = embedding(inputs["head_dim"], use_xpos=True, xpos_scale_base=4)
    yield "xpos_consecutive", inputs, scores(*made.rotate_queries_and_keys(*queries_and_keys(inputs)))
    inputs = {"seed": 3, "grid": [2, 2, 3], "heads": 1, "head_dim": 12, "theta": 100.0}
    freqs = embedding(inputs["head_dim"] // 3, freqs_for="lang", theta=100.0).get_axial_freqs(*inputs["grid"])
    q, k = (apply(freqs, t.unflatten(2, inputs["grid"])).flatten(2, 4) for t in queries_and_keys(inputs))
    yield "rope_axial_three", inputs, scores(q, k)


# ------------------------------------------------------------------------------------ rotations of images
def turned(inputs, embed, apply, **options):
    return scores(*(apply(t, embed, **options) for t in queries_and_keys(inputs)))


@recorder(TIMM + "RotaryEmbeddingCat", TIMM + "apply_rot_embed_cat", grows=3)
def axial(embedding, apply):
    made = embedding(IMAGE["head_dim"], temperature=100.0, in_pixels=False)
    yield "rope_axial", IMAGE | {"temperature": 100.0}, turned(IMAGE, made.get_embed(IMAGE["grid"]), apply)


@recorder(TIMM + "build_rotary_pos_embed", TIMM + "freq_bands", TIMM + "apply_rot_embed", grows=3)
def centred(build, freq_bands, apply):
    bands = freq_bands(IMAGE["head_dim"] // 4, temperature=10_000.0, step=1) / 2  # coordinates go from −1 to 1
    embed = build(IMAGE["grid"], bands=bands, in_pixels=False, grid_type="centered")
    given = IMAGE | {"bands": shortest(bands.numpy())}
    yield "rope_unit10k", given, scores(*(apply(t, *embed) for t in queries_and_keys(IMAGE)))


@recorder(TIMM + "RotaryEmbeddingDinoV3", TIMM + "apply_rot_embed_cat", grows=7)
def dinov3(embedding, apply):
    embed = embedding(IMAGE["head_dim"], temperature=100.0).get_embed(IMAGE["grid"])  # 2π · coordinate / period
    yield "rope_axial_learned", IMAGE | {"temperature": 100.0}, turned(IMAGE, embed, apply, half=True)


@recorder(TIMM + "RotaryEmbeddingMixed", TIMM + "apply_rot_embed_cat", grows=3)
def mixed(embedding, apply):
    importlib.import_module("torch").manual_seed(0)
    made = embedding(IMAGE["heads"] * IMAGE["head_dim"], depth=1, num_heads=IMAGE["heads"], temperature=10.0)
    freqs = shortest(made.freqs.detach().numpy()[:, 0])  # as drawn, [x|y, H, D/2]
    yield "rope_mixed", IMAGE | {"freqs": freqs}, turned(IMAGE, made.get_embed(IMAGE["grid"])[0], apply)


@recorder(TIMM + "init_random_2d_freqs", TIMM + "get_mixed_freqs", TIMM + "apply_rot_embed_cat", grows=3)
def mixed_fixed(init, mix, apply):
    inputs = IMAGE | {"heads": 1, "head_dim": 16}  # the direction of the only head is along x, y counts downwards
    y, x = np.indices(IMAGE["grid"]).reshape(2, -1)
    embed = mix(init(16, 1, 1, temperature=10.0, rotate=False), tensor(x), tensor(-y))[0]
    yield "rope_mixed_fixed", inputs | {"temperature": 10.0}, turned(inputs, embed, apply)


# ------------------------------------------------------------------------------------ added to the embedding
@recorder(MARIAN + "MarianSinusoidalPositionalEmbedding")
def marian(embedding):
    yield "sinusoidal", {"position": TEXT["position"], "width": 12}, waves(embedding, TEXT["position"], 12)


@recorder(TIMM + "build_sincos2d_pos_embed", grows=3)
def sincos2d(build):
    yield "sincos2d", {"grid": [2, 3], "width": 16}, build([2, 3], 16, interleave_sin_cos=True)


@recorder("transformers.models.vit_mae.modeling_vit_mae:build_2d_sinusoidal_position_embedding", grows=3)
def mae(build):
    yield "sincos2d_mae", {"grid": [2, 3], "width": 12}, build(2, 3, 12, dtype=tensor(0, "float64").dtype)


@recorder("timm.layers.pos_embed:resample_abs_pos_embed", grows=4)
def resized(resample):
    for name, old, new, antialias in (
        ("learned_larger", [2, 3], [3, 5], False),
        ("learned_smaller", [5, 4], [2, 3], False),
        ("learned_smaller_antialias", [5, 4], [2, 3], True),
    ):
        table = tensor(drawn(4, 1, old[0] * old[1], 3))
        values = resample(table, new, old, num_prefix_tokens=0, antialias=antialias)[0]
        yield name, {"seed": 4, "grid": old, "new_grid": new, "width": 3, "antialias": antialias}, values


# ------------------------------------------------------------------------------------ biases
@recorder("transformers.models.bloom.modeling_bloom:build_alibi_tensor", grows=4)
def bloom(build):
    # all head counts one after the other, a row a head, counted from the first site
    seen = tensor(np.ones((1, 4)))
    rows = [build(seen, heads, seen.dtype)[:, 0].numpy() for heads in HEAD_COUNTS]
    yield "alibi", {"head_counts": HEAD_COUNTS, "position": [0, 1, 2, 3], "zero": 0}, np.concatenate(rows)


@recorder("transformers.models.mpt.modeling_mpt:build_mpt_alibi_tensor", grows=4)
def mpt(build):
    rows = [build(heads, 4)[:, 0].numpy() for heads in HEAD_COUNTS]  # counted from the last site
    yield "alibi_mpt", {"head_counts": HEAD_COUNTS, "position": [0, 1, 2, 3], "zero": 3}, np.concatenate(rows)


@recorder(XT + "AlibiPositionalBias", grows=4)
def alibi_two_sided(bias):
    yield "alibi_two_sided", {"heads": 6, "position": [0, 1, 2]}, bias(6)(3, 3)


@recorder("transformers.models.t5.modeling_t5:T5Attention._relative_position_bucket")
def t5(bucket):
    for name, first in (("t5_bias", 0), ("t5_bias_two_sided", -140)):
        options = {"bidirectional": first < 0, "num_buckets": 32, "max_distance": 128}
        distances = [*range(first, 140), 200, 500]  # query minus key
        yield name, {"distances": distances} | options, bucket(tensor(np.negative(distances), "int64"), **options)


@recorder(RELATIVE + "gen_relative_position_index", RELATIVE + "resize_rel_pos_bias_table_simple", grows=16)
def swin(index, resize):
    yield "rel_bias_2d", {"grid": [2, 3]}, index((2, 3))
    inputs = {"seed": 5, "grid": [2, 3], "new_grid": [3, 4], "heads": 2}  # tables [H, 2 · 2 − 1, 2 · 3 − 1]
    yield "rel_bias_2d_larger", inputs, resize(tensor(drawn(5, 2, 3, 5), "float64"), (3, 4), (2, 5, 7))


@recorder(XT + "DataDependentAlibi", grows=6)
def fox(bias):
    inputs = {"seed": 6, "position": list(range(6)), "heads": 2, "width": 4}
    weights, x = np.split(drawn(6, 2 + 6, 4), [2])  # [H, C], [L, C]
    made = bias(inputs["width"], inputs["heads"], bias_init=0.5)
    made.to_forget_gates[0].weight.data = tensor(weights)
    yield "fox", inputs | {"bias_init": 0.5}, made(tensor(x)[None])[0]


# ------------------------------------------------------------------------------------ command
def shortest(array):
    """Nested lists of the shortest decimals that read back as the same numbers."""
    return [shortest(part) for part in array] if array.ndim else json.loads(str(array[()]))


def entry(paths, grows, inputs, values):
    values = values.detach().numpy() if hasattr(values, "detach") else values
    library, whole = paths[0].replace(":", ".").partition(".")[0], values.dtype.kind == "i"
    return {
        "library": library.replace("_", "-"),
        "version": version(library),
        "torch": version("torch"),
        "called": paths,
        "inputs": inputs,
        "dtype": str(values.dtype),
        "tolerance": 0.0 if whole else grows * float(np.finfo(values.dtype).eps),
        "values": shortest(values),
    }


def main():
    for package in ("timm", "timm.layers"):  # not run: they import torchvision, what is called here does not
        if spec := importlib.util.find_spec(package):
            sys.modules[package] = importlib.util.module_from_spec(spec)
    lines = [
        f"{json.dumps(name)}: {json.dumps(entry(paths, grows, inputs, values))}"
        for paths, grows, function in RECORDERS
        for name, inputs, values in function(*map(public, paths))
    ]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(lines)} entries, {OUT.stat().st_size:,} bytes in {OUT}")


if __name__ == "__main__":
    main()
