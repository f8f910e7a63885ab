"""The laws of an encoding of one's own:

    python -m jojax.laws NAME_OR_DOTTED_PATH [option=value …]

prints a line a law: whether it is claimed (must: of all encodings), whether it holds, and the residual. Exit code 1
where a claim is false, be it too large or too modest, or where a law that all must keep is broken. An encoding is
tried in language models and in vision models, whichever take it.
"""

import jax

from jojax import cli, laws
from jojax.errors import UserError


def main(argv) -> int:
    if len(argv) < 2:
        raise UserError("name an encoding: a module of jojax.encodings or a dotted path, then option=value")
    broken = 0
    for subject in laws.subjects({"name": argv[1]} | cli.options(argv[2:])):
        print(f"{argv[1]} in a {subject.kind} model")
        for law in laws.LAWS.values():
            if law.applies(subject):
                finding = law.check(subject)
                broken += not finding.good
                print(f"  {finding}", flush=True)
    print(f"{broken} broken" if broken else "all hold")
    return int(broken > 0)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    cli.run_main(main, positional=True)
