// Mixture-of-Experts training for LibTorch: operators with gradients, gates, FMoE, FMoETransformerMLP,
// checkpoints.
#pragma once

#include "all_gates.h"
#include "checkpoint.h"
#include "exchange.h"
#include "experts.h"
#include "layers.h"
#include "ops.h"
#include "safetensors.h"
