"""`python -m fmoe_ext.gpu prove`: which of our kernels a GPU computes right and fast, found out on that GPU.

Kernels are written for GPUs that their authors may not have, so that none is trusted unseen. prove.py starts a child
process, which alone touches the GPU (child.py), since a kernel that hangs or faults takes its process with it. The
child checks each kernel against float64 and the portable kernels, and races those that are right against what would
compute their product without them, and against torch (races.py). What is found is a small file for a model of GPU
(proof.py), bound to the digests of the sources: an edit voids the verdicts of the kernels that it reaches. A process
that trains reads it at its first use of the GPU and turns on what is proved (kernels.py). A GPU without a file takes
one of its compute capability, and races itself in the background (race() there).
"""
