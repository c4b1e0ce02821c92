"""Communication and arithmetic of compiled programs on eight simulated devices."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import radazo_jax as zo
from examples.research.benchmarks import hlo
from tests.helpers import tables
from tests.helpers.tables import mesh_of

# Those of the record.
DISTRIBUTIONS = {name: tables.DISTRIBUTIONS[name] for name in tables.KINDS}
ROOT = pathlib.Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "benchmarks"
WIDTH, ROWS, DEPTH = 32, 16, 3


def abstract(mesh, spec, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def compiled(mesh, fun, *args, **options):
    with jax.set_mesh(mesh):
        return jax.jit(fun, **options).lower(*args).compile()


def layers(params, x, weights=lambda w: w):
    """Scanned layers, whose products are 2 * DEPTH * ROWS * WIDTH² flops."""

    def layer(x, w):
        return jnp.tanh(x @ weights(w)), None

    x, _ = lax.scan(layer, x, params)
    return jnp.mean(x**2)


def step(loss, distribution, num_directions, batch_size=1, axis_name="k"):
    estimator = zo.forward_difference(DISTRIBUTIONS[distribution], num_directions, 1e-3)
    if axis_name is None:
        return zo.value_and_grad(loss, estimator, zo.vectorized(batch_size))
    return zo.value_and_grad(loss, estimator, zo.sharded(axis_name, batch_size))


KEY = jax.eval_shape(lambda: jax.random.key(0))
EVALUATION = 2 * DEPTH * ROWS * WIDTH**2


def test_products_and_bytes_in_loops_count_as_often_as_they_run():
    mesh = mesh_of(1, 8, 1)

    def fun(x, w):
        def body(x, _):
            x = jnp.tanh(x @ w)
            total = lax.with_sharding_constraint(jnp.sum(x, axis=0), P())
            return x + total[None], None

        return lax.scan(body, x, None, length=5)[0]

    x, w = abstract(mesh, P("data"), 16, 32), abstract(mesh, P(), 32, 32)
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


def _dense(x, w):
    return jnp.tanh(x @ w)


def _part(x, w):
    return jnp.tanh(lax.dynamic_slice(w, (jnp.int32(3), jnp.int32(0)), x.shape))


def _in_place(x, w):
    return lax.dynamic_update_slice(w, x, (jnp.int32(3), jnp.int32(0)))


def _until(x, w):
    def unfinished(carry):
        return (carry[0] < 7) & (carry[1][0, 0] < 9)

    start = jnp.int32(0), x
    return lax.while_loop(unfinished, lambda c: (c[0] + 1, _dense(c[1], w)), start)[1]


@pytest.mark.parametrize("fun", [_dense, _part, _in_place])
def test_bytes_that_a_program_accesses_are_as_xla_counts_them(fun):
    x, w = jnp.ones((8, 32)), jnp.ones((32, 32))
    donated = (1,) if fun is _in_place else ()
    program = jax.jit(fun, donate_argnums=donated).lower(x, w).compile()
    found = hlo.Program(program.as_text()).accessed_bytes()
    indices = 2 * 4  # Which XLA counts if they are not constants.
    assert 0 <= found - program.cost_analysis()["bytes accessed"] <= indices


def test_bytes_of_what_the_tpu_compiler_fuses_twice_and_of_what_it_fetches_ahead():
    """A product reads all of `w` through a fusion that reshapes it.

    The start of a pair lists its operand. Half of `x` is read, and not written to main
    memory.
    """
    text = """HloModule m

%inner (w: f32[64,32]) -> f32[32,64] {
  %w = f32[64,32]{1,0} parameter(0)
  ROOT %b = f32[32,64]{0,1} bitcast(%w)
}

%outer (x: f32[8,32], w: f32[64,32]) -> f32[8,64] {
  %x = f32[8,32]{1,0} parameter(0)
  %w = f32[64,32]{1,0} parameter(1)
  %f = f32[32,64]{0,1} fusion(%w), kind=kLoop, calls=%inner
  ROOT %y = f32[8,64]{1,0} convolution(%x, %f), dim_labels=bf_io->bf
}

