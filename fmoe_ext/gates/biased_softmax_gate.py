from fmoe_ext.gates.sigmoid_gate import SigmoidGate


class BiasedSoftmaxGate(SigmoidGate):
    """The gate of ERNIE 4.5: softmax scores, balanced by a bias that is added for the selection only.

    The weights are the softmax of the chosen logits. The bias moves as SigmoidGate's; arguments: SigmoidGate.
    """

    score = "softmax"
