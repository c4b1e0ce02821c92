"""Reads the text of a compiled program: its arithmetic, and what it reads and writes.

Unlike ``compiled.cost_analysis()``, this counts the body of a loop as often as it runs,
and of the arithmetic the products of matrices alone.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# Arithmetic that is counted by the elements it makes.
_ELEMENTWISE = re.compile(
    "abs|add|and|atan2|cbrt|ceil|clamp|compare|convert|cosine|divide|erf|exponential"
    "|exponential-minus-one|floor|log|log-plus-one|logistic|maximum|minimum|multiply"
    "|negate|not|or|popcnt|power|remainder|round-nearest-even|rsqrt|select|shift-left"
    "|shift-right-arithmetic|shift-right-logical|sign|sine|sqrt|subtract|tanh|xor"
)
_BYTES = {"pred": 1, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"([a-z]+\d*[a-z\d]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
# Its name, the type of its result, its opcode, and what follows.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation"
    r"|branch_computations|called_computations)=(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_LOOP = ("condition", "body")
# What calls computations, and reads and writes nothing itself.
_CONTROL = ("while", "conditional", "call")
# What reads and writes nothing, or whose counterpart does.
_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|after-all|while|conditional"
    "|call|partition-id|replica-id|.*-done"
)
_READS_A_PART = ("dynamic-slice", "gather", "slice")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":"(\d+)"\}')


class Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    on_chip: bool = False  # In a TPU's fast memory.

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        width = _BYTES.get(self.dtype) if bits is None else int(bits[0]) / 8
        assert width is not None, self.dtype
        return math.ceil(math.prod(self.shape) * width)


class Instruction(NamedTuple):
    """A line of a computation.

    Attributes:
      name: Its name.
      opcode: Such as ``dot``.
      results: The arrays it makes.
      operands: The names of what it reads.
      text: The rest of the line after the opcode.
      called: The names of the computations that it calls.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    called: tuple[str, ...]

    @property
    def made(self) -> tuple[Array, ...]:
        """The results, without the operands that the start of a pair passes on."""
        if self.opcode == "copy-start":
            return self.results[:1]
        if self.opcode.endswith("-start") and self.opcode != "all-reduce-start":
            # The operands, the results, and for some two words.
            return self.results[len(self.operands) :][: len(self.operands)]
        return self.results

    @property
    def main_bytes(self) -> int:
        """The bytes in main memory of what it makes."""
        return sum(x.num_bytes for x in self.made if not x.on_chip)

    @property
    def literal(self) -> str:
        """The value of a constant."""
        return self.text.partition(")")[0]

    def attribute(self, name: str) -> str:
        return re.search(rf"{name}=%?([\w.\-]+)", self.text)[1]


