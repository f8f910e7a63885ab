"""What a user can get wrong: one sentence that names key or file and the remedy, and nothing half-written. On the
command line it stands on stderr, with exit code 2 and no traceback; most cases save that a process of their own."""

import json
import re
import shutil

import pytest

import runs
from jojax import evaluate, task
from jojax.errors import UserError
from runs import LM, VIT, environment, lm, trained, vit

TEXT = {
    "a data source": ({"data.source": "wiki"}, r"data\.source = 'wiki': language models read text, wikipedia_exc"),
    "no tokenizer": ({"data.tokenizer": None}, r"data\.tokenizer is not set: bytes, bpe, or the path"),
    "another model's data": ({"model.kind": "vit"}, r"model\.kind = 'vit' needs data\.image_size and data\.classes"),
    "an option's type": ({"encoding.base": "big"}, r"encoding\.base = 'big': needs a float, like 10000\.0"),
    "no data": ({"data.train_path": "gone.jsonl"}, r"gone\.jsonl does not exist: give a file or folder of text"),
    "no valid data": ({"data.valid_path": ""}, r"data\.valid_path is not set: give the file or folder"),
    "micro-batches": ({"optim.accumulate": 3}, r"batch_size=8 must be divisible by .*optim\.acc.*; try batch_size=24"),
    "an odd head": ({"model.head_dim": 7}, r"model\.head_dim = 7: .*make it even"),
    "heads and width": ({"model.heads": 3}, r"model\.width = 32 is not divisible by model\.heads = 3: change one"),
    "an encoding's option": ({"encoding.bass": 9.0}, r"encoding\.bass is not an option of 'rope'; it has: "),
    "an encoding's choice": ({"encoding.transport": "kv"}, r"encoding\.transport = 'kv': choose from qk, qkv, v, none"),
    "an encoding's name": ({"encoding.name": "ropy"}, r"encoding\.name = 'ropy': no module .*; name a file in"),
    "warm-up": ({"optim.warmup_steps": 30}, r"optim\.warmup_steps=30 must be smaller than the 30 steps"),
    "a schedule": ({"optim.schedule": "step"}, r"optim\.schedule='step' is unknown; choose one of cosine, "),
    "a rate to end at": (
        {"optim.schedule": "constant", "optim.end_lr_fraction": 0.1}, r"fraction=0\.1 does nothing beside"
    ),
    "shards beside text": (
        {"data.path": "gone"}, r"data\.path = 'gone' would not be read: .* to tokens or .* data\.path to ''"
    ),
    "the type of activations": ({"dtype": "float16"}, r"dtype = 'float16': choose from float32, bfloat16, float64"),
    "a double without x64": ({"dtype": "float64"}, r"dtype = 'float64' needs JAX_ENABLE_X64=1 in the environment"),
    "other devices": ({"mesh.data": 3}, r"mesh\.data=3 .* does not fit 8 devices"),
    "too long a window": ({"eval.lengths": (32, 4096)}, r"no document has 4096 predictions .*: use smaller lengths"),
    "windows that do not divide": ({"eval.lengths": (32, 48)}, r"eval\.lengths: 32 does not divide 48"),
    "a small BPE": ({"data.tokenizer": "bpe", "data.vocab": 200}, r"data\.vocab is 200: .* needs at least 257"),
    "a small vocabulary": ({"data.vocab": 200}, r"bytes has 257 ids, but data\.vocab is 200: raise it"),
    "nothing to resume": ({"resume": "gone"}, r"there are no checkpoints in gone: give the workdir of a run"),
    "nothing to start from": ({"init_from": "gone"}, r"no checkpoint at .*gone: give a workdir"),
}  # fmt: skip
IMAGES = {
    "no data": ({"data.source": "folder", "data.path": "gone"}, r"gone is no folder: data\.path must hold"),
    "an unprepared set": ({"data.source": "tfds", "data.path": "tests"}, r"data\.name to a data set under it"),
    "classes": ({"data.classes": 12}, r"data\.classes is 12, but Fashion-MNIST has 10 classes: set it"),
    "patches": ({"model.patch": 5}, r"32×32 has no whole number of 5×5 patches: change model\.patch"),
    "one block to drop": ({"model.depth": 1, "model.drop_path": 0.1}, r"drop_path = 0\.1 does nothing at model\.depth"),
    "a resolution": ({"eval.resolutions": (32, 33)}, r"33×33 has no whole number of 8×8 patches"),
    "a head that mixed frames cannot halve": ({"model.head_dim": 6}, r"make model\.head_dim = 6 divisible by 4"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.depth", 0),
        ("model.heads", -2),
        ("model.dropout", 1.5),
        ("model.mlp_ratio", 0.0),
        ("model.init_std", float("nan")),
        ("model.loss_chunk", 0),
        ("optim.lr", float("inf")),
        ("data.length", 0),
        ("data.vocab", -1),
        ("eval.document_tokens", -5),
        ("eval.lengths", (16.5,)),
        ("eval.lengths", (32, 0)),
    ],
)
def test_numbers_out_of_range(key, value):
    given = runs.configs.apply_overrides(runs.configs.load(str(runs.ROOT / LM)), {key: value})
    with pytest.raises(UserError, match=rf"config\.{key}=.* must be "):
        runs.configs.validate(given)


