"""lm-evaluation-harness on a trained model: log-likelihoods against whole forward passes, and a local task through the
command. Needs the extra `harness`."""

import json

import jax
import numpy as np
import pytest

import runs

pytest.importorskip("lm_eval", reason="pip install -e '.[harness]'")
pytestmark = pytest.mark.slow
TASK = """
task: two_ways
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
# libraries of the harness warn of their own future
QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def harness():
    from jojax.harness import Harness

    return Harness(runs.trained(), batch_size=3)


def slow(harness, context, given):
    """Σ log p and greediness, one row, nothing padded."""
    ids = (context + given)[-harness.max_length - 1 :]
    logits = harness.job.apply(jax.device_get(harness.writer.params), np.array([ids[:-1]]))[0]
    logp = np.asarray(jax.nn.log_softmax(np.asarray(logits, float)[:, : harness.text.vocab_size]))
    n = min(len(given), len(ids) - 1)
    picked = [logp[t, ids[t + 1]] for t in range(len(ids) - 1)][-n:]
    return sum(picked), all(logp[t].argmax() == ids[t + 1] for t in range(len(ids) - 1 - n, len(ids) - 1))


@QUIET
def test_scores_are_those_of_whole_passes(harness):
    from lm_eval.api.instance import Instance

    texts = [("The river", " is long."), ("", "A"), ("One ", "two"), ("x" * 70, "y"), ("é", "z" * 40)]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in texts]
    got = harness.loglikelihood(requests, disable_tqdm=True)
    for (context, given), (total, greedy) in zip(texts, got, strict=True):
        ids = harness.tok_encode(context.rstrip()) or [harness.text.eos]
        want = slow(harness, ids, harness.tok_encode(context + given)[len(ids) if context else 0 :])
        assert total == pytest.approx(want[0], rel=1e-4) and greedy == want[1]
    best = harness.writer.tokens(harness.tok_encode("The "), 3, runs_greedy())
    likely = harness.text.to_bytes(list(best)).decode()
    assert harness.loglikelihood([Instance("loglikelihood", {}, ("The", " " + likely), 0)], disable_tqdm=True)


def runs_greedy():
    from jojax.generate import Sampling

    return Sampling(0.0)


@QUIET
def test_rolling_predicts_every_token_once(harness):
    from lm_eval.api.instance import Instance

    text = "A text that is longer than the model's training length of 32 bytes, so that windows are cut."
    (got,) = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    ids, n, want = [harness.text.eos, *harness.tok_encode(text)], harness.max_length, 0.0
    for start in range(0, len(ids) - 1, n):
        given = ids[start + 1 : start + n + 1]
        want += slow(harness, ids[max(0, start + len(given) - n) : start + 1], given)[0]
    assert got == pytest.approx(want, rel=1e-4)


@QUIET
def test_text_ends_before_the_stop(harness):
    whole = harness.until("The ", {"until": [], "max_gen_toks": 12})
    cut = harness.until("The ", {"until": [whole[4], "\0"], "max_gen_toks": 12})
    assert len(whole) > 4 and cut == whole[: whole.index(whole[4])]


def test_a_local_task_through_the_command(tmp_path):
    rows = [{"question": "The river", "choices": [" is", " zq"], "answer": n % 2} for n in range(4)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "two_ways.yaml").write_text(TASK.format(path=tmp_path / "rows.json"))
    import shutil

    shutil.copytree(runs.trained(), tmp_path / "run")
    args = ["-m", "jojax.harness", "--workdir", str(tmp_path / "run"), "--tasks", "two_ways"]
    env = runs.environment(devices=1, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    out, _ = runs.run([*args, "--include_path", str(tmp_path)], env=env)
    assert "two_ways: acc,none 0.5000" in out
    record = json.loads((tmp_path / "run" / "harness.json").read_text())
    assert record["n-samples"]["two_ways"]["effective"] == 4
