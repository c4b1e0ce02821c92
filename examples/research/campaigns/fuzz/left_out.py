"""Primitives that JAX lowers on the CPU and no program here is made of, and why."""

_HALVES = (
    "all_gather all_gather_reduced all_to_all ppermute psum psum_invariant "
    "reduce_scatter unreduced_psum pbroadcast unreduced_reduce_scatter"
)
_ASYNCHRONOUS = (
    "one half of an asynchronous collective: its value is a future, no array"
)
_REASONS = {
    "a message whose receiver is another program": "psend precv",
    "for values with an unreduced axis, which only sharded derivatives have": (
        "preduced unreduced_psum unreduced_reduce_scatter vary_unreduced_cast_p "
        "reduced_vary_cast_p all_gather_reduced"
    ),
    "XLA has no implementation for the CPU": "ragged_all_to_all",
    "only in exported programs of symbolic shapes": (
        "dim_as_value dimension_size shape_assertion"
    ),
    "only where cuDNN is called": (
        "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper "
        "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd_wrapper "
        "scaled_matmul_wrapper"
    ),
    "of linear references, for kernels; their values are no arrays": (
        "create_linear pin unpin broadcast_to"
    ),
    "is made by JAX while it lowers or differentiates, and stands in no program": (
        "custom_lin remat_opt run_state stage unreachable empty2 to_edtype from_edtype"
    ),
    "makes a token, which is no array": "after_all create_token",
    "of Pallas' kernels": "core_map with_memory_space_constraint",
    "between several processes": (
        "host_local_array_to_global_array global_array_to_host_local_array"
    ),
    "`checkify` turns it into values before anything is run": "check",
    "of `perturb` itself": "one_device row_major",
    "has a state: two runs of the same program differ": "rng_uniform",
    "returns nothing, and needs a program that is compiled": "inspect_sharding",
    "needs a rule of partitioning, a callback of the compiler": "custom_partitioning",
    "needs a compiled library; `pure_callback` stands for it": "ffi_call",
}
LEFT_OUT = {name: why for why, names in _REASONS.items() for name in names.split()} | {
    f"{name}_{half}": _ASYNCHRONOUS
    for name in _HALVES.split()
    for half in ("start", "done")
}
