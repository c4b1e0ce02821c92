"""Primitives that JAX lowers on the CPU and no program here is made of, and why."""

_ASYNCHRONOUS = (
    "one half of an asynchronous collective: its value is a future, no array"
)
_UNREDUCED = "for values with an unreduced axis, which only sharded derivatives have"
_SYMBOLIC = "only in exported programs of symbolic shapes"
_CUDA = "only where cuDNN is called"
_LINEAR = "of linear references, for kernels; their values are no arrays"
_CALLED = "is made by JAX while it lowers or differentiates, and stands in no program"
_TOKEN = "makes a token, which is no array"

LEFT_OUT = {
    **{
        f"{name}_{half}": _ASYNCHRONOUS
        for name in (
            *("all_gather", "all_gather_reduced", "all_to_all", "ppermute", "psum"),
            *("psum_invariant", "reduce_scatter", "unreduced_psum", "pbroadcast"),
            "unreduced_reduce_scatter",
        )
        for half in ("start", "done")
    },
    **dict.fromkeys(("psend", "precv"), "a message whose receiver is another program"),
    **dict.fromkeys(
        (
            *("preduced", "unreduced_psum", "unreduced_reduce_scatter"),
            *("vary_unreduced_cast_p", "reduced_vary_cast_p", "all_gather_reduced"),
        ),
        _UNREDUCED,
    ),
    "ragged_all_to_all": "XLA has no implementation for the CPU",
    **dict.fromkeys(("dim_as_value", "dimension_size", "shape_assertion"), _SYMBOLIC),
    **dict.fromkeys(
        (
            *(f"dot_product_attention_{d}_wrapper" for d in ("fwd", "bwd")),
            *(f"dot_product_attention_fp8_{d}_wrapper" for d in ("fwd", "bwd")),
            "scaled_matmul_wrapper",
        ),
        _CUDA,
    ),
    **dict.fromkeys(("create_linear", "pin", "unpin", "broadcast_to"), _LINEAR),
    **dict.fromkeys(
        (
            *("custom_lin", "remat_opt", "run_state", "stage", "unreachable"),
            *("empty2", "to_edtype", "from_edtype"),
        ),
        _CALLED,
    ),
    **dict.fromkeys(("after_all", "create_token"), _TOKEN),
    **dict.fromkeys(("core_map", "with_memory_space_constraint"), "of Pallas' kernels"),
    **dict.fromkeys(
        ("host_local_array_to_global_array", "global_array_to_host_local_array"),
        "between several processes",
    ),
    "check": "`checkify` turns it into values before anything is run",
    **dict.fromkeys(("one_device", "row_major"), "of `perturb` itself"),
    "rng_uniform": "has a state: two runs of the same program differ",
    "inspect_sharding": "returns nothing, and needs a program that is compiled",
    "custom_partitioning": "needs a rule of partitioning, a callback of the compiler",
    "ffi_call": "needs a compiled library; `pure_callback` stands for it",
}
