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
  std::string kv_cache_dtype = "auto";

  // Views the texts: valid while this object is.
  BackendOptions options() const {
    return {.kind = backend, .num_threads = threads, .kv_cache_dtype = kv_cache_dtype};
  }
};

// Adds --backend, --threads and --kv-cache-dtype; `flags` must outlive the command's parsing.
void AddBackendFlags(CLI::App* command, BackendFlags* flags);

}  // namespace flashquant
