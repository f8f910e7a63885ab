"""The preflight: FLOPs, bytes and collectives read from a program's text against counts by hand, and what is told."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import jax
import pytest

import runs
from jojax import chips, flops, hlo, preflight
from jojax.errors import UserError
from jojax.parts import Parts
from scripts import preflight_all

LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=8

%fused_dot (param_0: f32[6,4], param_1: f32[3,4,5]) -> f32[6,5] {
  %param_0 = f32[6,4]{1,0} parameter(0)
  %param_1 = f32[3,4,5]{2,1,0} parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,4,5]{2,1,0} dynamic-slice(%param_1, %zero, %zero, %zero), dynamic_slice_sizes={1,4,5}
  %flat = f32[4,5]{1,0} bitcast(%slice)
  ROOT %dot = f32[6,5]{1,0} dot(%param_0, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[6,4], f32[3,4,5], f32[6,5])) -> (s32[], f32[6,4], f32[3,4,5], f32[6,5]) {
  %state = (s32[], f32[6,4]{1,0}, f32[3,4,5]{2,1,0}, /*index=3*/f32[6,5]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[6,4]{1,0} get-tuple-element(%state), index=1
  %w = f32[3,4,5]{2,1,0} get-tuple-element(%state), index=2
  %y = f32[6,5]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused_dot
  %begun = f32[6,5]{1,0} all-reduce-start(%y), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %summed = f32[6,5]{1,0} all-reduce-done(%begun)
  ROOT %next = (s32[], f32[6,4]{1,0}, f32[3,4,5]{2,1,0}, f32[6,5]{1,0}) tuple(%i, %x, %w, %summed)
}

%condition (state.1: (s32[], f32[6,4], f32[3,4,5], f32[6,5])) -> pred[] {
  %state.1 = (s32[], f32[6,4]{1,0}, f32[3,4,5]{2,1,0}, f32[6,5]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %main (start: (s32[], f32[6,4], f32[3,4,5], f32[6,5])) -> f32[48,5] {
  %start = (s32[], f32[6,4]{1,0}, f32[3,4,5]{2,1,0}, f32[6,5]{1,0}) parameter(0)
  %loop = (s32[], f32[6,4]{1,0}, f32[3,4,5]{2,1,0}, f32[6,5]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %out = f32[6,5]{1,0:T(8,128)} get-tuple-element(%loop), index=3
  %near = f32[6,5]{1,0:T(8,128)S(1)} copy(%out)
  ROOT %all = f32[48,5]{1,0} all-gather(%near), replica_groups=[1,8]<=[8], dimensions={0}
}
""".replace("\\\n", "")


