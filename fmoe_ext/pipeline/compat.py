raise ImportError("fmoe_ext.pipeline.compat is fmoe_ext.compat.torch_pipe now")
