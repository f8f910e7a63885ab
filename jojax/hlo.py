"""What one run of a compiled program costs a device, read from its optimised HLO text.

`cost_analysis()` counts the body of a loop once; here it counts as often as the loop runs (`known_trip_count`, else the
bound that its condition compares with), a conditional as its costliest branch (chunked attention: no block is skipped).

FLOPs: dots and convolutions, two for each multiply-and-add that is not on padding, wherever they stand (the libraries'
products of GPUs too); everything else counts by its bytes. A kernel of its own has what its backend_config estimates,
or nothing and is named in `uncounted`.
Bytes: operands and results in main memory (on a TPU not those that lie on the chip, `S(1)`), a fusion's from outside;
of a slice, gather or update in place what is touched.
Collectives: each kind's runs, and what a device sends when n of them stand in a ring and x are its operand's bytes:
all-gather (n − 1) x, all-reduce 2 (n − 1) x / n, reduce-scatter and all-to-all (n − 1) x / n, collective-permute x.
An asynchronous pair counts once.
"""

import dataclasses
import functools
import json
import math
import re

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
# these move nothing themselves
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
FREE |= {"partition-id", "replica-id", "opt-barrier", "iota", "domain", "add-dependency", "get-dimension-size"}
SHAPE = re.compile(r"\b(pred|[subfc]\d+\w*|bf16|token)\[([\d,<=]*)\](\{[^}]*\})?")


@dataclasses.dataclass
class Instruction:
    name: str
    kind: str
    shape: str
    operands: list[str]
    attributes: str
    root: bool

    def called(self, key: str) -> list[str]:
        """Names of computations after `key=`."""
        found = re.search(rf"\b{key}=(?:%?([\w.\-]+)|\{{([^}}]*)\}})", self.attributes)
        return re.findall(r"[\w.\-]+", found[1] or found[2]) if found else []


@dataclasses.dataclass
class Cost:
    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict = dataclasses.field(default_factory=dict)  # kind: [runs, bytes sent]
    uncounted: dict = dataclasses.field(default_factory=dict)  # kernel: runs
    open_loops: int = 0  # whose number of runs is not in the text: counted once

    def add(self, other: "Cost", times: float = 1) -> None:
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        for kind, (runs, sent) in other.collectives.items():
            old = self.collectives.get(kind, (0, 0))
            self.collectives[kind] = (old[0] + times * runs, old[1] + times * sent)
        for name, runs in other.uncounted.items():
            self.uncounted[name] = self.uncounted.get(name, 0) + times * runs
        self.open_loops += other.open_loops


def cost(text: str) -> Cost:
    """Of the whole program, on one device."""
    return Program(text).total()


# ------------------------------------------------------------------------------------- reading
def arrays(shape: str):
    """(bytes of an element, sizes, layout) of every array in a type."""
    for kind, sizes, layout in SHAPE.findall(shape):
        if kind != "token":
            bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
            yield bits / 8, [int(n.lstrip("<=")) for n in sizes.split(",") if n], layout


def size(shape: str, everywhere: bool = False) -> float:
    """Bytes of a type, of what lies in main memory or of all."""
    found = arrays(shape)
    return sum(each * math.prod(n) for each, n, layout in found if everywhere or not re.search(r"S\([1-9]", layout))


