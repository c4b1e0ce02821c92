"""The reader of compiled programs, against XLA's own counts and by hand.

The texts hold for JAX 0.10.2 and its compilers.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import radazo_jax as zo
from benchmarks import hlo

WIDTH, ROWS, DEPTH = 32, 16, 3
EVALUATION = 2 * DEPTH * ROWS * WIDTH**2


def mesh_of(size):
    return jax.make_mesh(
        (size,), ("k",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size]
    )


def abstract(mesh, spec, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def compiled(mesh, fun, *args):
    with jax.set_mesh(mesh):
        return jax.jit(fun).lower(*args).compile()


def layers(params, x):
    """Scanned layers, whose products are `EVALUATION` flops."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def test_products_and_bytes_in_loops_count_as_often_as_they_run():
    mesh = mesh_of(8)

    def fun(x, w):
        def body(x, _):
            x = jnp.tanh(x @ w)
            total = lax.with_sharding_constraint(jnp.sum(x, axis=0), P())
            return x + total[None], None

        return lax.scan(body, x, None, length=5)[0]

    x, w = abstract(mesh, P("k"), 16, 32), abstract(mesh, P(), 32, 32)
    program = hlo.Program(compiled(mesh, fun, x, w).as_text())
    assert program.product_flops() == 5 * 2 * (16 // 8) * 32 * 32
    assert program.sent_bytes() == 5 * 4 * 32
    assert program.host_transfers() == []


@pytest.mark.parametrize("strides", [1, 2])
def test_products_of_convolutions(strides):
    x = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    w = jax.ShapeDtypeStruct((3, 3, 3, 4), jnp.float32)
    text = """HloModule m

ENTRY %main (x: f32[2,8,8,3], w: f32[3,3,3,4]) -> f32[2,8,8,4] {
  %x = f32[2,8,8,3]{3,2,1,0} parameter(0)
  %w = f32[3,3,3,4]{3,2,1,0} parameter(1)
  ROOT %c = f32[2,SIZE,SIZE,4]{3,2,1,0} convolution(%x, %w), window={size=3x3 pad=LIMITS stride=S}, dim_labels=b01f_01io->b01f
}
"""  # noqa: E501
    size, pad = {1: ("8", "1_1x1_1"), 2: ("4", "0_1x0_1")}[strides]
    text = text.replace("SIZE", size).replace("LIMITS", pad)
    text = text.replace("stride=S", f"stride={strides}x{strides}")

    def dense(x, w):
        return lax.conv_general_dilated(
            x, w, (strides, strides), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    analysis = jax.jit(dense).lower(x, w).cost_analysis()
    assert hlo.Program(text).product_flops() == analysis["flops"]


def test_a_batch_of_products_as_the_gpu_compiler_calls_it():
    """[4, 32, 64] with [4, 64, 16], and the memory that cuBLAS asks for."""
    text = """HloModule m

ENTRY %main (a: f32[4,32,64], b: f32[4,64,16]) -> f32[4,32,16] {
  %a = f32[4,32,64]{2,1,0} parameter(0)
  %b = f32[4,64,16]{2,1,0} parameter(1)
  %c = (f32[4,32,16]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
  ROOT %d = f32[4,32,16]{2,1,0} get-tuple-element(%c), index=0
}
"""  # noqa: E501
    assert hlo.Program(text).product_flops() == 2 * 4 * 32 * 16 * 64


def test_a_batch_of_products_as_the_tpu_compiler_writes_it():
    """[4, 256, 64] with [4, 256, 64]ᵀ, its batch the window of a convolution."""
    text = """HloModule m

ENTRY %main (a: f32[256,4,64], b: f32[256,4,64]) -> f32[4,256,256] {
  %a = f32[256,4,64]{2,1,0} parameter(0)
  %b = f32[256,4,64]{2,1,0} parameter(1)
  ROOT %c = f32[4,256,256]{1,2,0} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, dim_labels=b0f_o0i->0bf
}
"""  # noqa: E501
    assert hlo.Program(text).product_flops() == 2 * 4 * 256 * 256 * 64


def test_a_loop_of_the_tpu_compiler_is_counted_by_its_condition():
    text = """HloModule m

%body (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %s = f32[8,8]{1,0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%sum
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%next, %s)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%condition (p: (s32[], f32[8,8])) -> pred[] {
  %n = s32[] constant(7)
  %p = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %zero = s32[] constant(1)
  %copy = s32[] copy(%zero)
  %t = (s32[], f32[8,8]{1,0}) tuple(%copy, %x)
  %w = (s32[], f32[8,8]{1,0}) while(%t), condition=%condition, body=%body
  ROOT %y = f32[8,8]{1,0} get-tuple-element(%w), index=1
}
"""
    program = hlo.Program(text)
    assert program.product_flops() == (7 - 1) * 2 * 8**3
    assert program.sent_bytes() == (7 - 1) * 4 * 8**2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "size", "num_directions", "evaluations"),
    [
        ("sphere", 1, 7, 8),
        ("gaussian", 8, 7, 1),
        ("rademacher", 8, 8, 2),
        ("low_rank", 1, 7, 8),
        ("low_rank", 8, 8, 2),
    ],
)
def test_products_a_device(distribution, size, num_directions, evaluations):
    """A device has ⌈(K + 1) / N⌉ evaluations, and N losses are gathered for each."""
    mesh = mesh_of(size)
    params = abstract(mesh, P(), DEPTH, WIDTH, WIDTH)
    x = abstract(mesh, P(), ROWS, WIDTH)
    estimator = zo.forward_difference(getattr(zo, distribution)(), num_directions)
    fun = zo.value_and_grad(layers, estimator, evaluator=zo.sharded("k", 1))
    key = jax.eval_shape(lambda: jax.random.key(0))
    program = hlo.Program(compiled(mesh, fun, key, params, x).as_text())
    # Products with the two factors are of a width of one.
    allowed = 0.1 if distribution == "low_rank" else 0
    share = evaluations * EVALUATION
    assert share <= program.product_flops() <= (1 + allowed) * share
    if size > 1:
        assert program.sent_bytes() == 4 * size * evaluations
