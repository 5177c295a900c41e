"""LoRA adapters of experts in the layouts that tools write: fmoe adapter check, convert, merge (docs/adapters.md).

An adapter changes a weight by scaling * b @ a. Tools agree on that and on little else: one tensor may hold the
factors of all experts, gate and up may be one parameter or two, and old versions have a and b the other way round.
reading.py makes of every layout the same thing, a [E, r, in] and b [E, out, r] of each projection, or says what the
file does not show. All that follows is written once: delta.py compares that with a model and computes the change of a
weight, convert.py writes another layout, merge.py adds the changes to float weights, repack.py to packed ones, which
are rounded anew by a text so that a change smaller than their steps is not lost.
"""
