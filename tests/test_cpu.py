"""What a machine without a GPU needs: its cores and its memory are shared by the ranks."""

from unittest.mock import Mock

import cpu

import torch


def test_vllms_caches_on_a_host_share_its_memory_and_take_no_more_than_they_use(monkeypatch):
    monkeypatch.setattr(cpu, "available_memory", lambda: 2**32)
    monkeypatch.setenv("LOCAL_SIZE", "2")
    options = {"block_size": 32, "enforce_eager": True, "enable_chunked_prefill": False}
    options |= {"kv_cache_memory_bytes": 2**30 - 7, "max_num_batched_tokens": 8192}
    assert cpu.vllm_options(0.5, 7, 2**40, 100) == options
    longer = {"kv_cache_memory_bytes": 5, "max_num_batched_tokens": 9000}
    assert cpu.vllm_options(0.5, 7, 5, 9000) == options | longer


def test_what_vllm_has_packed_is_packed_anew_where_it_still_has_the_weights():
    tied, freed, experts, other = (torch.nn.Linear(2, 2) for _ in range(4))
    freed.weight.data = torch.empty(0)
    for module in (tied, freed, experts):
        module.quant_method = Mock(moe_kernel=None)
    tied.cpu_linear = freed.cpu_linear = True
    kernel = experts.quant_method.moe_kernel = Mock()
    cpu.repack(torch.nn.Sequential(tied, freed, experts, other))
    kernel.fused_experts.process_weights_after_loading.assert_called_once_with(experts)
    tied.quant_method.process_weights_after_loading.assert_called_once_with(tied)
    freed.quant_method.process_weights_after_loading.assert_not_called()
