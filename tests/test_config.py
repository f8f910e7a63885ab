"""Loading, overriding, validating; the command line's errors: one sentence, exit code 2, no traceback."""

import json
import subprocess
import sys
import textwrap

import pytest
from ml_collections import ConfigDict

from jojax import config as configs
from jojax.errors import UserError

COMMON = """
from ml_collections import ConfigDict, config_dict

def base(seed=0):
    return ConfigDict(dict(
        seed=seed, steps=100, batch_size=8, dtype="float32", flag=True, untyped=None, many=[1, 2],
        lengths=(1, 2), init_from=config_dict.placeholder(str), resume="",
        encoding=dict(name="rope", transport="qk"),
        model=dict(width=16, depth=2),
        optim=dict(lr=1e-3, warmup_steps=5, ema=0.0), eval=dict(every_steps=0),
        log=dict(every_steps=10), checkpoint=dict(every_steps=50, keep=2),
        mesh=dict(data=-1, fsdp=1, tensor=1, sequence=1),
    ))
"""
GOOD = """
from configs_of_test import common

def get_config(arg=None):
    if arg == "odd":
        raise ValueError("config argument 'odd': this config has seed, smoke")
    if arg == "bug":
        raise TypeError("a mistake in the config")
    return common.base(seed=int(arg or 0))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """configs_of_test/ in a folder that is not on the path."""
    folder = tmp_path_factory.mktemp("repository") / "configs_of_test"
    folder.mkdir()
    (folder / "common.py").write_text(COMMON)
    (folder / "good.py").write_text(GOOD)
    (folder / "bare.py").write_text("from configs_of_test import common\ndef get_config(): return common.base()\n")
    (folder / "empty.py").write_text("")
    (folder / "broken.py").write_text("\ndef get_config(:\n")
    yield folder
    sys.path[:] = [p for p in sys.path if p != str(folder.parent)]


def load(folder, name="good.py"):
    return configs.load(str(folder / name))


def test_load_finds_its_neighbours_from_anywhere(folder, monkeypatch):
    monkeypatch.chdir("/")
    config = load(folder, "good.py:7")
    assert config.seed == 7 and config.is_locked and config.optim.is_locked
    assert load(folder).seed == 0
    assert load(folder, "bare.py").seed == 0


def test_the_configs_own_neighbours_go_first(folder, tmp_path):
    """Another folder of that name stands before it on the path: in a process of its own, nothing is imported
    yet."""
    (tmp_path / "configs_of_test").mkdir()
    (tmp_path / "configs_of_test" / "common.py").write_text("")
    paths = [str(tmp_path), str(folder.parent)]
    good = str(folder / "good.py")
    code = f"import sys; sys.path[:0] = {paths}\nfrom jojax import config\nconfig.load({good!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names():
    assert configs.run_name("configs/wiki.py") == "wiki"
    assert configs.run_name("configs/wiki.py:encoding=rope,seed=1") == "wiki-encoding=rope,seed=1"
    assert "/" not in configs.run_name("configs/wiki.py:path=a/b")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gone.py", r"gone.py does not exist; .*configs_of_test/ has .*common.py, empty.py, good.py"),
        ("no/such.py:arg", r"such.py does not exist; there is no config in .*no/"),
        ("good.py:odd", r"good.py:odd: config argument 'odd': this config has seed, smoke"),
        ("bare.py:arg", r"get_config's argument: it takes none, but 'arg' follows the colon"),
        ("empty.py", r"empty.py has no function get_config"),
        ("broken.py", r"broken.py, line 2: invalid syntax"),
    ],
)
def test_load_errors(folder, spec, words):
    with pytest.raises(UserError, match=words):
        load(folder, spec)


def test_a_bug_in_a_config_keeps_its_traceback(folder):
    with pytest.raises(TypeError, match="a mistake in the config"):
        load(folder, "good.py:bug")


def test_overrides(folder):
    config = load(folder)
    given = {
        "steps": 7, "optim.lr": 1, "lengths": (5,), "flag": False, "init_from": "runs/a", "model.width": 32,
        "encoding.base": 500.0,  # not in the config: the encoding's module knows
    }  # fmt: skip
    assert configs.apply_overrides(config, given) is config
    assert (config.steps, config.optim.lr, config.lengths, config.flag) == (7, 1.0, (5,), False)
    assert isinstance(config.optim.lr, float)
    assert config.encoding.to_dict() == {"name": "rope", "transport": "qk", "base": 500.0}
    configs.apply_overrides(config, {"init_from": None, "encoding": {"name": "none"}})
    assert config.init_from is None and config.encoding.to_dict() == {"name": "none"}
    assert config.optim.is_locked and not config.encoding.is_locked
    with pytest.raises(AttributeError):
        config.optim.momentum = 0.9


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"stepz": 1}, r"config.stepz does not exist; did you mean config.steps\?"),
        ({"optim.zzz": 1}, r"config.optim.zzz does not exist; config.optim has ema, lr, warmup_steps"),
        (
            {"model.depth.x": 1},
            r"config.model.depth.x does not exist; config.model.depth is a value|config.model",
        ),
        ({"nothing.at.all": 1}, r"config.nothing.at.all does not exist; config has batch_size, "),
        ({"encoding.a.b": 1}, r"config.encoding.a.b does not exist"),
        ({"steps": 1.5}, r"config.steps=1.5: needs an int, like 100"),
        ({"steps": "7"}, r"config.steps='7': needs an int, like 100"),
        ({"lengths": 5}, r"config.lengths=5: needs a tuple, like \(1, 2\)"),
        ({"init_from": 5}, r"config.init_from=5: needs a str"),
        ({"encoding": "rope"}, r"config.encoding='rope': needs a dict, like \{'name': 'rope'"),
        ({"model": {"width": 8}}, r"config.model is a group of keys: override them one by one"),
    ],
)
def test_override_errors(folder, overrides, words):
    with pytest.raises(UserError, match=words):
        configs.apply_overrides(load(folder), overrides)


def test_validate_passes_and_returns(folder):
    config = load(folder)
    assert configs.validate(config) is config


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("seed", -1, "0 … 2³²-1"),
        ("steps", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("optim.lr", -1.0, "at least 0"),
        ("optim.ema", 1.0, "0 \\(off\\) … 1, without 1"),
        ("log.every_steps", 0, "at least 1"),
        ("checkpoint.keep", 0, "at least 1"),
        ("checkpoint.every_steps", -1, "at least 0"),
        ("eval.every_steps", -1, "at least 0"),
        ("mesh.fsdp", 0, "a size, or -1 = the rest"),
    ],
)
def test_validate_errors(folder, key, value, words):
    config = configs.apply_overrides(load(folder), {key: value})
    with pytest.raises(UserError, match=rf"config.{key}={value!r} must be {words}"):
        configs.validate(config)


def test_validate_needs_the_keys_of_every_run_and_their_types():
    with pytest.raises(UserError, match=r"config\.seed does not exist"):
        configs.validate(ConfigDict({"steps": 1}))
    whole = dict(seed=0, steps=1, batch_size=1, optim=dict(lr=1.0), log=dict(every_steps=1))
    whole["checkpoint"] = dict(every_steps=1, keep=1)
    configs.validate(ConfigDict(whole))
    for steps in (True, 10.0, "10"):
        with pytest.raises(UserError, match=rf"config.steps={steps!r} must be at least 1"):
            configs.validate(ConfigDict(whole | {"steps": steps}))


# the command line
PROGRAM = """
import json
from absl import flags
from jojax import cli
from jojax.errors import UserError
from jojax.writer import plain

