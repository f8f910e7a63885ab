"""Evaluation against NumPy loops over single examples: every one once, whatever the batch; and the command."""

import functools
import gc
import json
import math
import shutil
import weakref

import jax
import numpy as np
import pytest

import runs
import zoo
from jojax import cli, evaluate, extrapolate, task, writer
from jojax.errors import UserError
from runs import LM, lm, trained


def restored(workdir):
    """config, task, parameters and mesh of a run on all eight devices."""
    return evaluate.restore(workdir)[1:]


def test_a_kernel_of_the_training_s_devices_is_not_asked_of_these(tmp_path):
    workdir = shutil.copytree(trained(), tmp_path / "other")
    record = runs.result(workdir)
    record["config"]["attention"] = "splash"
    (workdir / "result.json").write_text(json.dumps(record))
    assert restored(workdir)[1].model.spec.attention == "auto"


def test_a_task_that_nobody_holds_is_gone_with_all_it_opened(monkeypatch):
    _, job, params, mesh = restored(trained())
    first = evaluate.evaluate_split(job, params, mesh)
    monkeypatch.setattr(task.corpus, "open_tokenizer", None)  # the corpus has it
    assert evaluate.evaluate_split(job, params, mesh) == first
    left = [weakref.ref(thing) for thing in (job, job.corpus("valid"), job.evaluate_step(mesh))]
    del job
    gc.collect()
    assert [ref() for ref in left] == [None] * 3


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


# --------------------------------------------------------------------------------- text
def documents():
    """Token ids of the valid split: bytes, then 256."""
    rows = (runs.text() / "valid.jsonl").read_text().splitlines()
    return [np.append(np.frombuffer(json.loads(row)["text"].encode(), np.uint8), 256).astype(int) for row in rows]


@functools.cache
def model_losses(length):
    """window of at most `length` inputs and their targets -> nats of each, on one device, one window at a time."""
    _, job, params, _ = restored(trained())
    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    logits = jax.jit(lambda tokens: job.apply(params, tokens))

    def losses(inputs, targets):
        padded = np.zeros((1, length), int)
        padded[0, : len(inputs)] = inputs  # what comes later changes nothing before it
        logp = log_softmax(np.asarray(logits(padded))[0])
        return -logp[np.arange(len(targets)), targets]

    return losses


def windows(tokens, length, most):
    """[(inputs, targets)] of the first `most` predictions of a document."""
    return [
        (tokens[i : min(i + length, most)], tokens[i + 1 : min(i + length, most) + 1]) for i in range(0, most, length)
    ]


def test_text_metrics_are_a_loop_over_all_windows():
    losses = [model_losses(32)(*pair) for tokens in documents() for pair in windows(tokens, 32, len(tokens) - 1)]
    assert len(losses) == 34  # no batch of 8, 16, 24 or 40 divides it
    total, count = sum(map(np.sum, losses)), sum(map(len, losses))
    size = sum((tokens[1:] != 256).sum() for tokens in documents())
    want = {
        "loss": total / count,
        "perplexity": math.exp(total / count),
        "bits_per_byte": total / math.log(2) / size,
    }
    for batch_size in (1, 24, 100):
        config = runs.config_of(LM, lm(eval__batch_size=batch_size))
        _, _, params, mesh = restored(trained())
        assert mesh.size == 8
        got, scored = evaluate.evaluate_split(task.make(config), params, mesh)
        assert scored == count and got == pytest.approx(want, rel=1e-5)
    stored = runs.result(trained())
    assert stored["metrics"] == pytest.approx(want, rel=1e-5) and stored["scored"] == count