@pytest.mark.parametrize("text", [LOOP, LOOP.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")])
def test_a_loop_counts_as_often_as_it_runs(text):
    found = hlo.cost(text)
    assert found.flops == 3 * 2 * 6 * 4 * 5 and not found.open_loops
    x, slice_, y = 6 * 4 * 4, 4 * 5 * 4, 6 * 5 * 4
    # in the loop the fusion and the two halves of the sum; then a copy, of which one side is on the chip, and the rest
    assert found.bytes == 3 * (x + slice_ + y + y + y) + y + 8 * y
    assert found.collectives == {"all-reduce": (3, 3 * 2 * 3 / 4 * y), "all-gather": (1, 7 * y)}


def test_a_loop_of_unknown_length_is_told():
    text = LOOP.replace(', backend_config={"known_trip_count":{"n":"3"}}', "").replace("direction=LT", "direction=NE")
    found = hlo.cost(text)
    assert found.open_loops == 1 and found.flops == 2 * 6 * 4 * 5


def test_of_a_stack_only_the_layer_in_use_counts():
    """Through fusions in fusions and other names for the same bytes; setting memory aside moves nothing."""
    text = """HloModule f
%layer (p: f32[3,4,5]) -> f32[4,5] {
  %p = f32[3,4,5]{2,1,0} parameter(0)
  %zero = s32[] constant(0)
  %slice = f32[1,4,5]{2,1,0} dynamic-slice(%p, %zero, %zero, %zero), dynamic_slice_sizes={1,4,5}
  ROOT %flat = f32[4,5]{1,0} bitcast(%slice)
}
%store (q: f32[3,20], new: f32[1,20]) -> f32[3,20] {
  %q = f32[3,20]{1,0} parameter(0)
  %new = f32[1,20]{1,0} parameter(1)
  %zero.1 = s32[] constant(0)
  ROOT %kept = f32[3,20]{1,0} dynamic-update-slice(%q, %new, %zero.1, %zero.1)
}
%outer (a: f32[3,20], b: f32[3,20]) -> f32[3,4,5] {
  %a = f32[3,20]{1,0} parameter(0)
  %b = f32[3,20]{1,0} parameter(1)
  %stack = f32[3,4,5]{2,1,0} bitcast(%a)
  %inner = f32[4,5]{1,0} fusion(%stack), kind=kLoop, calls=%layer
  %row = f32[1,20]{1,0} bitcast(%inner)
  %stored = f32[3,20]{1,0} fusion(%b, %row), kind=kLoop, calls=%store
  ROOT %out = f32[3,4,5]{2,1,0} bitcast(%stored)
}
ENTRY %main (x: f32[3,20]) -> f32[3,4,5] {
  %x = f32[3,20]{1,0} parameter(0)
  %room = f32[3,20]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %done = f32[3,4,5]{2,1,0} fusion(%x, %room), kind=kLoop, calls=%outer
}
"""
    layer = 4 * 5 * 4
    assert hlo.cost(text).bytes == layer + layer
    all_of_it = text.replace("%row = f32[1,20]{1,0} bitcast(%inner)", "%row = f32[1,20]{1,0} fusion(%a), calls=%any")
    all_of_it = all_of_it.replace(
        "%outer",
        "%any (w: f32[3,20]) -> f32[1,20] {\n  %w = f32[3,20]{1,0} parameter(0)\n"
        "  ROOT %m = f32[1,20]{1,0} reduce(%w)\n}\n%outer",
        1,
    )
    assert hlo.cost(all_of_it).bytes == 3 * layer + layer


def test_a_conditional_counts_as_its_costliest_branch():
    text = """HloModule f
%small (a: f32[2,2]) -> f32[2,2] {
  ROOT %a = f32[2,2]{1,0} parameter(0)
}
%large (b: f32[2,2]) -> f32[2,2] {
  %b = f32[2,2]{1,0} parameter(0)
  ROOT %c = f32[2,2]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (p: pred[], x: f32[2,2]) -> f32[2,2] {
  %p = pred[] parameter(0)
  %x = f32[2,2]{1,0} parameter(1)
  ROOT %r = f32[2,2]{1,0} conditional(%p, %x, %x), true_computation=%large, false_computation=%small
}
"""
    assert hlo.cost(text).flops == 16


@pytest.mark.parametrize("window", ["size=3 stride=2 pad=1_1", "size=3 pad=2_2 lhs_dilate=2", "size=2 rhs_dilate=3"])
def test_a_convolution_counts_what_meets_an_input(window):
    options = dict(item.split("=") for item in window.split())
    size, stride, spread, dilate = (int(options.get(k, 1)) for k in ("size", "stride", "lhs_dilate", "rhs_dilate"))
    low, high = map(int, options.get("pad", "0_0").split("_"))
    padded = [None] * low + [i // spread if i % spread == 0 else None for i in range(6 * spread - spread + 1)]
    padded += [None] * high
    starts = range(0, len(padded) - (size - 1) * dilate, stride)
    pairs = sum(padded[at + k * dilate] is not None for at in starts for k in range(size))
    text = f"""HloModule f
ENTRY %main (a: f32[2,6,3], b: f32[{size},3,5]) -> f32[2,{len(starts)},5] {{
  %a = f32[2,6,3]{{2,1,0}} parameter(0)
  %b = f32[{size},3,5]{{2,1,0}} parameter(1)
  ROOT %c = f32[2,{len(starts)},5]{{2,1,0}} convolution(%a, %b), window={{{window}}}, dim_labels=b0f_0io->b0f
}}
"""
    assert hlo.cost(text).flops == 2 * 2 * 3 * 5 * pairs


# ---------------------------------------------------------------------------- by hand and compiled
SIZES = {
    "lm": dict(model__width=64, model__heads=2, model__depth=4, data__length=48, data__vocab=97, batch_size=8),
    "vit": dict(model__width=64, model__heads=2, model__depth=4, data__image_size=24, model__patch=4, batch_size=8),
}


@functools.cache
def compiled(kind, encoding="none", **more):
    """(program, config, devices) of a training step on this process's devices."""
    spec, make = ("configs/quickstart.py", runs.lm) if kind == "lm" else ("configs/quickstart_vit.py", runs.vit)
    spec = f"{spec}:smoke,encoding={encoding}"
    parts = Parts(runs.config_of(spec, make(attention="xla", **SIZES[kind], **more)), spec, "")
    return parts.step_fn.lower(parts.like, parts.abstract_batch()).compile(), parts.config, parts.mesh.size


def share(kind, **more):
    """FLOPs of the compiled step over those that the model needs."""
    program, config, devices = compiled(kind, **more)
    return hlo.cost(program.as_text()).flops * devices / (flops.training(config) * config.batch_size)


@pytest.mark.parametrize("kind", SIZES)
def test_a_compiled_step_computes_what_the_model_needs(kind):
    """Less only by the gradient of the image; of a scanned body cost_analysis sees one run."""
    assert 0.95 < share(kind) <= 1.05
    program, config, devices = compiled(kind)
    once = program.cost_analysis()["flops"] * devices / (flops.training(config) * config.batch_size)
    assert once < 0.6


@pytest.mark.slow
def test_options_that_change_the_count():
    assert share("lm", model__scan=False) == pytest.approx(share("lm"), rel=0.01)
    assert 1.2 < share("lm", model__remat=True) < 1.4  # a second forward pass
    assert share("lm", encoding="jo_projected_mlp") > share("lm") + 0.01  # its own products are in no count by hand
    assert 0.95 < share("lm", model__mlp="swiglu", model__kv_heads=1) <= 1.05


# ------------------------------------------------------------------------------ what is told
def test_a_config_is_measured(monkeypatch):
    """On this process's devices, of which each can do what a v5e can, but for memory and speed."""
    chip = dataclasses.replace(chips.CHIPS["v5e"], memory=1e6, flops=1.0)
    monkeypatch.setattr(chips, "devices", lambda topology: (chip, jax.devices()))
    given = runs.lm(**SIZES["lm"]) | {"eval.batch_size": 9}
    out = preflight.measure(runs.config_of(runs.LM, given), runs.LM, "v5e:2x4")
    assert not out["fits"] and out["devices"] == 8 and out["steps"]["eval"]["batch"] == 16
    train, n = out["steps"]["train"], out["parameters"]["total"]
    assert train["memory"]["arguments"] == pytest.approx(3 * 4 * n, rel=0.02)  # parameters and two moments
    assert train["collectives"]["all-reduce"]["bytes"] >= 2 * 7 / 8 * 4 * n
    assert train["bound"] == max(train["seconds"], key=train["seconds"].get) == "compute"
    text = preflight.report(json.loads(json.dumps(out)))
    assert re.search(r"does not fit: train needs [\d.]+ MiB more than the 0\.95 MiB of a device", text)
    assert "what may help: --config.model.remat=True; --config.mesh.fsdp=8" in text and "all-reduce, sent" in text
    table = preflight_all.table({"a on b": out})
    assert "| a | v5e:2x4 |" in table and "does not fit" in table
    more = {"a": out | {"config": "configs/m.py:encoding=rope"}, "b": out | {"config": "configs/m.py:encoding=alibi"}}
    more["b"]["steps"] = {"train": train | {"flops": 2 * train["flops"]}}
    assert "| alibi | m.py | v5e:2x4 | 2.000 | 1.000 | 1.000 | 1.000 |" in preflight_all.ratios({"none": out, **more})


def test_a_device_is_known_by_what_jax_calls_it():
    """Every kind that jax knows, and the GPUs."""
    known = {"v4": "TPU v4", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e"}
    for name, kind in {**known, "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}.items():
        assert chips.peak(kind) == chips.CHIPS[name].flops
    for short, long in (("TPU v5 lite", "TPU v5e"), ("TPU v5", "TPU v5p"), ("TPU v6 lite", "TPU v6e")):
        assert chips.peak(short) == chips.peak(long)
    assert chips.peak("TPU7x") == chips.CHIPS["tpu7x"].flops / 2
    assert [chips.peak(kind) for kind in ("cpu", "TPU v4 lite", "TPU v3", "NVIDIA GH200 480GB")] == [None] * 4


def test_a_changed_config_is_compiled_again(tmp_path, monkeypatch, capsys):
    """One that was compiled before its digest was kept counts as it is."""
    spec, key = "configs/quickstart.py", "configs/quickstart.py --config.mesh.fsdp=2 on v5e:2x2"

    def state(record):
        (tmp_path / "p.json").write_text(json.dumps({key: record}))
        preflight_all.main()
        return capsys.readouterr().out.strip().rpartition(": ")[2]

    def compiles(command, **_):
        Path(command[-1].removeprefix("--json=")).write_text('{"quick": true}')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(preflight_all, "points", lambda: [(spec, ["--config.mesh.fsdp=2"], "v5e:2x2")])
    monkeypatch.setattr(preflight_all, "RECORDS", tmp_path / "p.json")
    monkeypatch.setattr(preflight_all, "write", lambda records: written.update(records))
    monkeypatch.setattr(preflight_all.subprocess, "run", compiles)
    monkeypatch.setattr(chips, "missing", lambda topology: "")
    monkeypatch.setattr(preflight_all.sys, "argv", ["preflight_all"])
    written = {}
    assert state({"quick": True}) == "done" and not written
    assert state({"quick": True, "digest": "of another config"}) == "to do"
    assert state(written[key]) == "done"
    assert preflight_all.digest(spec, ["--config.model.width=64"]) != preflight_all.digest(spec, [])
    assert preflight_all.digest(spec, ["--config.optim.ema=0"]) == preflight_all.digest(spec, [])  # as if it had no key


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("v9:2x2", r"v9:2x2: give CHIP:SHAPE, as v5e:16x16 or h200:8; chips: v4, v5e, .*b200"),
        ("v5e", r"--topology=v5e: give CHIP:SHAPE"),
        ("v5e:2by2", r"give CHIP:SHAPE"),
        ("h200:16", r"give the number of GPUs in one node, h200:1 to h200:8"),
    ],
)
def test_topologies_that_are_none(topology, words):
    with pytest.raises(UserError, match=words):
        chips.parse(topology)


@pytest.mark.parametrize(("topology", "extra"), [("v5e:2x2", "tpu"), ("h200:8", "cuda")])
def test_a_missing_compiler_is_told(topology, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"needs its compiler: python3 -m pip install -e '\.\[{extra}\]'"):
        chips.prepare(topology)


# ------------------------------------------------------------------------- the chips' compilers
def command(*arguments, code=0):
    """As a user runs it, without the flags of the tests' own compiler."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return runs.run(["-m", "jojax.preflight", *arguments], code=code, env=env)


tpu = pytest.mark.skipif(bool(chips.missing("v5e:2x2")), reason=chips.missing("v5e:2x2"))
gpu = pytest.mark.skipif(bool(chips.missing("h200:8")), reason=chips.missing("h200:8"))


@tpu
@pytest.mark.slow
def test_two_encodings_on_a_tpu(tmp_path):
    """Compiled as users do it, for chips that are not there."""
    given = [f"--config.{key}={value}" for key, value in runs.lm(**SIZES["lm"]).items()]
    file = tmp_path / "out.json"
    out, _ = command("--config", runs.LM, *given, "--topology=v5e:2x2", "--compare=none,rope", f"--json={file}")
    none, rope = json.loads(file.read_text())
    for found in (none, rope):
        train = found["steps"]["train"]
        assert found["fits"] and found["devices"] == 4 and not train["open_loops"] and not train["uncounted_kernels"]
        assert 0.95 < train["flops"] / train["model_flops"] <= 1.05
        sent = train["collectives"]["all-reduce"]["bytes"]
        assert sent >= 2 * 3 / 4 * 2 * found["parameters"]["total"]
    assert rope["steps"]["train"]["bytes"] > none["steps"]["train"]["bytes"]
    assert "(× 1.000)" in out and "bound by" in out


@tpu
@pytest.mark.slow
def test_what_does_not_fit_on_a_tpu():
    """On a mesh of 32 · 2, for which a side of the 4 × 4 × 4 chips is split."""
    more = {"batch_size": 2**30, "mesh.tensor": 2}
    given = [f"--config.{key}={value}" for key, value in (runs.lm(**SIZES["lm"]) | more).items()]
    out, _ = command("--config", runs.LM, *given, "--topology=v5p:4x4x4", code=1)
    assert re.search(r"does not fit: train needs [\d,.]+ GiB more than the 9\d\.\d+ GiB of a device", out)
    assert "what may help: --config.model.remat=True; --config.optim.accumulate=" in out


@tpu
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--topology=v5e:3x5"], r"--topology=v5e:3x5 is none that the compiler knows: .+"),
        (["--topology=v5e:2x2", "--config.mesh.data=3"], r"mesh\.data=3 .* does not fit 4 devices"),
    ],
)
@pytest.mark.slow
def test_errors_with_a_compiler(given, words):
    _, err = command("--config", runs.LM, *given, code=2)
    assert re.search(words, err) and err.startswith("error: ") and err.count("\n") == 1, err


@gpu
@pytest.mark.slow
def test_a_gpu(tmp_path):
    given = [f"--config.{key}={value}" for key, value in runs.lm(**SIZES["lm"]).items()]
    file = tmp_path / "out.json"
    command("--config", runs.LM, *given, "--topology=h200:4", f"--json={file}")
    train = json.loads(file.read_text())["steps"]["train"]
    assert 0.95 < train["flops"] / train["model_flops"] <= 1.05 and "all-reduce" in train["collectives"]