def test_a_checkpoint_of_another_run_is_not_gone_on_with(tmp_path, monkeypatch):
    """Without result.json too: the checkpoint itself knows its config and its text."""
    shutil.copytree(trained() / "checkpoints", tmp_path / "run" / "checkpoints")
    words = r"holds a run of another config \(optim\.b2: .*\): choose another --workdir"
    refused(words, LM, lm(optim__b2=0.9), tmp_path / "run")
    words = r"another config \(.*encoding\.name: rope → grape_a.*\): config\.resume continues the same model"
    given = lm(resume=str(trained()))
    refused(words, LM.replace("rope", "alibi"), given, tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(task.Text, "digests", lambda self: {"train": "edited", "valid": "as it was"})
        refused(r"text of a split, or its tokenizer, is not what the checkpoint", LM, lm(), tmp_path / "run")
        with pytest.raises(UserError, match=r"is not what .* was trained and evaluated with: put it back"):
            evaluate.evaluate_run(trained())


def test_a_finished_run_with_other_evaluations_says_how():
    words = r"is finished, with other config\.eval keys: evaluate it further with"
    refused(words, LM, lm(eval__lengths=(16,)), trained())


def nothing_written(workdir):
    return not any(path.is_file() for path in workdir.rglob("*"))


def refused(words, spec, given, workdir):
    with pytest.raises(UserError, match=words) as caught:
        runs.train_here(spec, given, workdir)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", TEXT)
def test_text(case, tmp_path):
    change, words = TEXT[case]
    refused(words, LM, lm() | change, tmp_path / "run")
    assert nothing_written(tmp_path / "run")


@pytest.mark.parametrize("case", IMAGES)
def test_images(case, tmp_path):
    change, words = IMAGES[case]
    refused(words, f"{VIT},encoding=rope_mixed", vit() | change, tmp_path / "run")
    assert nothing_written(tmp_path / "run")


def test_checkpoints_of_another_model(tmp_path):
    """A workdir that has lost its record; parameters of which none fits; a later step than the last one."""
    shutil.copytree(trained() / "checkpoints", tmp_path / "run" / "checkpoints")
    before = runs.snapshot(tmp_path)
    words = r"checkpoints/30 does not fit the model .*mlp_in/bias \(2, 128\) -> \(2, 256\).*choose another workdir"
    refused(words, LM, lm(model__width=64), tmp_path / "run")
    assert runs.snapshot(tmp_path) == before
    words = r"checkpoints/30 shares no parameter with this model \(missing: "
    refused(words, VIT, vit(init_from=str(tmp_path / "run"), model__width=48), tmp_path / "new")
    words = r"the checkpoint is at step 30, config\.steps = 20 ends before it: raise steps"
    refused(words, LM, lm(resume=str(tmp_path / "run"), steps=20), tmp_path / "new")
    assert nothing_written(tmp_path / "new")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(resolutions=(32,)), r"--resolutions and --offsets are for vision models"),
        (dict(stride=8), r"--stride slides windows of given lengths: give --lengths too"),
        (dict(lengths=(32, 48)), r"eval\.lengths: 32 does not divide 48"),
    ],
)
def test_evaluation(given, words):
    before = runs.snapshot(trained())
    with pytest.raises(UserError, match=words):
        evaluate.evaluate_run(trained(), **given)
    assert runs.snapshot(trained()) == before