ENTRY %main (x: f32[16,32], w: f32[64,32]) -> f32[8,64] {
  %x = f32[16,32]{1,0} parameter(0)
  %w = f32[64,32]{1,0} parameter(1)
  %s = ((f32[16,32]{1,0}), f32[8,32]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:8], [0:32]}
  %half = f32[8,32]{1,0:S(1)} slice-done(%s)
  %y = f32[8,64]{1,0:S(1)} fusion(%half, %w), kind=kOutput, calls=%outer
  %c = (f32[8,64]{1,0}, f32[8,64]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%y)
  ROOT %z = f32[8,64]{1,0} copy-done(%c)
}
"""  # noqa: E501
    floats = 8 * 32 + 64 * 32 + 8 * 64  # Half of x, all of w, and the product.
    assert hlo.Program(text).accessed_bytes() == 4 * floats


def test_a_loop_that_depends_on_values_is_counted_as_often_as_told():
    x, w = jnp.ones((8, 32)), jnp.ones((32, 32))
    text = jax.jit(_until).lower(x, w).compile().as_text()
    seven, six = (hlo.Program(text, trips=n) for n in (7, 6))
    assert seven.product_flops() == 7 * 2 * 8 * 32 * 32
    body = jax.jit(_dense).lower(x, w).compile().cost_analysis()["bytes accessed"]
    counted = seven.accessed_bytes() - six.accessed_bytes()
    assert body <= counted <= body + 64  # The counter, and the condition's number.


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
    mesh = mesh_of(size, 1, 1)
    params = abstract(mesh, P(), DEPTH, WIDTH, WIDTH)
    x = abstract(mesh, P(), ROWS, WIDTH)
    fun = step(layers, distribution, num_directions)
    program = hlo.Program(compiled(mesh, fun, KEY, params, x).as_text())
    # Products with the two factors are of a width of one.
    allowed = 0.1 if distribution == "low_rank" else 0
    share = evaluations * EVALUATION
    assert share <= program.product_flops() <= (1 + allowed) * share
    if size > 1:
        assert program.sent_bytes() == 4 * size * evaluations


@pytest.mark.parametrize("distribution", tables.every(DISTRIBUTIONS, *tables.FAST))
def test_replicated_parameters_send_scalars_alone(distribution):
    """The layers are scanned, so the CPU draws their directions one after another."""
    mesh = mesh_of(2, 4, 1)
    params = abstract(mesh, P(), DEPTH, WIDTH, WIDTH)
    x = abstract(mesh, P("data"), ROWS, WIDTH)
    program = hlo.Program(
        compiled(mesh, step(layers, distribution, 1), KEY, params, x).as_text()
    )
    # An evaluation a device: a sum over the minibatch, and both losses.
    assert program.sent_bytes() == 4 + 4 * 2


@pytest.mark.parametrize("distribution", tables.every(DISTRIBUTIONS, *tables.FAST))
def test_sharded_parameters_send_what_a_forward_pass_sends(distribution):
    mesh = mesh_of(2, 2, 2)
    params = abstract(mesh, P(None, None, "model"), DEPTH, WIDTH, WIDTH)
    x = abstract(mesh, P(("data", "model")), ROWS, WIDTH)

    def loss(params, x):
        def gathered(w):
            return lax.with_sharding_constraint(w, P())

        return layers(params, x, gathered)

    forward = hlo.Program(compiled(mesh, loss, params, x).as_text())
    program = hlo.Program(
        compiled(
            mesh,
            step(loss, distribution, 1),
            KEY,
            params,
            x,
            out_shardings=(NamedSharding(mesh, P()), params.sharding),
        ).as_text()
    )
    largest = max(sent.num_bytes for sent in forward.collectives())
    assert largest == 4 * WIDTH**2, "a gathered layer"
    assert max(sent.num_bytes for sent in program.collectives()) == largest
    # One evaluation a device, and what are less than the rows of a matrix.
    small = sum(
        sent.num_bytes * sent.times
        for sent in program.collectives()
        if sent.num_bytes < largest
    )
    assert program.sent_bytes() - small == DEPTH * largest
    assert small <= 2 * DEPTH * 4 * WIDTH * 8


def test_low_rank_evaluations_share_a_gathered_layer():
    """A constraint on a perturbed matrix is one on the matrix alone."""
    mesh = mesh_of(2, 1, 4)
    params = abstract(mesh, P(None, None, "model"), DEPTH, WIDTH, WIDTH)
    x = abstract(mesh, P("model"), ROWS, WIDTH)

    def loss(params, x):
        return layers(params, x, lambda w: lax.with_sharding_constraint(w, P()))

    fun = step(loss, "low_rank", 7, batch_size=None)
    program = hlo.Program(compiled(mesh, fun, KEY, params, x).as_text())
    layer = 4 * WIDTH**2
    gathered = [s for s in program.collectives() if s.opcode == "all-gather"]
    assert sum(s.times for s in gathered if s.num_bytes >= layer) == DEPTH
    assert max(s.num_bytes for s in gathered) == layer


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["gaussian", "low_rank"])
def test_a_constraint_in_the_loss_changes_nothing(distribution):
    mesh = mesh_of(2, 2, 2)
    params = jax.random.normal(jax.random.key(1), (DEPTH, WIDTH, WIDTH)) / WIDTH**0.5
    x = jax.random.normal(jax.random.key(2), (ROWS, WIDTH))
    expected = step(layers, distribution, 3, axis_name=None)(
        jax.random.key(0), params, x
    )

    def loss(params, x):
        return layers(params, x, lambda w: lax.with_sharding_constraint(w, P()))

    with jax.set_mesh(mesh):
        placed = jax.device_put(params, P(None, None, "model"))
        x = jax.device_put(x, P("data"))
        got = jax.jit(step(loss, distribution, 3))(jax.random.key(0), placed, x)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    scale = np.linalg.norm(expected[1])
    np.testing.assert_allclose(got[1], expected[1], rtol=0, atol=2e-3 * scale)


@pytest.mark.slow
def test_cross_entropy_over_a_sharded_vocabulary():
    """XLA's partitioner dies of it under a shard_map over some of the axes."""
    mesh = mesh_of(2, 2, 2)
    shapes = {"embedding": (64, 16), "hidden": (16, 16), "output": (16, 64)}
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        name: jax.random.normal(key, shape) / 4
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    tokens = jax.random.randint(jax.random.key(1), (8, 12), 0, 64)

    def loss(params, tokens):
        x = params["embedding"][tokens]
        logits = jnp.tanh(x @ params["hidden"]) @ params["output"]
        found = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(found, tokens[..., None], axis=-1))

    expected, _ = step(loss, "gaussian", 3, None, None)(
        jax.random.key(2), params, tokens
    )
    with jax.set_mesh(mesh):
        params = jax.device_put(params, P(None, "model"))
        tokens = jax.device_put(tokens, P("data"))
        value, gradient = jax.jit(step(loss, "gaussian", 3))(
            jax.random.key(2), params, tokens
        )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_record_meets_the_bars(platform):
    path = RECORDS / f"scaling_{platform}.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    steps = [row for row in record["rows"] if row["table"] == "steps"]
    few = {"rademacher", "low_rank"} if platform == "gpu" else set(DISTRIBUTIONS)
    assert {row["distribution"] for row in steps} == few
    most = {"cpu": 8, "gpu": 16, "tpu": 256}
    assert max(row["chips"] for row in steps) == most[platform]
    for row in steps:
        assert row["host_transfers"] == []
        if row["replicated"]:
            assert row["sent_bytes"] <= 4 * row["K+1"] + 64, row
        else:
            assert row["largest_bytes"] <= 1e6 * row["forward_largest_MB"], row
        if row["evaluations_spread"]:
            # One more evaluation than its share, if K + 1 cannot be divided.
            most = math.ceil(row["K+1"] / row["chips"]) / (row["K+1"] / row["chips"])
            assert 0.95 <= row["flops/ideal"] <= 1.05 * most, row


@pytest.mark.parametrize("size", [1, 8])
def test_slices_have_their_layout_given_on_one_chip_alone(size):
    # A given layout would gather a sharded array.
    mesh = mesh_of(1, 1, size)
    params = abstract(mesh, P(None, None, "model"), DEPTH, WIDTH, WIDTH)
    x = abstract(mesh, P(), ROWS, WIDTH)
    key = jax.ShapeDtypeStruct((), KEY.dtype, sharding=NamedSharding(mesh, P()))
    traced = jax.jit(step(layers, "gaussian", 2, axis_name=None)).trace(key, params, x)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("LayoutConstraint" in text) == (size == 1)
