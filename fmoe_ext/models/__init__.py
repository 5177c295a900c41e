"""Find the MLPs of a model and put MoE layers in their places: fmoefy() and the model kinds that it knows."""
