"""What a name in a trace stands for: kernels, copies, driver calls, spans of the host.

Names are matched once each and remembered, so a trace of millions of events pays for its few
thousand different names. Kernel names are those of NCCL, RCCL, NVSHMEM, DeepEP, vLLM, TensorRT-LLM,
SGLang and PyTorch symmetric memory; driver calls those of the CUDA and HIP runtimes.
"""

from __future__ import annotations

import re
from enum import IntEnum


class Gpu(IntEnum):
    """Kind of an event on the GPU."""

    COMPUTE = 0
    COLLECTIVE = 1
    POINT_TO_POINT = 2
    COPY_H2D_PAGEABLE = 3
    COPY_H2D = 4
    COPY_D2H = 5
    COPY_DEVICE = 6


class Host(IntEnum):
    """Kind of a span on a host thread, the most specific first: the first one that fits wins."""

    CHECKPOINT_SAVE = 0
    CHECKPOINT_LOAD = 1
    DATA = 2
    DATA_IN_TRAINER = 3
    GC = 4
    COMPILE = 5
    LOGGING = 6
    PROFILER = 7
    ALLOCATOR = 8
    EVALUATION = 9
    SYNC = 10
    BUSY = 11
    OTHER = 12


# A kernel is judged by its own name: template arguments ("CollectiveMainloop" of CUTLASS) and
# parameter types say what it is made of.
_OWN_NAME = re.compile(r"(?:\(anonymous namespace\)|[^<(])+")
_COMMUNICATION = re.compile(
    r"""
      ^(void\s+)?(nccl|rccl|msccl|mscclpp)[A-Za-z_]*Kernel         # ncclDevKernel_AllReduce_...
    | \bnccl(x)?(Dev)?(Kernel|RedOp)
    | \bnvshmem                                                     # NVSHMEM's own kernels
    | \b(deep_)?ep::(internode|intranode|internode_ll)[A-Za-z_]*::
    | \b(internode|intranode|internode_ll)::(dispatch|combine|notify|cached_notify|clean)
    | (^|::|\s)(low_latency|notify|cached_notify)_(dispatch|combine)
    | cross_device_reduce                                           # vLLM and SGLang, 1 and 2 stage
    | (one|two|1|2)_?shot_?(push_)?(all_?reduce|all_?gather|reduce_?scatter)
    | multimem_(one_shot_|two_shot_)?(all_?reduce|all_?gather|reduce_?scatter|barrier)
    | (all_?reduce|reduce_?scatter|all_?gather|all_?to_?all)_?
      (fusion|norm|rms|kernel_?one|kernel_?two|one_?shot|two_?shot|ll|multimem|p2p|push|nvls)
    | \b(symm(etric)?_mem|symmetric_memory)
    | \b(custom|quick|trtllm|tensorrt_llm|userbuffers|mnnvl|aiter)[A-Za-z_:]*
      (all_?reduce|all_?gather|all_?to_?all|reduce_?scatter)
    | userbuffers_fp16|nvls_(all|reduce)
    | \bmscclpp::
    """,
    re.IGNORECASE | re.VERBOSE,
)
_POINT_TO_POINT = re.compile(r"^(nccl:|c10d::)?(batch_isend_irecv|i?send|i?recv)(\b|_)", re.I)
_SEND_RECV_KERNEL = re.compile(r"SendRecv|_(Send|Recv)_|\bput_signal|sendrecv", re.I)

# Collectives with no common end: a root may leave early, so durations say nothing about waiting.
_NO_COMMON_END = re.compile(
    r"broadcast|(?<!all)(?<!all_)reduce(?!_?scatter)|gather_to|^(nccl:)?(gather|scatter)(\b|_)",
    re.I,
)

