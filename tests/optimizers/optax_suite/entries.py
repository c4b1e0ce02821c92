"""Our optimizers, as rows of the tables that drive Optax's tests."""

import functools
import types

from radazo_jax._src.optimizers import aliases, moments

OURS = types.SimpleNamespace(
    radazo=aliases.radazo,
    zo_adamm=aliases.zo_adamm,
    zo_rmsprop=aliases.zo_rmsprop,
    zo_sgd=aliases.zo_sgd,
    zo_signsgd=aliases.zo_signsgd,
)

# Our optimizer -> the optimizer of Optax that the tests treat alike. They look for its
# name to skip a case or to pass a further argument.
TREATED_AS = {
    # Skipped for complex parameters, like all of Optax that takes real signs, and for
    # Rosenbrock, on which signs need a learning rate schedule.
    "zo_signsgd": "sign_sgd",
    # Not skipped. Passed the value of the objective, which `reduce_on_plateau` reads.
    "zo_sgd": "sgd",
}


def entry(name, **kwargs):
    return {"opt_name": name, "opt_kwargs": kwargs}


OPTIMIZERS = [
    entry("radazo", learning_rate=3e-3),
    entry("radazo", learning_rate=3e-3, bias_correction=True),
    entry("zo_adamm", learning_rate=1e-2, mu_dtype="float32", bias_correction=True),
    entry("zo_rmsprop", learning_rate=5e-3),
    entry("zo_sgd", learning_rate=1e-3, momentum=0.9),
    entry("zo_signsgd", learning_rate=1e-1),
]

# `_common_test` has more objectives, schedules, and the wrappers of `optax.contrib`:
# an optimizer alone, then plain descent in each wrapper as Optax tests them, then
# all that has moments in `mechanize`, which tunes the learning rate.
OPTIMIZERS_ALONE = [entry("radazo", learning_rate=3e-3)]
WRAPPED = [
    {**entry("zo_sgd", learning_rate=rate), "wrapper_name": name, "wrapper_kwargs": kw}
    for name, rate, kw in (
        ("mechanize", 1e-1, {"weight_decay": 0.0}),
        ("schedule_free", 1e-2, {"learning_rate": 1e-2}),
        ("reduce_on_plateau", 1e-3, {}),
    )
]
TO_MECHANIZE = [
    entry("radazo", learning_rate=1.0),
    entry("zo_adamm", learning_rate=1.0),
    entry("zo_rmsprop", learning_rate=1.0),
    entry("zo_sgd", learning_rate=1.0, momentum=0.9),
]


FLOAT64_MODULES = [
    ("scale_by_radazo", moments.scale_by_radazo, {}),
    ("scale_by_radazo_debiased", moments.scale_by_radazo, {"bias_correction": True}),
    ("scale_by_radazo_bf16", moments.scale_by_radazo, {"mu_dtype": "bfloat16"}),
    ("scale_by_zo_adamm", moments.scale_by_zo_adamm, {}),
    ("radazo", aliases.radazo, {"learning_rate": 0.1}),
    ("zo_adamm", aliases.zo_adamm, {"learning_rate": 0.1, "bias_correction": True}),
    ("zo_rmsprop", aliases.zo_rmsprop, {"learning_rate": 0.1}),
    ("zo_sgd", aliases.zo_sgd, {"learning_rate": 0.1}),
    ("zo_sgd_momentum", aliases.zo_sgd, {"learning_rate": 0.1, "momentum": 0.9}),
    ("zo_signsgd", aliases.zo_signsgd, {"learning_rate": 0.1}),
]

SHARDING_OPTIMIZERS = {
    name: make(learning_rate=1.0)
    for name, make in {
        **vars(OURS),
        "radazo_debiased": functools.partial(aliases.radazo, bias_correction=True),
        "zo_sgd_momentum": functools.partial(aliases.zo_sgd, momentum=0.9),
    }.items()
}


# Module -> its path, its tables with their replacements, and the tests that the
# tables do not drive. An assignment to a table is replaced, an addition too.
MODULES = {
    "alias": (
        "optax._src.alias_test",
        {"_OPTIMIZERS_UNDER_TEST": OPTIMIZERS},
        {"test_explicit_dtype"},
    ),
    "common": (
        "optax.contrib._common_test",
        {
            "_MAIN_OPTIMIZERS_UNDER_TEST": OPTIMIZERS_ALONE,
            "_MAIN_OPTIMIZERS_UNDER_TEST +=": WRAPPED,
            "_BASE_OPTIMIZERS": TO_MECHANIZE,
        },
        # It ignores the wrappers, and without them it is the test of `alias_test`.
        {"test_state_shape_dtype_shard_stability"},
    ),
    "sharding": (
        "optax._src.sharding_test",
        {"OPTIMIZERS": SHARDING_OPTIMIZERS},
        {"test_microbatch_with_explicit_sharding"},
    ),
    "float64": ("optax._src.float64_test", {"ALL_MODULES": FLOAT64_MODULES}, set()),
}
