"""Find the MLPs of a model and put MoE layers in their places: fmoefy().

target.py says what a model kind is. plain.py is PyTorch's; those of Megatron and Transformers are beside their
libraries (LIBRARIES in fmoefy.py).
"""
