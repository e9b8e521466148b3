from __future__ import annotations

import pytest

from whyidle_rules.trace import names
from whyidle_rules.trace.names import Gpu, Host

COMMUNICATING = (
    # NCCL before 2.19, since, and its symmetric kernels since 2.27
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    "ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs)",
    "ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymDevArgs)",
    "void ncclDevRedOpFull<FuncPreMulSum<float>>(int)",
    # RCCL
    "ncclDevKernel_Generic(ncclDevComm*, unsigned long, ncclWork*)",
    "rcclDevKernel_AllReduce(int)",
    "void msccl_kernel::mscclKernel_Sum_half_LL128(ncclDevComm*)",
    # NVSHMEM, DeepEP
    "nvshmemi_barrier_all_kernel(int)",
    "nvshmemi_transfer_rma_p2p<float>(int)",
    "void deep_ep::internode::dispatch<false, 4, false, 8192>(int4*, float*, int*)",
    "void ep::internode::combine<true, 8>(int4*, float*)",
    "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)",
    "void deep_ep::intranode::cached_notify_combine<8>(void**, int*)",
    "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, void*)",
    "void deep_ep::internode_ll::clean_low_latency_buffer<1>(int*)",
    # vLLM, SGLang, TensorRT-LLM, FlashInfer, PyTorch's symmetric memory, MSCCL++
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
    "void sglang::cross_device_reduce_2stage<__half, 4>(sglang::RankData*)",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8>(AllReduceParams)",
    "void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport<int>(int)",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<int>(int)",
    "void one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16*)",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16, 4>(float**)",
    "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
    "void multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<int>>(int)",
    "void mscclpp::executionKernel<mscclpp::LL16Packet, true>(int, mscclpp::DeviceExecutionPlan)",
    "void allreduce_LL_1node<__half>(mscclpp::MemoryChannelDeviceHandle*)",
    "void userbuffers_fp16_sum_inplace_gpu_rw_ag<8>(int)",
)
COMPUTING = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>, "
    "cutlass::gemm::collective::CollectiveMma<int>, CollectiveMainloop>>(int)",
    "void cub::CUB_200700::DispatchReduceByKey<float*, float*>(float*, float*)",
    "void cub::CUB_200700::DeviceReduceKernel<cub::Policy, float*>(float*)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
    "at::native::MeanOps<float>>>(at::native::ReduceOp<float>)",
    "void at::native::(anonymous namespace)::elementwise_kernel<128, 2, ncclKernel>(int)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int)",
    "void nccl_test(int)",
    "my_kernel(ncclDevKernelArgs*)",
    "void my_kernel<mscclpp::LLPacket>(mscclpp::LLPacket*)",
    "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128>>(int)",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    "triton_red_fused_all_reduce_scale_3",
    "void dispatch_and_reduce<int>(int)",
    "void moe_combine_kernel<float>(float*)",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
    "Memset (Device)",
    "",
)


@pytest.mark.parametrize("name", COMMUNICATING)
def test_kernels_that_communicate(name: str) -> None:
    assert names.gpu_kernel(name) is Gpu.COLLECTIVE


@pytest.mark.parametrize("name", COMPUTING)
def test_kernels_that_compute(name: str) -> None:
    assert names.gpu_kernel(name) is Gpu.COMPUTE


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", Gpu.COPY_H2D_PAGEABLE),
        ("Memcpy HtoD (Pinned -> Device)", Gpu.COPY_H2D),
        ("CopyHostToDevice", Gpu.COPY_H2D),
        ("Memcpy DtoH (Device -> Pageable)", Gpu.COPY_D2H),
        ("CopyDeviceToHost", Gpu.COPY_D2H),
        ("Memcpy DtoD (Device -> Device)", Gpu.COPY_DEVICE),
        ("Memcpy PtoP (Device -> Device)", Gpu.COPY_DEVICE),
        ("Memset (Device)", Gpu.COPY_DEVICE),
    ],
)
def test_copies(name: str, kind: Gpu) -> None:
    assert names.gpu_copy(name) is kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaStreamSynchronize", Host.SYNC),
        ("cudaDeviceSynchronize", Host.SYNC),
        ("hipEventSynchronize", Host.SYNC),
        ("cuStreamSynchronize", Host.SYNC),
        ("cudaMemcpy", Host.SYNC),
        ("hipMemcpyWithStream", Host.SYNC),
        ("cudaMemcpyAsync", Host.BUSY),
        ("cudaMalloc", Host.ALLOCATOR),
        ("cudaFree", Host.ALLOCATOR),
        ("cudaHostAlloc", Host.ALLOCATOR),
        ("cuMemAddressReserve", Host.ALLOCATOR),
        ("cuMemMap", Host.ALLOCATOR),
        ("hipMalloc", Host.ALLOCATOR),
        ("cuModuleLoadData", Host.COMPILE),
        ("cuLibraryLoadData", Host.COMPILE),
        ("hipModuleLoadData", Host.COMPILE),
        ("cudaLaunchKernel", Host.BUSY),
        ("cudaEventQuery", Host.BUSY),
        ("cudaStreamIsCapturing", Host.BUSY),
        ("cudaStreamWaitEvent", Host.BUSY),
        ("cuMemcpyHtoDAsync_v2", Host.BUSY),
    ],
)
def test_driver_calls(name: str, kind: Host) -> None:
    assert names.driver_call(name) is kind


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("cudaLaunchKernel", True),
        ("cudaLaunchKernelExC", True),
        ("cuLaunchKernel", True),
        ("cudaGraphLaunch", True),
        ("hipExtModuleLaunchKernel", True),
        ("cudaMemcpyAsync", True),
        ("cudaMemsetAsync", True),
        ("cudaStreamSynchronize", False),
        ("cudaMalloc", False),
        ("cudaEventRecord", False),
    ],
)
def test_launches(name: str, launches: bool) -> None:
    assert names.is_launch(name) is launches