class Program:
    """A compiled module, parsed.

    Args:
      text: ``compiled.as_text()``.
      trips: Number of passes of a loop whose end depends on what is computed.
    """

    def __init__(self, text: str, trips: int | None = None) -> None:
        self.trips = trips
        assert text.count("HloModule ") == 1, "There is more than one module."
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        inside: dict[str, Instruction] | None = None
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                inside = self.computations.setdefault(found[2], {})
                self.entry = found[2] if found[1] else self.entry
            elif line.startswith("}"):
                inside = None
            elif inside is not None and (found := _INSTRUCTION.match(line)):
                instruction = _parsed(*found.groups())
                inside[instruction.name] = instruction

    def walk(self) -> Iterator[tuple[dict[str, Instruction], Instruction, int]]:
        """Yields the instructions of a run, with their computations and counts.

        It yields every branch of a conditional. Work that the TPU compiler splits into
        pieces, next to other work, is yielded once.
        """
        yield from self._walk(self.entry, 1, set())

    def _walk(
        self, name: str, times: int, begun: set[str]
    ) -> Iterator[tuple[dict[str, Instruction], Instruction, int]]:
        computation = self.computations[name]
        for instruction in computation.values():
            if "chain_id=" in instruction.text:
                channel = instruction.attribute("channel_id")
                if channel in begun:
                    continue
                begun.add(channel)
            yield computation, instruction, times
            loop = instruction.opcode == "while"
            inner = times * (self._num_trips(instruction, computation) if loop else 1)
            for called in instruction.called:
                yield from self._walk(called, inner, set() if loop else begun)

    def _num_trips(self, loop: Instruction, around: dict[str, Instruction]) -> int:
        """Returns the trip count of a loop that counts up to a constant.

        A step of `solver` updates in a loop that runs once, or not at all if the step
        is skipped. Its bound is no constant, and it is counted once.
        """
        if known := _TRIPS.search(loop.text):
            return int(known[1])
        condition, body = (self.computations[loop.attribute(n)] for n in _LOOP)
        if self.trips is not None and "and" in {
            i.opcode for _, i, _ in self._walk(loop.attribute("condition"), 1, set())
        }:
            return self.trips
        test = self._inner(condition, "compare")
        assert "direction=LT" in test.text, f"How often does this run? {loop.text}"
        # The operands of the comparison, or if it is fused, all that it can be about.
        names = test.operands if test.name in condition else list(condition)
        tested = [_resolved(condition, name) for name in names]
        counter, *rest = [i for i in tested if i.opcode == "get-tuple-element"]
        bounds = [i for i in tested if i.opcode == "constant"]
        first, *carried = (
            _resolved(around, around[loop.operands[0]].operands[place])
            for place in (int(i.attribute("index")) for i in (counter, *rest))
        )
        bounds += [i for i in carried if i.opcode == "constant"]
        if not bounds and len(carried) == 1 and "jit(take)/while" in loop.text:
            return 1
        assert len(bounds) == 1, f"What is counted? {loop.text}"
        place = int(counter.attribute("index"))
        start = int(first.literal) if first.opcode == "constant" else 0
        root = list(body.values())[-1]
        after = _resolved(body, root.operands[place])
        computation = self.computations[after.called[0]] if after.called else body
        steps = [
            found.literal
            for operand in self._inner(computation, "add", after).operands
            if (found := _resolved(computation, operand)).opcode == "constant"
        ]
        assert steps == ["1"], f"By how much does this count? {after.text}"
        return int(bounds[0].literal) - start

    def _inner(
        self,
        computation: dict[str, Instruction],
        opcode: str,
        instruction: Instruction | None = None,
    ) -> Instruction:
        """The instruction of this kind that a computation ends with, maybe fused."""
        last = instruction or list(computation.values())[-1]
        if last.opcode == opcode:
            return last
        computation = self.computations[last.called[0]] if last.called else computation
        (found,) = [i for i in computation.values() if i.opcode == opcode]
        return found

    def product_flops(self) -> int:
        """Twice the multiplications in products of matrices, on one device."""
        total = 0
        for computation, instruction, times in self.walk():
            if instruction.opcode == "dot":
                total += times * _dot_flops(computation, instruction)
            elif instruction.opcode == "convolution":
                total += times * _convolution_flops(computation, instruction)
            elif "__cublas$" in instruction.text:
                total += times * _cublas_flops(computation, instruction)
        return total

    def accessed_bytes(self) -> int:
        """The bytes of main memory that kernels read and write, on one device.

        Of an array from which a kernel takes a slice, or rows, it reads no more than
        these; an array that it updates in place it writes no further than that.
        """
        return self._accessed_by(self.entry)

    def _accessed_by(self, name: str) -> int:
        computation, total = self.computations[name], 0
        for instruction in computation.values():
            if instruction.opcode in _CONTROL:
                loop = instruction.opcode == "while"
                times = self._num_trips(instruction, computation) if loop else 1
                inner = (self._accessed_by(called) for called in instruction.called)
                total += times * sum(inner)
            elif not _FREE.fullmatch(instruction.opcode):
                for number, operand in enumerate(instruction.operands):
                    if operand in computation:
                        size = computation[operand].main_bytes
                        total += self._read(instruction, number, size)
                written = self._written(computation, instruction)
                total += min(written, instruction.main_bytes)
        return total

    def _read(self, instruction: Instruction, number: int, size: int) -> int:
        """The bytes read of an operand, which has `size` of them."""
        made = sum(array.num_bytes for array in instruction.made)
        opcode = instruction.opcode.removesuffix("-start")
        if number == 0 and opcode in _READS_A_PART:
            return min(size, made)
        if number == 0 and instruction.opcode == "dynamic-update-slice":
            return 0
        if instruction.opcode != "fusion":
            return size
        inside = self.computations[instruction.called[0]]
        return min(size, self._read_inside(inside, _parameter(inside, number), size))

    def _passes_on(self, instruction: Instruction, number: int) -> bool:
        """Whether the result is an operand, maybe in another shape."""
        if instruction.opcode != "fusion":
            return instruction.opcode in ("bitcast", "tuple")
        inside = self.computations[instruction.called[0]]
        last = list(inside.values())[-1]
        while last.opcode == "bitcast":
            last = inside[last.operands[0]]
        return last.name == _parameter(inside, number)

    def _read_inside(
        self, computation: dict[str, Instruction], name: str, size: int
    ) -> int:
        total = 0
        for user in computation.values():
            for number, operand in enumerate(user.operands):
                if operand != name:
                    continue
                if self._passes_on(user, number):
                    total += self._read_inside(computation, user.name, size)
                else:
                    total += self._read(user, number, size)
        return total

    def _written(
        self, computation: dict[str, Instruction], instruction: Instruction
    ) -> int:
        """The bytes that an instruction writes."""
        if instruction.opcode == "dynamic-update-slice":
            update = computation[instruction.operands[1]]
            return sum(array.num_bytes for array in update.results)
        if instruction.opcode in ("fusion", "bitcast", "tuple"):
            if instruction.opcode == "fusion":
                computation = self.computations[instruction.called[0]]
                last = [list(computation.values())[-1]]
            else:
                last = [computation[operand] for operand in instruction.operands]
            return sum(self._written(computation, one) for one in last)
        return sum(array.num_bytes for array in instruction.made)

    def elementwise_operations(self) -> int:
        """The elements that operations other than products make, on one device.

        Drawing numbers is of this kind.
        """
        return sum(
            times * math.prod(instruction.results[0].shape)
            for _, instruction, times in self.walk()
            if _ELEMENTWISE.fullmatch(instruction.opcode)
        )


