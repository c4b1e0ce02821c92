"""Metrics on Weights & Biases, by a module that stands for wandb."""

import contextlib
import sys
import types

import pytest

from radazo_llm.run.tracking import on_wandb


def stand_in(logged, **given):
    """A module that keeps what it is given."""

    class Run(contextlib.nullcontext):
        id = given.get("id") or "first"

        def log(self, values, step):
            logged.append((step, values))

    return Run()


def test_a_run_that_is_resumed_keeps_its_name(tmp_path, monkeypatch):
    logged, begun = [], []

    def init(**options):
        begun.append(options)
        return stand_in(logged, **options)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for step in range(2):
        with on_wandb(tmp_path, {"settings": {}}) as log:
            log(step, {"loss": 1.0})
    assert logged == [(0, {"loss": 1.0}), (1, {"loss": 1.0})]
    assert [options["id"] for options in begun] == [None, "first"]
    assert begun[0]["dir"] == tmp_path and begun[0]["config"] == {"settings": {}}


def broken(**options):
    raise RuntimeError("no\nkey")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "--wandb must be given with wandb installed; it is not. pip install"),
        (
            types.SimpleNamespace(init=broken),
            "must reach a server .* got RuntimeError: no key. Run",
        ),
    ],
    ids=["missing", "broken"],
)
def test_a_run_without_wandb_is_refused(module, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ValueError, match=message), on_wandb(tmp_path, {}):
        pass