# ------------------------------------------------------------------------- on the command line
# Each line of stdin, [module, …arguments, place of the output], is `python -m module …arguments` in a fork of a process
# that has imported all and started nothing yet: a process of its own, without the seconds of imports.
SERVER = """
import json, os, runpy, sys
from jojax import loop, evaluate, extrapolate, dry_run, cli
for line in sys.stdin:
    module, *arguments, told = json.loads(line)
    child = os.fork()
    if not child:
        for number, name in ((1, told + ".out"), (2, told + ".err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        sys.argv = [module, *arguments]
        for name in [module, "jojax.train"]:
            sys.modules.pop(name, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    with runs.start(["-c", SERVER], env=environment(devices=1), stdin=-1) as process:
        yield process
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err


@pytest.fixture
def command(server, tmp_path):
    """Runs `python -m module arguments` -> exit code, stdout, stderr"""

    def call(module, *arguments):
        told = tmp_path / "told"
        server.stdin.write(json.dumps([module, *arguments, str(told)]) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        files = [told.with_suffix(".out"), told.with_suffix(".err")]
        texts = [file.read_text() for file in files]
        for file in files:
            file.unlink()
        return code, *texts

    return call


def refused_at_once(command, words, spec, given, workdir):
    code, out, err = command(*runs.arguments(spec, given, workdir)[1:])
    assert code == 2, out + err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    assert re.search(words, err), err


@pytest.mark.parametrize(
    ("spec", "given", "words"),
    [
        ("configs/gone.py", {}, r"config file configs/gone\.py does not exist; configs/ has .*quickstart\.py"),
        ("configs/quickstart.py:encoding=ropy", {}, r"encoding=ropy: no such preset; there are .*rope"),
        (LM, {"modell.width": 8}, r"config\.modell.* does not exist; did you mean config\.model\?"),
        (LM, {"steps": "ten"}, r"--config\.steps=ten: needs an int, like 4"),
        ("configs/imagenet_vits.py:smoke", {"data.path": "gone"}, r"gone is no folder: data\.path must hold"),
    ],
)
def test_config_and_data(command, spec, given, words, tmp_path):
    refused_at_once(command, words, spec, given, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_workdir_of_another_run(command):
    before = runs.snapshot(trained())
    words = r"holds a run of another config \(model\.depth: 2 → 3, seed: 0 → 1\): choose another --workdir"
    refused_at_once(command, words, LM, lm(seed=1, model__depth=3), trained())
    assert runs.snapshot(trained()) == before


def test_a_workdir_that_cannot_be_written(command, tmp_path):
    (tmp_path / "file").write_text("")
    words = r"cannot write .*file/run.*: Not a directory; make room or choose another workdir"
    refused_at_once(command, words, LM, lm(), tmp_path / "file" / "run")


def test_a_loss_that_is_not_finite_stops_the_run(command, tmp_path):
    given = lm(optim__lr=1e30, optim__warmup_steps=0, checkpoint__every_steps=3, log__every_steps=5)
    words = r"not finite at step 2; nothing later was saved\. Lower optim\.lr \(1e\+30\) or set optim\.clip"
    refused_at_once(command, words, LM, given, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert runs.result(tmp_path / "run")["state"] == "running"


def test_empty_documents_are_left_out_and_said(command, tmp_path):
    rows = ["", "Some text.", "  \n", "More of it."]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    given = lm(data__train_path=str(tmp_path / "train.jsonl"), data__cache=str(tmp_path / "cache"))
    code, out, err = command(*runs.arguments(LM, given, tmp_path / "run")[1:], "--dry_run")
    assert code == 0 and "train split: 1 rows" in out
    assert "train.jsonl: 2 empty documents are left out" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workdir", "gone"], r"gone has no result\.json: give the workdir of a run of jojax\.train"),
        (["--workdir", "gone", "--lengths", "32,x"], r"--lengths=32,x: give numbers separated by commas"),
        (["--workdir", "gone", "--lengths", ","], r"--lengths=,: give numbers separated by commas"),
        (["--workdir", "gone", "--offsets", "0,nan"], r"--offsets=0,nan: give numbers separated by commas"),
    ],
)
def test_evaluation_command(command, arguments, words):
    code, out, err = command("jojax.evaluate", *arguments)
    assert code == 2 and re.search(words, err) and err.startswith("error: ") and err.count("\n") == 1, out + err


def test_help_lists_every_option_and_is_no_error():
    out, err = runs.run(["-m", "jojax.train", "--help"], env=environment(devices=1))
    assert all(option in out for option in ("--config", "--workdir", "--[no]dry_run", "--heartbeat_timeout")), out
    assert not err