def _parsed(name: str, result: str, opcode: str, text: str) -> Instruction:
    operands = re.findall(r"%([\w.\-]+)", _up_to_closing(text))
    called = []
    for one, several in _CALLED.findall(text):
        called += [one] if one else re.findall(r"[\w.\-]+", several)
    arrays = [
        Array(
            dtype,
            tuple(int(n.strip("<=")) for n in shape.split(",") if n),
            "S(1)" in layout,
        )
        for dtype, shape, layout in _SHAPE.findall(result)
    ]
    return Instruction(
        name, opcode, tuple(arrays), tuple(operands), text, tuple(called)
    )


def _parameter(computation: dict[str, Instruction], number: int) -> str:
    """The name of a parameter."""
    (found,) = (
        i.name
        for i in computation.values()
        if i.opcode == "parameter" and i.literal == str(number)
    )
    return found


def _up_to_closing(text: str) -> str:
    depth = 1
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            return text[:i]
    return text


def _resolved(computation: dict[str, Instruction], name: str) -> Instruction:
    """Returns the operand without its copies."""
    found = computation[name]
    while found.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        found = computation[found.operands[0]]
    return found


def _operand(
    computation: dict[str, Instruction], instruction: Instruction, number: int
) -> tuple[int, ...]:
    return computation[instruction.operands[number]].results[0].shape


def _dot_flops(computation: dict[str, Instruction], dot: Instruction) -> int:
    lhs = _operand(computation, dot, 0)
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.text)
    contracted = [lhs[int(axis)] for axis in axes[1].split(",") if axis] if axes else []
    return 2 * math.prod(dot.results[0].shape) * math.prod(contracted)


def _cublas_flops(computation: dict[str, Instruction], call: Instruction) -> int:
    """The GPU compiler calls a library for products; a second result is its memory."""
    lhs = _operand(computation, call, 0)
    axes = re.search(r'"lhs_contracting_dimensions":\[([\d",]*)\]', call.text)
    contracted = [lhs[int(axis)] for axis in re.findall(r"\d+", axes[1])]
    return 2 * math.prod(call.results[0].shape) * math.prod(contracted)


def _convolution_flops(
    computation: dict[str, Instruction], convolution: Instruction
) -> int:
    """The TPU compiler makes convolutions of products of matrices.

    Axes that a batch of products has may become spatial ones, with strides and
    padding such that most positions of the window fall outside of the input. These
    are not computed.
    """
    text = convolution.text
    lhs_axes, rhs_axes, out_axes = re.search(
        r"dim_labels=(\w+)_(\w+)->(\w+)", text
    ).groups()
    lhs = dict(zip(lhs_axes, _operand(computation, convolution, 0), strict=True))
    rhs = dict(zip(rhs_axes, _operand(computation, convolution, 1), strict=True))
    out = dict(zip(out_axes, convolution.results[0].shape, strict=True))
    window = re.search(r"window=\{([^}]*)\}", text)
    options = dict(pair.split("=") for pair in window[1].split()) if window else {}

    def option(name: str, i: int, default: str) -> str:
        return options[name].split("x")[i] if name in options else default

    pairs = 1
    for i in range(len(lhs) - 2):
        pairs *= _valid_pairs(
            lhs[str(i)],
            rhs[str(i)],
            out[str(i)],
            int(option("stride", i, "1")),
            int(option("pad", i, "0_0").split("_")[0]),
            int(option("lhs_dilate", i, "1")),
            int(option("rhs_dilate", i, "1")),
        )
    batch_groups = re.search(r"batch_group_count=(\d+)", text)
    batch = lhs["b"] // (int(batch_groups[1]) if batch_groups else 1)
    return 2 * batch * rhs["i"] * out["f"] * pairs


def _valid_pairs(
    size: int, kernel: int, out: int, stride: int, pad: int, dilate: int, spread: int
) -> int:
    """Counts the positions of a window, over all outputs, inside the input."""
    at = np.arange(out)[:, None] * stride + np.arange(kernel) * spread - pad
    return int(np.sum((at % dilate == 0) & (at >= 0) & (at // dilate < size)))
