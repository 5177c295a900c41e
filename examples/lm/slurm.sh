#!/usr/bin/env bash
# sbatch examples/lm/slurm.sh --model large --data /data/text --out /shared/run1
#
# One torchrun on each node, one process for each of its GPUs. Options are passed on to train.py; --out must be on a file
# system that all nodes share. A rank that dies costs the steps since the last checkpoint: torchrun starts all again. A job that
# is preempted or at the end of its time gets SIGTERM early enough to save, is queued again, and goes on where it was, also
# with another --nodes.
#SBATCH --job-name=fmoe-lm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$first_node:${RENDEZVOUS_PORT:-29500}" \
  --max-restarts 10 \
  "${TRAINER:-examples/lm/train.py}" --device cuda --resume auto "$@"
