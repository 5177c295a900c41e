"""Parallel plans of other libraries for the audit, one file each; `parallelize` of a recipe returns their Parallel.

transformers: tensor and expert parallelism, FSDP2 of from_pretrained(); fsdp: torch's fully_shard;
pipelining: torch.distributed.pipelining;
deepspeed: engines with ZeRO and experts over ranks; megatron: Megatron-core's DistributedDataParallel and experts over
ranks; torchtitan: its parallelize functions.
"""
