raise ImportError(f"{__name__} is fmoe_ext.compat.torch_pipe now")
