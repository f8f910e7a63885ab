"""`python -m jojax.encodings.show NAME`: the command of `jojax.show`, which needs whole models and so lives above."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jojax.show", run_name="__main__", alter_sys=True)
