"""What torch's compiler makes of a function for an H100, on a machine without a GPU: each kernel's bytes and FLOPs.

The compiler plans its kernels from shapes alone. It asks for a GPU's properties, which are told here, and neither
builds nor runs what it wrote. Private names of torch 2.13 to 2.15; needs the package triton. Patterns that the compiler
would replace in a graph (attention written out, say) are not looked for: paceline's model has none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.post_grad
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import _recursive_post_grad_passes
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

H100 = SimpleNamespace(  # the SXM one; a compiler asks how large its memories are, not how fast
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    warp_size=32,
    gcnArchName="",
)


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one call of a library's."""

    operations: frozenset[str]  # torch's, that it computes: aten.mm, aten.erf ...
    num_bytes: int  # read and written
    flops: float  # of matrix products and attention; 0: none
    is_call: bool  # of a library's kernel


@contextmanager
def pretended(options: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the compiler takes "cuda" for an H100, with these options of torch.compile. Tensors must be fake, see
    `no_gpu.pretend`."""
    worker = SimpleNamespace(get_device_properties=lambda device=None: H100, current_device=lambda: 0)
    told = {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_properties": lambda device=None: H100,
            "get_device_capability": lambda device=None: (H100.major, H100.minor),
            "get_device_name": lambda device=None: H100.name,
            "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device=None: None,
        },
        CudaInterface: {
            "is_available": staticmethod(lambda: True),
            "get_device_properties": staticmethod(lambda device=None: H100),
            "get_compute_capability": staticmethod(lambda device=None: 90),
            "Worker": worker,
        },
        torch.version: {"cuda": "13.0"},
        driver: {"_active": SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))},
        torch._inductor.fx_passes.joint_graph: {"lazy_init": lambda device=None: None},
        torch._inductor.fx_passes.post_grad: {"lazy_init": lambda device=None: None},
    }
    patches = [patch.object(place, name, value) for place, names in told.items() for name, value in names.items()]
    with torch._inductor.config.patch({"compile_threads": 1, "fx_graph_cache": False, **options}):
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


def kernels_of(function: Callable[..., Tensor], arguments: Sequence[Tensor]) -> list[Kernel]:
    """Returns the kernels of a function's forward pass, and of its backward pass if an argument needs a gradient. The
    arguments are fake tensors on "cuda"; call it inside `pretended` and a FakeTensorMode."""
    kernels: list[Kernel] = []

    def planned(graph: torch.fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> torch.fx.GraphModule:
        kernels.extend(_plan(graph, inputs, is_backward=is_backward))
        return graph  # which then runs on fake tensors, so that a backward pass follows

    compiled = aot_function(
        function,
        fw_compiler=lambda graph, inputs: planned(graph, inputs, is_backward=False),
        bw_compiler=lambda graph, inputs: planned(graph, inputs, is_backward=True),
        partition_fn=lambda graph, inputs, **how: min_cut_rematerialization_partition(
            graph, inputs, compiler="inductor", **how
        ),
        decompositions=select_decomp_table(),
    )
    out = compiled(*arguments)
    if out.requires_grad:
        out.sum().backward()
    return kernels


def _plan(graph: torch.fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> list[Kernel]:
    """Returns the kernels that the compiler would launch for one graph."""
    mode = torch._guards.detect_fake_mode(inputs)
    assert isinstance(mode, FakeTensorMode)
    with V.set_fake_mode(mode):
        _recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env, is_backward=is_backward)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            lowering.codegen()
            return [kernel for node in lowering.scheduler.nodes if (kernel := _kernel(node)).num_bytes]


def _kernel(node: Any) -> Kernel:
    """node: the scheduler's. The rest of a call's outputs are nodes of no bytes."""
    origins = {origin for part in node.get_nodes() for origin in part.node.origins}
    is_call = any(type(part).__name__ == "ExternKernelSchedulerNode" for part in node.get_nodes())
    flops = sum(_flops(origin) for origin in origins) if is_call else 0.0
    operations = frozenset(str(getattr(origin.target, "overloadpacket", origin.target)) for origin in origins)
    return Kernel(operations, node.get_read_write_buffers_sizes(), flops, is_call)


def _flops(origin: torch.fx.Node) -> float:
    formula = flop_registry.get(getattr(origin.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    values = torch.utils._pytree.tree_map(lambda x: x.meta["val"] if isinstance(x, torch.fx.Node) else x, origin.args)
    values = [value for value in values if not isinstance(value, torch.dtype)]  # of the product's result
    return float(formula(*values, **origin.kwargs, out_val=origin.meta["val"]))
