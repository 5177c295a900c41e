"""Parallel plans of other libraries for the audit, one file each; `parallelize` of a recipe file returns their Parallel.

transformers: tensor and expert parallelism, FSDP2 of from_pretrained(); fsdp: torch's fully_shard;
pipelining: torch.distributed.pipelining.
"""
