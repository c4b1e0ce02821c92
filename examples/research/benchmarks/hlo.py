"""Reads the text of a compiled program: its arithmetic, and what it sends.

Unlike ``compiled.cost_analysis()``, this counts the body of a loop as often as it runs,
and of the arithmetic the products of matrices alone.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# Arithmetic that is counted by the elements it makes.
_ELEMENTWISE = re.compile(
    "abs|add|and|atan2|cbrt|ceil|clamp|compare|convert|cosine|divide|erf|exponential"
    "|exponential-minus-one|floor|log|log-plus-one|logistic|maximum|minimum|multiply"
    "|negate|not|or|popcnt|power|remainder|round-nearest-even|rsqrt|select|shift-left"
    "|shift-right-arithmetic|shift-right-logical|sign|sine|sqrt|subtract|tanh|xor"
)
# What would take the host, or another program, into a step.
_HOST = ("infeed", "outfeed", "send", "recv")
_BYTES = {"pred": 1, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"([a-z]+\d*[a-z\d]*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
# Its name, the type of its result, its opcode, and what follows.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation"
    r"|branch_computations|called_computations)=(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_LOOP = ("condition", "body")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":"(\d+)"\}')


class Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

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
    def literal(self) -> str:
        """The value of a constant."""
        return self.text.partition(")")[0]

    def attribute(self, name: str) -> str:
        return re.search(rf"{name}=%?([\w.\-]+)", self.text)[1]


class Sent(NamedTuple):
    """A collective: its opcode, what it makes, and how often a run comes by."""

    opcode: str
    results: tuple[Array, ...]
    times: int

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.results)


class Program:
    """A compiled module, parsed.

    Args:
      text: ``compiled.as_text()``.
    """

    def __init__(self, text: str) -> None:
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

    def collectives(self) -> list[Sent]:
        """Lists what devices send: the start of each asynchronous pair."""
        found = []
        for _, instruction, times in self.walk():
            opcode = instruction.opcode.removesuffix("-start")
            if opcode not in COLLECTIVES:
                continue
            found.append(Sent(opcode, instruction.made, times))
        return found

    def sent_bytes(self) -> int:
        """The bytes of the results of all collectives, on one device."""
        return sum(sent.num_bytes * sent.times for sent in self.collectives())

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

    def elementwise_operations(self) -> int:
        """The elements that operations other than products make, on one device.

        Drawing numbers is of this kind.
        """
        return sum(
            times * math.prod(instruction.results[0].shape)
            for _, instruction, times in self.walk()
            if _ELEMENTWISE.fullmatch(instruction.opcode)
        )

    def host_transfers(self) -> list[str]:
        """The instructions that take the host into the program."""
        return [
            instruction.name
            for _, instruction, _ in self.walk()
            if instruction.opcode.removesuffix("-done") in _HOST
            or (instruction.opcode == "custom-call" and "callback" in instruction.text)
            or "is_host_transfer=true" in instruction.text
        ]


def facts(compiled: Any) -> dict[str, Any]:
    """Returns what a program sends, computes and holds on one of its devices."""
    program = Program(compiled.as_text())
    sent = program.collectives()
    memory = compiled.memory_analysis()
    return {
        "host_transfers": program.host_transfers(),
        "sent_bytes": program.sent_bytes(),
        "largest_bytes": max((s.num_bytes for s in sent), default=0),
        "product_flops": program.product_flops(),
        "elementwise": program.elementwise_operations(),
        "peak_bytes": memory.peak_memory_in_bytes,
    }


def _parsed(name: str, result: str, opcode: str, text: str) -> Instruction:
    operands = re.findall(r"%([\w.\-]+)", _up_to_closing(text))
    called = []
    for one, several in _CALLED.findall(text):
        called += [one] if one else re.findall(r"[\w.\-]+", several)
    arrays = [
        Array(dtype, tuple(int(n.strip("<=")) for n in shape.split(",") if n))
        for dtype, shape in _SHAPE.findall(result)
    ]
    return Instruction(
        name, opcode, tuple(arrays), tuple(operands), text, tuple(called)
    )


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