_SYNC = re.compile(
    r"^(cuda|hip)(Stream|Device|Event)Synchronize|^(cuda|hip)ThreadSynchronize"
    r"|^cu(Stream|Event|Ctx)Synchronize|^hip(Memcpy|MemcpyWithStream|MemcpyDtoH)$"
    r"|^cudaMemcpy$|^cuMemcpyDtoH(_v2)?$"
)
_ALLOCATOR = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|FreeHost|MallocHost|MallocAsync|FreeAsync|HostFree"
    r"|HostRegister|HostUnregister|HostMalloc|MemPool\w*|IpcOpenMemHandle|IpcCloseMemHandle)"
    r"|^cuMem(Alloc|Free|Create|Map|Unmap|Release|SetAccess|Address(Reserve|Free)|HostAlloc)"
    r"|^hipMem(Create|Map|Unmap|Release|SetAccess)"
)
_MODULE = re.compile(
    r"^cu(Module|Library|Link)(Load|Unload|Add|Complete|GetModule)|^hipModule(Load|Unload)"
    r"|^cudaGetFuncBySymbol$|^cuLibraryGetKernel$"
)
_LAUNCH = re.compile(r"[Ll]aunch|Memcpy|Memset|GraphLaunch|ModuleLaunch")

_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_SPANS: tuple[tuple[re.Pattern[str], Host], ...] = (
    (
        re.compile(
            r"torch/serialization\.py\(\d+\): (_?legacy_)?save\b|^torch\.save\b"
            r"|torch/distributed/checkpoint/[\w/]+\.py\(\d+\): (async_)?save\b"
            r"|\b(save|saving|write|writing|dump)_?(a_|the_|model_)?(checkpoint|ckpt|state)"
            r"|\b(checkpoint|ckpt)_?(save|saving|write|writing)"
            r"|\b(dcp|checkpoint(ing)?|checkpointer|ckpt)[.:](async_)?save"
            r"|^(#+\s*|\[\w+\]\s*)?(save|write) (a |the )?checkpoint",
            re.I,
        ),
        Host.CHECKPOINT_SAVE,
    ),
    (
        re.compile(
            r"torch/serialization\.py\(\d+\): load\b|^torch\.load\b"
            r"|torch/distributed/checkpoint/[\w/]+\.py\(\d+\): load\b"
            r"|\b(load|loading|restore|resume)_?(a_|the_|from_|model_)?(checkpoint|ckpt)"
            r"|\b(checkpoint|ckpt)_?(load|restore)|\b(dcp|checkpointer|ckpt)[.:]load",
            re.I,
        ),
        Host.CHECKPOINT_LOAD,
    ),
    (
        re.compile(
            r"enumerate\(DataLoader\)#_SingleProcess|_SingleProcessDataLoaderIter.__next__"
            r"|torch/utils/data/dataloader\.py\(\d+\): _next_data_single",
        ),
        Host.DATA_IN_TRAINER,
    ),
    (
        re.compile(
            r"enumerate\(DataLoader\)|DataLoaderIter\.(__next__|_next_data)"
            r"|torch/utils/data/dataloader\.py\(\d+\): __next__"
            r"|^\[pl\]\[(profile|module)\].*(train_dataloader_next|fetch_next|_next_data)"
            r"|(^|\W)(data_?loader|dataloading|data_loading|next_batch|get_batch|fetch_batch"
            r"|load_batch|data_fetch|dataload)(\W|$)",
            re.I,
        ),
        Host.DATA,
    ),
    (
        re.compile(
            r"\bPython GC\b|\bgc\.collect\b|\bgc\.py\(\d+\)|<built-in function collect>"
            r"|^garbage.?collect|(^|\W)gc_collect(\W|$)",
            re.I,
        ),
        Host.GC,
    ),
    (
        re.compile(
            r"_compile\.(compile|_compile|compile_inner)|\bcompile_(inner|wrapper|fx\w*)\b"
            r"|torch/_dynamo/convert_frame\.py\(\d+\): |torch/_inductor/[\w/]*compile\w*\.py\(\d+\)"
            r"|inductor_compile|(OutputGraph|dynamo)\.(call_user_)?compile|backend_compile"
            r"|triton/(compiler|runtime/jit)\S*\(\d+\): (compile|run_compile|_do_compile)"
            r"|async_compile\.(wait|triton)|\bnvrtc|cudnn.*heuristic.*build",
            re.I,
        ),
        Host.COMPILE,
    ),
    (
        re.compile(
            r"\blogging/__init__\.py\(\d+\): (_?log|info|debug|warning|error|handle|emit)"
            r"|\bwandb/\S+\(\d+\): (log|_log|_partial_history)|\bwandb\.log\b|\bmlflow[./]\S*log"
            r"|tensorboard/(writer|summary)\S*\(\d+\): add_|SummaryWriter\.(add_|flush)"
            r"|<built-in function print>|(^|\W)log(ging)?_(metrics|step|scalars?|stats)(\W|$)",
            re.I,
        ),
        Host.LOGGING,
    ),
    (
        re.compile(
            r"(^|[^a-z])(eval|evaluate|evaluation|validate|validation|valid_step|val_step|val_loop"
            r"|validation_step|test_step|eval_step|eval_loop|run_eval)([^a-z]|$)",
            re.I,
        ),
        Host.EVALUATION,
    ),
)
# Dispatcher and autograd names use some of the words above for other things:
# "autograd::engine::evaluate_function", "torch::autograd::...CheckpointFunction".
_ORDINARY_OPERATOR = re.compile(
    r"^(aten|c10d?|prim|torch|autograd|cudnn|nccl|inductor|triton)\w*::|evaluate_function"
    r"|Backward\d*$|CheckpointFunction"
)