SPANS = {
    Host.CHECKPOINT_SAVE: (
        "torch/serialization.py(921): save",
        "torch/serialization.py(757): _legacy_save",
        "torch/distributed/checkpoint/state_dict_saver.py(104): save",
        "torch/distributed/checkpoint/state_dict_saver.py(190): async_save",
        "torch.save",
        "save_checkpoint",
        "trainer.py(77): save_checkpoint",
        "Trainer.save_checkpoint",
        "## save checkpoint ##",
        "checkpoint_save",
        "dcp.save",
    ),
    Host.CHECKPOINT_LOAD: (
        "torch/serialization.py(1205): load",
        "torch/distributed/checkpoint/state_dict_loader.py(60): load",
        "load_checkpoint",
        "restore_checkpoint",
        "resume_from_checkpoint",
        "checkpoint_load",
    ),
    Host.DATA_IN_TRAINER: (
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "torch/utils/data/dataloader.py(716): _next_data_single",
    ),
    Host.DATA: (
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
        "torch/utils/data/dataloader.py(628): __next__",
        "[pl][profile][_TrainingEpochLoop].train_dataloader_next",
        "## dataloader ##",
        "data_loading",
        "next_batch",
        "get_batch",
    ),
    Host.GC: ("Python GC", "gc.collect", "<built-in function collect>", "gc_collect"),
    Host.COMPILE: (
        "torch/_dynamo/convert_frame.py(1000): _compile",
        "_compile.compile_inner",
        "OutputGraph.call_user_compiler",
        "compile_fx_inner",
        "async_compile.wait",
        "triton/runtime/jit.py(500): run_compile",
    ),
    Host.LOGGING: (
        "logging/__init__.py(1600): _log",
        "wandb/sdk/wandb_run.py(1700): log",
        "wandb.log",
        "<built-in function print>",
        "log_metrics",
        "SummaryWriter.add_scalar",
    ),
    Host.EVALUATION: (
        "evaluate",
        "evaluation",
        "validation_step",
        "## eval ##",
        "Trainer.evaluate",
        "eval_loop",
    ),
    Host.OTHER: (
        "CheckpointFunction",
        "torch::autograd::CppNode<CheckpointFunction>",
        "CheckpointFunctionBackward",
        "torch/utils/checkpoint.py(333): checkpoint",
        "torch/utils/checkpoint.py(1100): _checkpoint_without_reentrant_generator",
        "autograd::engine::evaluate_function: MmBackward0",
        "aten::_validate_sparse_coo_tensor_args",
        "aten::to",
        "aten::_nested_view_from_buffer",
        "Optimizer.step#AdamW.step",
        "Optimizer.zero_grad#SGD.zero_grad",
        "nn.Module: DataParallel_0",
        "<built-in method load_state_dict of X object>",
        "torch/nn/modules/module.py(1500): _call_impl",
        "retrieval_head",
        "medieval",
        "catalog",
        "backlog_size",
        "aten::log_softmax",
        "nn.Module: LogSoftmax_3",
        "aten::_log_softmax_backward_data",
        "garment",
        "forward",
        "",
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind, some in SPANS.items() for name in some]
)
def test_spans_of_the_host(name: str, kind: Host) -> None:
    assert names.host_span(name) is kind


def test_each_kind_that_a_name_can_mean_is_in_the_table() -> None:
    only_by_category = {Host.PROFILER, Host.ALLOCATOR, Host.SYNC, Host.BUSY}
    assert set(SPANS) == set(Host) - only_by_category


@pytest.mark.parametrize(
    ("operation", "together"),
    [
        ("allreduce", True),
        ("nccl:all_reduce", True),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(int)", True),
        ("_allgather_base", True),
        ("_reduce_scatter_base", True),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(int)", True),
        ("reduce_scatter_tensor_coalesced", True),
        ("all_to_allv", True),
        ("allreduce_coalesced", True),
        ("barrier", True),
        ("broadcast", False),
        ("_broadcast_oop", False),
        ("ncclDevKernel_Broadcast_RING_LL(int)", False),
        ("reduce", False),
        ("_reduce_oop", False),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(int)", False),
        ("nccl:gather", False),
        ("nccl:scatter", False),
        ("gather", False),
        ("scatter", False),
    ],
)
def test_collectives_that_end_together(operation: str, together: bool) -> None:
    assert names.has_common_end(operation) is together


@pytest.mark.parametrize(
    ("operation", "between_two"),
    [
        ("send", True),
        ("recv", True),
        ("nccl:send 0->1", True),
        ("nccl:recv 0<-1", True),
        ("isend", True),
        ("c10d::recv_", True),
        ("batch_isend_irecv", True),
        ("allreduce", False),
        ("nccl:all_to_all", False),
        ("all_to_allv", False),
        ("sender", False),
        ("", False),
    ],
)
def test_point_to_point(operation: str, between_two: bool) -> None:
    assert names.is_point_to_point(operation) is between_two


def test_steps() -> None:
    assert names.step_number("ProfilerStep#12") == 12
    assert names.step_number("ProfilerStep#") is None
    assert names.step_number("ProfilerStep*") is None
    assert names.step_number("my ProfilerStep#1") is None
