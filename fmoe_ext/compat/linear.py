"""fmoe.linear."""

from fmoe_ext import ops
from fmoe_ext.linear import FMoELinear, cast_to_weight, cumulative_ends


class MOELinear:
    """The linear map of each expert on rows sorted by expert; called as MOELinear.apply(...), differentiable."""

    @staticmethod
    def apply(global_input_buf, fwd_expert_count, weight, bias=None):
        """global_input_buf [R, in], fwd_expert_count [E], weight [E, out, in], bias [E, out] -> [R, out]."""
        offs = cumulative_ends(fwd_expert_count, weight.shape[0], global_input_buf.device)
        return ops.grouped_gemm(cast_to_weight(global_input_buf, weight), weight, offs, bias)


__all__ = ["FMoELinear", "MOELinear"]