@functools.cache
def common():
    """{length: [document][window, position] nats} of the first ⌊n/64⌋·64 predictions of each document."""
    kept = [tokens for tokens in documents() if len(tokens) > 64]
    return {
        length: [
            np.stack([model_losses(length)(*w) for w in windows(tokens, length, (len(tokens) - 1) // 64 * 64)])
            for tokens in kept
        ]
        for length in (32, 64)
    }


@pytest.mark.parametrize("length", [32, 64])
def test_extrapolation_numbers(length):
    """From the losses of single windows; the training length, of which the tail is made, is 32."""
    stored = runs.result(trained())["extrapolation"]
    row, losses = stored["lengths"][str(length)], common()[length]
    every = np.concatenate(losses)
    assert row["scored"] == every.size == common()[32][0].size + sum(x.size for x in common()[32][1:])
    assert row["loss"] == pytest.approx(every.mean(), rel=1e-5)
    assert row["ppl"] == pytest.approx(math.exp(every.mean()), rel=1e-5)
    assert row["tail_ppl"] == pytest.approx(math.exp(every[:, -32:].mean()), rel=1e-5)
    size = sum((tokens[1 : (len(tokens) - 1) // 64 * 64 + 1] != 256).sum() for tokens in documents())
    assert row["bytes"] == size
    assert row["bits_per_byte"] == pytest.approx(every.sum() / math.log(2) / size, rel=1e-5)
    assert row["by_position"]["end"] == list(range(1, length + 1))
    np.testing.assert_allclose(row["by_position"]["loss"], every.mean(0), rtol=1e-4)
    assert row["documents"] == len(losses) and row["by_document"]["count"] == [x.size for x in losses]
    np.testing.assert_allclose(row["by_document"]["loss"], [x.mean() for x in losses], rtol=1e-5)
    deviation = np.array([x.sum() - every.mean() * x.size for x in losses])
    n = len(losses)
    assert row["standard_error"] == pytest.approx(math.sqrt(n / (n - 1) * (deviation**2).sum()) / every.size, rel=1e-3)
    shortest = np.concatenate(common()[32]).mean()
    assert row["ratio"] == pytest.approx(math.exp(every.mean() - shortest), rel=1e-5)
    assert stored["protocol"]["windows"][str(length)]["predictions"] == every.size


def test_command_slides_windows_and_adds_to_the_record(tmp_path):
    shutil.copytree(trained(), tmp_path / "run")
    before = runs.result(tmp_path / "run")
    args = ["-m", "jojax.evaluate", "--workdir", str(tmp_path / "run"), "--lengths", "64", "--stride", "16"]
    out, err = runs.run(args, env=runs.environment(devices=1))
    assert "valid: loss" in out and "tail PPL" in out and err == ""
    after = runs.result(tmp_path / "run")
    assert {k: v for k, v in after.items() if k not in ("evaluation", "sliding")} == before
    assert after["evaluation"] == before["metrics"] | {"scored": before["scored"]}
    total, count, tail = 0.0, 0, []
    for tokens in documents():
        n, done = len(tokens) - 1, 0
        for start in range(0, max(n - 64, 0) + 16, 16):
            end = min(start + 64, n)
            losses = model_losses(64)(tokens[start:end], tokens[start + 1 : end + 1])[done - start :]
            tail += [x for x, at in zip(losses, range(done, end), strict=True) if at - start >= 32]
            total, count, done = total + losses.sum(), count + len(losses), end
            if end == n:
                break
    row = after["sliding"]["lengths"]["64"]
    assert row["scored"] == count == sum(len(tokens) - 1 for tokens in documents())
    assert row["loss"] == pytest.approx(total / count, rel=1e-5)
    assert row["tail_loss"] == pytest.approx(np.mean(tail), rel=1e-5)
    assert after["sliding"]["protocol"]["windows"]["64"]["stride"] == 16
    assert (tmp_path / "run" / "sliding.png").exists()


@pytest.mark.slow
def test_an_encoding_with_other_options_is_scored_beside_the_run(tmp_path):
    """The run's own numbers stay; the key and the protocol name the change, and the numbers are a changed model's."""
    shutil.copytree(trained(), tmp_path / "run")
    before = runs.result(tmp_path / "run")
    options = "scale_method=yarn,scale_factor=2"
    args = ["-m", "jojax.evaluate", "--workdir", str(tmp_path / "run"), "--lengths", "32,64", "--encoding", options]
    out, err = runs.run(args, env=runs.environment(devices=1))
    assert "tail PPL" in out and err == ""
    after, name = runs.result(tmp_path / "run"), "-scale_method=yarn-scale_factor=2"
    added = {"evaluation" + name, "extrapolation" + name}
    assert {k: v for k, v in after.items() if k not in added} == before and added <= after.keys()
    scores = after["extrapolation" + name]
    assert scores["protocol"].pop("encoding") == {"scale_method": "yarn", "scale_factor": 2}
    assert scores["protocol"] == before["extrapolation"]["protocol"]
    _, _, job, params, mesh = evaluate.restore(trained(), {"scale_method": "yarn", "scale_factor": 2})
    want, scored = evaluate.evaluate_split(job, params, mesh)
    found = after["evaluation" + name]
    assert found.pop("protocol") == {"encoding": {"scale_method": "yarn", "scale_factor": 2}}
    assert found == pytest.approx(want | {"scored": scored}, rel=1e-5)
    changed = runs.config_of(LM, lm(encoding__scale_method="yarn", encoding__scale_factor=2.0))
    loud = zoo.noisy(params, 0.3)  # 30 steps have hardly taught it to look at places
    got, same, run = (
        evaluate.evaluate_split(j, loud, mesh)[0]["loss"] for j in (job, task.make(changed), restored(trained())[1])
    )
    assert got == pytest.approx(same, rel=1e-5) and abs(got - run) > 1e-3


@pytest.mark.slow
def test_both_the_last_parameters_and_their_average_are_scored(tmp_path, capsys):
    """As training scores them on the valid split; every score says which, and neither takes the other's place."""
    given = lm(steps=3, optim__ema=0.5, eval__every_steps=0, model__depth=1)
    assert runs.train_here(LM, given, tmp_path) == 0
    assert "extrapolation: parameters of the last step; of their average: python -m " in capsys.readouterr().out
    before = runs.result(tmp_path)
    for ema in (False, True):
        evaluate.evaluate_run(tmp_path, lengths=(32, 64), ema=ema)
        assert f" scored, parameters: {'average' if ema else 'last step'})" in capsys.readouterr().out
    after = runs.result(tmp_path)
    assert {k: after[k] for k in before} == before and (tmp_path / "extrapolation-ema.png").exists()
    for prefix, kind, which in (("", "", "last step"), ("ema_", "-ema", "average")):
        found, metrics = after[f"evaluation{kind}"], before["metrics"]
        want = {name: metrics[prefix + name] for name in ("loss", "perplexity", "bits_per_byte")}
        assert found == want | {"scored": before["scored"], "protocol": {"parameters": which}}
        assert after[f"extrapolation{kind}"]["protocol"]["parameters"] == which
    one, other = (after[f"extrapolation{kind}"]["lengths"]["64"]["loss"] for kind in ("", "-ema"))
    assert abs(one - other) > 1e-3 * one


def test_a_run_without_an_average_says_so():
    with pytest.raises(UserError, match=r"--ema: .* keeps no average of its parameters \(config\.optim\.ema = 0\)"):
        evaluate.evaluate_run(trained(), ema=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale_method": "yarns"}, r"encoding\.scale_method = 'yarns': choose from none, pi, ntk, yarn"),
        ({"learned": True}, r"does not fit the encoding with learned=True: missing.*freq"),
    ],
)
def test_options_that_the_checkpoint_does_not_fit(changes, words):
    with pytest.raises(UserError, match=words):
        evaluate.evaluate_run(trained(), changes=changes)


@pytest.mark.parametrize("text", ["name=xpos", "learned"])
def test_only_options_of_an_encoding_can_be_changed(text):
    assert cli.options(["scale_factor=8", "scale_method=yarn"]) == {"scale_factor": 8, "scale_method": "yarn"}
    with pytest.raises(UserError, match=f"'{text}' is no option of an encoding: give option=value"):
        cli.options([text])


def test_scores_by_another_protocol_come_beside_those_of_the_run():
    record = {"loss": 1.0}
    made = [{"protocol": {"windows": n}, "lengths": {"64": ppl}} for n, ppl in ((64, 3.0), (128, 4.0), (64, 5.0))]
    keys = [evaluate.add(record, record, "extrapolation", scores, (64, 128)) for scores in made]
    assert keys == ["extrapolation", "extrapolation-64-128", "extrapolation"]  # the same again takes its place
    assert record == {"loss": 1.0, "extrapolation": made[2], "extrapolation-64-128": made[1]}
    assert evaluate.add({}, {"resolutions": made[0]}, "resolutions", made[1], [32, (32, 48)]) == "resolutions-32-32x48"


def test_scores_in_the_middle_of_a_run_say_so(tmp_path):
    """They are not those of the finished run, which find their keys free."""
    shutil.copytree(trained(), tmp_path / "run")
    before = runs.result(tmp_path / "run") | {"state": "running"}
    writer.write_result(tmp_path / "run", before)
    after = evaluate.evaluate_run(tmp_path / "run", lengths=(32,))
    assert after["extrapolation-step30"]["protocol"]["step"] == after["evaluation-step30"]["protocol"]["step"] == 30
    assert {k: v for k, v in after.items() if not k.endswith("-step30")} == before


def test_strides_have_keys_of_their_own(tmp_path):
    shutil.copytree(trained(), tmp_path / "run")
    for stride in (16, 32, 8):
        after = evaluate.evaluate_run(tmp_path / "run", lengths=(64,), stride=stride)
    found = {
        key: scores["protocol"]["windows"]["64"]["stride"] for key, scores in after.items() if key.startswith("sliding")
    }
    assert found == {"sliding": 16, "sliding-64-stride32": 32, "sliding-64-stride8": 8}


def test_a_table_of_positions_has_no_answer_beyond_it():
    job = task.make(runs.config_of(f"{LM},encoding=learned", lm()))
    sets, refused = extrapolate.window_sets(job, (32, 64))
    assert list(sets) == [32] and refused == [64]
    with pytest.raises(UserError, match=r"encoding learned is a table of 32 positions and has no answer at 64: "):
        extrapolate.window_sets(job, (64, 128))