def main(_):
    if flags.FLAGS.fail == "user":
        raise UserError("the data is gone; get it back.")
    if flags.FLAGS.fail == "bug":
        raise RuntimeError("a bug")
    config, spec, overrides = cli.parsed_config()
    print(json.dumps(plain({"config": config, "spec": spec, "overrides": overrides})))

cli.define_config()
flags.DEFINE_string("workdir", None, "")
flags.DEFINE_string("fail", "", "")
cli.run_main(main)
"""


@pytest.fixture(scope="module")
def program(folder):
    path = folder.parent / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))

    def run(*arguments):
        arguments = [argument.replace("GOOD", str(folder / "good.py")) for argument in arguments]
        return subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True, timeout=60)

    return run


def test_command_line_overrides(program):
    done = program(
        "--config=GOOD:7", "--workdir", "x", "--config.steps=9", "--config.optim.lr=2", "--noconfig.flag",
        "--config.lengths=(3,4)", "--config.init_from=None", "--config.encoding.base=500",
        "--config.encoding.transport=none",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    config = told["config"]
    assert (config["seed"], config["steps"], config["optim"]["lr"], config["flag"]) == (7, 9, 2.0, False)
    assert config["lengths"] == [3, 4] and config["init_from"] is None
    assert config["encoding"] == {"name": "rope", "transport": "none", "base": 500}  # a choice, not None
    assert told["spec"].endswith("good.py:7")
    assert told["overrides"] == {
        "steps": 9,
        "optim.lr": 2.0,
        "flag": False,
        "lengths": [3, 4],
        "init_from": None,
        "encoding.base": 500,
        "encoding.transport": "none",
    }


def test_the_encoding_may_be_given_whole(program):
    done = program("--config", "GOOD", "--config.encoding={'name': 'mine', 'bands': 4}")
    assert json.loads(done.stdout)["config"]["encoding"] == {"name": "mine", "bands": 4}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--config is missing: give --config=configs/FILE.py[:arg]."),
        (("--config=gone/no.py",), "config file gone/no.py does not exist; there is no config in gone/."),
        (("--config=GOOD:odd",), "config argument 'odd': this config has seed, smoke"),
        (("--config=GOOD", "--config.stepz=5"), "config.stepz does not exist; did you mean config.steps?"),
        (
            ("--config=GOOD", "--config.optim.b9=5"),
            "config.optim.b9 does not exist; config.optim has ema, lr, ",
        ),
        (("--config=GOOD", "--config.steps=abc"), "--config.steps=abc: needs an int, like 100."),
        (("--config=GOOD", "--config.steps=None"), "--config.steps=None: needs an int, like 100."),
        (("--config=GOOD", "--config.flag=maybe"), "--config.flag=maybe: needs a bool, like True."),
        (("--config=GOOD", "--config.encoding=rope"), "--config.encoding=rope: needs a dict, like {'name'"),
        (
            ("--config=GOOD", "--config.model={'w': 1}"),
            "config.model is a group of keys: override them one by",
        ),
        (("--config=GOOD", "--config.many=[3]"), "config.many is a list, which cannot be overridden"),
        (("--config=GOOD", "--config.untyped=3"), "config.untyped has no type; its config should use"),
        (("--config=GOOD", "--config.steps=0"), "config.steps=0 must be at least 1."),
        (("--config=GOOD", "--config.steps"), "Missing value for flag --config.steps"),
        (
            ("--config.steps=3", "--config=GOOD"),
            "--config.steps=3 stands before --config; put --config first.",
        ),
        (("--config.steps=3",), "'config.steps' is given without --config=configs/FILE.py before it."),
        (("--config=GOOD", "--wrkdir=x"), "Unknown option 'wrkdir'. Did you mean: workdir ?"),
        (("--config=GOOD", "stray"), "argument 'stray' is not understood: options look like --name=value."),
        (("--config=GOOD", "--fail=user"), "error: the data is gone; get it back."),
    ],
)
def test_command_line_errors(program, arguments, said):
    done = program(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_bug_is_not_hidden(program):
    done = program("--config=GOOD", "--fail=bug")
    assert done.returncode == 1 and "Traceback" in done.stderr and "RuntimeError: a bug" in done.stderr


def test_configs_load_without_jax():
    code = "import sys, jojax.config, jojax.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
