// The ablation of the packer's last step: the same packed layer with the outlier slots of a block
// by position, as a packer that knows nothing of banks would leave them.
#pragma once

#include "kernels/cuda/linear_w4a16/pack.h"

namespace flashquant::bench {

// Rewrites every piece of every record in place; any order inside a block is valid.
void OrderSlotsByPosition(cuda::PackedLinear& packed);

}  // namespace flashquant::bench