def closing(text: str, start: int) -> int:
    """Index behind the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def instruction(line: str) -> Instruction | None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    start = head.end()
    end = closing(line, start) if line[start] == "(" else line.index(" ", start)
    open_ = line.index("(", end)
    close = closing(line, open_)
    inside = re.sub(r"/\*.*?\*/", "", line[open_ + 1 : close - 1])
    operands = re.findall(r"%([\w.\-]+)", inside) or re.findall(r"([\w.\-]+)(?:,|$)", inside)
    return Instruction(head[2], line[end:open_].strip(), line[start:end], operands, line[close:], bool(head[1]))


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """({name: instructions}, name of the entry)"""
    found, entry, now = {}, "", None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            now = found[head[2]] = []
            entry = head[2] if head[1] else entry
        elif now is not None and (one := instruction(line)):
            now.append(one)
    return found, entry


# ------------------------------------------------------------------------------------ counting
class Program:
    def __init__(self, text: str):
        self.of, self.entry = computations(text)
        self.shapes = {name: {one.name: one.shape for one in body} for name, body in self.of.items()}
        partitions = re.search(r"num_partitions=(\d+)", text.split("\n", 1)[0])
        replicas = re.search(r"replica_count=(\d+)", text.split("\n", 1)[0])
        self.cost = functools.cache(self._cost)  # in the program, with which it goes
        self.devices = int(partitions[1] if partitions else 1) * int(replicas[1] if replicas else 1)

    def total(self) -> Cost:
        return self.cost(self.entry)

    def _cost(self, name: str, fused: bool = False) -> Cost:
        """Of one run of a computation; inside a fusion nothing goes through main memory."""
        out = Cost()
        for one in self.of[name]:
            if not fused:
                out.bytes += self.traffic(name, one)
            kind = one.kind.removesuffix("-start")
            if kind in KINDS:
                out.add(Cost(collectives={kind: (1, self.sent(name, one, kind))}))
            elif kind == "while":
                self.loop(out, one, fused)
            elif kind == "conditional":
                branches = [
                    b for k in ("branch_computations", "true_computation", "false_computation") for b in one.called(k)
                ]
                out.add(max((self.cost(b, fused) for b in branches), key=lambda c: (c.flops, c.bytes)))
            elif kind in ("dot", "convolution", "custom-call"):
                self.product(out, name, one)
            elif kind in ("fusion", "call", "async"):
                for inner in one.called("calls") + one.called("to_apply"):
                    out.add(self.cost(inner, fused or kind == "fusion"))
        return out

    def loop(self, out: Cost, one: Instruction, fused: bool) -> None:
        (body,), (condition,) = one.called("body"), one.called("condition")
        known = re.search(r'"known_trip_count":\{"n":"?(\d+)', one.attributes)
        times = int(known[1]) if known else self.bound(condition)
        out.add(self.cost(body, fused), times or 1)
        out.open_loops += times is None

    def bound(self, condition: str) -> int | None:
        """n of the condition `counter < n` that a scan has, whose counter starts at 0."""
        bodies = [condition, *(inner for one in self.of[condition] for inner in one.called("calls"))]
        found = [one for name in bodies for one in self.of[name]]
        compares = [one.attributes for one in found if one.kind == "compare"]
        numbers = [one.operands[0] for one in found if one.kind == "constant" and re.match(r"[su]32\[\]", one.shape)]
        alone = len(compares) == len(numbers) == 1 and "direction=LT" in compares[0]
        return int(numbers[0]) if alone else None

    def product(self, out: Cost, name: str, one: Instruction) -> None:
        shapes = [self.shapes[name].get(operand, "") for operand in one.operands]
        if one.kind == "dot":
            out.flops += dot(one, shapes, r"lhs_contracting_dims=\{([\d,]*)\}")
        elif one.kind == "convolution" or "$conv" in one.attributes:
            out.flops += convolution(one, shapes)
        elif "lhs_contracting_dimensions" in one.attributes:
            out.flops += dot(one, shapes, r'"lhs_contracting_dimensions":\[([\d,"]*)\]')
        elif kernel := re.search(
            r'custom_call_target="([^"]*(?:tpu_custom_call|triton|fmha|mosaic)[^"]*)"', one.attributes
        ):
            if estimate := re.search(r'"cost_estimate":(\{[^}]*\})', one.attributes):
                out.flops += float(json.loads(estimate[1])["flops"])
            else:
                out.uncounted[kernel[1]] = out.uncounted.get(kernel[1], 0) + 1

    def sent(self, name: str, one: Instruction, kind: str) -> float:
        x = sum(size(self.shapes[name].get(operand, ""), everywhere=True) for operand in one.operands)
        n = self.group(one.attributes)
        ring = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1}
        return x * ring.get(kind, (n - 1) / n)

    def group(self, attributes: str) -> int:
        """Devices in one group of a collective."""
        if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
            return listed[1].count(",") + 1
        if counted := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
            return int(counted[1])
        return self.devices

    def traffic(self, name: str, one: Instruction) -> float:
        """Bytes to and from main memory."""
        if one.kind in FREE or '"AllocateBuffer"' in one.attributes:
            return 0
        shapes = [self.shapes[name].get(operand, "") for operand in one.operands]
        if one.kind.endswith("-done"):
            return size(one.shape)
        if one.kind.endswith("-start"):  # what its -done yields is counted there
            return sum(map(size, shapes))
        if one.kind == "fusion":
            (inner,) = one.called("calls")
            return self.written(inner, one) + sum(self.read(inner, i, shape) for i, shape in enumerate(shapes))
        if one.kind in ("dynamic-slice", "slice", "gather"):
            return 2 * size(one.shape)
        if one.kind == "dynamic-update-slice":
            return 2 * size(shapes[1])
        return size(one.shape) + sum(map(size, shapes))

    def read(self, inner: str, index: int, shape: str) -> float:
        """Of operand `index`, by the computation of a fusion."""
        body = self.of[inner]
        own = next((one.name for one in body if one.kind == "parameter" and one.operands == [str(index)]), None)
        return min(self.touched(inner, own, shape), size(shape))

    def touched(self, inner: str, own: str | None, shape: str) -> float:
        """Bytes of the array `own` that a computation of a fusion looks at, through fusions and names within."""
        total = 0.0
        for user in self.of[inner]:
            places = [i for i, operand in enumerate(user.operands) if operand == own and user.kind != "parameter"]
            for place in places:
                if user.kind in ("dynamic-slice", "slice", "gather") and place == 0:
                    total += size(user.shape)
                elif user.kind == "fusion":
                    total += sum(self.read(called, place, shape) for called in user.called("calls"))
                elif user.kind == "bitcast":
                    total += self.touched(inner, user.name, shape)
                elif user.kind != "dynamic-update-slice" or place != 0:  # else in place
                    total += size(shape)
        return total

    def written(self, inner: str, one: Instruction) -> float:
        return max(size(one.shape) - self.kept(inner, next(r for r in self.of[inner] if r.root)), 0.0)

    def kept(self, inner: str, out: Instruction) -> float:
        """Bytes of a result that an update in place leaves as they were."""
        of = {one.name: one for one in self.of[inner]}
        if out.kind == "dynamic-update-slice":
            return size(out.shape) - size(self.shapes[inner].get(out.operands[1], ""))
        if out.kind in ("tuple", "bitcast"):
            return sum(self.kept(inner, of[name]) for name in out.operands)
        if out.kind == "fusion":
            (called,) = out.called("calls")
            return self.kept(called, next(one for one in self.of[called] if one.root))
        return 0.0


def dot(one: Instruction, shapes: list[str], pattern: str) -> float:
    contracted = re.search(pattern, one.attributes)
    (_, left, _), (_, out, _) = next(arrays(shapes[0])), next(arrays(one.shape))
    axes = re.findall(r"\d+", contracted[1]) if contracted else []
    return 2.0 * math.prod(out) * math.prod(left[int(axis)] for axis in axes)


def convolution(one: Instruction, shapes: list[str]) -> float:
    """2 · output positions and channels · kernel positions that meet an input · input channels."""
    of_left, of_right, of_out = re.findall(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)[0]
    (_, left, _), (_, right, _), (_, out, _) = (next(arrays(s)) for s in (*shapes[:2], one.shape))
    if "convBackwardInput" in one.attributes:  # cuDNN's gradients bear the labels of the product that they belong to
        left, out = out, left
    elif "convBackwardFilter" in one.attributes:
        right, out = out, right
    total = 2.0 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    window = dict(
        item.split("=") for text in re.findall(r"window=\{([^}]*)\}", one.attributes) for item in text.split()
    )
    for axis, size in enumerate(window.get("size", "").split("x") if window else ()):
        rows, inputs = out[of_out.index(str(axis))], left[of_left.index(str(axis))]
        stride, spread, dilate = (
            int(window[key].split("x")[axis]) if key in window else 1 for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(window["pad"].split("x")[axis].split("_")[0]) if "pad" in window else 0
        at = np.arange(rows)[:, None] * stride + np.arange(int(size)) * dilate - low
        total *= np.count_nonzero((at >= 0) & (at <= (inputs - 1) * spread) & (at % spread == 0))
    return total
