// What the subcommands of `bench` that time kernels share: shapes from the command line, and output
// files.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/bench/kernel_bench.h"

namespace flashquant {

// "KxN,KxN,...", or a file with one KxN a line (empty lines and what follows # are ignored); none
// for
// "". NOT_FOUND for neither, INVALID_ARGUMENT for sizes that the kernel does not take.
absl::StatusOr<std::vector<bench::KernelShape>> ParseKernelShapes(const std::string& text);

absl::Status WriteText(const std::string& path, std::string_view text);

// So that minutes of measuring do not end with a name that cannot be written; the file stays as it
// is, or is not there, until then. OK for "".
absl::Status CheckWritable(const std::string& path);

}  // namespace flashquant
