// What the CUDA backend asks of a driver and of a card, as plain decisions on what was found: no
// CUDA in here, so that every refusal can be tested where there is no card.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace flashquant::cuda {

// CUDA versions as the runtime gives them: 1000 * major + 10 * minor; driver 0 = there is none.
// UNAVAILABLE, one line with what was found and what is needed, for a driver that is missing or
// older than `runtime`'s major version.
absl::Status CheckDriver(int driver, int runtime);

// UNAVAILABLE for a card before compute capability 8.0: BF16 tensor cores, cp.async.
absl::Status CheckCapability(std::string_view card, int major, int minor);

}  // namespace flashquant::cuda
