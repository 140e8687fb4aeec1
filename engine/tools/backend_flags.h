// The flags that say where an off-line command runs its model, the same for all of them.
#pragma once

#include <cstdint>
#include <string>

#include "CLI/CLI.hpp"
#include "kernels/backend_factory.h"

namespace flashquant {

struct BackendFlags {
  std::string backend = "auto";
  int32_t threads = 0;

  // Views `backend`: valid while this object is.
  BackendOptions options() const { return {.kind = backend, .num_threads = threads}; }
};

// Adds --backend and --threads; `flags` must outlive the command's parsing.
void AddBackendFlags(CLI::App* command, BackendFlags* flags);

}  // namespace flashquant
