// See backend_flags.h.
#include "engine/tools/backend_flags.h"

#include <limits>

namespace flashquant {

void AddBackendFlags(CLI::App* command, BackendFlags* flags) {
  command->add_option("--backend", flags->backend, "auto, cpu or cuda")->capture_default_str();
  command->add_option("--threads", flags->threads, "CPU workers, 0 = one per core")
      ->check(CLI::Range(int32_t{0}, std::numeric_limits<int32_t>::max()))
      ->capture_default_str();
  command
      ->add_option("--kv-cache-dtype", flags->kv_cache_dtype,
                   "keys and values: auto (FP32 on the CPU, BF16 on CUDA), bf16 or fp8")
      ->capture_default_str();
}

}  // namespace flashquant
