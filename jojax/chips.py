"""Chips that a step can be compiled for without having one, and what they can do at best.

Numbers are the makers', of dense bfloat16 products; `interconnect` is what a chip can send, all its links together:
half of what is published as bidirectional. A collective along one axis of the mesh may not have all links.

TPU (docs.cloud.google.com/tpu/docs/NAME): TFLOP/s, memory, its bandwidth, interconnect both ways:
    v5e 197, 16 GiB, 819 GB/s, 400 GB/s; v5p 459, 95 GiB, 2,765, 1,200; v6e 918, 32 GiB, 1,638, 800;
    tpu7x 2,307, 192 GiB, 7,380, 1,200; v4 275, 32 GiB, 1,200, and 1.1 PB/s of all-reduce in a pod of 4,096
    A device may be half a chip (tpu7x); it has half of all.
GPU, SXM modules with NVLink, the 8 of one node at most. Memory, bandwidth and the compiler's description of them:
    openxla/xla, xla/backends/gpu/target_config/specs/NAME.txtpb. For the rest NVIDIA's data sheets: h100 and h200
    989 TFLOP/s (1,979 of sparse products) and 900 GB/s both ways, b200 2,250 and 1,800
    (glennklockwood.com/garden/processors/B200).
"""

import dataclasses
import importlib.util
import math
import os
import re

from jojax.errors import UserError, first_line

GiB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Of one device: bytes of memory, FLOP/s, bytes/s from memory, bytes/s to other chips."""

    platform: str  # tpu | gpu
    memory: float
    flops: float
    bandwidth: float
    interconnect: float


CHIPS = {
    "v4": Chip("tpu", 32 * GiB, 275e12, 1200e9, 1.1e15 / 4096),
    "v5e": Chip("tpu", 16 * GiB, 197e12, 819e9, 200e9),
    "v5p": Chip("tpu", 95 * GiB, 459e12, 2765e9, 600e9),
    "v6e": Chip("tpu", 32 * GiB, 918e12, 1638e9, 400e9),
    "tpu7x": Chip("tpu", 192 * GiB, 2307e12, 7380e9, 600e9),
    "h100": Chip("gpu", 84942979072, 989e12, 3352e9, 450e9),
    "h200": Chip("gpu", 151397597184, 989e12, 4800e9, 450e9),
    "b200": Chip("gpu", 191514411008, 2250e12, 7672e9, 900e9),
}
# of TPUs, what jax calls a device (jax/_src/pallas/mosaic/tpu_info.py); one of TPU7x is half a chip
KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"}
KINDS |= {"TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x"}
# what the GPU compiler asks of a chip beside its memory: cores, L2 cache, clock, compute capability
GPUS = {"h100": (132, 52428800, 1.98, 9), "h200": (132, 52428800, 1.98, 9), "b200": (148, 132644864, 1.965, 10)}
DESCRIPTION = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: {cache} clock_rate_ghz: {clock}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 cuda_compute_capability {{ major: {major} }}
}} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
device_description_str: "NVIDIA {name}" """
MISSING = "compiling for {} needs its compiler: python3 -m pip install -e '.[{}]'"


def parse(topology: str) -> tuple[str, tuple[int, ...]]:
    """'v5e:16x16' -> ('v5e', (16, 16)); UserError lists what there is."""
    name, _, shape = topology.partition(":")
    match = re.fullmatch(r"\d+(x\d+)*", shape)
    if name not in CHIPS or not match:
        raise UserError(f"--topology={topology}: give CHIP:SHAPE, as v5e:16x16 or h200:8; chips: {', '.join(CHIPS)}")
    sizes = tuple(map(int, shape.split("x")))
    if CHIPS[name].platform == "gpu" and not (len(sizes) == 1 and 1 <= sizes[0] <= 8):
        raise UserError(f"--topology={topology}: give the number of GPUs in one node, {name}:1 to {name}:8")
    return name, sizes


def peak(kind: str) -> float | None:
    """FLOP/s of a device that is here, by its device_kind; None where it is none of CHIPS."""
    if kind in KINDS:
        return CHIPS[KINDS[kind]].flops / (2 if kind == "TPU7x" else 1)
    gpus = [CHIPS[name].flops for name in GPUS if name in kind.lower().split()]  # 'NVIDIA H100 80GB HBM3'
    return gpus[0] if gpus else None


def missing(topology: str) -> str:
    """What to install to compile for it, or nothing."""
    name, _ = parse(topology)
    for platform, package, words in (
        ("tpu", "libtpu", ("a TPU", "tpu")),
        ("gpu", "jax_cuda13_plugin", ("a GPU", "cuda")),
    ):
        if CHIPS[name].platform == platform and importlib.util.find_spec(package) is None:
            return MISSING.format(*words)
    return ""


def prepare(topology: str, quick: bool = False) -> None:
    """Environment of the compiler; before jax is imported. UserError where it is not installed. quick: it
    searches less, and has no Triton on GPUs."""
    if lacking := missing(topology):
        raise UserError(lacking)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if quick:
        os.environ["JAX_OPTIMIZATION_LEVEL"] = "O0"
    if CHIPS[parse(topology)[0]].platform == "tpu":  # no TPU host to ask
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # beside a process that has the chips, or another preflight
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-256")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        given = [os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0"]
        # without a chip to try on, some products have no tile sizes that Triton takes
        os.environ["XLA_FLAGS"] = " ".join(given + ["--xla_gpu_enable_triton_gemm=false"] * quick)


def devices(topology: str) -> tuple[Chip, list]:
    """(what each device can do, the devices to compile for); after `prepare`."""
    import jax
    from jax.experimental import topologies

    name, sizes = parse(topology)
    chip = CHIPS[name]
    try:
        if chip.platform == "tpu":
            found = topologies.get_topology_desc(topology, "tpu").devices
        else:
            cores, cache, clock, major = GPUS[name]
            numbers = dict(bandwidth=int(chip.bandwidth), memory=int(chip.memory), name=name.upper())
            text = DESCRIPTION.format(cores=cores, cache=cache, clock=clock, major=major, **numbers)
            found = topologies.get_topology_desc("", "cuda", target_config=text, topology=f"1x1x{sizes[0]}").devices
    except (jax.errors.JaxRuntimeError, ValueError, RuntimeError) as error:
        raise UserError(f"--topology={topology} is none that the compiler knows: {first_line(error)}") from error
    share = math.prod(sizes) / len(found)
    numbers = {k: v * share for k, v in dataclasses.asdict(chip).items() if k != "platform"}
    return dataclasses.replace(chip, **numbers), list(found)