def gpu_kernel(name: str) -> Gpu:
    """Return whether a kernel computes or communicates.

    Sends and receives run in the same kernel as all-to-alls, so that POINT_TO_POINT is never known
    from the kernel alone; `is_point_to_point` looks at the operator that launched it.
    """
    own = _OWN_NAME.match(name)
    if own and _COMMUNICATION.search(own.group()):
        return Gpu.COLLECTIVE
    return Gpu.COMPUTE


def gpu_copy(name: str) -> Gpu:
    """Return the kind of a copy: "Memcpy HtoD (Pageable -> Device)", "CopyHostToDevice"."""
    plain = name.lower().replace(" ", "")
    if "htod" in plain or "hosttodevice" in plain:
        return Gpu.COPY_H2D_PAGEABLE if "pageable" in plain else Gpu.COPY_H2D
    if "dtoh" in plain or "devicetohost" in plain:
        return Gpu.COPY_D2H
    return Gpu.COPY_DEVICE


def is_send_recv_kernel(name: str) -> bool:
    """Say whether a communication kernel may be a send or a receive between two ranks."""
    return bool(_SEND_RECV_KERNEL.search(name))


def is_point_to_point(operation: str) -> bool:
    """Say whether an operation ("send", "nccl:recv 0<-1", "c10d::send") is between two ranks."""
    return bool(_POINT_TO_POINT.search(operation))


def has_common_end(operation: str) -> bool:
    """Say whether all ranks leave a collective together, so that the shortest one came last."""
    return not _NO_COMMON_END.search(operation)


def driver_call(name: str) -> Host:
    """Return what a call of the CUDA or HIP runtime or driver does to the host."""
    if _SYNC.search(name):
        return Host.SYNC
    if _ALLOCATOR.search(name):
        return Host.ALLOCATOR
    if _MODULE.search(name):
        return Host.COMPILE
    return Host.BUSY


def is_launch(name: str) -> bool:
    """Say whether a driver call puts work on a GPU."""
    return bool(_LAUNCH.search(name))


def host_span(name: str) -> Host:
    """Return what an operator, an annotation or a Python frame says about its thread."""
    if _ORDINARY_OPERATOR.search(name):
        return Host.OTHER
    for pattern, kind in _SPANS:
        if pattern.search(name):
            return kind
    return Host.OTHER


def step_number(name: str) -> int | None:
    """Return the number of a step annotation ("ProfilerStep#12"), or None for anything else."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else None
